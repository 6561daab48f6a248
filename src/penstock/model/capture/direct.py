"""The direct path: capture a sequence of modules, each of which is called with the result of the one before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.compile.options import GroupError, Options, compiled
from penstock.errors import CaptureError
from penstock.model.capture.replay.module_shell import HOOKS, make_shell
from penstock.model.capture.replay.replayed_visit import move_shell, run_with
from penstock.model.example import Call
from penstock.model.graph import Graph, Node, Size, Value, held_by_stage
from penstock.model.parameters import (
    held_tensors,
    main_device,
    module_signature,
    read_parameters,
    stand_in,
    unsaved_names,
)
from penstock.model.preserve import OriginalDevices, RandomStates, in_mode, restore_values
from penstock.model.stages import Chain, HeldTensors, Results, Stage
from penstock.model.structure import flatten, rebuild
from penstock.model.visit import Visitor
from penstock.randomness.draw_names import enter

_GROUP_SIZE = 8  # modules per compiled group; groups with the same types of modules share their compiled code


def sequence_of(model: nn.Module) -> list[str] | None:
    """Return the paths of the modules of a sequence, in order, or None if the model is not a plain `nn.Sequential`.

    A sequence inside a sequence is replaced by its modules. A sequence with hooks, or with a forward of its own, counts
    as an ordinary module.
    """
    if type(model).forward is not nn.Sequential.forward or "forward" in vars(model) or _has_hooks(model):
        return None
    paths: list[str] = []
    for name, child in model._modules.items():  # named_children() would leave out repeated modules
        if child is None:
            return None
        inner = sequence_of(child) if isinstance(child, nn.Sequential) else None
        paths += [name] if inner is None else [f"{name}.{path}" for path in inner]
    return paths


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, kind) for kind in HOOKS) or module._compiled_call_impl is not None


class _ModuleArguments:
    """The arguments that a module gets from the one before: a template, and the tensors that fill it."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, apart: bool = False) -> None:
        self.tensors, self.template = flatten((args, dict(kwargs)), apart=apart)
        self.count = len(self.tensors)
        self.is_plain = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
        self.is_changed = [False] * self.count

    def cut(self) -> None:
        """Detach the tensors: their autograd graphs would keep all activations of the model in memory."""
        self.tensors = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.tensors]

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = rebuild(self.template, tensors)
        return args, kwargs


