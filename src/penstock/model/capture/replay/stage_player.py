"""Stage player: run one stage by the model's own forward, which skips earlier stages and ends before later ones.

Before its first unit, a stage computes nothing. All tensors are *holes*: tensors on the meta device, which have a shape
and no data. If Python reads data, the result comes from the notes of the stage before. A hole that stands for a
received value is filled with it in place. So at the first unit of the stage, the variables of the model's code have the
same values as in the whole model, and all further code runs on data.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.errors import CaptureError
from penstock.model.capture.replay.call_recorder import Recording
from penstock.model.capture.replay.forward_walk import Args, Done, Frame, Function, Kwargs, Mark, Walk, tensors_in
from penstock.model.capture.replay.module_shell import is_of_library, model_hooks, without_model_hooks
from penstock.model.capture.replay.torch_functions import (
    describe,
    described,
    is_data_shaped,
    is_device_question,
    is_plain_result,
    is_query,
    reads_data,
    run_on_holes,
)
from penstock.model.source import line_of_stack
from penstock.model.structure import Slot, flatten, rebuild

if TYPE_CHECKING:
    from penstock.model.capture.replay.replayed_stage import Notes


@dataclass(frozen=True)
class Part:
    """The part of a forward that a stage plays."""

    index: int  # the index of the stage
    start: int  # its first unit
    stop: int  # the first unit after it
    is_last: bool  # whether it is the last stage
    held_names: tuple[str, ...]  # the names of the parameters and buffers of the stage
    recording: Recording  # the recorded run of the whole forward
    # for each module that was not called, a unit of the stage to which it belongs
    uncalled: Mapping[str, tuple[int, int]]
    wanted: Mapping[Mark, str]  # for each mark of a tensor that the stage receives or sends, the name of the value
    copied: frozenset[str]  # the names of the received values that the stage changes in place

    @property
    def is_dynamic(self) -> bool:
        """Whether control flow depends on data; the stages then send notes."""
        return self.recording.reads_data

    def units_of(self, path: str, ordinal: int) -> tuple[int, int]:
        """Return the first and the last unit in a call.

        An additional call of a module belongs to the same units as its last recorded call. The call of a module that
        was never called in the recording belongs to the stage that holds its parameters.
        """
        while ordinal > 0 and (path, ordinal) not in self.recording.range_of:
            ordinal -= 1
        return self.recording.range_of.get((path, ordinal)) or self.uncalled.get(path, (0, 0))


class _Guarded(TorchFunctionMode):
    """The mode for whole calls with holes: it allows queries of shapes and devices, and refuses other functions."""

    def __init__(self, play: Play) -> None:
        super().__init__()
        self._play = play

    def __torch_function__(self, function: Function, _: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:  # noqa: ANN401
        if is_device_question(function) and args[0].is_meta:
            return self._play.device
        if not is_query(function):
            self._play.check_filled(tensors_in((args, kwargs or {})))
        return function(*args, **(kwargs or {}))


class Play(Walk):
    """One run of one stage."""

    def __init__(
        self, part: Part, *, device: torch.device, received: Mapping[str, torch.Tensor], extra: list[torch.Tensor],
        notes: Notes, known_shapes: dict[Any, Any], batch_size: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.part, self.device, self.received, self.notes = part, device, received, notes
        self.known_shapes, self.batch_size = known_shapes, batch_size
        self.modules: Mapping[str, nn.Module] = {}
        self.buffers: dict[int, tuple[dict[str, Any], str]] = {}
        self.replaced_buffers: list[tuple[dict[str, Any], str, Any]] = []
        self.is_before = part.start > 0
        self.sent_of: dict[Mark, torch.Tensor] = {
            (path, ordinal, number): tensor
            for marks, tensor in zip(notes.live, extra, strict=True)
            for path, ordinal, number in marks
        }
        self.made: dict[str, torch.Tensor] = {}
        self.living: list[torch.Tensor] = []
        self.alive: dict[Mark, weakref.ref[torch.Tensor]] = {}
        self.pending: list[tuple[torch.Tensor, Mark]] = []

    def run(self, shell: nn.Module, modules: Mapping[str, nn.Module], arguments: Callable[[list[Any]], Any],
            inputs: list[torch.Tensor]) -> Any:  # noqa: ANN401  # fmt: skip
        """Run the stage; return the result of the forward, or None if it ended at a later stage."""
        self.modules = modules
        self.buffers = {
            id(tensor): (module._buffers, key)
            for module in modules.values()
            for key, tensor in module._buffers.items()
            if tensor is not None
        }
        given = []
        for index, tensor in enumerate(inputs):
            mark = ("", -1, index)
            own = tensor.clone() if f"{mark}" in self.part.copied else _alias(tensor)
            self.mark(own, mark)
            given.append(own)
        args, kwargs = arguments(given)
        is_grad_enabled = torch.is_grad_enabled()
        try:
            with self.watching(modules):
                result = shell(*args, **kwargs)
            self._fill_holes()
            self._note_live_tensors()
        except Done:
            return None
        finally:
            for place, key, own in reversed(self.replaced_buffers):
                place[key] = own
            torch.set_grad_enabled(is_grad_enabled)  # the forward may have ended while it had changed this
        return result

    def on_call(self, path: str, ordinal: int, call: Function, args: Args, kwargs: Kwargs) -> Any:  # noqa: ANN401
        """Skip calls before the stage, make its own calls, and end the forward at the first call after it."""
        first, last = self.part.units_of(path, ordinal)
        if self.is_before:
            self._fill_holes()
            if last < self.part.start and path not in self.part.recording.hooked:
                return self._skip(path, ordinal, call, args, kwargs)
            if first >= self.part.start:
                self.is_before = False
        if first >= self.part.stop and not self.is_before:
            self._note_live_tensors()  # while the variables of the model's code still exist
            raise Done
        if last >= self.part.stop or self.is_before or path in self.part.recording.hooked:
            given = flatten((args, dict(kwargs)))[0] if self.part.is_dynamic else []
            result = self.inside(path, ordinal, call, args, kwargs)
            made = flatten(result)[0] if self.part.is_dynamic else []
        else:
            given = flatten((args, dict(kwargs)))[0] if first == last or self.part.is_dynamic else []
            has_holes = any(tensor.is_meta for tensor in given)
            if self._is_unit(path) or not has_holes:
                with _Guarded(self) if has_holes else contextlib.nullcontext():  # the call may leave holes unused
                    result = self.whole(call, args, kwargs)
                made = self.mark_outputs(result, path, ordinal)
            else:  # holes may only be passed on; each inner call checks its own arguments
                result = self.inside(path, ordinal, call, args, kwargs)
                made = flatten(result)[0]
        if self.part.is_dynamic and not self.is_before:
            self.notes.shapes[f"{path}#{ordinal}"] = [describe(tensor, given) for tensor in made]
        return result

    def _is_unit(self, path: str) -> bool:
        """Return whether a module is a unit: no module inside it is watched."""
        return not any(inner.startswith(f"{path}.") for inner in self.modules)

    def on_function(self, function: Function, args: Args, kwargs: Kwargs) -> Any:  # noqa: ANN401
        """Run a function, on holes before the stage and on data within it; record the data that it reads."""
        if self.pending:
            self._fill_holes()
        if is_device_question(function) and args[0].is_meta:
            return self.device
        if self.is_before and function in _HOOKING:
            return _NoHook()  # the stage that computes the gradient sets the hook
        if is_query(function):
            return function(*args, **kwargs)
        if self.is_before:
            return self._imagine(function, args, kwargs)
        self.check_filled(tensors_in((args, kwargs)))
        result = function(*args, **kwargs)
        if self.part.is_dynamic:
            if reads_data(function) or is_plain_result(result):
                self.notes.reads[self._place()] = result
            elif self._is_shaped_by_data(function, args):
                self.notes.reads[self._place()] = [describe(tensor, []) for tensor in tensors_in(result)]
        self.mark_results(result)
        return result

    def check_filled(self, tensors: Iterable[torch.Tensor]) -> None:
        """Check that no tensor is a hole; some kernels would use it as if it had data.

        Raises:
            CaptureError: if one is a hole, which means that the stage did not receive this value.
        """
        if self.device.type != "meta" and any(tensor.is_meta for tensor in tensors):
            raise CaptureError(
                f"{line_of_stack()}: a value is used here that did not reach this stage: the model passes it in a way"
                " that replay cannot see; cut the model elsewhere, or pass a list of stage modules"
            )

    def _is_shaped_by_data(self, function: Function, args: Args) -> bool:
        return function in self.part.recording.unimaginable or is_data_shaped(function, args)

    def _place(self) -> str:
        """Return the name of the current read of data: the frame, and the number of the read in it."""
        frame = self.frames[-1]
        frame.reads += 1
        return f"{frame.path}#{frame.ordinal}:{frame.reads}"

    def on_marked(self, tensor: torch.Tensor, mark: Mark) -> None:
        """Remember a hole until it can be filled, and a tensor of this stage if a later stage needs it."""
        if self.is_before and tensor.is_meta:
            self.pending.append((tensor, mark))
        elif self.part.is_dynamic:
            self.alive[mark] = weakref.ref(tensor)
        elif not self.is_before and mark in self.part.wanted:
            self.made[self.part.wanted[mark]] = tensor

    def _fill_holes(self) -> None:
        """Fill the holes made since the last call, if the stage received values for them.

        Holes are not filled immediately. A tensor filled inside an autograd function would lose its gradient when the
        function returns, and a tensor that torch.vmap refers to cannot be filled before vmap returns.
        """
        while self.pending and not self.depth_of_functions:
            hole, mark = self.pending.pop()
            if self.part.is_dynamic:
                tensor, is_copied = self.sent_of.get(mark), True
            else:
                name = self.part.wanted.get(mark, "")
                tensor, is_copied = self.received.get(name), name in self.part.copied
            if tensor is not None and hole.is_meta and not tensor.is_meta:
                if hole.shape != tensor.shape:
                    raise CaptureError(
                        f"{line_of_stack()}: two stages took different branches of the model: one made a tensor of"
                        f" shape {tuple(tensor.shape)}, but the other expects {tuple(hole.shape)}"
                    )
                marks = self.marks_of(hole)
                torch.utils.swap_tensors(hole, tensor.clone() if is_copied else _alias(tensor))  # type: ignore[no-untyped-call]
                self.set_marks(hole, marks)
                if self.part.is_dynamic:
                    self.alive[mark] = weakref.ref(hole)

    def _note_live_tensors(self) -> None:
        """Find the tensors to which the model's code still refers, and write their marks into the notes."""
        if not self.part.is_dynamic:
            return
        found: dict[int, torch.Tensor] = {}
        for reference in self.alive.values():
            tensor = reference()
            if tensor is not None and not tensor.is_meta:
                found[id(tensor)] = tensor
        self.notes.live = [[list(mark) for mark in self.marks_of(tensor)] for tensor in found.values()]
        self.living = list(found.values())

    # --- before the stage: holes -----------------------------------------------------------------------------------

    def _imagine(self, function: Function, args: Args, kwargs: Kwargs) -> Any:  # noqa: ANN401
        """Run a torch function on holes, which computes shapes without data and without random numbers."""
        if reads_data(function) or function in self.part.recording.readers:
            return self._remember()
        if self._is_shaped_by_data(function, args):
            return self._remember(is_shape=True)
        result = run_on_holes(function, args, kwargs, self.device)
        if is_plain_result(result):
            return self._remember()
        self.mark_results(result)
        if args and isinstance(result, torch.Tensor) and id(args[0]) in self.buffers and _changes_in_place(function):
            place, key = self.buffers[id(args[0])]
            self.replaced_buffers.append((place, key, place[key]))
            place[key] = result  # later code reads the content for this micro-batch
            self.buffers[id(result)] = (place, key)
        return result

    def _remember(self, *, is_shape: bool = False) -> Any:  # noqa: ANN401
        """Return the data that an earlier stage read at this place."""
        place = self._place()
        if place not in self.notes.reads:
            raise CaptureError(
                f"{line_of_stack()}: the model reads data here, but did not when it was captured; capture it with an"
                " example that takes this branch"
            )
        read = self.notes.reads[place]
        if not is_shape:
            return read
        holes = [described(item) for item in read]
        result = holes[0] if len(holes) == 1 else tuple(holes)
        self.mark_results(result)
        return result

    def _skip(self, path: str, ordinal: int, call: Function, args: Args, kwargs: Kwargs) -> Any:  # noqa: ANN401
        """Return holes for the results of a call that belongs to an earlier stage."""
        for inner, count in self.part.recording.calls_in.get((path, ordinal), {}).items():
            self.ordinals[inner] = self.ordinals.get(inner, 0) + count
        _before_hooks(self.modules[path], args, kwargs)
        given, _ = flatten((args, dict(kwargs)))
        noted = self.notes.shapes.get(f"{path}#{ordinal}") if self.part.is_dynamic else None
        if noted is not None:
            template = self._template(path, ordinal, len(noted))
        else:
            key = (path, ordinal, tuple((tuple(t.shape), t.dtype) for t in given))
            # a module that fills a list must run each time; it fills the list with holes
            if key not in self.known_shapes or path in self.part.recording.filling:
                self.known_shapes[key] = self._learn(path, ordinal, call, args, kwargs, given=given)
            noted, template = self.known_shapes[key]
        leaves = [given[item[1]] if item[0] == "in" else described(item) for item in noted]
        result = rebuild(template, leaves)
        self.mark_outputs(result, path, ordinal)
        return _after_hooks(self.modules[path], args, kwargs, result)

    def _template(self, path: str, ordinal: int, count: int) -> object:
        while ordinal > 0 and (path, ordinal) not in self.part.recording.template_of:
            ordinal -= 1
        one_or_more = Slot(0) if count == 1 else flatten(tuple(torch.empty(0) for _ in range(count)))[1]
        return self.part.recording.template_of.get((path, ordinal), one_or_more)

    def _learn(
        self, path: str, ordinal: int, call: Function, args: Args, kwargs: Kwargs, *, given: list[torch.Tensor]
    ) -> Any:  # noqa: ANN401
        """Find the shapes of a call's results by a run on holes; if that fails, take them from the recording."""
        try:
            with without_model_hooks(self.modules[path]):  # `_after_hooks` calls them on the result
                return self._rehearse(call, args, kwargs, given)
        except Exception:
            seen = self.part.recording.seen_of.get((path, ordinal))
            if seen is None:
                raise
            return [_at_batch(item, self.batch_size) for item in seen], self._template(path, ordinal, len(seen))

    def _rehearse(self, call: Function, args: Args, kwargs: Kwargs, given: list[torch.Tensor]) -> Any:  # noqa: ANN401
        """Make a call on holes; return the descriptions of its results, and their template."""
        frames, self.frames, self._is_whole = self.frames, [Frame("(rehearsal)", 0)], True
        ordinals, num_borrowed = dict(self.ordinals), len(self.replaced_buffers)
        learn, self.on_marked = self.on_marked, lambda tensor, mark: None  # type: ignore[method-assign]
        try:
            with self.switched(on=True):
                result = call(*args, **kwargs)
        finally:
            self.frames, self.on_marked, self._is_whole = frames, learn, False  # type: ignore[method-assign]
            self.ordinals = ordinals
            while len(self.replaced_buffers) > num_borrowed:  # the stage itself may call this module with data
                place, key, own = self.replaced_buffers.pop()
                place[key] = own
        tensors, template = flatten(result)
        return [describe(tensor, given) for tensor in tensors], template


