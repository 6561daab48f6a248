"""Graph steps: training steps as CUDA graphs if possible, and eager steps otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from penstock.devices.graph_capture import CudaGraphs, no_collection
from penstock.devices.kinds import has_graphs
from penstock.devices.streams import after_callers
from penstock.errors import LaneError, UsageError, warn_user
from penstock.model.structure import flatten, plain_values
from penstock.pipeline.executor_setup import ExecutorSetup
from penstock.pipeline.weights import Weights
from penstock.runtime.executor import Executor
from penstock.runtime.graphs.lane_graphs import COMPUTE, Capture, Tape
from penstock.runtime.step import Step
from penstock.schedule.keep_policies import POLICIES

if TYPE_CHECKING:
    from penstock.deciding.cut_request import Progress


Run = Callable[..., None]  # run(step, is_recorded=...) runs a step once on all lanes
GraphsOption = bool | Literal["auto"]  # "auto" uses graphs if possible

_MOST_SEEN = 256
_MOST_SHAPES = 8  # batch shapes with graphs: the most frequent ones; batches of other shapes run eagerly
_MIN_FREQUENCY_RATIO = 2  # a shape replaces another one that has graphs if it is this many times as frequent


class GraphSteps:
    """The training steps of one pipeline, run as CUDA graphs if possible.

    The first step with a given batch shape runs eagerly. It is the warm-up for everything that must not happen for the
    first time during a capture. The second step is captured and then replayed; all later steps are replayed. Graphs
    depend on the addresses of parameters and buffers, on which of them need a gradient, and on hooks. The pipeline
    compares all of these before each replay. If one has changed, all graphs are captured again.
    """

    def __init__(
        self, wanted: GraphsOption, setup: ExecutorSetup, weights: Weights, loss: object, progress: Progress | None
    ) -> None:
        self._setup, self._lane_group, self._weights, self._loss = setup, setup.lane_group, weights, loss
        self._progress, self._wanted = progress, wanted
        self._makers: dict[int, CudaGraphs] = {}
        self._tapes: dict[object, dict[int, Tape]] = {}
        self._counts: Counter[object] = Counter()  # steps of each shape
        self._gradients = _Gradients()
        self._state: list[tuple[int, bool, bool]] = []
        on_gpu = all(map(has_graphs, setup.devices))
        if wanted is True and not on_gpu:
            raise UsageError("graphs: CUDA graphs need lanes on GPUs; leave graphs= out, or pass devices=")
        self.is_on = wanted is not False and on_gpu
        if self.is_on and (why := self._obstacle()):
            self._disable(why)

    def for_setup(self, setup: ExecutorSetup) -> GraphSteps:
        """Return an object with the same options for a new setup, and free all graphs."""
        self.forget()
        return GraphSteps(self._wanted, setup, self._weights, self._loss, self._progress)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield all parameters that a step may give a gradient to, including those of the loss."""
        yield from self._weights.parameters()
        yield from self._loss.parameters() if isinstance(self._loss, nn.Module) else ()

    def _obstacle(self) -> str:
        """Return the reason why the lanes cannot run as graphs, if the setup shows one; otherwise an empty string."""
        if self._setup.schedule.versions is not None:
            return f"{self._setup.schedule.name} changes weights within the step"
        for policy in self._setup.keep:
            if POLICIES[policy].graph_obstacle:
                return POLICIES[policy].graph_obstacle
        if self._setup.defers_batch_norm:
            return "deferred batch norm collects statistics outside the graph"
        return ""

    def forget(self) -> None:
        """Free all graphs and their memory pools. A pool cannot be used again after its last graph is gone."""
        for tape in (tape for tapes in self._tapes.values() for tape in tapes.values()):
            tape.forget()
        self._tapes.clear()
        self._makers.clear()
        self._counts.clear()
        self._gradients = _Gradients()  # parameters frozen since then no longer get a gradient

    def _disable(self, why: str) -> None:
        self.is_on = False
        self.forget()
        if self._wanted is True:
            raise UsageError(f"graphs: {why}; graphs='auto' runs eagerly in this case")
        warn_user(f"no CUDA graphs: {why}. Steps run eagerly; graphs=False turns this warning off")

    def run(self, step: Step, run: Run) -> None:
        """Run a step, as graphs if possible; `run` runs it once on all lanes, and may record it."""
        if not self.is_on or step.measures_memory or step.watch is not None or not all(step.scales):
            run(step, is_recorded=True)
            return
        state, key = self._graph_state(), _signature(step)
        # either all processes capture, or none does
        told = self._lane_group.control.agree(step, "state", [state != self._state, key in self._counts])
        if any(has_changed for has_changed, _ in told):
            self.forget()
            self._state = state
        elif key not in self._tapes and all(is_seen for _, is_seen in told) and self._has_room(key):
            self._capture(step, key, run)
        tapes = self._tapes.get(key)
        if tapes is None:
            run(step, is_recorded=True)
            self._count(key)  # after the run, since a failed step is no warm-up
            self._gradients.note(self.parameters())
            return
        self._prepare_gradients()
        step.tapes = tapes
        run(step, is_recorded=True)
        self._count(key)

    def _count(self, key: object) -> None:
        self._counts[key] += 1
        if len(self._counts) > _MOST_SEEN:
            for rare in [other for other in self._counts if other not in self._tapes and other != key]:
                del self._counts[rare]

    def _has_room(self, key: object) -> bool:
        """Return whether there is room for the graphs of one more shape; if needed, free those of a rarer shape.

        Steps have the same shapes in all processes, so all processes return the same.
        """
        if len(self._tapes) < _MOST_SHAPES:
            return True
        rarest = min(self._tapes, key=lambda other: self._counts[other])
        if self._counts[key] < _MIN_FREQUENCY_RATIO * self._counts[rarest]:
            return False
        for tape in self._tapes.pop(rarest).values():
            tape.forget()
        return True

    def _prepare_gradients(self) -> None:
        """Move gradients to the memory that graphs add to, after the last step, whichever stream it was called on."""
        after_callers(self._lane_group.streams)
        self._gradients.prepare()

    def _graph_state(self) -> list[tuple[int, bool, bool]]:
        """Return the state that captured graphs depend on: addresses, gradient flags and hooks."""
        stages = [run.stage for executor in self._executors() for run in executor.stages.values()]
        return [(t.data_ptr(), t.requires_grad, _has_hooks(t)) for stage in stages for t in stage.held.tensors()]

    def _executors(self) -> Sequence[Executor]:
        return self._setup.executors(training=True, has_backward=True)

    def _capture(self, step: Step, key: object, run: Run) -> None:
        """Capture the graphs of a step; nothing is computed."""
        told = [
            why for why in self._lane_group.control.agree(step, "capture obstacle", self._capture_obstacle()) if why
        ]
        if told:
            self._disable(told[0])
            return
        executors = self._executors()
        total = sum(i.kind in COMPUTE for e in executors for i in e.program.instructions)
        done = 0

        def tell() -> None:
            nonlocal done
            done += 1
            if self._progress is not None:
                self._progress("capture CUDA graphs", done, total)

        captures = {e.lane: Capture(e, self._maker(e.lane), tell) for e in executors}
        self._prepare_gradients()
        held = [run.stage.held for executor in executors for run in executor.stages.values()]
        before = [(own, name, own.get(name)) for own in held for name in own]
        gradients = [(parameter, parameter.grad) for parameter in self.parameters()]
        trial, is_captured, why = replace(step, tapes=captures, losses={}), False, ""
        try:
            with no_collection(), _no_stream_warnings():
                run(trial, is_recorded=False)
            if self._graph_state() != self._state:
                why = "the model replaces buffers or parameters by new tensors"
            elif num_stray := self._gradients.num_stray(self.parameters()):
                why = f"{num_stray} parameters got a gradient that they did not get in earlier steps"
            told = [why for why in self._lane_group.control.agree(trial, "captured", why) if why]
            why, is_captured = told[0] if told else "", not told
        except LaneError as error:
            why = str(error)
        finally:
            step.number = trial.number + 1
            if not is_captured:  # a failed capture has computed nothing, so undo its changes
                for own, name, tensor in before:
                    if own.get(name) is not tensor:
                        own.set(name, tensor)
                for parameter, gradient in gradients:
                    parameter.grad = gradient
        if is_captured:
            self._tapes[key] = {lane: capture.finish() for lane, capture in captures.items()}
        else:
            self._disable(why)

    def _maker(self, lane: int) -> CudaGraphs:
        if lane not in self._makers:
            self._makers[lane] = CudaGraphs()
        return self._makers[lane]

    def _capture_obstacle(self) -> str:
        """Return the reason why a replay would differ from an eager step, if the eager step has shown one."""
        if any(map(_has_hooks, self.parameters())):
            return "a parameter has hooks, which a replay would not call"
        runs = [run for executor in self._executors() for run in executor.stages.values()]
        if any(run.restores_buffers for run in runs):
            return "a recomputed stage changes buffers, as batch norm does"
        if any(run.draws_on_host for run in runs):
            return "the model draws random numbers on the host"
        return ""


