"""Around: what a call of a graph runs within."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from penstock.devices import cuda

__all__ = ["Around"]


class Around:
    """Compute without gradients, on a device, and in no inference mode, whatever the caller is in.

    What is made in that mode could not be written to outside of it. As torch's own contexts together, but what is so
    already costs nothing: a small graph takes little longer than they do.

    Args:
        device: where; of a CPU there is one.
    """

    __slots__ = ("_device", "_had_gradients", "_others")

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._others: ExitStack | None = None
        is_inferring = torch.is_inference_mode_enabled()
        is_elsewhere = self._device.type == "cuda" and cuda.current_gpu() != self._device.index
        if is_inferring or is_elsewhere:
            self._others = ExitStack()
            if is_inferring:
                self._others.enter_context(torch.inference_mode(False))
            if is_elsewhere:
                self._others.enter_context(cuda.on_gpu(self._device))
        self._had_gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._had_gradients)
        if self._others is not None:
            self._others.close()
