"""Graph replay: a program as one CUDA graph per shape, the cache of these graphs, and the context of a call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Generic, TypeVar

import torch

from penstock.devices import cuda
from penstock.devices.cuda_streams import OnStream, Stream, current_stream
from penstock.devices.graph_capture import CudaGraphs, no_collection
from penstock.devices.kinds import kind_of
from penstock.infer.graph.interpreter import Interpreter

T = TypeVar("T")

_MOST = 8  # shapes with a graph
_REST_CALLS = 64  # unused for so many calls: evict; a capture takes as long as hundreds of replays
_WARM_RUNS = 3  # first calls choose kernels and allocate, which must not happen in a capture


class Replay:
    """The CUDA graph of one shape.

    All graphs of a model share one memory pool, so they never run at the same time. Outputs are valid until one of the
    graphs runs again.

    Args:
        held: the parameters, buffers and constants of the program. The graph reads them at their current addresses, so
            it keeps their memory alive; it sees later changes in place.
        changed: the tensors in `held` that the program changes in place.
        places: the addresses of all tensors of the model.
        values: the inputs of a call, on any device.
        streams: one per branch; None on a CPU.
    """

    def __init__(
        self, interpreter: Interpreter, *, held: Sequence[torch.Tensor], places: list[int],
        changed: Sequence[torch.Tensor], values: Sequence[torch.Tensor], batch_size: int, device: torch.device,
        maker: CudaGraphs, streams: Sequence[Stream] | None,
    ) -> None:  # fmt: skip
        self._interpreter, self._streams, self._device = interpreter, streams, device
        self._slots = [torch.empty_like(value, device=device, requires_grad=False) for value in values]
        self._held = [tensor.detach() for tensor in held]
        self.places = places
        self._load(values)
        arguments = [*self._held, *self._slots, batch_size]
        with self._on_first_stream():
            with self._restored(changed):
                self._once = interpreter.make_once(arguments)
                for _ in range(_WARM_RUNS):
                    interpreter.run(arguments, self._once, streams)
            with no_collection(), maker.capturing(()) as replay:
                self.outputs: tuple[torch.Tensor, ...] = interpreter.run(arguments, self._once, streams)
        self._replay = replay

    def __call__(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the program on the current stream; return its outputs, which the next run overwrites."""
        self._load(values)
        self._replay()
        return self.outputs

    def _load(self, values: Sequence[torch.Tensor]) -> None:
        """Copy the inputs to the graph's memory; the caller has switched gradients off."""
        for slot, value in zip(self._slots, values, strict=True):
            slot.copy_(value, non_blocking=True)

    @contextmanager
    def _on_first_stream(self) -> Iterator[None]:
        """Work on the graph's first stream, after the caller's earlier work and before its later work."""
        if self._streams is None:
            yield
            return
        now, first = current_stream(self._device), self._streams[0]
        first.wait_stream(now)
        try:
            with OnStream(first):
                yield
        finally:
            now.wait_stream(first)

    @contextmanager
    def _restored(self, changed: Sequence[torch.Tensor]) -> Iterator[None]:
        """Restore what the warm-up runs change: buffers and the random state."""
        before = [tensor.clone() for tensor in changed]
        drawn = kind_of(self._device).random_state(self._device)
        try:
            yield
        finally:
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(old)
            kind_of(self._device).set_random_state(self._device, drawn)


class ShapeCache(Generic[T]):
    """A bounded cache by shape.

    When it is full, the least recently used entry is evicted, but only if it was unused for `rest_calls` calls of
    `get`. So if more shapes than fit take turns, the first ones stay.

    >>> shapes = ShapeCache[str](most=1, rest_calls=2)
    >>> shapes.put("a", "made for a")
    >>> shapes.get("a"), shapes.get("b"), shapes.has_space
    ('made for a', None, False)
    >>> shapes.get("b"), shapes.has_space
    (None, True)
    """

    def __init__(self, *, most: int = _MOST, rest_calls: int = _REST_CALLS) -> None:
        self._most, self._rest_calls, self._calls = most, rest_calls, 0
        self._made: OrderedDict[object, tuple[T, int]] = OrderedDict()  # the least recently used comes first

    def get(self, shape: object) -> T | None:
        """Return the entry of a shape, or None."""
        self._calls += 1
        if shape not in self._made:
            return None
        made, _ = self._made[shape]
        self._made[shape] = (made, self._calls)
        self._made.move_to_end(shape)
        return made

    @property
    def has_space(self) -> bool:
        """Whether another entry can be added."""
        if len(self._made) < self._most:
            return True
        _, used = next(iter(self._made.values()))
        return self._calls - used >= self._rest_calls

    def evict(self) -> None:
        """Evict the least recently used entry if the cache is full."""
        if len(self._made) >= self._most:
            self._made.popitem(last=False)

    def put(self, shape: object, made: T) -> None:
        """Add an entry."""
        self.evict()
        self._made[shape] = (made, self._calls)

    def clear(self) -> None:
        """Remove all entries."""
        self._made.clear()


class CallContext:
    """Run on a device, without gradients and outside inference mode, whatever the caller's modes.

    Tensors made in inference mode could not be written to outside of it. This equals a combination of torch's own
    contexts, but skips those that are not needed: in a small graph they take a large share of the time.
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