def _has_hooks(tensor: torch.Tensor) -> bool:
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


class _Gradients:
    """The memory to which captured backwards add the gradients of all parameters that get one."""

    def __init__(self) -> None:
        self._wanting: dict[int, nn.Parameter] = {}
        self._memory: dict[int, torch.Tensor] = {}

    def note(self, parameters: Iterator[nn.Parameter]) -> None:
        """Record which parameters have a gradient after an eager step."""
        self._wanting |= {id(p): p for p in parameters if p.grad is not None and p.requires_grad}

    @torch.no_grad()
    def prepare(self) -> None:
        """Move the current gradients to the memory that captured backwards add to; missing gradients become zero."""
        empty: list[torch.Tensor] = []
        for key, parameter in self._wanting.items():
            memory, now = self._memory.get(key), parameter.grad
            if memory is None or memory.shape != parameter.shape or memory.device != parameter.device:
                with torch.inference_mode(False):  # graphs cannot add to inference tensors
                    memory = self._memory[key] = torch.empty_like(parameter, requires_grad=False)
            if now is None:
                empty.append(memory)
            elif now is not memory:
                memory.copy_(now)
            parameter.grad = memory
        if empty:
            torch._foreach_zero_(empty)

    def num_stray(self, parameters: Iterator[nn.Parameter]) -> int:
        """Return how many parameters have a gradient outside this memory."""
        return sum(p.grad is not None and p.grad is not self._memory.get(id(p)) for p in parameters)


def _signature(step: Step) -> object:
    """Return the properties that steps must share to replay the same graphs."""
    inputs = tuple((name, tensor.shape, tensor.dtype) for given in step.batch.inputs for name, tensor in given.items())
    found: list[Any] = []
    for target in step.targets:
        if len(target) == 1 and type(target[0]) is torch.Tensor:
            found.append((target[0].shape, target[0].dtype))
            continue
        tensors, template = flatten(target, apart=True)
        plain = tuple(map(repr, plain_values(template)))
        found.append((tuple(map(type, target)), tuple((tuple(t.shape), t.dtype) for t in tensors), plain))
    return (step.mode, tuple(step.batch.sizes), inputs, tuple(found))


@contextmanager
def _no_stream_warnings() -> Iterator[None]:
    """Turn off autograd's warning about lanes that share a parameter on different streams: autograd orders them."""
    get = getattr(torch._C, "_warn_on_accumulate_grad_stream_mismatch", lambda: True)
    put = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", lambda on: None)
    before = get()
    put(False)
    try:
        yield
    finally:
        put(before)
