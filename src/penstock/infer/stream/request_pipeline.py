"""Pipeline: requests that stream through a model, prepared, copied, computed and finished at the same time."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from penstock.devices.device_names import check_device
from penstock.errors import UsageError
from penstock.infer.graph.inference_graph import Graph
from penstock.infer.graph.unchanged_model import Plain
from penstock.infer.stream.stage_runner import Arguments, Line, Parcel, arguments
from penstock.infer.stream.stream_threads import CLOSED, Works
from penstock.runtime.exclusive_use import Use

__all__ = ["Pipeline"]

Stage = nn.Module | Callable[..., Any]
Errors = Literal["raise", "return"]


class Pipeline:
    """Requests that stream through a model.

    While one request is computed, the next is copied to the device and others are prepared or finished:

        preprocess ─► copy in ─► model ─► copy out ─► postprocess

    >>> with Pipeline(nn.Linear(4, 2), preprocess=torch.tensor, postprocess=lambda out: tuple(out.shape)) as pipe:
    ...     list(pipe.map([[0.0] * 4, [1.0] * 4]))
    [(2,), (2,)]

    Results come in the order of their requests. An error belongs to its request, the others go on.

    Args:
        model: a module, a `Graph`, or any function. It is called with what `preprocess` returns: a tuple is several
            arguments, a dict keyword arguments, anything else one.
        stages: in its place several of them, each called with what the one before returned (a tuple is several
            arguments). Each has a thread and a stream of its own, on the device where it is.
        preprocess: from a request to the model's arguments; by default they are the request itself.
        postprocess: from what the model returns, in host memory, to the result; by default that is the result.
        example: how the model is called. A module on a GPU then runs as a `Graph`, and else as it is.
        device: where a module is moved to and a function runs; by default where the module is, and the CPU.
        depth: how many requests are in flight at most.
        workers: threads that preprocess, and as many that postprocess.

    Raises:
        UsageError: when an argument cannot be right.
    """

    def __init__(
        self, model: Stage | None = None, *, stages: Sequence[Stage] | None = None,
        preprocess: Callable[[Any], Any] | None = None, postprocess: Callable[[Any], Any] | None = None,
        example: object = None, device: torch.device | str | int | None = None, depth: int = 4, workers: int = 1,
    ) -> None:  # fmt: skip
        if (model is None) == (stages is None):
            raise UsageError("give either a model or stages=[...]")
        if stages is not None and not isinstance(stages, (Sequence, nn.ModuleList, nn.Sequential)):
            raise UsageError(f"stages: give a list of them; given: {type(stages).__name__}")
        given = [model] if stages is None else list(stages)
        names = ["model"] if stages is None else [f"stage {at}" for at in range(len(given))]
        faults = [
            f"{name}: {stage!r:.60} cannot be called"
            for name, stage in zip(names, given, strict=True)
            if not callable(stage)
        ]
        faults += [
            f"{name}: {stage.__name__} is a class; give a module: {stage.__name__}(...)"
            for name, stage in zip(names, given, strict=True)
            if isinstance(stage, type) and issubclass(stage, nn.Module)
        ]
        faults += [
            f"{name}: give a function; given: {type(function).__name__}"
            for name, function in (("preprocess", preprocess), ("postprocess", postprocess))
            if function is not None and not callable(function)
        ]
        faults += [
            f"{name}: {count!r} must be a whole number, 1 or more"
            for name, count in (("depth", depth), ("workers", workers))
            if isinstance(count, bool) or not isinstance(count, int) or count < 1
        ]
        if faults or not given:
            raise UsageError("; ".join(faults) or "stages: none given")
        self.depth, self._use = depth, Use()
        place = None if device is None else check_device(device)
        self._works = Works(
            _lines([stage for stage in given if stage is not None], example, place),
            preprocess=preprocess,
            postprocess=postprocess,
            depth=depth,
            workers=workers,
        )
        weakref.finalize(self, self._works.let_go)

    def map(self, requests: Iterable[Any], *, errors: Errors = "raise") -> Iterator[Any]:
        """Return the results of requests, in order, each as soon as it is there.

        Requests are read when results are asked for, and never more than `depth` ahead of them.

        Args:
            requests: any iterable, which may have no end.
            errors: "raise" raises the error of a request in its turn, after which the next result may be asked for;
                "return" hands it out in the place of the result.
        """
        if errors not in ("raise", "return"):
            raise UsageError(f"errors: {errors!r} is neither 'raise' nor 'return'")
        if not any(hasattr(type(requests), name) for name in ("__iter__", "__getitem__")):  # as a Dataset of torch
            raise UsageError(f"requests: give something to go through; given: {type(requests).__name__}")
        return _Results(self, requests, errors)

    def submit(self, request: object) -> Future[Any]:
        """Take one request; waits while `depth` of them are in flight.

        Raises:
            UsageError: when the pipeline is closed, or this is a fork of the process that made it.
        """
        self._use.check()
        future = self._works.submit(request)
        future._of = self  # type: ignore[attr-defined]  # a pipeline that nobody holds is closed, and cancels requests
        return future

    def close(self) -> None:
        """Cancel what has not begun, finish what has, and end all threads."""
        if self._use.is_here:  # a fork has none of the threads
            self._works.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Results(Iterator[Any]):
    """The results of requests, in order; goes on after an error, as a generator would not."""

    def __init__(self, pipe: Pipeline, requests: Iterable[Any], errors: Errors) -> None:
        self._waiting: deque[Future[Any]] = deque()
        self._pipe, self._requests, self._errors = pipe, iter(requests), errors
        self._has_more = True
        self._failure: Exception | None = None

    def __next__(self) -> Any:  # noqa: ANN401 - a result
        self._fill()
        if not self._waiting:
            failure, self._failure = self._failure, None
            raise failure or StopIteration
        future = self._waiting.popleft()
        try:
            error = future.exception()
        except CancelledError:
            raise UsageError(CLOSED) from None
        if error is None:
            return future.result()
        if self._errors == "return":
            return error
        if isinstance(error, StopIteration):  # for whoever asks here it would be the end
            raise RuntimeError("a request raised StopIteration") from error
        raise error

    def _fill(self) -> None:
        """Read as many requests as may be in flight."""
        while self._has_more and len(self._waiting) < self._pipe.depth:
            try:
                self._waiting.append(self._pipe.submit(next(self._requests)))
            except StopIteration:
                self._has_more = False
            except Exception as error:  # raised in its turn: behind the results of what was read before
                self._has_more, self._failure = False, error

    def __del__(self) -> None:
        for future in self._waiting:
            future.cancel()


def _lines(stages: Sequence[Stage], example: object, device: torch.device | None) -> list[Line]:
    """Return what runs each stage; with an example modules on a GPU become graphs."""
    lines: list[Line] = []
    parcel = None if example is None else Parcel.of(arguments(example), is_apart=True)
    for at, stage in enumerate(stages):
        line = _line(stage, None if parcel is None else parcel.open(), device)
        lines.append(line)
        if parcel is not None and at + 1 < len(stages):
            with line.working():
                parcel = line(parcel, is_last=False, is_apart=True)
            if parcel.ready is not None:
                parcel.ready.synchronize()
    plain = [str(at) for at, line in enumerate(lines) if isinstance(line.run, Plain) and line.streams is not None]
    if plain:
        told = f"no example= was given. Stages that run as they are: {', '.join(plain)}"
        warnings.warn(f"no CUDA graph: {told}", stacklevel=3)
    return lines


def _line(stage: Stage, example: Arguments | None, device: torch.device | None) -> Line:
    if isinstance(stage, Graph):
        if device not in (None, stage.device):
            raise UsageError(f"device: {device}, but the graph is on {stage.device}; leave it out")
        return Line(stage, stage.device)
    if not isinstance(stage, nn.Module):
        return Line(stage, device or torch.device("cpu"))
    if example is not None:
        args, kwargs = example
        graph = Graph(stage, kwargs or args, device=device)
        return Line(graph, graph.device)
    held = next((tensor.device for tensor in (*stage.parameters(), *stage.buffers())), torch.device("cpu"))
    return Line(Plain(stage if device is None else stage.to(device)), check_device(device or held))
