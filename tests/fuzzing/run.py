"""Run random cases; print refusals by reason; exit with 1 if a case is wrong or ends with a raw exception.

python tests/fuzzing/run.py --cases 5000                 # lanes are threads
python tests/fuzzing/run.py --cases 500 --processes      # lanes are processes
python tests/fuzzing/run.py --cases 5000 --jobs 16       # several cases at once
python tests/fuzzing/run.py --cases 1 --first 4711 --show
"""

from __future__ import annotations

import argparse
import collections
import copy
import multiprocessing
import random
import re
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import penstock
import processes
from fuzzing.losses import OUTPUTS, random_loss
from fuzzing.models import Model, batch_for
from penstock.errors import LaneError, PenstockError
from penstock.runtime.micro_batches import sizes_of
from runtime_everywhere import everyone, together

SCHEDULES = (
    "1f1b", "gpipe", "zb_gpipe", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2", "zb_v", "dualpipe", "dualpipe_v",
    "chimera", "hanayo", "v_half",
)  # fmt: skip
FORWARDS_FIRST = ("gpipe", "zb_gpipe", "looped_bfs")
KEEPS = ("hold", "hold", "recompute", "except_last", "offload")
TOLERANCE = 1e-9  # of the largest gradient
_PER_GROUP = 20  # cases that one group of processes runs


class Case:
    """One random case: all of it follows from its seed.

    Attributes:
        model: to be trained.
        batches: one for each step; gradients add up over the steps.
        targets: of the loss, for each.
        loss: of what the model returns, and a target.
        loss_name: what it is.
        options: of the pipeline.
    """

    def __init__(self, seed):
        self.seed = seed
        rng, more = random.Random(seed), random.Random(f"more {seed}")
        self.model = Model(rng.randrange(1 << 30), outputs=OUTPUTS)
        torch.manual_seed(seed)
        size = rng.choice([2, 3, 5, 8, 9])
        state = rng.getstate()
        sizes = [size, *(more.choice([size, size, 2, 7]) for _ in range(more.choice([0, 0, 1, 2])))]
        self.batches, self.targets = [], []
        for one in sizes:
            rng.setstate(state)
            batch = batch_for(self.model, one, rng)
            shape = self.model.output_of(called(copy.deepcopy(self.model), batch)).shape
            name, loss, target, is_coupled = random_loss(rng, shape)
            self.batches.append(batch)
            self.targets.append(target)
            if len(self.batches) == 1:
                self.loss_name, inner = name, loss
        self.loss = lambda made, target: inner(self.model.output_of(made), target)
        whole = is_coupled and rng.random() < 0.7
        schedule = rng.choice(FORWARDS_FIRST if whole else SCHEDULES)
        self.options = {
            "schedule": schedule,
            "lanes": 4 if schedule == "chimera" and rng.random() < 0.3 else 2,
            "micro_batches": rng.choice([1, 2, 3, 4]),
            "keep": rng.choice(KEEPS),
            "capture_path": rng.choice(["auto", "auto", "replay", "export"]),
            "loss_over": "batch" if whole else "micro_batch",
            "timeout": 60,
        }

    def told(self):
        """Return a line that says what the case is."""
        blocks = [type(block).__name__ for block in self.model.blocks]
        return f"seed {self.seed}: {blocks}, {len(self.batches)} steps, {self.loss_name}, {self.options}"

    def plain(self):
        """Return what the plain model gives, where batch norm sees one micro-batch after the other."""
        count = self.options["micro_batches"]
        model = copy.deepcopy(self.model).in_micro_batches(lambda size: sizes_of(size, count))
        losses = []
        for batch, target in zip(self.batches, self.targets, strict=True):
            losses.append(self.loss(called(model, batch), target))
            if losses[-1].requires_grad:
                losses[-1].backward()
        return Result(
            [loss.detach() for loss in losses],
            {name.replace("norm.norm.", "norm."): p.grad for name, p in model.named_parameters()},
            {name.replace("norm.norm.", "norm."): x for name, x in model.named_buffers()},
        )

    def pipelined(self, model, options):
        """Return what a pipeline gives, and how it captured the model."""
        with penstock.Pipeline(model, example=self.batches[0], loss=self.loss, **options) as pipe:
            torch.manual_seed(7)
            losses = [pipe.step(b, t).detach() for b, t in zip(self.batches, self.targets, strict=True)]
            together()
            gradients = {}
            for of_lane in everyone({name: p.grad for name, p in pipe.named_parameters()}):
                gradients |= of_lane
            # a process changes the buffers of its own stages alone, and does not say which those are
            buffers = {} if in_processes() else dict(model.named_buffers())
            return Result(losses, gradients, buffers), pipe.internals.captured.path

    def run(self):
        """Return how the case ended."""
        told = self.told()
        options = dict(self.options)
        if in_processes():
            options["lanes"] = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wanted = self.plain()
                model = copy.deepcopy(self.model)
                found, path = self.pipelined(self.model, options)
                if model.is_random and not in_processes():
                    # masks are a pipeline's own, and must be the same for all cuts, schedules and policies
                    one = {"schedule": "gpipe", "lanes": 1, "keep": "hold", "capture_path": path}
                    wanted, _ = self.pipelined(model, options | one)
        except PenstockError as error:
            cause = error.__cause__
            if not isinstance(error, LaneError) or isinstance(cause, PenstockError):
                return Outcome("refused", reason_of(str(error)), f"{told}\n{error}")
            if in_processes() and cause is None:  # another process failed, which says how
                return Outcome("told", "", f"{told}\n{error}")
            return Outcome("crashed", f"{type(cause).__name__} in a lane", f"{told}\n{traceback.format_exc()}")
        except Exception as error:
            return Outcome("crashed", type(error).__name__, f"{told}\n{traceback.format_exc()}")
        if model.is_random and in_processes():  # one lane to compare with would be another process group
            return Outcome("not compared", "", told)
        # with two directions, and in waves, micro-batches come in another order, which a running average follows
        has_order = options["schedule"] not in ("dualpipe", "chimera", "hanayo")
        running = ("running_mean", "running_var") if has_order else ()
        off, what = found.farthest(wanted, ("num_batches_tracked", *running))
        return Outcome("wrong", f"{what} off by {off:.2g}", told) if off > TOLERANCE else Outcome("right", "", told)


