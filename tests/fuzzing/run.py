"""Run random cases: `python tests/fuzzing/run.py --cases 5000`. Prints refusals by reason; exits 1 if one is wrong."""

from __future__ import annotations

import argparse
import collections
import copy
import random
import re
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import penstock
from fuzzing.losses import OUTPUTS, random_loss
from fuzzing.models import Model, batch_for
from penstock.errors import LaneError, PenstockError

SCHEDULES = (
    "1f1b", "gpipe", "zb_gpipe", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2", "zb_v", "dualpipe", "dualpipe_v",
    "chimera", "hanayo", "v_half",
)  # fmt: skip
FORWARDS_FIRST = ("gpipe", "zb_gpipe", "looped_bfs")
KEEPS = ("hold", "hold", "recompute", "except_last", "offload")


@dataclass(frozen=True)
class Case:
    """One random case: all of it follows from its seed."""

    seed: int

    def build(self):
        """Return the model, batch, loss, target and options."""
        rng = random.Random(self.seed)
        model = Model(rng.randrange(1 << 30), outputs=OUTPUTS)
        torch.manual_seed(self.seed)
        size = rng.choice([2, 3, 5, 8, 9])
        batch = batch_for(model, size, rng)
        shape = model.output_of(called(copy.deepcopy(model), batch)).shape
        name, loss, target, is_coupled = random_loss(rng, shape)
        whole = is_coupled and rng.random() < 0.7
        schedule = rng.choice(FORWARDS_FIRST if whole else SCHEDULES)
        lanes = 4 if schedule == "chimera" and rng.random() < 0.3 else 2
        options = {
            "schedule": schedule,
            "lanes": lanes,
            "micro_batches": rng.choice([1, 2, 3, 4]),
            "keep": rng.choice(KEEPS),
            "capture_path": rng.choice(["auto", "auto", "replay", "export"]),
            "loss_over": "batch" if whole else "micro_batch",
            "timeout": 60,
        }
        return model, batch, (name, lambda made, t: loss(model.output_of(made), t)), target, options


@dataclass(frozen=True)
class Outcome:
    """How a case ended: "right", "refused", "wrong" or "crashed", and why."""

    kind: str
    why: str
    told: str


def called(model, batch):
    """Call a model as a pipeline is called with a batch."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def run_case(seed):
    """Run a case; return how it ended."""
    model, batch, (name, loss), target, options = Case(seed).build()
    blocks = [type(block).__name__ for block in model.blocks]
    told = f"seed {seed}: {blocks}, {name}, {options}"
    plain = copy.deepcopy(model)
    made = loss(called(plain, batch), target)
    if made.requires_grad:
        made.backward()
    wanted = {key: p.grad for key, p in plain.named_parameters()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe = penstock.Pipeline(model, example=batch, loss=loss, **options)
            with pipe:
                found = pipe.step(batch, target)
                gradients = {key: p.grad for key, p in pipe.named_parameters()}
    except PenstockError as error:
        cause = error.__cause__
        if not isinstance(error, LaneError) or isinstance(cause, PenstockError):
            return Outcome("refused", reason_of(str(error)), f"{told}\n{error}")
        return Outcome("crashed", f"{type(cause).__name__} in a lane", f"{told}\n{traceback.format_exc()}")
    except Exception as error:
        return Outcome("crashed", type(error).__name__, f"{told}\n{traceback.format_exc()}")
    off = worst_difference(found, made.detach(), gradients, wanted)
    if off > 1e-9:
        return Outcome("wrong", f"off by {off:.2g}", told)
    return Outcome("right", "", told)


def worst_difference(loss, wanted_loss, gradients, wanted):
    """Return the largest difference of loss and gradients, relative to the largest of each."""
    largest = max([1e-12, *(float(_dense(g).abs().max()) for g in wanted.values() if g is not None)])
    off = float((loss - wanted_loss).abs() / wanted_loss.abs().clamp(min=1e-12))
    for name, want in wanted.items():
        got = gradients.get(name)
        if want is None and got is None:
            continue
        zero = torch.zeros(())
        off = max(
            off,
            float((_dense(zero if got is None else got) - _dense(zero if want is None else want)).abs().max())
            / largest,
        )
    return off


def _dense(tensor):
    return tensor.to_dense() if tensor.is_sparse else tensor


def reason_of(message):
    """Return the kind of a refusal: its first words, without numbers and names."""
    return re.sub(r"'[^']*'|\d+(\.\d+)?", "…", message)[:70]


def main():
    """Run the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first case")
    parser.add_argument("--loss", default="", help="only cases whose loss has this in its name")
    parser.add_argument("--show", action="store_true", help="print every refusal whole")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    counts, reasons, begin = collections.Counter(), collections.Counter(), time.monotonic()
    for number in range(asked.cases):
        if asked.loss and asked.loss not in Case(asked.first + number).build()[2][0]:
            continue
        outcome = run_case(asked.first + number)
        counts[outcome.kind] += 1
        if outcome.kind == "refused":
            reasons[outcome.why] += 1
        if outcome.kind in ("wrong", "crashed") or (asked.show and outcome.kind == "refused"):
            print(f"--- {outcome.kind} ({outcome.why})\n{outcome.told}", flush=True)
        if (number + 1) % 100 == 0:
            print(f"{number + 1} cases, {time.monotonic() - begin:.0f} s: {dict(counts)}", flush=True)
    print(f"\n{sum(counts.values())} cases: {dict(counts)}")
    for why, count in reasons.most_common():
        print(f"  refused {count:>5}: {why}")
    sys.exit(1 if counts["wrong"] or counts["crashed"] else 0)


if __name__ == "__main__":
    main()
