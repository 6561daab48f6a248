"""Sanitizer: make torch's detector of GPU races (`TORCH_CUDA_SANITIZER=1`) work with lanes.

The detector is a dispatch mode that observes the operations of the main thread. It needs four corrections:

- Lanes are threads, so each of them has to enter the mode itself.
- A trace runs operations on tensors without memory. The detector reads their addresses, which ends the process.
- It identifies a tensor of zero bytes by Python's object id, and Python soon reuses that id.
- Inside such a mode torch compiles nothing, unless the mode allows it.
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


@contextmanager
def sanitized() -> Iterator[None]:
    """Let the sanitizer, if it is on, observe this thread."""
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
    """Hide tensors without memory from the sanitizer, if it is on."""
    if _enabled() is None:
        yield
        return
    with _disable_current_modes():
        yield


def let_compile() -> None:
    """Let torch compile while the sanitizer is on: it pauses during compilation and then observes the compiled code."""
    watch = _enabled()
    if watch is None:
        return
    type(watch.dispatch).ignore_compile_internals = classmethod(lambda cls: True)
    # torch cached the answer when the mode was entered in the main thread
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
    if "_handle_kernel_launch" not in vars(handler):  # it counts what it observes: two threads would use one number
        handler._handle_kernel_launch = _one_at_a_time(handler._handle_kernel_launch)
        module.ArgumentHandler._handle_argument = _with_memory(module.ArgumentHandler._handle_argument)
    return watch


def _with_memory(function: Callable[..., None]) -> Callable[..., None]:
    """Return a handler that skips arguments without memory."""

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
