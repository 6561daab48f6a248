"""Model state: restore the attributes and buffers of a model that a run or a trace of its forward changes."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from penstock.model.preserve.tensor_values import restore_values

CONTAINERS = (list, dict, set, deque)

TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) | {"_is_hf_initialized", "_compiled_call_impl"}


def refill(container: Any, content: Any) -> None:  # noqa: ANN401 - a list, dict, set or deque
    """Replace the content of a container."""
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(content)


@contextlib.contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore attributes, buffers and buffer values after runs of a model's forward."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    try:
        with preserve_attributes(model):
            yield
    finally:
        for buffer, before in buffers:
            restore_values(buffer, before)


@contextlib.contextmanager
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
