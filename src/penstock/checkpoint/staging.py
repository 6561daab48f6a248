"""Staging: copies of tensors in host memory, which is kept from one save to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["Staging"]

_Pair = tuple[torch.Tensor, torch.Tensor]  # to, from


class Staging:
    """Host memory for one save at a time; pinned for what comes from a GPU, so that the host need not wait.

    Args:
        num_threads: that copy what is in host memory already: as many as lanes stand still meanwhile.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._num_threads = num_threads
        self._memory: dict[str, torch.Tensor] = {}
        self._pinned: set[str] = set()  # asking torch whether memory is pinned would start CUDA

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[Callable[[], None]]]:
        """Return copies of tensors, and what to wait for before they are read.

        A copy from a GPU is put into its current stream: what comes later there does not change it.
        """
        self._memory = {name: self._place(name, tensor) for name, tensor in tensors.items()}
        pairs = [(self._memory[name], tensor) for name, tensor in tensors.items()]
        devices: dict[torch.device, None] = {}
        for place, tensor in pairs:
            if tensor.is_cuda:
                place.copy_(tensor, non_blocking=True)
                devices[tensor.device] = None
        events = [torch.cuda.current_stream(device).record_event() for device in devices]
        self._copy_here([(place, tensor) for place, tensor in pairs if not tensor.is_cuda])
        return dict(self._memory), [event.synchronize for event in events]

    def _copy_here(self, pairs: Sequence[_Pair]) -> None:
        """Copy within host memory, by several threads: one alone does not use all that memory can do."""
        first, *others = _even(pairs, self._num_threads)
        with ThreadPoolExecutor(max(1, len(others)), "penstock-copy") as pool:
            waiting = [pool.submit(_copy, part) for part in others if part]
            _copy(first)
            for copied in waiting:
                copied.result()

    def _place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._memory.get(name)
        is_same = kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype)
        if kept is not None and is_same and (name in self._pinned) == tensor.is_cuda:
            return kept
        (self._pinned.add if tensor.is_cuda else self._pinned.discard)(name)
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


@torch.no_grad()
def _copy(pairs: Sequence[_Pair]) -> None:
    for place, tensor in pairs:
        place.copy_(tensor)


def _even(pairs: Sequence[_Pair], count: int) -> list[list[_Pair]]:
    """Return pairs in so many parts of about as many bytes each, in their order."""
    total = sum(place.nbytes for place, _ in pairs)
    parts: list[list[_Pair]] = [[] for _ in range(count)]
    done = 0
    for place, tensor in pairs:
        parts[min(count - 1, done * count // max(1, total))].append((place, tensor))
        done += place.nbytes
    return parts
