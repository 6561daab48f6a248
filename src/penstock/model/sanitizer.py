"""Torch's sanitizer for races on a GPU (`TORCH_CUDA_SANITIZER=1`): let it see what it would miss, and leave the rest.

It looks at every operation of the main thread. Lanes are threads, so they let it in themselves. A trace runs operations
on tensors that have no memory: it asks for their addresses, and that ends the process.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode

__all__ = ["sanitized", "unsanitized"]


@contextmanager
def sanitized() -> Iterator[None]:
    """Let the sanitizer, where it is on, see what this thread does."""
    watch = _enabled()
    if watch is None or threading.current_thread() is threading.main_thread():
        yield
        return
    handler = watch.dispatch.event_handler
    if "_handle_kernel_launch" not in vars(handler):  # it numbers what it sees, and two threads would take one number
        handler._handle_kernel_launch = _one_at_a_time(handler._handle_kernel_launch)
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


def _enabled() -> Any:  # noqa: ANN401 - torch's own
    module = sys.modules.get("torch.cuda._sanitizer")
    watch = None if module is None else module.cuda_sanitizer
    return watch if watch is not None and watch.enabled else None


def _one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    lock = threading.RLock()

    def locked(*args: Any) -> Any:  # noqa: ANN401 - as the function
        with lock:
            return function(*args)

    return locked