_HOOKING = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


class _NoHook:
    """The handle of a gradient hook that another stage sets."""

    def remove(self) -> None:
        """Do nothing."""


def _changes_in_place(function: Function) -> bool:
    name = getattr(function, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name.endswith("__"))


def _before_hooks(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
    """Call the forward pre-hooks that are part of the model on the arguments of a skipped module."""
    for number in model_hooks(module, "_forward_pre_hooks"):
        hook = module._forward_pre_hooks[number]
        if number in module._forward_pre_hooks_with_kwargs:
            hook(module, args, dict(kwargs))
        else:
            hook(module, args)


def _after_hooks(module: nn.Module, args: Args, kwargs: Kwargs, result: Any) -> Any:  # noqa: ANN401
    """Call the forward hooks that are part of the model, but not the user's, on the result of a skipped module."""
    of_model = model_hooks(module, "_forward_hooks")
    for number, hook in module._forward_hooks.items():
        if number not in of_model and not is_of_library(hook, module):
            continue
        with_kwargs = number in module._forward_hooks_with_kwargs
        changed = hook(module, args, dict(kwargs), result) if with_kwargs else hook(module, args, result)
        result = result if changed is None else changed
    return result


def _at_batch(item: list[Any], batch_size: int) -> list[Any]:
    """Return the description of a tensor for a batch size, from a description with a `Size` for each dimension."""
    if item[0] == "in":
        return item
    shape = [size.at(batch_size) for size in item[0]]
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return [shape, strides, item[1]]


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor with the same memory, through which gradients reach the given tensor."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach()
