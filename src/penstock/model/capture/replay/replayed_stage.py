"""Replayed stages: the part of the forward of a stage, the program that runs it, and its notes for later stages."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from penstock.compile.options import Options
from penstock.errors import CaptureError, UsageError
from penstock.model.capture.export.tracing import is_cache
from penstock.model.capture.replay.call_recorder import Recording
from penstock.model.capture.replay.module_shell import HOOKS, containers_of, is_of_library, make_shell, model_hooks
from penstock.model.capture.replay.stage_player import Part, Play
from penstock.model.example import Call
from penstock.model.graph import Graph
from penstock.model.preserve import refill
from penstock.model.stages import HeldTensors
from penstock.model.structure import flatten
from penstock.randomness.draw_names import here, seeded_python


def make_part(
    recording: Recording, ranges: Sequence[range], held: Sequence[tuple[str, ...]], paths: Sequence[str], index: int
) -> Part:
    """Return the part of the forward that a stage plays, given the units and the parameters of all stages."""
    nodes = ranges[index]
    wanted, copied = {}, set()
    for number, seen in enumerate(recording.seen):
        name = f"value_{number}"
        if seen.producer < 0:
            if any(change in nodes for change in _changes(recording, number)):
                copied.add(f"{seen.marks[0][1]}")
            continue
        is_received = seen.producer < nodes.start and any(use in nodes for use in seen.uses)
        is_sent = seen.producer in nodes and any(use >= nodes.stop for use in seen.uses)
        if is_received or is_sent:
            wanted.update({mark: name for _, mark in seen.marks})
        if is_received and any(change in nodes for change in _changes(recording, number)):
            copied.add(name)
    is_last = index == len(ranges) - 1
    return Part(
        index,
        nodes.start,
        2**60 if is_last else nodes.stop,
        is_last,
        held[index],
        recording,
        uncalled=_uncalled(recording, ranges, held, paths),
        wanted=wanted,
        copied=frozenset(copied),
    )


def _uncalled(
    recording: Recording, ranges: Sequence[range], held: Sequence[tuple[str, ...]], paths: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """Return a unit for each module that was not called; the unit's stage holds the parameters of the module."""
    called = {path for path, _ in recording.range_of}
    first_of = {name: nodes.start for nodes, names in zip(ranges, held, strict=True) for name in names}
    found, now = {}, 0
    for path in paths:
        if path in called:
            now = next(last for (other, _), (_, last) in recording.range_of.items() if other == path)
        else:
            own = [first for name, first in first_of.items() if name.startswith(f"{path}.")]
            at = own[0] if own else now
            found[path] = (at, at)
    return found


def _changes(recording: Recording, number: int) -> set[int]:
    """Return the units that change the memory of a tensor in place, also through other tensors."""
    memory = recording.seen[number].known.memory
    return {change for seen in recording.seen if seen.known.memory == memory for change in seen.changes}


