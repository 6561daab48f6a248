"""Run a model and its captured form on the same batch with the same seed, and report the differences."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.model.capture.export.tracing import is_cache

__all__ = [
    "Batch",
    "Outcome",
    "as_batch",
    "difference",
    "named_buffers",
    "restore",
    "run",
    "seed_all",
    "snapshot",
    "tensors_of",
    "weighted",
]

SEED = 1234
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


@dataclass(frozen=True)
class Batch:
    """The arguments of a call; `dim` is the dimension of the samples."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dim: int = 0

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return a batch in which `change` was applied to every tensor."""
        return Batch(tuple(_mapped(x, change) for x in self.args), _mapped(self.kwargs, change), self.dim)

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in the order in which `mapped` visits them."""
        found: list[Tensor] = []
        self.mapped(lambda x: found.append(x) or x)
        return found

    def rows(self, size: int, rows: Sequence[int]) -> Batch:
        """Return these rows of a batch with `size` samples."""
        index = torch.tensor(list(rows))
        return self.mapped(
            lambda x: x.index_select(self.dim, index) if x.ndim > self.dim and x.shape[self.dim] == size else x
        )

    def to(self, dtype: torch.dtype) -> Batch:
        """Return a copy; floating-point tensors get the given dtype."""
        return self.mapped(lambda x: x.to(dtype) if x.is_floating_point() else x.clone())

    def resized(self, old: int, new: int) -> Batch:
        """Return a batch of another size: it drops rows or repeats them."""
        return self.rows(old, [row % old for row in range(new)])


@dataclass(frozen=True)
class Outcome:
    """The results of one forward and backward."""

    shape: str
    own_loss: str
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def as_batch(example: Any, dim: int = 0) -> Batch:  # noqa: ANN401
    """Return a tensor, a tuple or a dict as a Batch."""
    if isinstance(example, dict):
        return Batch((), dict(example), dim)
    return Batch(example if isinstance(example, tuple) else (example,), {}, dim)


