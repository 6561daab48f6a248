"""Original devices: the device of each tensor at the first capture, so that the model can be captured there again.

Lanes move parameters and buffers to their devices. The second mode (training or evaluation) is captured when it is
first needed. The tensors of the model may then be on several devices, where its own forward cannot run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from penstock.model.parameters import held_tensors


class OriginalDevices:
    """The current devices of a model's parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._device_of = {name: tensor.device for name, tensor in held_tensors(model).items()}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Temporarily move tensors to their original devices; keep their storage, which CUDA graphs may refer to."""
        moved: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            for name, tensor in held_tensors(self._model).items():
                device = self._device_of.get(name, tensor.device)
                if tensor.device != device and not tensor.is_meta:
                    moved.append((tensor, tensor.data))
                    tensor.data = tensor.data.to(device)
            yield
        finally:
            for tensor, data in moved:
                tensor.data = data


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device: a parameter is moved in place, any other tensor is copied."""
    if tensor.device == device or tensor.is_meta:
        return tensor
    if isinstance(tensor, nn.Parameter):
        tensor.data = tensor.data.to(device)
        return tensor
    return tensor.to(device)