class ReplayProgram:
    """The program of one stage in a mode: the model's own forward, in a shell of the stage's own."""

    reassigned: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, call: Call, graph: Graph, part: Part) -> None:
        recording = part.recording
        self.call, self.part, self.held_names = call, part, part.held_names
        self.changed = recording.changed.intersection(part.held_names)  # the buffers that a forward may change
        self.shell = make_shell(model, recording.filled)
        caches = [container for name, container in containers_of(self.shell).items() if name in recording.cached]
        self._caches = [(cache, cache.copy()) for cache in caches]
        self._known_shapes: dict[Any, Any] = {}
        self.template: object = recording.template  # of the last result
        given = tuple(f"input:{name}" for name in call.names)
        self._given = len(given)
        nodes = range(part.start, min(part.stop, len(graph.nodes)))
        if part.is_dynamic:
            self._from: tuple[str, ...] = (f"notes_{part.index - 1}",) if part.index else ()
            own: tuple[str, ...] = (f"notes_{part.index}",)
        else:
            self._from = tuple(
                f"value_{i}" for i, seen in enumerate(recording.seen)
                if 0 <= seen.producer < nodes.start and any(use in nodes for use in seen.uses)
            )  # fmt: skip
            own = tuple(
                f"value_{i}" for i, seen in enumerate(recording.seen)
                if seen.producer in nodes and any(use >= nodes.stop for use in seen.uses)
            )  # fmt: skip
        self.inputs = given + self._from
        self.outputs = tuple(f"output:{i}" for i in range(len(recording.outputs))) if part.is_last else own
        self._places = self._prepare(nodes, graph, recording)

    def _prepare(self, nodes: range, graph: Graph, recording: Recording) -> list[tuple[nn.Module, str, str, str]]:
        """Remove the tensors of other stages from the shell, and find the modules to intercept."""
        own = set(self.held_names)
        first_of = {alias: p.name for p in graph.parameters.values() for alias in (p.name, *p.aliases)}
        places = []
        paths = dict(self.shell.named_modules())
        for path, module in paths.items():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # shared, not copied
            for kind in ("_parameters", "_buffers"):
                place = getattr(module, kind)
                for key, tensor in place.items():
                    if tensor is None:
                        continue
                    name = first_of[f"{path}.{key}" if path else key]
                    if name in own:
                        places.append((module, kind, key, name))
                    elif kind == "_parameters":
                        place[key] = nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False)
                    else:
                        place[key] = torch.empty_like(tensor, device="meta")
        inside = {
            path for (path, ordinal), (first, last) in recording.range_of.items()
            if first < nodes.start <= last or first < nodes.stop <= last
        } | {""}  # fmt: skip
        self._watched = {path: paths[path] for path in recording.watched}
        self._entered = [paths[path] for path in inside]
        self._drop_foreign_hooks(paths, nodes.start, recording)
        return places

    def _drop_foreign_hooks(self, paths: dict[str, nn.Module], start: int, recording: Recording) -> None:
        """Remove the hooks of modules that only earlier stages run.

        A module keeps its hooks if this stage or a later one also calls it, for example inside another module.
        """
        last_of: dict[str, int] = {}
        for (path, _), (_, last) in recording.range_of.items():
            last_of[path] = max(last, last_of.get(path, -1))
        units = {unit.path for unit in recording.units}
        kept: set[int] = set()
        for path, last in last_of.items():
            if last >= start:
                kept |= {id(inner) for inner in paths[path].modules()} if path in units else {id(paths[path])}
        for path, last in last_of.items():
            if last < start:
                for inner in paths[path].modules():
                    if id(inner) not in kept:
                        _remove_user_hooks(inner)

    @property
    def draws_python_random(self) -> bool:
        """Whether the forward draws Python's or numpy's random numbers."""
        return self.part.recording.draws_python_random

    def compile(self, options: Options) -> None:  # noqa: ARG002
        """Raise: replayed stages run the model's own Python code, and Inductor needs a traced graph."""
        raise UsageError("compile: replayed stages cannot be compiled; try capture_path='export' or leave compile= out")

    def run(self, held: HeldTensors, values: Sequence[Any], batch_size: int) -> tuple[Any, ...]:
        """Compute the outputs; if control flow depends on data, unnamed values can follow the named ones."""
        for module, kind, key, name in self._places:
            getattr(module, kind)[key] = held.get(name)
        inputs = list(values[: self._given])
        named = values[self._given : self._given + len(self._from)]
        extra = list(values[self._given + len(self._from) :])
        notes = Notes.from_tensor(named[0]) if self.part.is_dynamic and self._from else Notes()
        if self.draws_python_random and here.seed is None:
            notes.note_random() if notes.python_random is None else notes.set_random()
        first = next(iter(held), None)
        device = held.get(first).device if first is not None else inputs[0].device
        received = {} if self.part.is_dynamic else dict(zip(self._from, named, strict=True))
        play = Play(
            self.part,
            device=device,
            received=received,
            extra=extra,
            notes=notes,
            known_shapes=self._known_shapes,
            batch_size=batch_size,
        )
        before = [(module, dict(module._buffers), dict(vars(module))) for module in self._entered]
        seed = here.seed if self.draws_python_random else None
        try:
            with nullcontext() if seed is None else seeded_python(seed):
                result = play.run(self.shell, self._watched, self.call.arguments, inputs)
            made = self._results(play, result, {id(held.get(name)) for name in self.held_names})
        finally:
            self._restore_modules(before, held)
        return made

    def as_sent(self, notes: torch.Tensor, made: Sequence[Any]) -> tuple[Any, ...]:
        """Return the outputs of a recomputed forward, with the selection and the order of the first run.

        With gradients on, autograd keeps more tensors alive than those that the first run sent.
        """
        tensor_of = {
            tuple(mark): tensor
            for marks, tensor in zip(Notes.from_tensor(made[0]).live, made[1:], strict=True)
            for mark in marks
        }
        sent = [[tuple(mark) for mark in marks] for marks in Notes.from_tensor(notes).live]
        lost = [marks for marks in sent if not any(mark in tensor_of for mark in marks)]
        if lost:
            raise CaptureError(f"the recomputed forward took other branches; missing: {lost[0]}; pass keep='hold'")
        return (notes, *(next(tensor_of[mark] for mark in marks if mark in tensor_of) for marks in sent))

    def _results(self, play: Play, result: object, held: set[int]) -> tuple[Any, ...]:
        if self.part.is_last:
            tensors, self.template = flatten(result, drop=is_cache)
            return tuple(tensors)
        if self.part.is_dynamic:
            return (play.notes.to_tensor(), *(_apart(tensor, held) for tensor in play.living))
        return tuple(_apart(play.made[name], held) for name in self.outputs)

    def _restore_modules(
        self, before: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]], held: HeldTensors
    ) -> None:
        """Store new tensors of the stage's own buffers, and undo the changes of modules by code before the stage."""
        owned = {(id(module), key): name for module, kind, key, name in self._places if kind == "_buffers"}
        for module, buffers, attributes in before:
            for key, value in list(vars(module).items()):
                is_new = isinstance(value, torch.Tensor) and attributes.get(key) is not value
                if is_new and (value.is_meta or attributes.get(key) is None):  # each run makes it again
                    vars(module).pop(key)
                    vars(module).update({key: attributes[key]} if key in attributes else {})
            for key, old in buffers.items():
                new = module._buffers[key]
                if new is not old and ((id(module), key) not in owned or new is None or new.is_meta):
                    module._buffers[key] = old
        for cache, content in self._caches:  # code before the stage fills them with holes; each run refills them
            refill(cache, content)
        for module, kind, key, name in self._places:
            if kind == "_buffers" and module._buffers.get(key) is not held.get(name):
                held.set(name, cast(torch.Tensor, module._buffers[key]).detach())  # as in `ExportProgram`