@dataclass(frozen=True)
class Result:
    """What a run leaves behind: a loss for each step, gradients and buffers by name."""

    losses: list
    gradients: dict
    buffers: dict

    def farthest(self, wanted, statistics):
        """Return the largest difference from another, relative to the largest gradient or to each loss, and where.

        Args:
            wanted: the other.
            statistics: names of batch norm's buffers to compare.
        """
        largest = max([1e-12, *(float(_dense(g).abs().max()) for g in wanted.gradients.values() if g is not None)])
        off = [
            (float((ours - loss).abs() / loss.abs().clamp(min=1e-12)), "the loss")
            for ours, loss in zip(self.losses, wanted.losses, strict=True)
        ]
        zero = torch.zeros(())
        for name, want in wanted.gradients.items():
            ours = self.gradients.get(name)
            if want is not None or ours is not None:
                one, other = (_dense(zero if g is None else g) for g in (ours, want))
                off.append((float((one - other).abs().max()) / largest, f"the gradient of {name}"))
        off += [
            (float((self.buffers[name] - wanted.buffers[name]).abs().max()), f"the buffer {name}")
            for name in wanted.buffers.keys() & self.buffers.keys()
            if name.rpartition(".")[2] in statistics
        ]
        return max(off)


@dataclass(frozen=True)
class Outcome:
    """How a case ended: "right", "refused", "wrong", "crashed" or "not compared" (it ran, and drew), and why."""

    kind: str
    why: str
    told: str


def in_processes():
    """Say whether lanes are processes."""
    return torch.distributed.is_initialized()


def called(model, batch):
    """Call a model as a pipeline is called with a batch."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _dense(tensor):
    return tensor.to_dense() if tensor.is_sparse else tensor


def reason_of(message):
    """Return the kind of a refusal: its first words, without numbers and names."""
    return re.sub(r"'[^']*'|\d+(\.\d+)?", "…", message)[:70]


def run_case(seed):
    """Run a case; return how it ended."""
    torch.set_num_threads(1)
    return Case(seed).run()


def run_in_processes(seeds):
    """Run cases with lanes that are two processes; return how each ended."""
    lanes = processes.run(_run_lane, 2, seeds, seconds=90 * len(seeds))
    return [_agreed(outcomes) for outcomes in zip(*lanes, strict=True)]


def _run_lane(seeds):
    return [run_case(seed) for seed in seeds]


def _agreed(outcomes):
    """Return the outcome of a case from those of its processes: the worst, which all must tell alike if refused."""
    outcomes = [outcome for outcome in outcomes if outcome.kind != "told"] or [replace(outcomes[0], kind="crashed")]
    kinds = {outcome.kind for outcome in outcomes}
    if "refused" in kinds and len(kinds) > 1:
        told = "\n".join(f"{outcome.kind}: {outcome.told}" for outcome in outcomes)
        return Outcome("crashed", "not all processes refuse it", told)
    order = ("crashed", "wrong", "refused", "not compared", "right")
    return min(outcomes, key=lambda outcome: order.index(outcome.kind))


def _parts(seeds, size):
    return [seeds[start : start + size] for start in range(0, len(seeds), size)]


def _run_part(seeds):
    return [run_case(seed) for seed in seeds]


def outcomes_of(seeds, jobs, lanes_are_processes):
    """Yield how each case ended, as it ends."""
    if lanes_are_processes:
        for part in _parts(seeds, _PER_GROUP):
            yield from run_in_processes(part)
    elif jobs == 1:
        yield from map(run_case, seeds)
    else:
        with multiprocessing.get_context("forkserver").Pool(jobs, maxtasksperchild=10) as pool:
            for part in pool.imap_unordered(_run_part, _parts(seeds, 10)):
                yield from part


def main():
    """Run the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first case")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once")
    parser.add_argument("--processes", action="store_true", help="lanes are two processes")
    parser.add_argument("--loss", default="", help="only cases whose loss has this in its name")
    parser.add_argument("--show", action="store_true", help="print every refusal whole")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    seeds = list(range(asked.first, asked.first + asked.cases))
    if asked.loss:
        seeds = [seed for seed in seeds if asked.loss in Case(seed).loss_name]
    counts, reasons, begin = collections.Counter(), collections.Counter(), time.monotonic()
    for number, outcome in enumerate(outcomes_of(seeds, asked.jobs, asked.processes), 1):
        counts[outcome.kind] += 1
        if outcome.kind == "refused":
            reasons[outcome.why] += 1
        if outcome.kind in ("wrong", "crashed") or (asked.show and outcome.kind == "refused"):
            print(f"--- {outcome.kind} ({outcome.why})\n{outcome.told}", flush=True)
        if number % 100 == 0:
            print(f"{number} cases, {time.monotonic() - begin:.0f} s: {dict(counts)}", flush=True)
    print(f"\n{sum(counts.values())} cases: {dict(counts)}")
    for why, count in reasons.most_common():
        print(f"  refused {count:>5}: {why}")
    sys.exit(1 if counts["wrong"] or counts["crashed"] else 0)


if __name__ == "__main__":
    main()
