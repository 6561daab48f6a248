"""Capturing: how one CUDA graph is made, and what is put right when that fails."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["CudaGraphs", "Maker", "Replay", "make_graphs", "no_collection"]

Replay = Callable[[], None]


class Maker(Protocol):
    """Makes graphs of one lane."""

    def capturing(self, generators: Sequence[torch.Generator]) -> AbstractContextManager[Replay]:
        """Make a graph of what is done inside; what is yielded replays it afterwards."""
        ...


class CudaGraphs:
    """CUDA graphs that take their memory from one pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def capturing(self, generators: Sequence[torch.Generator]) -> Iterator[Replay]:
        """Make a graph of what is done inside; what is yielded replays it afterwards."""
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        is_captured = False
        try:
            with _disable_current_modes():  # it sets up torch's own generator, which is for no mode to see
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            yield graph.replay
            is_captured = True
        finally:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*Graph is empty")  # of an action with nothing to do
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
        """Close the pool behind a capture that failed: else torch's allocator takes it to go on for ever.

        Memory that was used on several streams is given again only while no capture goes on anywhere.
        """
        with suppress(RuntimeError):  # it was closed already
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)


def make_graphs() -> Maker:
    """Return what makes graphs for a lane."""
    return CudaGraphs()


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python from freeing what is on a GPU in the middle of a capture."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _free_generators(generators: Sequence[torch.Generator]) -> None:
    """Let generators draw again: a capture that failed leaves them, and torch's own one, as if it still went on."""
    for generator in (torch.cuda.default_generators[torch.cuda.current_device()], *generators):
        generator.graphsafe_set_state(generator.clone_state())