def _apart(tensor: torch.Tensor, held: set[int]) -> torch.Tensor:
    """Return a copy of a buffer to send; the next micro-batch may change the buffer before the copy is read."""
    return tensor.clone() if id(tensor) in held else tensor


def _remove_user_hooks(module: nn.Module) -> None:
    """Remove the user's hooks from a module, except those that are part of the model."""
    for key in HOOKS:
        of_model = model_hooks(module, key)
        hooks = vars(module)[key].items()
        vars(module)[key] = OrderedDict(
            (number, hook) for number, hook in hooks if number in of_model or is_of_library(hook, module)
        )


@dataclass
class Notes:
    """The observations that later stages need to take the same branches."""

    # the data that was read into Python, by the frame and the number of the read in it
    reads: dict[str, Any] = field(default_factory=dict)
    # for each module call, by path and ordinal, a description of each result: ["in", i] for the i-th tensor argument,
    # or shape, stride and dtype of a new tensor
    shapes: dict[str, list[list[Any]]] = field(default_factory=dict)
    live: list[list[list[Any]]] = field(default_factory=list)  # the marks of the tensors that are sent with the notes
    # the states of Python's and numpy's random numbers at the start of the forward, if it draws any
    python_random: list[Any] | None = None

    def to_tensor(self) -> torch.Tensor:
        """Return the notes as a tensor of bytes, which can be sent as any other value."""
        text = json.dumps([self.reads, self.shapes, self.live, self.python_random], default=_encode)
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Notes:
        """Return the notes from the tensor that `to_tensor` made."""
        reads, shapes, live, state = json.loads(bytes(tensor.cpu().numpy().tobytes()))
        return cls({place: _decode(item) for place, item in reads.items()}, shapes, live, state)

    def note_random(self) -> None:
        """Save the states of Python's and numpy's random numbers."""
        version, state, gauss = random.getstate()
        name, keys, *rest = np.random.get_state(legacy=True)
        self.python_random = [version, list(state), gauss, [name, np.asarray(keys).tolist(), *rest]]

    def set_random(self) -> None:
        """Restore the saved states, if there are any, so that the same numbers are drawn again."""
        if self.python_random is not None:
            version, state, gauss, (name, keys, *rest) = self.python_random
            random.setstate((version, tuple(state), gauss))
            np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def _encode(item: object) -> object:
    if isinstance(item, np.ndarray):
        return {"array": item.tolist(), "dtype": str(item.dtype)}
    if isinstance(item, complex):
        return {"complex": [item.real, item.imag]}
    if isinstance(item, np.generic):
        return item.item()
    raise TypeError(f"a value of type {type(item).__name__} cannot be sent to another stage")


def _decode(item: Any) -> Any:  # noqa: ANN401
    if isinstance(item, dict) and "array" in item:
        return np.array(item["array"], dtype=item["dtype"])
    if isinstance(item, dict) and "complex" in item:
        return complex(*item["complex"])
    return item
