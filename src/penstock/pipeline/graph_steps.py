"""GraphSteps: run training steps as CUDA graphs where that can be, and one action after the other where it cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import nn

from penstock.devices.device_names import has_graphs
from penstock.devices.graph_capture import Maker, make_graphs, no_collection
from penstock.devices.streams import after_callers
from penstock.errors import LaneError, UsageError, warn_user
from penstock.model.structure import flatten, plain_values
from penstock.pipeline.executor_setup import ExecutorSetup
from penstock.runtime.executor import Executor
from penstock.runtime.graphs.lane_graphs import COMPUTE, Capture, Tape
from penstock.runtime.lanes.lane_group import LaneGroup
from penstock.runtime.step import Step
from penstock.schedule.keep_policies import POLICIES

if TYPE_CHECKING:
    from penstock.deciding.cut_request import Progress

__all__ = ["GraphSteps", "GraphsOption", "trained_parameters"]


class Run(Protocol):
    """Runs one pass of all lanes."""

    def __call__(self, step: Step, *, is_recorded: bool) -> None:
        """Run it."""
        ...


GraphsOption = bool | Literal["auto"]

_MOST_SEEN = 256
_MOST_SHAPES = 8  # of batches that graphs are kept for, the most frequent ones; others run eagerly
_MIN_FREQUENCY_RATIO = 2  # a shape must come than one that has graphs, to take its place


class GraphSteps:
    """Steps of one pipeline.

    The first step with a batch of some shape runs eagerly, and warms up what a capture may not do for the first time;
    the second is captured and replayed, and those after it are replayed. What a captured graph relies on is looked at
    before each replay: where parameters moved, were frozen or thawed, or got hooks, all is captured anew.

    Args:
        wanted: True, False, or "auto": where they can be.
        setup: the lanes.
        lane_group: and those in other processes.
        parameters: of the lanes that run here.
        progress: is told of what is captured.
    """

    def __init__(
        self,
        wanted: GraphsOption,
        setup: ExecutorSetup,
        lane_group: LaneGroup,
        *,
        parameters: Callable[[], Iterator[nn.Parameter]],
        progress: Progress | None,
    ) -> None:
        self._setup, self._lane_group, self.parameters = setup, lane_group, parameters
        self._progress, self._wanted = progress, wanted
        self._makers: dict[int, Maker] = {}
        self._tapes: dict[object, dict[int, Tape]] = {}
        self._counts: Counter[object] = Counter()  # steps of each shape
        self._gradients = _Gradients()
        self._state: list[tuple[int, bool, bool]] = []
        on_gpu = all(map(has_graphs, setup.devices))
        if wanted is True and not on_gpu:
            raise UsageError("graphs: CUDA graphs need lanes on GPUs; leave graphs= out, or give devices=")
        self.is_on = wanted is not False and on_gpu
        if self.is_on and (why := self._obstacle()):
            self._give_up(why)

    def for_setup(self, setup: ExecutorSetup) -> GraphSteps:
        """Return the same for lanes that are set up anew; what was captured is let go."""
        self.forget()
        return GraphSteps(
            self._wanted, setup, self._lane_group, parameters=self.parameters, progress=self._progress
        )  # fmt: skip

    def _obstacle(self) -> str:
        """Return why the lanes cannot run as graphs, as far as that can be known before; nothing if they may."""
        if self._setup.schedule.versions is not None:
            return f"{self._setup.schedule.name} changes weights within the step"
        for policy in self._setup.keep:
            if POLICIES[policy].graph_obstacle:
                return POLICIES[policy].graph_obstacle
        if self._setup.defers_batch_norm:
            return "deferred batch norm collects statistics outside the graph"
        return ""

    def forget(self) -> None:
        """Let go of all graphs, and of their memory: a pool that no graph uses any more cannot be used again."""
        for tape in (tape for tapes in self._tapes.values() for tape in tapes.values()):
            tape.forget()
        self._tapes.clear()
        self._makers.clear()
        self._counts.clear()
        self._gradients = _Gradients()  # what was frozen wants none any more

    def _give_up(self, why: str) -> None:
        self.is_on = False
        self.forget()
        if self._wanted is True:
            raise UsageError(f"graphs: {why}; graphs='auto' runs eagerly then")
        warn_user(f"no CUDA graphs: {why}. Steps run eagerly; graphs=False says so from the start")

    def run(self, step: Step, run: Run) -> None:
        """Run a step, as graphs if that can be; `run` runs one pass of all lanes, and may record it."""
        if not self.is_on or step.measures_memory or step.watch is not None or not all(step.scales):
            run(step, is_recorded=True)
            return
        state, key = self._graph_state(), _signature(step)
        # lanes of several processes capture together or not at all
        told = self._lane_group.control.agree(step, "state", [state != self._state, key in self._counts])
        if any(has_changed for has_changed, _ in told):
            self.forget()
            self._state = state
        elif key not in self._tapes and all(is_seen for _, is_seen in told) and self._has_room(key):
            self._capture(step, key, run)
        tapes = self._tapes.get(key)
        if tapes is None:
            run(step, is_recorded=True)
            self._count(key)  # not before: a step that failed has warmed up nothing
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
        """Return whether there may be graphs for one more shape; lets those of a rarer one go.

        Steps have the same shapes in all processes, so these come to the same.
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
        """Let gradients be where graphs add to, behind the step before, on whatever stream that was asked for."""
        after_callers(self._setup.streams)
        self._gradients.prepare()

    def _graph_state(self) -> list[tuple[int, bool, bool]]:
        """Return what a captured graph relies on."""
        stages = [run.stage for executor in self._executors() for run in executor.stages.values()]
        return [(t.data_ptr(), t.requires_grad, _has_hooks(t)) for stage in stages for t in stage.held.tensors()]

    def _executors(self) -> Sequence[Executor]:
        return self._setup.executors(training=True, has_backward=True)

    def _capture(self, step: Step, key: object, run: Run) -> None:
        """Capture what a step like this one does; nothing of it is computed."""
        told = [
            why for why in self._lane_group.control.agree(step, "capture obstacle", self._capture_obstacle()) if why
        ]
        if told:
            self._give_up(told[0])
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
                why = "the model puts new tensors in the place of buffers or parameters"
            elif strays := self._gradients.strays(self.parameters()):
                why = f"{strays} parameters have a gradient that they had not before"
            told = [why for why in self._lane_group.control.agree(trial, "captured", why) if why]
            why, is_captured = told[0] if told else "", not told
        except LaneError as error:
            why = str(error)
        finally:
            step.number = trial.number + 1
            if not is_captured:  # nothing of it was computed, so nothing of it may stay
                for own, name, tensor in before:
                    if own.get(name) is not tensor:
                        own.set(name, tensor)
                for parameter, gradient in gradients:
                    parameter.grad = gradient
        if is_captured:
            self._tapes[key] = {lane: capture.finish() for lane, capture in captures.items()}
        else:
            self._give_up(why)

    def _maker(self, lane: int) -> Maker:
        if lane not in self._makers:
            self._makers[lane] = make_graphs()
        return self._makers[lane]

    def _capture_obstacle(self) -> str:
        """Return what a replay would leave out, as far as it shows: code of the user's that runs with gradients."""
        if any(map(_has_hooks, self.parameters())):
            return "a parameter has hooks, which a replay would not call"
        runs = [run for executor in self._executors() for run in executor.stages.values()]
        if any(run.restores_buffers for run in runs):
            return "a stage that is recomputed changes buffers, as batch norm does"
        if any(run.draws_on_host for run in runs):
            return "the model draws random numbers on the host"
        return ""


