"""Nonfinite: run a batch again, check all results, and name the first value that is not finite."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.model.source import line_of_frame
from penstock.runtime.step import Step
from penstock.schedule.actions import Action, Kind

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline
    from penstock.pipeline.step_runner import PastStep
    from penstock.runtime.lane_program import Instruction
    from penstock.runtime.step import Watch

_NO_TARGET = object()
_FORWARD = (Kind.F, Kind.RECOMPUTE)
_BACKWARD = (Kind.B, Kind.I, Kind.W)
_UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
# they write constants: an infinity from them is intended, as in a mask
_CONSTANT = ("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor", "where")


@dataclass(frozen=True)
class Place:
    """The place where a value first was not finite.

    >>> print(Place("action", lane=1, stage=1, mb=2, action="1F2", what="an output", operation="log at model.py:9"))
    lane 1, stage 1, micro-batch 2, action 1F2 (forward): an output is not finite, first made by log at model.py:9
    """

    kind: str  # "input" (in the batch), "weight" (in a parameter or buffer before the step), or "action"
    lane: int = -1  # -1 for the batch
    stage: int = -1  # -1 for the batch
    mb: int = -1  # the micro-batch; -1 for a weight
    action: str = ""  # such as `1F2`, if one made the value
    what: str = ""  # the name of the input, the parameter or the result
    operation: str = ""  # within the action, with its module and line if they are known

    def __str__(self) -> str:
        if self.kind == "input":
            return f"the batch itself is not finite: {self.what}, in micro-batch {self.mb}; look at the data"
        if self.kind == "weight":
            return (
                f"lane {self.lane}, stage {self.stage}: {self.what} is not finite before the step begins; an earlier "
                "update caused it"
            )
        words = Action.parse(self.action).kind.words
        by = f", first made by {self.operation}" if self.operation else ""
        return (
            f"lane {self.lane}, stage {self.stage}, micro-batch {self.mb}, action {self.action} ({words}): {self.what} "
            f"is not finite{by}"
        )

    def order(self, num_stages: int) -> tuple[int, int, int]:
        """Return a sort key: possible causes come before their effects, then by micro-batch."""
        if self.kind != "action":
            return (0 if self.kind == "input" else 1, self.stage, self.mb)
        is_forward = Action.parse(self.action).kind in _FORWARD
        return (2, self.stage if is_forward else 2 * num_stages - self.stage, self.mb)


def locate(pipe: Pipeline, batch: object, target: object = _NO_TARGET) -> Place | None:
    """Run a step's batch again and return where a value first was not finite; None if all values are finite.

    Call it right after the step, before the weights change; under torchrun, in all processes. The random numbers are
    those of the step, so dropout drops the same values. Gradients, buffers and random states are restored afterwards.
    If the schedule updates weights within the step, only the forwards run again, with the current weights.

    Args:
        pipe: the pipeline.
        batch: the same object that the step got.
        target: the target of the step, if it had one.

    Raises:
        UsageError: if the batch is not like the example.
        LaneError: if an action fails.
    """
    ran = pipe.internals.past_step(batch)
    finder = _Finder(pipe, ran)
    given = () if target is _NO_TARGET else (target,)

    def watch(step: Step) -> None:
        finder.check_inputs(step)
        step.watch = finder

    pipe.internals.rerun_step(batch, given, watch)
    first = _first(finder.found, pipe.schedule.num_stages)
    everyone = pipe.internals.gather(None if first is None else asdict(first))
    return _first([Place(**fields) for fields in everyone if fields is not None], pipe.schedule.num_stages)


def _first(places: Sequence[Place], num_stages: int) -> Place | None:
    return min(places, key=lambda place: place.order(num_stages), default=None)


class _Finder:
    """Checks the results of all actions. A watch that the pipeline already had keeps working."""

    def __init__(self, pipe: Pipeline, ran: PastStep | None) -> None:
        self._pipe, self._ran = pipe, ran
        self._inner: Watch | None = pipe.watch
        self.found: list[Place] = []  # from all lanes of this process; append is thread-safe
        self._stages = {(e.lane, s): run.stage for e in pipe.internals.executors() for s, run in e.stages.items()}
        self._open = threading.local()

    def check_inputs(self, step: Step) -> None:
        """Check the batch, and the parameters and buffers of the stages."""
        for mb, given in enumerate(step.batch.inputs):
            self.found += [Place("input", mb=mb, what=name) for name, value in given.items() if not _is_finite(value)]
        for mb, target in enumerate(step.targets):
            if any(isinstance(thing, torch.Tensor) and not _is_finite(thing) for thing in target):
                self.found.append(Place("input", mb=mb, what="target"))
        for (lane, index), stage in self._stages.items():
            held = [*stage.named_parameters(), *stage.named_buffers()]
            bad = [name for name, tensor in held if not _is_finite(tensor) and not _is_mask(tensor)]
            self.found += [Place("weight", lane, index, what=name) for name in bad]

    def before(self, lane: int, step_number: int, instruction: Instruction) -> bool:
        """Start to check an action."""
        if self._inner is not None and not self._inner.before(lane, self._number(step_number), instruction):
            return False
        if instruction.kind in (*_FORWARD, *_BACKWARD) and not self._pipe.internals.is_compiled:
            held = self._stages[lane, instruction.stage].held
            self._open.finder = _OpFinder({id(held.get(name)): name for name in held})
            self._open.finder.__enter__()
        return True

    def after(self, lane: int, step_number: int, instruction: Instruction, values: Sequence[torch.Tensor]) -> None:
        """Check the results of an action."""
        ops = self._close()
        if self._inner is not None:
            self._inner.after(lane, self._number(step_number), instruction, values)
        bad = [value for value in values if not _is_finite(value)]
        if instruction.kind in _FORWARD:
            bad = [value for value in bad if not (value.dim() and _is_mask(value))]
        if not bad or instruction.kind not in (*_FORWARD, *_BACKWARD):
            return
        has_nan = any(bool(torch.isnan(value.detach()).any()) for value in bad)
        operation = "" if ops is None else self._with_line(ops.nan if has_nan else ops.infinity, instruction.stage)
        self.found.append(
            Place(
                "action",
                lane,
                instruction.stage,
                instruction.mb,
                str(instruction.action),
                self._name(lane, instruction, bad[0]),
                operation,
            )
        )

    def failed(self, lane: int, step_number: int, instruction: Instruction) -> None:
        """Stop checking."""
        self._close()
        if self._inner is not None:
            self._inner.failed(lane, self._number(step_number), instruction)

    def _close(self) -> _OpFinder | None:
        ops: _OpFinder | None = getattr(self._open, "finder", None)
        if ops is not None:
            self._open.finder = None
            ops.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return ops

    def _with_line(self, operation: str, stage: int) -> str:
        """Add the line to an operation that runs in a graph without user code, if only one node has this operation."""
        if not operation or " at " in operation:
            return operation
        graph, name = self._pipe.internals.captured.graph, operation.split(maxsplit=1)[0].rstrip(",")
        here = graph.stages(self._pipe.cuts)[stage]
        nodes = [graph.nodes[index] for index in here if graph.nodes[index].op.rstrip("_") == name]
        return f"{operation} at {nodes[0].source}" if len(nodes) == 1 and nodes[0].source else operation

    def _number(self, step_number: int) -> int:
        return step_number if self._ran is None else self._ran.number

    def _name(self, lane: int, i: Instruction, value: torch.Tensor) -> str:
        if i.kind in _BACKWARD:
            named = self._stages[lane, i.stage].named_parameters()
            own = next((name for name, p in named if p.grad is value), None)
            return "the gradient of its input" if own is None else f"the gradient of {own}"
        is_last = i.stage == self._pipe.schedule.num_stages - 1
        return "the loss" if is_last and value.dim() == 0 else "its output"


def _is_mask(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's infinities may be intended: it requires no gradient and has no NaN."""
    return not tensor.requires_grad and not bool(torch.isnan(tensor).any())


