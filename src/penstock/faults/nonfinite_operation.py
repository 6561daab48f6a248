"""Nonfinite operation: the operation within an action that made the first value that is not finite."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.model.source import line_of_frame

_UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
# they write constants: an infinity from them is intended, as in a mask
_CONSTANT = ("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor", "where")


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers of a tensor are finite; integers always are."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or not tensor.numel():
        return True
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        values = values._values()
    return bool(torch.isfinite(values).all())


class OpFinder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the first operation that made a NaN from numbers, and the first that made an infinity from finite numbers.

    Args:
        name_of: the names of the stage's tensors by id, to name the module of an operation.
    """

    def __init__(self, name_of: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name_of, self._module = name_of, ""
        self.nan = self.infinity = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run an operation and check its result."""
        made = func(*args, **(kwargs or {}))
        if not self.nan:
            self._check(func, made, args, kwargs)
        return made

    def _check(self, func: Any, made: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401 - torch's signature
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        own = next((self._name_of[id(tensor)] for tensor in given if id(tensor) in self._name_of), "")
        self._module = own.rpartition(".")[0] or own or self._module
        values = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor) and not is_finite(leaf)]
        if not values or name in _UNWRITTEN:
            return
        if any(map(_has_nan, values)):
            if not any(map(_has_nan, given)) or name.endswith("_"):
                self.nan = self._describe(name, own) + self._infinite(given)
        elif not self.infinity and name not in _CONSTANT and all(map(is_finite, given)):
            self.infinity = self._describe(name, own)

    def _infinite(self, given: list[torch.Tensor]) -> str:
        if all(map(is_finite, given)):
            return ""
        return f", from an infinity{f' made by {self.infinity}' if self.infinity else ''}"

    def _describe(self, name: str, own: str) -> str:
        module = f" in {self._module}" if own else f" after {self._module}" if self._module else ""
        line = next((line for frame in _frames() if (line := line_of_frame(frame))), "")
        return f"{name.strip('_')}{module}{f' at {line}' if line else ''}"


def _has_nan(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return False
    values = tensor.detach()
    return bool(torch.isnan(values._values() if values.layout is torch.sparse_coo else values).any())


def _frames() -> Iterator[FrameType]:
    """Yield the stack frames from the innermost to the stage; frames outside the stage are not part of the model."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith("stage_run.py"):
        yield frame
        frame = frame.f_back