def trained_parameters(
    parameters: Callable[[], Iterator[nn.Parameter]], loss: object
) -> Callable[[], Iterator[nn.Parameter]]:
    """Return what yields all parameters that a step may give a gradient: a loss may have some of its own."""

    def everything() -> Iterator[nn.Parameter]:
        yield from parameters()
        yield from loss.parameters() if isinstance(loss, nn.Module) else ()

    return everything


def _has_hooks(tensor: torch.Tensor) -> bool:
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


class _Gradients:
    """The memory that captured backwards add gradients to: of all parameters that get one."""

    def __init__(self) -> None:
        self._wanting: dict[int, nn.Parameter] = {}
        self._memory: dict[int, torch.Tensor] = {}

    def note(self, parameters: Iterator[nn.Parameter]) -> None:
        """Note after an eager step which parameters got a gradient."""
        self._wanting |= {id(p): p for p in parameters if p.grad is not None and p.requires_grad}

    @torch.no_grad()
    def prepare(self) -> None:
        """Let the gradients of all parameters be where captured backwards add to, with the values that they have."""
        empty: list[torch.Tensor] = []
        for key, parameter in self._wanting.items():
            memory, now = self._memory.get(key), parameter.grad
            if memory is None or memory.shape != parameter.shape or memory.device != parameter.device:
                with torch.inference_mode(False):  # graphs could not add to it, if the caller is in that mode
                    memory = self._memory[key] = torch.empty_like(parameter, requires_grad=False)
            if now is None:
                empty.append(memory)
            elif now is not memory:
                memory.copy_(now)
            parameter.grad = memory
        if empty:
            torch._foreach_zero_(empty)

    def strays(self, parameters: Iterator[nn.Parameter]) -> int:
        """Return how many parameters have a gradient elsewhere."""
        return sum(p.grad is not None and p.grad is not self._memory.get(id(p)) for p in parameters)


def _signature(step: Step) -> object:
    """Return what two steps must have in common to be replays of the same graphs."""
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
    """Keep autograd from warning where lanes that hold the same parameter capture on streams of their own: it waits."""
    get = getattr(torch._C, "_warn_on_accumulate_grad_stream_mismatch", lambda: True)
    put = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", lambda on: None)
    before = get()
    put(False)
    try:
        yield
    finally:
        put(before)
