"""Dispatch watch: a dispatch mode that sees every operation of a thread and of the backwards that it starts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from penstock.doctor.finding_kinds import Kind
from penstock.doctor.gpu_tensors import GpuTensors
from penstock.doctor.sightings import Tally
from penstock.doctor.slow_reductions import find_reduction
from penstock.doctor.source_lines import find_place
from penstock.doctor.sync_signs import launches, read_sign, tensors_of


class DispatchWatch(TorchDispatchMode):
    """Records operations that wait for the device, and reductions over an outer dimension.

    Args:
        tally: the tally to add to.
        where: which tensors are on the device.
        thread: the thread whose line is reported for operations in torch's own threads.

    Attributes:
        is_on: whether operations are recorded; if the mode cannot be left, it is switched off.
    """

    supports_higher_order_operators = True

    def __init__(self, tally: Tally, where: GpuTensors, thread: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tally, self._where, self._thread = tally, where, thread
        self.is_on = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Do not look into compiled code: otherwise torch.compile would run it uncompiled, in all threads."""
        return True

    @property
    def is_on_top(self) -> bool:
        """Whether this mode was entered last; only then can it be left."""
        return _get_current_dispatch_mode() is self

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's signature
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
            self._where.mark_results(tensors_of(out))
            self._find_reductions(func, args, named)
        sign = read_sign(func, args, named, out, self._where)
        if sign is not None:
            place = find_place(self._thread)
            self._tally.add(sign.kind, place, blocked=end - begin, detail=sign.detail)
            if sign.is_wait:
                self._tally.drained(sign.kind, place, end)
        return out

    def _find_reductions(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:  # noqa: ANN401
        reduction = find_reduction(func, args, kwargs)
        is_backward = torch._C._current_autograd_node() is not None  # the user cannot change these
        if reduction is not None and not is_backward:
            self._tally.add(Kind.REDUCTION, find_place(self._thread), detail=str(reduction), reduction=reduction)
