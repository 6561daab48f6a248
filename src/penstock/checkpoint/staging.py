"""Staging: copies of tensors in host memory, which is kept from one save to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

__all__ = ["Staging"]


class Staging:
    """Host memory for one save at a time; pinned for what comes from a GPU, so that the host need not wait."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}
        self._pinned: set[str] = set()  # asking torch whether memory is pinned would start CUDA

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[Callable[[], None]]]:
        """Return copies of tensors, and what to wait for before they are read.

        A copy from a GPU is put into its current stream: what comes later there does not change it.
        """
        self._memory = {name: self._place(name, tensor) for name, tensor in tensors.items()}
        devices: dict[torch.device, None] = {}
        for name, tensor in tensors.items():
            self._memory[name].copy_(tensor, non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices[tensor.device] = None
        events = [torch.cuda.current_stream(device).record_event() for device in devices]
        return dict(self._memory), [event.synchronize for event in events]

    def _place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._memory.get(name)
        is_same = kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype)
        if kept is not None and is_same and (name in self._pinned) == tensor.is_cuda:
            return kept
        (self._pinned.add if tensor.is_cuda else self._pinned.discard)(name)
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
