"""Untouched: a model after a trace is as it was before: a trace leaves fake tensors, and numbers, in attributes."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from penstock.model.preserve.put_back import put_back

__all__ = ["CONTAINERS", "OF_TORCH", "refill", "unchanged", "untouched"]

CONTAINERS = (list, dict, set, deque)

OF_TORCH = frozenset(vars(nn.Module())) | {"_is_hf_initialized", "_compiled_call_impl"}


def refill(container: Any, content: Any) -> None:  # noqa: ANN401 - a list, dict, set or deque
    """Let a container hold what another one holds, and nothing else."""
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(content)


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put back what runs of a model's forward leave in it: attributes, and the buffers with their values."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    try:
        with untouched(model):
            yield
    finally:
        for buffer, before in buffers:
            put_back(buffer, before)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put back what a trace leaves in a model's modules."""
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
    own = [value for _, attributes, _ in before for key, value in attributes.items() if key not in OF_TORCH]
    inside = [(value, value.copy()) for value in own if type(value) in CONTAINERS]
    # tensors that are neither parameters nor buffers are real to a trace, which changes them as a call would
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