# ---- the operation within an action


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers of a tensor are finite; integers always are."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or not tensor.numel():
        return True
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        values = values._values()
    return bool(torch.isfinite(values).all())


class _OpFinder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the first operation that made a NaN from numbers, and the first that made an infinity from finite ones."""

    def __init__(self, name_of: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name_of, self._module = name_of, ""  # of the stage's tensors by id, to name the module of an operation
        self.nan = self.infinity = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run an operation and check its result."""
        made = func(*args, **(kwargs or {}))
        if not self.nan:
            self._check(func, made, args, kwargs)
        return made

    def _check(self, func: Any, made: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401 - torch's signature
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        own = next((self._name_of[id(tensor)] for tensor in given if id(tensor) in self._name_of), "")
        self._module = own.rpartition(".")[0] or own or self._module
        values = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor) and not _is_finite(leaf)]
        if not values or name in _UNWRITTEN:
            return
        if any(map(_has_nan, values)):
            if not any(map(_has_nan, given)) or name.endswith("_"):
                self.nan = self._describe(name, own) + self._infinite(given)
        elif not self.infinity and name not in _CONSTANT and all(map(_is_finite, given)):
            self.infinity = self._describe(name, own)

    def _infinite(self, given: list[torch.Tensor]) -> str:
        if all(map(_is_finite, given)):
            return ""
        return f", from an infinity{f' made by {self.infinity}' if self.infinity else ''}"

    def _describe(self, name: str, own: str) -> str:
        module = f" in {self._module}" if own else f" after {self._module}" if self._module else ""
        line = next((line for frame in _frames() if (line := line_of_frame(frame))), "")
        return f"{name.strip('_')}{module}{f' at {line}' if line else ''}"


def _has_nan(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return False
    values = tensor.detach()
    return bool(torch.isnan(values._values() if values.layout is torch.sparse_coo else values).any())


def _frames() -> Iterator[FrameType]:
    """Yield the stack frames from the innermost to the stage; frames outside the stage are not part of the model."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith("stage_run.py"):
        yield frame
        frame = frame.f_back
