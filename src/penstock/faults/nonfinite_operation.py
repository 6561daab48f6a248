"""Ops: the operation that made the first value that is not finite, within one action."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.model.source import line_of_frame

__all__ = ["OpFinder", "is_finite"]

_UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
# they write a constant: an infinity that they make is what the model asked for, as in a mask
_CONSTANT = ("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor", "where")


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all of a tensor's numbers are finite; what holds no fractions is."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or not tensor.numel():
        return True
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        values = values._values()
    return bool(torch.isfinite(values).all())


class OpFinder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first operation inside that made a NaN of none, and the first that made an infinity of none.

    Args:
        name_of: what the stage holds, by id, to say which module an operation is of.
    """

    def __init__(self, name_of: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name_of, self._module = name_of, ""
        self.nan = self.infinity = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run an operation and look at what it made."""
        made = func(*args, **(kwargs or {}))
        if not self.nan:
            self._look(func, made, args, kwargs)
        return made

    def _look(self, func: Any, made: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401 - as torch gives them
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        own = next((self._name_of[id(tensor)] for tensor in given if id(tensor) in self._name_of), "")
        self._module = own.rpartition(".")[0] or own or self._module
        values = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor) and not is_finite(leaf)]
        if not values or name in _UNWRITTEN:
            return
        if any(map(_has_nan, values)):
            if not any(map(_has_nan, given)) or name.endswith("_"):
                self.nan = self._tell(name, own) + self._infinite(given)
        elif not self.infinity and name not in _CONSTANT and all(map(is_finite, given)):
            self.infinity = self._tell(name, own)

    def _infinite(self, given: list[torch.Tensor]) -> str:
        if all(map(is_finite, given)):
            return ""
        return f", of an infinity{f' that was made by {self.infinity}' if self.infinity else ''}"

    def _tell(self, name: str, own: str) -> str:
        module = f" in {self._module}" if own else f" after {self._module}" if self._module else ""
        line = next((line for frame in _frames() if (line := line_of_frame(frame))), "")
        return f"{name.strip('_')}{module}{f' at {line}' if line else ''}"


def _has_nan(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return False
    values = tensor.detach()
    return bool(torch.isnan(values._values() if values.layout is torch.sparse_coo else values).any())


def _frames() -> Iterator[FrameType]:
    """Yield the calls that lead here, the innermost first, as far as the stage: what is around it is no model."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith("stage_run.py"):
        yield frame
        frame = frame.f_back