def _mapped(x: Any, change: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, dict):
        return {key: _mapped(value, change) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(_mapped(value, change) for value in x)
    return x


def tensors_of(x: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401
    """Yield every tensor in a structure with its path, through dicts, lists, dataclasses and plain objects."""
    if isinstance(x, Tensor):
        yield path or "output", x
    elif is_cache(x):
        return
    elif isinstance(x, Mapping):
        for key, value in x.items():
            yield from tensors_of(value, f"{path}[{key!r}]", depth + 1)
    elif isinstance(x, list | tuple):
        for index, value in enumerate(x):
            yield from tensors_of(value, f"{path}[{index}]", depth + 1)
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        for entry in dataclasses.fields(x):
            yield from tensors_of(getattr(x, entry.name), f"{path}.{entry.name}", depth + 1)
    elif depth < 6 and hasattr(x, "__dict__") and not callable(x):
        yield from tensors_of(vars(x), path, depth + 1)


def shape_of(x: Any) -> str:  # noqa: ANN401
    """Return a text with the types and keys of a structure and its values that are not tensors."""
    if isinstance(x, Tensor):
        return "tensor"
    name = type(x).__name__
    if isinstance(x, Mapping):
        return f"{name}({', '.join(f'{k}: {shape_of(v)}' for k, v in x.items() if v is not None and not is_cache(v))})"
    if isinstance(x, list | tuple):
        return f"{name}({', '.join(map(shape_of, x))})"
    if dataclasses.is_dataclass(x):
        return f"{name}({', '.join(f'{f.name}: {shape_of(getattr(x, f.name))}' for f in dataclasses.fields(x))})"
    return repr(x) if isinstance(x, str | int | float | bool | None) else name


def own_loss(out: Any) -> str:  # noqa: ANN401
    """Return the path of the output's own loss, or an empty string."""
    found = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if not (isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad):
        return ""
    return next(path for path, x in tensors_of(out) if x is found)


def weighted(tensors: Iterable[Tensor]) -> Tensor:
    """Return a weighted sum of all tensors that have a gradient, so that no gradient is zero by chance."""
    generator = torch.Generator().manual_seed(SEED)
    total = torch.zeros((), dtype=torch.float64)
    for x in tensors:
        if x.requires_grad:
            weights = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            real = torch.view_as_real(x).sum(-1) if x.is_complex() else x
            total = total + (real.double() * weights).sum()
    return total


def seed_all() -> None:
    """Seed all random generators that a model may use."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


def run(call: Callable[..., Any], batch: Batch, owner: nn.Module, stages: Sequence[nn.Module] = ()) -> Outcome:
    """Run forward and backward of a callable; return the results, with the gradients and buffers of `owner`."""
    for parameter in (*owner.parameters(), *(p for stage in stages for p in stage.parameters())):
        parameter.grad = None
    batch = batch.mapped(torch.clone)
    seed_all()
    out = call(*batch.args, **batch.kwargs)
    found = dict(tensors_of(out))
    outputs = {path: x.detach().clone() for path, x in found.items()}
    own = own_loss(out)
    loss = found[own].sum() if own else weighted(found.values())
    outputs["the loss"] = loss.detach().clone()
    if loss.requires_grad:
        loss.backward()
    gradients = {name: None if p.grad is None else p.grad.detach().clone() for name, p in owner.named_parameters()}
    buffers = {name: x.detach().clone() for name, x in named_buffers(owner, stages)}
    return Outcome(shape_of(out), own, outputs, gradients, buffers)


def named_buffers(owner: nn.Module, stages: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of the model. If a stage has a buffer of the same name, yield that one instead."""
    found = dict(owner.named_buffers())
    for stage in stages:
        found.update((name, x) for name, x in stage.named_buffers() if name in found)
    yield from found.items()


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers."""
    return {name: x.detach().clone() for name, x in (*model.named_parameters(), *model.named_buffers())}


@torch.no_grad()
def restore(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Restore a snapshot in place, for all names that the model has."""
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if name in saved and x.shape == saved[name].shape:
            x.copy_(saved[name])


def difference(ours: Outcome, plain: Outcome, dtype: torch.dtype) -> str:
    """Return the first difference, or an empty string."""
    if ours.shape != plain.shape:
        return f"output is {ours.shape[:150]}, not {plain.shape[:150]}"
    for what in ("outputs", "gradients", "buffers"):
        mine, theirs = getattr(ours, what), getattr(plain, what)
        if mine.keys() != theirs.keys():
            return f"{what}: {sorted(mine.keys() ^ theirs.keys())[:5]} only on one side"
        wrong = {name: text for name in mine if (text := _differs(mine[name], theirs[name], dtype))}
        if wrong:
            first = next(iter(wrong))
            return f"{len(wrong)} of {len(mine)} {what} differ, first {first}: {wrong[first]}"
    return ""


def _differs(a: Tensor | None, b: Tensor | None, dtype: torch.dtype) -> str:
    if a is None or b is None:
        return "" if a is b else f"{'none' if a is None else 'one'} where {'none' if b is None else 'one'} is due"
    if a.is_sparse or b.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
    if a.numel() == 0:
        return ""
    if not (a.is_floating_point() or a.is_complex()):
        return "" if torch.equal(a, b) else "other integers"
    if not torch.equal(a.isfinite(), b.isfinite()):
        return "not finite elsewhere"
    a, b = torch.nan_to_num(a, 0, 0, 0), torch.nan_to_num(b, 0, 0, 0)
    tolerance = max(TOLERANCE[dtype], TOLERANCE.get(b.dtype, 0.0))  # a model may compute a loss in float32
    worst, size = (a - b).abs().max().item(), b.abs().max().item()
    return "" if worst <= tolerance * max(1.0, size) else f"by {worst:.2e} of {size:.2e}"