class Direct:
    """A captured sequence of modules; with `spreads`, a returned tuple becomes the arguments of the next module."""

    def __init__(
        self, model: nn.Module, call: Call, paths: list[str], *, training: bool, spreads: bool = False
    ) -> None:
        self.model, self.call, self.training, self.paths, self.spreads = model, call, training, paths, spreads
        self.path = "direct"
        self.reason = "a list of stage modules" if spreads else "the model is a sequence of modules"
        self._places_of: dict[bool, list[_ModuleArguments]] = {}
        self._original_devices = OriginalDevices(model)
        places, others = self._places(training), self._run(call.resized(call.batch_size + 1))
        self.graph = self._graph(places, others)
        self._forget()

    def _places(self, training: bool) -> list[_ModuleArguments]:
        if training not in self._places_of:
            with in_mode(self.model, training=training), self._original_devices.restored():
                self._places_of[training] = self._run(self.call)
            if hasattr(self, "graph"):  # the tensors were needed only to make the graph
                self._forget()
        return self._places_of[training]

    def _forget(self) -> None:
        """Release the tensors of the example."""
        for places in self._places_of.values():
            for place in places:
                place.tensors = []

    def _run(self, call: Call) -> list[_ModuleArguments]:
        """Run all modules once; return the arguments of each module, and the result of the last one."""
        states = RandomStates()
        shell = make_shell(self.model)
        buffers = [(buffer, buffer.clone()) for buffer in shell.buffers() if not buffer.is_meta]
        inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in call.tensors]
        place = _ModuleArguments(*call.arguments(inputs), apart=True)
        places = [place]
        try:
            with torch.enable_grad():
                for path in self.paths:
                    # copies: autograd refuses in-place changes of leaves, and the recorded tensors must not change
                    inside = [_linked(tensor) for tensor in place.tensors]
                    versions = [tensor._version for tensor in inside]
                    args, kwargs = place.arguments(inside)
                    result = shell.get_submodule(path)(*args, **kwargs)
                    place.is_changed = [t._version != v for t, v in zip(inside, versions, strict=True)]
                    place = _ModuleArguments(*self._next(result))
                    place.is_plain &= isinstance(result, torch.Tensor)  # a tuple with one tensor is not plain
                    place.cut()
                    places.append(place)
        finally:
            states.restore()
            for buffer, before in buffers:
                restore_values(buffer, before)
        return places

    def _next(self, result: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (tuple(result) if self.spreads and isinstance(result, tuple) else (result,)), {}

    def _graph(self, places: list[_ModuleArguments], others: list[_ModuleArguments]) -> Graph:
        parameters, first_of = read_parameters(self.model)
        values = [
            _value(f"input:{self.call.names[i]}", -1, *pair, self.call) for i, pair in _pairs(places[0], others[0])
        ]
        before: tuple[int, ...] = tuple(range(len(values)))
        nodes = []
        for index, path in enumerate(self.paths):
            module = self.model.get_submodule(path)
            made = [
                _value(f"value_{index}_{i}", index, *pair, self.call)
                for i, pair in _pairs(places[index + 1], others[index + 1])
            ]
            outputs = tuple(range(len(values), len(values) + len(made)))
            values += made
            held = [first_of[f"{path}.{name}"] for name in held_tensors(module)]
            nodes.append(
                Node(
                    name=path,
                    op=type(module).__name__,
                    module=path,
                    inputs=before,
                    outputs=outputs,
                    parameters=tuple(dict.fromkeys(held)),
                    signature=module_signature(module),
                )
            )
            before = outputs
        return Graph(
            tuple(nodes), tuple(values), tuple(range(len(self.call.tensors))), before, parameters, self.call.batch_size
        )

    def split(self, cuts: Sequence[int]) -> Chain:
        """Return the stages between the cuts."""
        ranges, held = self.graph.stages(cuts), held_by_stage(self.graph, cuts)
        tensors = held_tensors(self.model)
        stages = []
        for index, nodes in enumerate(ranges):
            made: dict[bool, DirectProgram] = {}

            def program(training: bool, nodes: range = nodes, made: dict[bool, DirectProgram] = made) -> DirectProgram:
                if training not in made:
                    with in_mode(self.model, training=training):
                        made[training] = DirectProgram(self, nodes, self._places(training))
                return made[training]

            own = {name: tensors[name] for name in held[index]}
            stages.append(
                Stage(index, tensors=own, program_of=program, unsaved=unsaved_names(self.model)).train(self.training)
            )

        def results(training: bool) -> Results:
            last = self._places(training)[-1]
            template = last.template.parts[0].parts[0]  # type: ignore[attr-defined]  # the only argument
            count = last.count
            return Results(lambda: template, [f"value_{len(self.paths) - 1}_{i}" for i in range(count)])

        first = self.model.get_submodule(self.paths[0]) if self.spreads else self.model
        return Chain(self.model, stages, example=self.call, results=results, forward_of=first)

    def visit(self, visitor: Visitor, *, device: torch.device | None = None, batch_size: int | None = None) -> None:
        """Run the model once, on a device (also "meta") and for a batch size, and pass each module to a visitor."""
        where = device or main_device(self.model, self.call)
        call = self.call if batch_size is None else self.call.resized(batch_size)
        with in_mode(self.model, training=self.training), torch.no_grad():
            shell = make_shell(self.model)
            is_on_meta = any(tensor.is_meta for tensor in held_tensors(shell).values())
            if not is_on_meta:
                move_shell(shell, where)
            args, kwargs = call.map(lambda tensor: stand_in(tensor.detach(), where)).arguments()
            held = held_tensors(shell)
            for index, path in enumerate(self.paths):
                names, module = self.graph.nodes[index].parameters, shell.get_submodule(path)
                if is_on_meta:  # the whole model may not fit
                    module = move_shell(make_shell(module), where)
                    held = self._own(path, module)
                result = run_with(visitor, index, module, args, kwargs, names=names, held=held)
                args, kwargs = self._next(result)

    def _own(self, path: str, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors of a module by their first names in the model."""
        first_of = {alias: p.name for p in self.graph.parameters.values() for alias in (p.name, *p.aliases)}
        return {first_of[f"{path}.{name}"]: tensor for name, tensor in held_tensors(module).items()}


@dataclass(frozen=True)
class _Part:
    """A module of a stage, or several modules that are compiled together."""

    path: str  # the path of the first module
    module: nn.Module  # the module to call; several modules are one `nn.Sequential`
    apart: tuple[_Part, ...] = ()  # the same modules as separate parts


class DirectProgram:
    """The program of one stage, which calls the stage's modules in a shell of its own."""

    reassigned: tuple[str, ...] = ()

    def __init__(self, direct: Direct, nodes: range, places: list[_ModuleArguments]) -> None:
        self._direct, self._place, self._end = direct, places[nodes.start], places[nodes.stop]
        shell = make_shell(direct.model)
        # a tensor that a module changes in place may be a view of an input of the stage
        self._is_changing = any(any(places[index].is_changed) for index in nodes)
        self._parts = [_Part(direct.paths[index], shell.get_submodule(direct.paths[index])) for index in nodes]
        self.inputs = _names(direct, nodes.start, self._place.count)
        self.outputs = _names(direct, nodes.stop, self._end.count)
        first_of = {alias: p.name for p in direct.graph.parameters.values() for alias in (p.name, *p.aliases)}
        self._places = [
            (getattr(module, kind), key, first_of[f"{path}.{key}"])
            for index in nodes
            for path, module in _modules_below(shell, direct.paths[index])
            if not isinstance(module, torch.jit.ScriptModule)  # shared, not copied
            for kind in ("_parameters", "_buffers")
            for key, tensor in getattr(module, kind).items()
            if tensor is not None
        ]
        self.held_names = tuple(dict.fromkeys(name for _, _, name in self._places))
        # whether there is a single positional argument, as between the modules of an nn.Sequential
        self._has_plain_output = [places[index + 1].is_plain for index in nodes]
        self._is_plain_first = self._place.is_plain

    def compile(self, options: Options) -> None:
        """Let Inductor compile the modules in groups, so that it can fuse kernels of neighbouring modules."""
        grouped: list[list[int]] = [[]]
        for index, is_plain in enumerate(self._has_plain_output):
            grouped[-1].append(index)
            is_alone = not self._is_plain_first and len(grouped) == 1
            if not is_plain or is_alone or len(grouped[-1]) == _GROUP_SIZE:
                grouped.append([])
        self._parts = [self._part([self._parts[index] for index in group], options) for group in grouped if group]

    def _part(self, parts: Sequence[_Part], options: Options) -> _Part:
        """Return several modules as one part, compiled together."""
        if len(parts) == 1:
            return _Part(parts[0].path, compiled(parts[0].module, options))
        whole = nn.Sequential(*(part.module for part in parts))
        apart = tuple(_Part(part.path, compiled(part.module, options)) for part in parts)
        return _Part(parts[0].path, compiled(whole, options, is_group=True), apart)

    def run(self, held: HeldTensors, values: Sequence[Any], batch_size: int) -> tuple[Any, ...]:
        """Call the modules in order."""
        del batch_size
        for place, key, name in self._places:
            place[key] = held.get(name)
        given = [value.clone() for value in values] if self._is_changing else values
        args, kwargs = self._place.arguments(given)
        at = 0
        while at < len(self._parts):
            part = self._parts[at]
            enter(part.path)
            try:
                result = part.module(*args, **kwargs)
            except GroupError:  # no module of the group has run
                self._parts[at : at + 1] = part.apart
                continue
            args, kwargs = self._direct._next(result)
            at += 1
        # nearly all results are a single tensor, and `flatten` would take longer than a small stage
        is_plain = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
        tensors = [args[0]] if is_plain else flatten((args, kwargs))[0]
        for place, key, name in self._places:  # buffers that a module replaced
            if place[key] is not held.get(name):
                held.set(name, place[key])
        if len(tensors) != len(self.outputs):
            raise CaptureError(f"a module returned {len(tensors)} tensors, but {len(self.outputs)} during the capture")
        return tuple(tensors)


def _modules_below(shell: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    root = shell.get_submodule(path)
    return [(f"{path}.{name}" if name else path, module) for name, module in root.named_modules(remove_duplicate=False)]


def _names(direct: Direct, cut: int, count: int) -> tuple[str, ...]:
    if cut == 0:
        return tuple(f"input:{name}" for name in direct.call.names)
    return tuple(f"value_{cut - 1}_{i}" for i in range(count))


def _linked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.requires_grad else tensor.detach().clone()


def _pairs(a: _ModuleArguments, b: _ModuleArguments) -> list[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
    if len(a.tensors) != len(b.tensors):
        raise CaptureError("a module returned different numbers of tensors for different batch sizes")
    return list(enumerate(zip(a.tensors, b.tensors, strict=True)))


def _value(name: str, producer: int, tensor: torch.Tensor, other: torch.Tensor, call: Call) -> Value:
    return Value(
        name=name,
        producer=producer,
        shape=tuple(Size.seen(a, b, call.batch_size) for a, b in zip(tensor.shape, other.shape, strict=True)),
        dtype=str(tensor.dtype).removeprefix("torch."),
        item_bytes=tensor.element_size(),
        has_grad=tensor.requires_grad,
    )
