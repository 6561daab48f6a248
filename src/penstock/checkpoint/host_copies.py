"""Staging: copies of tensors in host memory, which is kept from one save to the next.

The training stands still until the copies are made, or on their way from a GPU. What a save holds is mostly what the
last one held, so no more is done for each tensor than to see that it is of the same shape: of many small ones Python
would take longer than the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from operator import attrgetter

import torch

__all__ = ["Staging"]

Files = dict[str, dict[str, torch.Tensor]]
Tensors = list[torch.Tensor]

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_sign = attrgetter("shape", "dtype", "is_cuda")


class Staging:
    """Host memory for one save at a time; pinned for what comes from a GPU, so that the host need not wait.

    Args:
        num_threads: that copy within host memory, where torch has but one of its own: as many as lanes stand still.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._num_threads = num_threads
        self._names: list[tuple[str, ...]] = []
        self._signs: list[object] = []
        self._memory: Files = {}

    def copy(self, files: Mapping[str, Mapping[str, torch.Tensor]]) -> tuple[Files, list[Callable[[], None]]]:
        """Return copies of tensors, and what to wait for before they are read.

        A copy from a GPU is put into its current stream: what comes later there does not change it.

        Args:
            files: for each file its tensors, by their names.

        Raises:
            RuntimeError: when one cannot be copied.
        """
        names = [(file, *tensors) for file, tensors in files.items()]
        given = [tensor for tensors in files.values() for tensor in tensors.values()]
        signs: list[object] = list(map(_sign, given))
        if names != self._names or signs != self._signs:
            self._make_room(files)
            self._names, self._signs = names, signs
        to = [place for places in self._memory.values() for place in places.values()]
        if not any(tensor.is_cuda for tensor in given):
            self._copy_here(to, given)
            waits = []
        else:
            on_gpu = [at for at, tensor in enumerate(given) if tensor.is_cuda]
            _copy([to[at] for at in on_gpu], [given[at] for at in on_gpu], is_cuda=True)
            devices = {given[at].device for at in on_gpu}
            waits = [torch.cuda.current_stream(device).record_event().synchronize for device in devices]
            here = [at for at, tensor in enumerate(given) if not tensor.is_cuda]
            self._copy_here([to[at] for at in here], [given[at] for at in here])
        return {file: dict(places) for file, places in self._memory.items()}, waits

    def _make_room(self, files: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take memory for each tensor: what was kept, where it fits."""
        names = [(file, name) for file, *own in self._names for name in own]
        sign_of = dict(zip(names, self._signs, strict=True))
        memory = self._memory

        def place(file: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
            if sign_of.get((file, name)) == _sign(tensor):
                return memory[file][name]
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

        self._memory = {
            file: {name: place(file, name, tensor) for name, tensor in tensors.items()}
            for file, tensors in files.items()
        }

    def _copy_here(self, to: Tensors, given: Tensors) -> None:
        """Copy within host memory.

        Torch divides a large tensor among its own threads. Where it has but one, threads of ours share them: one alone
        does not use all that memory can do.
        """
        if _has_threads() or self._num_threads == 1:
            _copy(to, given)
            return
        first, *others = _even([place.nbytes for place in to], self._num_threads)
        with ThreadPoolExecutor(max(1, len(others)), "penstock-copy") as pool:
            waiting = [pool.submit(_copy, to[part], given[part]) for part in others]
            _copy(to[first], given[first])
            for copied in waiting:
                copied.result()


def _has_threads() -> bool:
    return torch.get_num_threads() > 1


@torch.no_grad()
def _copy(to: Tensors, given: Tensors, *, is_cuda: bool = False) -> None:
    """Copy all in one call: Python would take as long for each as a small tensor does.

    Tensors of other classes, such as quantized states of an optimizer, know at least how one of them is copied.
    """
    if _PLAIN.issuperset(map(type, given)):
        if to:
            torch._foreach_copy_(to, given, non_blocking=is_cuda)
        return
    for place, tensor in zip(to, given, strict=True):
        place.copy_(tensor, non_blocking=is_cuda)


def _even(sizes: list[int], count: int) -> list[slice]:
    """Return what is in a row in so many parts of about the same size, in their order."""
    total, done, at = sum(sizes), 0, 0
    bounds = [0]
    for number in range(1, count):
        while at < len(sizes) and done * count < number * total:
            done += sizes[at]
            at += 1
        bounds.append(at)
    return [slice(begin, end) for begin, end in pairwise([*bounds, len(sizes)])]
