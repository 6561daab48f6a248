"""Graph capture: capture one CUDA graph, and clean up after a failed capture."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch.utils._python_dispatch import _disable_current_modes

Replay = Callable[[], None]


class CudaGraphs:
    """CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def capturing(self, generators: Sequence[torch.Generator]) -> Iterator[Replay]:
        """Capture the work inside; the yielded function replays it."""
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        is_captured = False
        try:
            with _disable_current_modes():  # it sets up torch's own generator; modes must not see that
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            yield graph.replay
            is_captured = True
        finally:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*Graph is empty")  # an action may have nothing to do
                try:
                    graph.capture_end()
                except Exception:
                    self._end_allocating()
                    is_captured, was_captured = False, is_captured
                    if was_captured:
                        raise
                finally:
                    if not is_captured:
                        _free_generators(generators)

    def _end_allocating(self) -> None:
        """Close the pool after a failed capture; torch's allocator would otherwise treat the capture as still open.

        While any capture is open, the allocator does not reuse memory that several streams used.
        """
        with suppress(RuntimeError):  # it was closed already
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)


@contextmanager
def no_collection(*, collects: bool = True) -> Iterator[None]:
    """Turn Python's garbage collector off: in a capture it must free no GPU memory. Let it run once before."""
    was_on = gc.isenabled()
    if collects:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _free_generators(generators: Sequence[torch.Generator]) -> None:
    """Make generators usable after a failed capture, which leaves them, and torch's default one, in capture mode."""
    for generator in (torch.cuda.default_generators[torch.cuda.current_device()], *generators):
        generator.graphsafe_set_state(generator.clone_state())
