"""Torch's sanitizer for races on a GPU (`TORCH_CUDA_SANITIZER=1`): let it see what it would miss, and leave the rest.

It looks at every operation of the main thread. Lanes are threads, so they let it in themselves. A trace runs operations
on tensors that have no memory: it asks for their addresses, and that ends the process. And it knows a tensor of no
bytes by the number that Python gave the object, which Python soon gives to another. Within any mode of the kind that
it is, torch compiles nothing, unless the mode says that it may.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode, _pop_mode, _push_mode

__all__ = ["let_compile", "sanitized", "unsanitized"]


@contextmanager
def sanitized() -> Iterator[None]:
    """Let the sanitizer, where it is on, see what this thread does."""
    watch = _enabled()
    if watch is None or threading.current_thread() is threading.main_thread():
        yield
        return
    _push_mode(watch.dispatch)
    try:
        yield
    finally:
        _pop_mode()


@contextmanager
def unsanitized() -> Iterator[None]:
    """Keep the sanitizer, where it is on, from tensors that have no memory."""
    if _enabled() is None:
        yield
        return
    with _disable_current_modes():
        yield


def let_compile() -> None:
    """Let torch compile where the sanitizer is on: it is kept out meanwhile, and then sees what was compiled."""
    watch = _enabled()
    if watch is None:
        return
    type(watch.dispatch).ignore_compile_internals = classmethod(lambda cls: True)
    # torch asked when it was entered, in the main thread, and notes the answer
    is_noted = _python_dispatch.is_in_any_mode_without_ignore_compile_internals()
    if is_noted and _get_current_dispatch_mode() is watch.dispatch:
        watch.disable()
        watch.enable()


def _enabled() -> Any:  # noqa: ANN401 - torch's own
    module = sys.modules.get("torch.cuda._sanitizer")
    watch = None if module is None else module.cuda_sanitizer
    if module is None or watch is None or not watch.enabled:
        return None
    handler = watch.dispatch.event_handler
    if "_handle_kernel_launch" not in vars(handler):  # it numbers what it sees, and two threads would take one number
        handler._handle_kernel_launch = _one_at_a_time(handler._handle_kernel_launch)
        module.ArgumentHandler._handle_argument = _with_memory(module.ArgumentHandler._handle_argument)
    return watch


def _with_memory(function: Callable[..., None]) -> Callable[..., None]:
    """Return what handles an argument, for those that have memory."""

    def handle(self: object, value: object, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as the function
        if isinstance(value, torch.Tensor) and value.is_cuda and value.data_ptr():
            function(self, value, *args, **kwargs)

    return handle


def _one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    lock = threading.RLock()

    def locked(*args: Any) -> Any:  # noqa: ANN401 - as the function
        with lock:
            return function(*args)

    return locked
