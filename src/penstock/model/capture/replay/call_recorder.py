"""Call recorder: run a model once and record its module calls, the tensors between them, and the data it reads."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from penstock.model.capture.export.tracing import is_cache
from penstock.model.capture.replay.forward_walk import Args, Function, Kwargs, Mark, ModuleCall, Walk, tensors_in
from penstock.model.capture.replay.module_shell import containers_of, make_shell
from penstock.model.capture.replay.torch_functions import (
    describe,
    is_data_shaped,
    is_plain_result,
    is_query,
    reads_data,
    works_on_holes,
)
from penstock.model.example import Call
from penstock.model.parameters import held_tensors, new_tensors_on_meta
from penstock.model.preserve import RandomStates, in_mode, preserve_state
from penstock.model.source import line_of_stack
from penstock.model.structure import flatten

_TRIES = 4
_SHARE = 1 / 32  # modules with a smaller share of all parameters are units


@dataclass(frozen=True)
class Known:
    """The properties of a tensor that stay known after the run."""

    shape: tuple[int, ...]  # its shape in that run
    dtype: torch.dtype  # its dtype
    has_grad: bool  # whether it requires a gradient
    memory: int  # a number that is equal for tensors that shared memory

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Known:
        """Return the properties of a tensor."""
        try:
            memory = tensor.untyped_storage()._cdata
        except NotImplementedError:  # sparse tensors have none
            memory = -id(tensor)
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, memory)


@dataclass
class Seen:
    """A tensor that was made between module calls, or by one.

    Code between two units usually belongs to the first of them (`_Recorder.now`).
    """

    producer: int  # the unit that made it; -1 for an input of the model
    tensor: torch.Tensor | Known  # the tensor while the model runs; afterwards its properties, without its memory
    # its marks, each with the unit that added it; a call that returns the tensor adds a mark
    marks: list[tuple[int, Mark]]
    uses: set[int] = field(default_factory=set)  # the units that use it
    changes: set[int] = field(default_factory=set)  # the units that change it in place

    @property
    def known(self) -> Known:
        """Its properties, after the run."""
        assert isinstance(self.tensor, Known)
        return self.tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in this run."""
        return tuple(self.tensor.shape)


@dataclass
class Unit:
    """A module call that replay runs whole."""

    path: str
    ordinal: int
    inputs: list[int] = field(default_factory=list)
    held: set[int] = field(default_factory=set)  # ids of parameters and buffers that the code around it uses


@dataclass
class Recording:
    """The observations of one run.

    A module call is identified by the path of the module and the ordinal of the call: 0 for its first call, and so on.
    """

    units: list[Unit] = field(default_factory=list)  # the units, in order
    seen: list[Seen] = field(default_factory=list)  # all tensors between them
    # for each module call, the first and the last unit in it
    range_of: dict[ModuleCall, tuple[int, int]] = field(default_factory=dict)
    # whether data was read into Python, shapes depend on data, or Python's own random numbers were drawn; with other
    # data, the model may then take other branches
    reads_data: bool = False
    reads_where: str = ""  # the first line of the model that read data
    template: object = None  # the template of the model's result
    outputs: list[int] = field(default_factory=list)  # the indices in `seen` of the tensors that fill it
    # for each module call, the template of its result
    template_of: dict[ModuleCall, object] = field(default_factory=dict)
    unimaginable: set[Function] = field(default_factory=set)  # torch functions that do not work on holes
    readers: set[Function] = field(default_factory=set)  # torch functions that returned plain values, and so read data
    uncuttable: set[int] = field(default_factory=set)  # positions where no cut may lie
    # for each module call, the numbers of calls of other modules inside it, by path
    calls_in: dict[ModuleCall, dict[str, int]] = field(default_factory=dict)
    # for each module call, the descriptions of the tensors that it returned
    shapes_of: dict[ModuleCall, list[list[Any]]] = field(default_factory=dict)
    # the same descriptions, with dimensions as functions of the batch size
    seen_of: dict[ModuleCall, list[list[Any]]] = field(default_factory=dict)
    watched: tuple[str, ...] = ()  # the paths of the modules whose calls were observed
    # the modules to look into even if they are skipped, because of hooks or hidden values inside them
    hooked: set[str] = field(default_factory=set)
    draws_python_random: bool = False  # whether Python's or numpy's random numbers were drawn
    changed: set[str] = field(default_factory=set)  # the names of the buffers that the forward changes
    filling: set[str] = field(default_factory=set)  # the modules that change a list or dict among their arguments
    # the lists and dicts in attributes that get other tensors, as "path:name"
    filled: set[str] = field(default_factory=set)
    cached: set[str] = field(default_factory=set)  # those of them that a second call does not change


