"""Homes: where a model's tensors were when it was captured, so that it can be captured there once more.

Lanes take parameters and buffers to their devices. The mode that was not captured at first is captured when it is first
asked for, and then the tensors of one model may be on several devices, where its own forward cannot run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from penstock.model.parameters import held_tensors

__all__ = ["Homes", "on_device"]


class Homes:
    """The devices of a model's parameters and buffers, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._device_of = {name: tensor.device for name, tensor in held_tensors(model).items()}

    @contextmanager
    def visited(self) -> Iterator[None]:
        """Bring the tensors back for a while; their own memory, which CUDA graphs may know, waits as it is."""
        moved: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            for name, tensor in held_tensors(self._model).items():
                home = self._device_of.get(name, tensor.device)
                if tensor.device != home and not tensor.is_meta:
                    moved.append((tensor, tensor.data))
                    tensor.data = tensor.data.to(home)
            yield
        finally:
            for tensor, data in moved:
                tensor.data = data


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device: a parameter itself, moved there, or a copy of anything else."""
    if tensor.device == device or tensor.is_meta:
        return tensor
    if isinstance(tensor, nn.Parameter):
        tensor.data = tensor.data.to(device)
        return tensor
    return tensor.to(device)
