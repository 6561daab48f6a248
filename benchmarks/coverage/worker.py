"""Run one model with Penstock or with the peer, and print the result as one line of JSON.

    .venv/bin/python benchmarks/coverage/worker.py NAME [--what ours|stages|peer|plain]

NAME is a name in models.py, timm:NAME, torchvision:NAME, or a model type of transformers. `ours` is the user's path:
`Pipeline(model, example=…)`, then `step` (users_path.py). `stages` runs 2 and 4 captured stages in order, in training
(with dropout and the same seed) and in evaluation, for two batch sizes. Loss, every gradient and every buffer must
agree with the plain model, in float64 to 1e-10.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
import warnings
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from compare import Batch, Outcome, as_batch, difference, restore, run, snapshot
from models import BATCH, ENTRIES
from pictures import LARGE, build_picture, declare_operations
from registry import Entry
from torch import Tensor, nn

if TYPE_CHECKING:
    from penstock.model.graph import Graph

STAGES = (2, 4)
OTHER_BATCH = 6
USERS_BATCH = 4 * BATCH  # eight micro-batches of two samples, by default


def build(name: str, batch_size: int) -> tuple[nn.Module, Batch]:
    """Return a model and a batch, always the same for a name."""
    declare_operations()  # models of transformers import torchvision if it is installed
    torch.manual_seed(0)
    if ":" in name:
        model, example = build_picture(name, batch_size)
        return model, as_batch(example)
    if name in ENTRIES:
        model, _ = ENTRIES[name].build()
        return model, _joined(ENTRIES[name], batch_size)
    from small_table import SMALL

    from penstock.model.small_models.named_models import load

    model, example = load(name, batch_size=batch_size, exceptions=SMALL)
    return model, as_batch(example)


def _joined(entry: Entry, batch_size: int) -> Batch:
    """Return a batch of several examples, each with its own random numbers."""
    examples = []
    for seed in range(-(-batch_size // BATCH)):
        torch.manual_seed(seed)
        examples.append(as_batch(entry.build()[1], entry.batch_dim))
    columns = iter(list(zip(*(example.tensors() for example in examples), strict=True)))

    def join(x: Tensor) -> Tensor:
        column, dim = next(columns), entry.batch_dim
        has_batch = x.dim() > dim and x.shape[dim] == BATCH
        return torch.cat(column, dim).narrow(dim, 0, batch_size) if has_batch else x

    return examples[0].mapped(join)


def even_cuts(graph: Graph, stages: int) -> list[int]:
    """Return allowed cuts that divide the bytes of the parameters about equally.

    A parameter counts at its first use. Every node counts a little, so that models without parameters get cuts too.
    """
    seen: set[str] = set()
    weights = []
    for node in graph.nodes:
        new = [name for name in node.parameters if name not in seen]
        seen.update(new)
        weights.append(sum(graph.parameters[name].num_bytes for name in new))
    little = max(1.0, sum(weights) / max(1, len(weights)) / 100)
    sums = list(accumulate(weight + little for weight in weights))
    allowed = [c for c in range(1, len(graph.nodes)) if c not in graph.uncuttable]
    if len(allowed) < stages - 1:
        raise ValueError(f"only {len(allowed)} places for cuts among {len(graph.nodes)} nodes")
    cuts: list[int] = []
    for k in range(1, stages):
        wanted = bisect_left(sums, sums[-1] * k / stages) + 1
        free = [c for c in allowed if c > (cuts[-1] if cuts else 0)]
        left = stages - 1 - k
        cuts.append(min(free[: len(free) - left], key=lambda c: abs(c - wanted)))
    return cuts


def where(error: BaseException) -> str:
    """Return an error in one line: its type, its message, the last source line, and the last one in Penstock."""
    frames = traceback.extract_tb(error.__traceback__)
    short = [f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in frames]
    own = [s for s, frame in zip(short, frames, strict=True) if "/penstock/" in frame.filename]
    cause = f" <- {where(error.__cause__)}" if error.__cause__ else ""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text} [{', '.join(dict.fromkeys([*own[-1:], *short[-1:]]))}]{cause}"


class Plain:
    """The results of the plain model, which every case must match. Each case runs once."""

    def __init__(self, name: str) -> None:
        self.name = name
        entry = ENTRIES.get(name)
        self.sizes = [BATCH, OTHER_BATCH]
        self.dtype = torch.float32 if entry and entry.is_single else torch.float64
        self.batches = {size: build(name, size)[1] for size in self.sizes}
        self.outcomes: dict[tuple[bool, int], Outcome | str] = {}
        self._run_all()
        if self.dtype == torch.float64 and isinstance(self.outcomes[True, BATCH], str):
            self.dtype = torch.float32  # the model requires float32
            self._run_all()

    def _run_all(self) -> None:
        model = self.fresh()
        saved = snapshot(model)
        for is_training in (True, False):
            for size in self.sizes:
                restore(model, saved)
                try:
                    self.outcomes[is_training, size] = run(model.train(is_training), self.batch(size), model)
                except Exception as error:
                    self.outcomes[is_training, size] = where(error)

    def fresh(self) -> nn.Module:
        """Return a new model with the same parameters."""
        return build(self.name, BATCH)[0].to(self.dtype)

    def batch(self, size: int) -> Batch:
        return self.batches[size].to(self.dtype)

    def cases(self, attempt: Callable[[bool, int], Outcome], *, only_first: bool = False) -> dict[str, str]:
        """Return "ok" or the difference, for both modes and each batch size, or only for the first of these cases."""
        results = {}
        for (is_training, size), expected in list(self.outcomes.items())[: 1 if only_first else None]:
            key = f"{'train' if is_training else 'eval'}/{size}"
            if isinstance(expected, str):
                results[key] = f"skip: the plain model fails: {expected}"
                continue
            try:
                results[key] = difference(attempt(is_training, size), expected, self.dtype) or "ok"
            except Exception as error:
                results[key] = where(error)
        return results


def ours(name: str) -> dict[str, Any]:
    """Run a model with `Pipeline` and `step`, in float64, or in float32 if the model requires it."""
    from users_path import run_pipeline, without_dropout

    entry = ENTRIES.get(name)
    dtypes = [torch.float32] if entry and entry.is_single else [torch.float64, torch.float32]
    for dtype in dtypes:
        size = BATCH if name in LARGE else USERS_BATCH
        model, batch = build(name, size)
        model = without_dropout(model.to(dtype))
        try:
            report = run_pipeline(model, batch.to(dtype), size, dtype)
        except Exception as error:  # an error of the plain model
            if dtype == dtypes[-1]:
                raise
            del error
            continue
        return report | {"dtype": str(dtype).removeprefix("torch.")}
    raise AssertionError("one of the precisions is the last")


def stages(it: Plain) -> dict[str, Any]:
    from penstock.model.capture.capture import capture

    model = it.fresh().train()
    saved = snapshot(model)
    batch = it.batch(BATCH)
    begin = time.perf_counter()
    captured = capture(model, batch.kwargs or batch.args, training=True, num_stages=max(STAGES))
    report: dict[str, Any] = {
        "path": captured.path,
        "reason": captured.reason,
        "nodes": len(captured.graph.nodes),
        "capture_seconds": round(time.perf_counter() - begin, 3),
        "results": {},
    }
    for stages in STAGES:
        try:
            cuts = even_cuts(captured.graph, stages)
            chain = captured.split(cuts)
        except Exception as error:
            report["results"][f"{stages}"] = where(error)
            continue

        def attempt(is_training: bool, size: int, chain: Any = chain) -> Outcome:  # noqa: ANN401
            for module in (model, *chain.stages):
                restore(module, saved)
            (chain.train if is_training else chain.eval)()
            return run(chain, it.batch(size), model, chain.stages)

        report["results"] |= {f"{stages}/{key}": text for key, text in it.cases(attempt).items()}
    return report


def peer(it: Plain) -> dict[str, Any]:
    from peer import run_peer

    results: dict[str, str] = {}
    for stages in STAGES:

        def attempt(is_training: bool, size: int, stages: int = stages) -> Outcome:
            expected = it.outcomes[is_training, size]
            return run_peer(it.fresh().train(is_training), it.batch(size), stages, expected)

        # each case captures the model again, so the peer runs only the batch of the example in training
        results |= {f"{stages}/{key}": text for key, text in it.cases(attempt, only_first=True).items()}
        if any(text != "ok" and not text.startswith("skip") for text in results.values()):
            break
    return {"results": results}


def only_plain(it: Plain) -> dict[str, Any]:
    model = it.fresh()
    saved = snapshot(model)

    def attempt(is_training: bool, size: int) -> Outcome:
        restore(model, saved)
        return run(model.train(is_training), it.batch(size), model)

    return {"results": it.cases(attempt)}


def report_of(name: str, what: str) -> dict[str, Any]:
    """Run one model with `what` and return the report."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    report: dict[str, Any] = {"model": name, "what": what}
    begin = time.perf_counter()
    try:
        if what == "ours":
            report |= ours(name)
        else:
            it = Plain(name)
            report["dtype"] = str(it.dtype).removeprefix("torch.")
            report |= {"stages": stages, "peer": peer, "plain": only_plain}[what](it)
    except Exception as error:
        report["error"] = where(error)
    report["seconds"] = round(time.perf_counter() - begin, 2)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--what", choices=("ours", "stages", "peer", "plain"), default="ours")
    given = parser.parse_args()
    print(json.dumps(report_of(given.name, given.what)), flush=True)


if __name__ == "__main__":
    main()
