"""Host copies: copies of tensors in host memory, which is reused by the next save.

Training waits until the copies are made, or are in the stream of a GPU. Most saves hold the same tensors as the last
one, so each tensor only has its shape checked: with many small tensors, Python takes longer than the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from operator import attrgetter

import torch

from penstock.devices.kinds import kind_of

Files = dict[str, dict[str, torch.Tensor]]
Tensors = list[torch.Tensor]

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_layout = attrgetter("shape", "dtype", "is_cuda")


class Staging:
    """Host memory for one save at a time; pinned for tensors on a GPU, so that the host does not wait.

    Args:
        num_threads: the number of threads that copy within host memory if torch has only one thread of its own; give
            one per waiting lane.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._num_threads = num_threads
        self._names: list[tuple[str, ...]] = []
        self._layouts: list[object] = []
        self._memory: Files = {}

    def copy(self, files: Mapping[str, Mapping[str, torch.Tensor]]) -> tuple[Files, list[Callable[[], None]]]:
        """Return copies of the tensors of each file, and functions that wait until the copies can be read.

        A copy from a GPU runs in the GPU's current stream, so later work in that stream does not change it.
        """
        names = [(file, *tensors) for file, tensors in files.items()]
        given = [tensor for tensors in files.values() for tensor in tensors.values()]
        layouts: list[object] = list(map(_layout, given))
        if names != self._names or layouts != self._layouts:
            self._allocate(files)
            self._names, self._layouts = names, layouts
        to = [place for places in self._memory.values() for place in places.values()]
        if not any(tensor.is_cuda for tensor in given):
            self._copy_on_host(to, given)
            waits = []
        else:
            on_gpu = [at for at, tensor in enumerate(given) if tensor.is_cuda]
            _copy([to[at] for at in on_gpu], [given[at] for at in on_gpu], is_cuda=True)
            devices = {given[at].device for at in on_gpu}
            events = [kind_of(device).record_event(device) for device in devices]
            waits = [event.synchronize for event in events if event is not None]
            here = [at for at, tensor in enumerate(given) if not tensor.is_cuda]
            self._copy_on_host([to[at] for at in here], [given[at] for at in here])
        return {file: dict(places) for file, places in self._memory.items()}, waits

    def _allocate(self, files: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Allocate memory for each tensor; reuse the existing memory if the shape is the same."""
        names = [(file, name) for file, *own in self._names for name in own]
        layout_of = dict(zip(names, self._layouts, strict=True))
        memory = self._memory

        def place(file: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
            if layout_of.get((file, name)) == _layout(tensor):
                return memory[file][name]
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

        self._memory = {
            file: {name: place(file, name, tensor) for name, tensor in tensors.items()}
            for file, tensors in files.items()
        }

    def _copy_on_host(self, to: Tensors, given: Tensors) -> None:
        """Copy within host memory.

        Torch splits a large tensor among its own threads. If torch has only one thread, our threads share the tensors,
        because a single thread does not use the whole memory bandwidth.
        """
        if _has_threads() or self._num_threads == 1:
            _copy(to, given)
            return
        first, *others = _split_evenly([place.nbytes for place in to], self._num_threads)
        with ThreadPoolExecutor(max(1, len(others)), "penstock-copy") as pool:
            waiting = [pool.submit(_copy, to[part], given[part]) for part in others]
            _copy(to[first], given[first])
            for copied in waiting:
                copied.result()


def _has_threads() -> bool:
    return torch.get_num_threads() > 1


@torch.no_grad()
def _copy(to: Tensors, given: Tensors, *, is_cuda: bool = False) -> None:
    """Copy all tensors in one call: a call from Python takes about as long as the copy of a small tensor.

    Tensor subclasses, such as quantized optimizer states, are copied one at a time.
    """
    if _PLAIN.issuperset(map(type, given)):
        if to:
            torch._foreach_copy_(to, given, non_blocking=is_cuda)
        return
    for place, tensor in zip(to, given, strict=True):
        place.copy_(tensor, non_blocking=is_cuda)


def _split_evenly(sizes: list[int], count: int) -> list[slice]:
    """Return slices that split a list into `count` consecutive parts of about the same total size."""
    total, done, at = sum(sizes), 0, 0
    bounds = [0]
    for number in range(1, count):
        while at < len(sizes) and done * count < number * total:
            done += sizes[at]
            at += 1
        bounds.append(at)
    return [slice(begin, end) for begin, end in pairwise([*bounds, len(sizes)])]
