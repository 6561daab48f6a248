"""Request pipeline: requests stream through a model; they are prepared, copied, computed and finished in parallel."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from penstock.devices.kinds import check_device
from penstock.errors import UsageError, warn_user
from penstock.infer.graph.inference_graph import Graph, UnchangedModel
from penstock.infer.stream.stage_runner import Arguments, StageData, StageRunner, arguments
from penstock.infer.stream.stream_threads import CLOSED, StreamThreads
from penstock.runtime.exclusive_use import ExclusiveUse

Stage = nn.Module | Callable[..., Any]
Errors = Literal["raise", "return"]


class RequestPipeline:
    """Streams requests through a model.

    While one request is computed, the next is copied to the device, and others are prepared or finished:

        preprocess ─► copy in ─► model ─► copy out ─► postprocess

    >>> shape_of = lambda out: tuple(out.shape)
    >>> with RequestPipeline(nn.Linear(4, 2), preprocess=torch.tensor, postprocess=shape_of) as pipe:
    ...     list(pipe.map([[0.0] * 4, [1.0] * 4]))
    [(2,), (2,)]

    Results come in the order of their requests. An error affects only its own request.

    Args:
        model: a module, a `Graph`, or any function. Its arguments are the result of `preprocess`: a tuple is several
            arguments, a dict is keyword arguments, and anything else is one argument.
        stages: instead of `model`, several of them; each is called with the result of the one before (a tuple is
            several arguments). Each has its own thread and stream, on its own device.
        preprocess: a function from a request to the model's arguments; by default, the request is the argument.
        postprocess: a function from the model's output, in host memory, to the result; by default, the output is the
            result.
        example: an example call of the model. With it, a module on a GPU runs as a `Graph`.
        device: the device of a module or a function; by default the module's own device, and the CPU for a function.
        depth: the maximum number of requests in progress.
        workers: the number of threads for `preprocess`, and again for `postprocess`.

    Raises:
        UsageError: for an invalid argument.
    """

    def __init__(
        self, model: Stage | None = None, *, stages: Sequence[Stage] | None = None,
        preprocess: Callable[[Any], Any] | None = None, postprocess: Callable[[Any], Any] | None = None,
        example: object = None, device: torch.device | str | int | None = None, depth: int = 4, workers: int = 1,
    ) -> None:  # fmt: skip
        if (model is None) == (stages is None):
            raise UsageError("pass either a model or stages=[...]")
        if stages is not None and not isinstance(stages, (Sequence, nn.ModuleList, nn.Sequential)):
            raise UsageError(f"stages: expected a list of stages; given: {type(stages).__name__}")
        given = [model] if stages is None else list(stages)
        names = ["model"] if stages is None else [f"stage {at}" for at in range(len(given))]
        faults = [
            f"{name}: {stage!r:.60} cannot be called"
            for name, stage in zip(names, given, strict=True)
            if not callable(stage)
        ]
        faults += [
            f"{name}: {stage.__name__} is a class; pass an instance: {stage.__name__}(...)"
            for name, stage in zip(names, given, strict=True)
            if isinstance(stage, type) and issubclass(stage, nn.Module)
        ]
        faults += [
            f"{name}: expected a function; given: {type(function).__name__}"
            for name, function in (("preprocess", preprocess), ("postprocess", postprocess))
            if function is not None and not callable(function)
        ]
        faults += [
            f"{name}: {count!r} must be a whole number of at least 1"
            for name, count in (("depth", depth), ("workers", workers))
            if isinstance(count, bool) or not isinstance(count, int) or count < 1
        ]
        if faults or not given:
            raise UsageError("; ".join(faults) or "stages: the list is empty")
        self.depth, self._use = depth, ExclusiveUse()
        place = None if device is None else check_device(device)
        runners = _runners([stage for stage in given if stage is not None], example, place)
        self._threads = StreamThreads(runners, preprocess, postprocess, depth=depth, workers=workers)
        weakref.finalize(self, self._threads.finalize)

    def map(self, requests: Iterable[Any], *, errors: Errors = "raise") -> Iterator[Any]:
        """Return the results of requests, in order, each as soon as it is ready.

        Requests are read when results are requested, at most `depth` ahead of them.

        Args:
            requests: any iterable, possibly endless.
            errors: "raise" raises a request's error in place of its result; you can then request the next result.
                "return" returns the error instead.
        """
        if errors not in ("raise", "return"):
            raise UsageError(f"errors: {errors!r} is neither 'raise' nor 'return'")
        # __getitem__: for example a torch Dataset
        if not any(hasattr(type(requests), name) for name in ("__iter__", "__getitem__")):
            raise UsageError(f"requests: expected an iterable; given: {type(requests).__name__}")
        return _Results(self, requests, errors)

    def submit(self, request: object) -> Future[Any]:
        """Submit one request; wait while `depth` requests are in progress.

        Raises:
            UsageError: if the pipeline is closed, or this process is a fork of the one that made it.
        """
        self._use.check()
        future = self._threads.submit(request)
        future._of = self  # type: ignore[attr-defined]  # keeps the pipeline alive: without references, it closes and cancels requests
        return future

    def close(self) -> None:
        """Cancel requests that have not started, finish the others, and end all threads."""
        if self._use.is_here:  # a fork has no threads
            self._threads.close()

    def __enter__(self) -> RequestPipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Results(Iterator[Any]):
    """The results of requests, in order; unlike a generator, it continues after an error."""

    def __init__(self, pipe: RequestPipeline, requests: Iterable[Any], errors: Errors) -> None:
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
        if isinstance(error, StopIteration):  # it would end the caller's loop
            raise RuntimeError("a request raised StopIteration") from error
        raise error

    def _fill(self) -> None:
        """Read requests until `depth` are in progress."""
        while self._has_more and len(self._waiting) < self._pipe.depth:
            try:
                self._waiting.append(self._pipe.submit(next(self._requests)))
            except StopIteration:
                self._has_more = False
            except Exception as error:  # raised after the results of earlier requests
                self._has_more, self._failure = False, error

    def __del__(self) -> None:
        for future in self._waiting:
            future.cancel()


def _runners(stages: Sequence[Stage], example: object, device: torch.device | None) -> list[StageRunner]:
    """Return the runner of each stage; with an example, modules on a GPU become graphs."""
    runners: list[StageRunner] = []
    data = None if example is None else StageData.of(arguments(example), is_apart=True)
    for at, stage in enumerate(stages):
        runner = _runner(stage, None if data is None else data.open(), device)
        runners.append(runner)
        if data is not None and at + 1 < len(stages):
            with runner.working():
                data = runner(data, is_last=False, is_apart=True)
            if data.ready is not None:
                data.ready.synchronize()
    plain = [
        str(at)
        for at, runner in enumerate(runners)
        if isinstance(runner.run, UnchangedModel) and runner.streams is not None
    ]
    if plain:
        warn_user(f"no CUDA graph: example= is missing, so these stages run without a graph: {', '.join(plain)}")
    return runners


def _runner(stage: Stage, example: Arguments | None, device: torch.device | None) -> StageRunner:
    if isinstance(stage, Graph):
        if device not in (None, stage.device):
            raise UsageError(f"device: {device}, but the graph is on {stage.device}; leave it out")
        return StageRunner(stage, stage.device)
    if not isinstance(stage, nn.Module):
        return StageRunner(stage, device or torch.device("cpu"))
    if example is not None:
        args, kwargs = example
        graph = Graph(stage, kwargs or args, device=device)
        return StageRunner(graph, graph.device)
    held = next((tensor.device for tensor in (*stage.parameters(), *stage.buffers())), torch.device("cpu"))
    return StageRunner(UnchangedModel(stage if device is None else stage.to(device)), check_device(device or held))
