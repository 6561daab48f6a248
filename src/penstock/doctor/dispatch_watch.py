"""Looking: a dispatch mode that sees every operation of a thread, and of the backwards that it starts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from penstock.doctor.finding_kinds import Kind
from penstock.doctor.gpu_tensors import Where
from penstock.doctor.sightings import Tally
from penstock.doctor.slow_reductions import find_reduction
from penstock.doctor.source_lines import find_place
from penstock.doctor.sync_signs import launches, read_sign, tensors_of

__all__ = ["Looking"]


class Looking(TorchDispatchMode):
    """Notes operations that wait for the device, and reductions in the wrong order.

    Args:
        tally: to add to.
        where: which tensors are on the device.
        thread: whose line is named for what runs in threads of torch's own.

    Attributes:
        is_on: notes are taken; a mode that cannot be left is at least quiet.
    """

    supports_higher_order_operators = True

    def __init__(self, tally: Tally, where: Where, thread: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tally, self._where, self._thread = tally, where, thread
        self.is_on = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code as it is: otherwise torch.compile would run it uncompiled, in all threads."""
        return True

    @property
    def is_on_top(self) -> bool:
        """Is this mode the last that was entered? Only then may it be left."""
        return _get_current_dispatch_mode() is self

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - as torch has it
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        named = kwargs or {}
        if not self.is_on:
            return func(*args, **named)
        inputs = tensors_of((args, named))
        touches = any(map(self._where.is_on_device, inputs))
        begin = time.perf_counter()
        if touches and launches(func):
            self._tally.launched(begin)
        out = func(*args, **named)
        end = time.perf_counter()
        if touches:
            self._where.made(tensors_of(out))
            self._look_at_reductions(func, args, named)
        sign = read_sign(func, args, named, out, self._where)
        if sign is not None:
            place = find_place(self._thread)
            self._tally.add(sign.kind, place, blocked=end - begin, detail=sign.detail)
            if sign.is_wait:
                self._tally.drained(sign.kind, place, end)
        return out

    def _look_at_reductions(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:  # noqa: ANN401
        reduction = find_reduction(func, args, kwargs)
        is_backward = torch._C._current_autograd_node() is not None  # those are not the user's to turn
        if reduction is not None and not is_backward:
            self._tally.add(Kind.REDUCTION, find_place(self._thread), detail=str(reduction), reduction=reduction)
