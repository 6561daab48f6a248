"""Preserve: leave a model unchanged after a capture or a check: its mode, attributes, buffers and devices."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.devices import cuda
from penstock.model.parameters import held_tensors, replaced_tensors, tensor_places

CONTAINERS = (list, dict, set, deque)
TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) | {"_is_hf_initialized", "_compiled_call_impl"}


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model into a mode temporarily; if it is already in this mode, its submodules keep their own modes."""
    before = [(module, module.training) for module in model.modules()]
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


class RandomStates:
    """A snapshot of all random states."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._gpus = cuda.random_states()
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()

    def have_others_changed(self) -> bool:
        """Return whether Python's or numpy's random numbers were drawn since the snapshot."""
        now: Any = np.random.get_state()
        same = now[2:] == self._numpy[2:] and bool(np.array_equal(now[1], self._numpy[1]))
        return random.getstate() != self._python or not same

    def restore(self) -> None:
        """Restore the snapshot."""
        torch.set_rng_state(self._torch)
        cuda.set_random_states(self._gpus)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def refill(container: Any, content: Any) -> None:  # noqa: ANN401 - a list, dict, set or deque
    """Replace the content of a container."""
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(content)


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore attributes, buffers and buffer values after runs of a model's forward."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    try:
        with preserve_attributes(model):
            yield
    finally:
        for buffer, before in buffers:
            restore_values(buffer, before)


@contextmanager
def preserve_attributes(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of a model's modules after a trace, which leaves fake tensors and numbers there."""
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
    own = [value for _, attributes, _ in before for key, value in attributes.items() if key not in TORCH_ATTRIBUTES]
    inside = [(value, value.copy()) for value in own if type(value) in CONTAINERS]
    # a trace treats tensors that are neither parameters nor buffers as real, and changes them as a call would
    tensors = [
        (value, value.detach().clone(), value._version)
        for value in own
        if type(value) is torch.Tensor and not value.is_inference()
    ]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            for key in vars(module).keys() - attributes.keys():
                del vars(module)[key]
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        for container, content in inside:
            refill(container, content)
        for tensor, content, version in tensors:
            if tensor._version != version:
                tensor.detach().copy_(content)


@torch.no_grad()
def restore_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Restore the values of a tensor from a copy; an unchanged tensor is not written to.

    This also restores a size that was changed through `.data`. An expanded tensor cannot be written to, and so cannot
    have changed.
    """
    if not is_same_kind(tensor, values):
        tensor.data = values.clone()
    elif tensor.layout is not torch.strided or tensor.is_nested or not torch.equal(tensor, values):
        tensor.copy_(values)


def is_same_kind(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and device."""
    return (tensor.shape, tensor.dtype, tensor.device) == (values.shape, values.dtype, values.device)


class OriginalDevices:
    """The devices of a model's parameters and buffers at the first capture, so that it can be captured there again.

    Lanes move parameters and buffers to their devices. The second mode (training or evaluation) is captured when it is
    first needed. The tensors of the model may then be on several devices, where its own forward cannot run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._device_of = {name: tensor.device for name, tensor in held_tensors(model).items()}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Temporarily move tensors to their original devices; keep their storage, which CUDA graphs may refer to."""
        moved: list[tuple[torch.Tensor, torch.Tensor]] = []
        empty: dict[str, torch.Tensor] = {}  # a tensor cannot be moved to meta in place
        try:
            for name, tensor in held_tensors(self._model).items():
                device = self._device_of.get(name, tensor.device)
                if device.type == "meta" and not tensor.is_meta:
                    empty[name] = emptied(tensor)
                elif tensor.device != device and not tensor.is_meta:
                    moved.append((tensor, tensor.data))
                    tensor.data = tensor.data.to(device)
            places = tensor_places(self._model) if empty else {}
            with replaced_tensors(places, {name: tensor for name, tensor in empty.items() if name in places}):
                yield
        finally:
            for tensor, data in moved:
                tensor.data = data


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like another one, on meta."""
    made = torch.empty_like(tensor, device="meta")
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device: a parameter is moved in place, any other tensor is copied."""
    if tensor.device == device or tensor.is_meta:
        return tensor
    if isinstance(tensor, nn.Parameter):
        tensor.data = tensor.data.to(device)
        return tensor
    return tensor.to(device)