def record(model: nn.Module, call: Call) -> Recording:
    """Run a model's forward and return a recording; the model and all random states stay unchanged.

    If control flow depends on data or random numbers, as with LayerDrop, a run may skip modules. The model then runs a
    few more times, also in evaluation, and the recording with the most units is returned.
    """
    states = RandomStates()
    best = _record_once(model, call)
    if not best.reads_data:
        return best
    others = []
    for _ in range(_TRIES if model.training else 0):
        if not _missing(model, best):
            break
        torch.rand(1)  # other random numbers
        random.random()  # noqa: S311
        others.append(_record_once(model, call))
    states.restore()
    if model.training and _missing(model, best):
        with in_mode(model, training=False):
            others.append(_record_once(model, call))
    most = max([best, *others], key=lambda recording: len(recording.units))
    most.reads_data, most.reads_where = True, best.reads_where
    most.draws_python_random = any(recording.draws_python_random for recording in [best, *others])
    return most


def _missing(model: nn.Module, recording: Recording) -> bool:
    """Return whether the run called neither some module with parameters, nor a module around it or inside it."""
    called = {unit.path for unit in recording.units}
    return any(
        not any(path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.") for other in called)
        for path, module in model.named_modules()
        if path and any(True for _ in module.parameters())
    )


def _record_once(model: nn.Module, call: Call, whole: frozenset[str] = frozenset()) -> Recording:
    shell = make_shell(model)
    modules = dict(shell.named_modules())
    units = {path for path, module in modules.items() if path and (path in whole or _is_unit(module, modules[""]))}
    inside = {path: m for path, m in modules.items() if not any(path.startswith(f"{unit}.") for unit in units)}
    recorder = _Recorder(units, {id(tensor): name for name, tensor in held_tensors(shell).items()})
    states = RandomStates()
    versions = {name: (tensor, tensor._version) for name, tensor in held_tensors(model).items()}
    before = {name: _ids_in(container) for name, container in containers_of(model).items()}
    try:
        with preserve_state(model), new_tensors_on_meta(model, call):
            result = recorder.run(shell, inside, call)
            after = held_tensors(shell)
            changed = {name for name, (t, v) in versions.items() if after.get(name) is not t or t._version != v}
            filled = {
                name
                for name, container in containers_of(model).items()
                if before.get(name) not in (None, _ids_in(container))
                and any(True for _ in tensors_in(_values_of(container)))
            }
            cached = _unchanged_by_a_second_call(shell, call, {name: containers_of(model)[name] for name in filled})
    finally:
        is_random = states.have_others_changed()
        states.restore()
    if recorder.leaf_paths - whole:  # these modules call no submodule, so they are units
        return _record_once(model, call, whole | frozenset(recorder.leaf_paths))
    recorder.found.uncuttable |= recorder.around_changed_buffers({name: t for name, (t, _) in versions.items()}, after)
    recording = recorder.recording(result)
    recording.reads_data |= is_random
    recording.draws_python_random, recording.watched = is_random, tuple(inside)
    hooked = {path for path, module in inside.items() if path not in units and _has_hooks_inside(module)}
    recording.hooked = hooked | ((_escaped(recording) | recording.filling) - units)
    recording.changed, recording.filled, recording.cached = changed, filled, cached
    return recording


def _unchanged_by_a_second_call(shell: nn.Module, call: Call, containers: Mapping[str, Any]) -> set[str]:
    """Return the containers that are caches: the first call fills them, and the next one only reads them."""
    if not containers:
        return set()
    before = {name: _ids_in(container) for name, container in containers.items()}
    args, kwargs = call.arguments([tensor.detach().clone() for tensor in call.tensors])
    with torch.no_grad():
        shell(*args, **kwargs)
    return {name for name, container in containers.items() if _ids_in(container) == before[name]}


def _escaped(recording: Recording) -> set[str]:
    """Return the modules that pass a value to later code without returning it: by a list, an attribute or a buffer.

    Every stage looks into such a module, whether it runs or skips it. Otherwise the value would be missing.
    """
    calls: dict[str, list[tuple[int, int, int]]] = {}
    for (path, ordinal), (first, last) in recording.range_of.items():
        calls.setdefault(path, []).append((ordinal, first, last))
    found = set()
    for seen in recording.seen:
        producer, marks = seen.producer, {mark for _, mark in seen.marks}
        path = seen.marks[0][1][0]
        while path and producer >= 0 and seen.uses:
            for ordinal, first, last in calls.get(path, ()):
                is_returned = any(mark[:2] == (path, ordinal) and mark[2] < 0 for mark in marks)
                if first <= producer <= last < max(seen.uses) and not is_returned:
                    found.add(path)
            path = path.rpartition(".")[0]
    return found


def _containers_in(thing: Any, depth: int = 0) -> list[tuple[Any, list[int]]]:  # noqa: ANN401 - arguments
    """Return the lists, dicts and sets in a call's arguments, each with the ids of its items."""
    if depth > 3 or not isinstance(thing, (list, tuple, dict, set)):
        return []
    inner = thing.values() if isinstance(thing, dict) else thing
    own = [] if isinstance(thing, tuple) else [(thing, _ids_in(thing))]
    return own + [found for item in inner for found in _containers_in(item, depth + 1)]


def _values_of(container: Any) -> list[Any]:  # noqa: ANN401 - a list, dict or set
    return list(container.values() if isinstance(container, dict) else container)


def _ids_in(container: Any) -> list[int]:  # noqa: ANN401 - a list, dict or set
    return [id(item) for item in _values_of(container)]


def _is_unit(module: nn.Module, root: nn.Module) -> bool:
    """Return whether a module is a unit: it is small, has no submodules, or is compiled or scripted."""
    if not any(module.children()) or _is_sealed(module):
        return True
    if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return False
    total = sum(p.numel() for p in root.parameters())
    return sum(p.numel() for p in module.parameters()) < _SHARE * total


def _is_sealed(module: nn.Module) -> bool:
    is_compiled = type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
    return is_compiled or isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_penstock_sealed")


def _has_hooks_inside(module: nn.Module) -> bool:
    return any(inner._forward_hooks for inner in module.modules() if inner is not module)


class _Recorder(Walk):
    def __init__(self, units: set[str], held: Mapping[int, str]) -> None:
        super().__init__()
        self.unit_paths, self.held = units, held
        self.found = Recording()
        self.index_of: dict[int, int] = {}
        self.held_at: dict[int, set[int]] = {}
        self.open_at: list[int] = []  # for each running call, the number of units before it
        self.leaf_paths: set[str] = set()
        self.changes_of: dict[int, set[int]] = {}  # for the id of each held tensor, the units that change it
        self._hooks: Any = None

    def run(self, shell: nn.Module, modules: Mapping[str, nn.Module], call: Call) -> object:
        tensors = []
        for index, tensor in enumerate(call.tensors):
            # a copy: the model may change its inputs, and the example belongs to the user
            alias = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            self.mark(alias, ("", -1, index))
            tensors.append(alias)
        args, kwargs = call.arguments(tensors)
        with torch.enable_grad(), self._watching_functions(), self.watching(modules):
            return shell(*args, **kwargs)

    @contextmanager
    def _watching_functions(self) -> Iterator[None]:
        """Forbid cuts inside autograd functions; a stage cannot leave one before it returns."""
        original: Any = torch.autograd.Function.__dict__["apply"]

        def apply(cls: type, /, *args: object, **kwargs: object) -> object:
            first = len(self.found.units)
            result = original.__get__(None, cls)(*args, **kwargs)
            self.found.uncuttable |= set(range(first, len(self.found.units)))
            return result

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            torch.autograd.Function.apply = original  # type: ignore[method-assign]

    def _note_checkpoint(self) -> None:
        """Forbid a cut between two units that the model recomputes together; the recompute would cross the cut."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None and self._hooks is not None and hooks[0] is self._hooks[0]:
            self.found.uncuttable.add(len(self.found.units) - 1)
        self._hooks = hooks

    @property
    def now(self) -> int:
        """The unit to which the current code belongs: the unit that was called last.

        Inside a call that has not reached a unit yet, it is the next unit; a cut before it lies before the whole call.
        """
        count = len(self.found.units)
        return count if count in self.open_at else max(0, count - 1)

    def on_call(self, path: str, ordinal: int, call: Function, args: Args, kwargs: Kwargs) -> Any:  # noqa: ANN401
        first, before = len(self.found.units), dict(self.ordinals)
        containers = _containers_in((args, kwargs))
        if path not in self.unit_paths:
            self.open_at.append(first)
            try:
                result = self.inside(path, ordinal, call, args, kwargs)
            finally:
                self.open_at.pop()
            self._note_filled(path, containers)
            if len(self.found.units) == first and path:
                self.leaf_paths.add(path)
            elif len(self.found.units) > first:
                self.found.range_of[path, ordinal] = (first, len(self.found.units) - 1)
                calls = {inner: count - before.get(inner, 0) for inner, count in self.ordinals.items()}
                self.found.calls_in[path, ordinal] = {inner: count for inner, count in calls.items() if count}
                made, self.found.template_of[path, ordinal] = flatten(result)
                given, _ = flatten((args, dict(kwargs)))
                self.found.shapes_of[path, ordinal] = [describe(tensor, given) for tensor in made]
            return result
        self.found.units.append(Unit(path, ordinal))
        self._note_checkpoint()
        self.found.range_of[path, ordinal] = (first, first)
        given, _ = flatten((args, dict(kwargs)))
        versions = [tensor._version for tensor in given]
        for tensor in given:
            self._use(tensor, is_argument=True)
        result = self.whole(call, args, kwargs)
        self._note_filled(path, containers)
        self.mark_outputs(result, path, ordinal)
        made, self.found.template_of[path, ordinal] = flatten(result)
        self.found.shapes_of[path, ordinal] = [describe(tensor, given) for tensor in made]
        self._note_changes(given, versions)
        return result

    def on_function(self, function: Function, args: Args, kwargs: Kwargs) -> Any:  # noqa: ANN401
        if is_query(function):
            return function(*args, **kwargs)
        given = list(tensors_in((args, kwargs)))
        for tensor in given:
            self._use(tensor)
        versions = [tensor._version for tensor in given]
        result = function(*args, **kwargs)
        if reads_data(function) or is_data_shaped(function, args):
            self._note_read()
        elif is_plain_result(result):
            self.found.readers.add(function)
            self._note_read()
        elif not works_on_holes(function, args, kwargs, result):
            self.found.unimaginable.add(function)
            self._note_read()
        self._note_changes(given, versions)
        if function is torch.autograd.grad:  # one stage must have all operations that this gradient goes through
            first = min((s.producer for t in given for s in self._seen_of(t)), default=self.now)
            self.found.uncuttable |= set(range(max(0, first) + 1, self.now + 1))
        self.mark_results(result)
        return result

    def _note_filled(self, path: str, containers: list[tuple[Any, list[int]]]) -> None:
        """Record a module that adds items to a list or dict among its arguments, or removes them."""
        if any(_ids_in(container) != before for container, before in containers):
            self.found.filling.add(path)

    def _seen_of(self, tensor: torch.Tensor) -> list[Seen]:
        return [self.found.seen[self.index_of[id(tensor)]]] if self.marks_of(tensor) else []

    def _note_read(self) -> None:
        self.found.reads_where = self.found.reads_where or line_of_stack()
        self.found.reads_data = True

    def _use(self, tensor: torch.Tensor, *, is_argument: bool = False) -> None:
        if id(tensor) in self.held:
            self.held_at.setdefault(self.now, set()).add(id(tensor))
        if self.marks_of(tensor):  # also a buffer after an in-place change: it is a value
            index: int = self.index_of[id(tensor)]
            self.found.seen[index].uses.add(self.now)
            if is_argument and index not in self.found.units[-1].inputs:
                self.found.units[-1].inputs.append(index)

    def _note_changes(self, given: list[torch.Tensor], versions: list[int]) -> None:
        for tensor, version in zip(given, versions, strict=True):
            if tensor._version != version and id(tensor) in self.held:
                self.changes_of.setdefault(id(tensor), set()).add(self.now)
            if tensor._version != version and self.marks_of(tensor):
                self.found.seen[self.index_of[id(tensor)]].changes.add(self.now)

    def around_changed_buffers(self, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> set[int]:
        """Return the cuts between the code that reads or changes a buffer and the code that changes it last.

        All of this code must run on one stage: another stage would read old content, or change a copy. After the last
        change, the buffer's content is a value, which can be sent to any stage.
        """
        found: set[int] = set()
        for name, tensor in before.items():
            new, changes = after.get(name), set(self.changes_of.get(id(tensor), ()))
            if new is not None and new is not tensor and id(new) in self.index_of:
                changes.add(self.found.seen[self.index_of[id(new)]].producer)
            last = max(changes, default=-1)
            uses = {at for at, held in self.held_at.items() if id(tensor) in held and at <= last}
            found |= set(range(min(uses | changes, default=0) + 1, last + 1))
        return found

    def on_marked(self, tensor: torch.Tensor, mark: Mark) -> None:
        index = self.index_of.get(id(tensor))  # all seen tensors are kept alive, so ids are unique
        if index is None:
            self.index_of[id(tensor)] = len(self.found.seen)
            producer = -1 if mark[1] < 0 else self.now
            self.found.seen.append(Seen(producer, tensor, [(producer, mark)]))
        else:
            self.found.seen[index].marks.append((self.now, mark))

    def recording(self, result: object) -> Recording:
        tensors, template = flatten(result, drop=is_cache)
        for index, held in self.held_at.items():
            if self.found.units:
                self.found.units[min(index, len(self.found.units) - 1)].held |= held
        for tensor in tensors:  # a tensor without a mark is a parameter that the model returns
            if id(tensor) not in self.index_of:
                self.mark(tensor, ("", 0, -1000 - len(self.found.seen)))
        outputs = [self.index_of[id(tensor)] for tensor in tensors]
        for index in outputs:
            self.found.seen[index].uses.add(self.now)
        # the recording lives on, so it must not keep memory, autograd graphs, or gradient accumulators of this stream
        known = [Known.of(seen.tensor) for seen in self.found.seen if isinstance(seen.tensor, torch.Tensor)]
        for seen, of_it in zip(self.found.seen, known, strict=True):
            seen.tensor.__dict__.pop("_penstock_marks", None)
            seen.tensor = of_it
        self.found.template, self.found.outputs = template, outputs
        return self.found
