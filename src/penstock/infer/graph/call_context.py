"""Call context: the context in which a call of a graph runs."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from penstock.devices import cuda


class CallContext:
    """Run on a device, without gradients and outside inference mode, whatever the caller's modes.

    Tensors made in inference mode could not be written to outside of it. This equals a combination of torch's own
    contexts, but skips those that are not needed: in a small graph they take a large share of the time.

    Args:
        device: the device.
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
