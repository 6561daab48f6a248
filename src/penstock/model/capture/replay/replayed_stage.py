"""A stage by replay: its part of the forward, the shell that it runs in, and what it holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn

from penstock.compile.options import Options
from penstock.errors import CaptureError, UsageError
from penstock.model.capture.export.exported_stage import renew
from penstock.model.capture.export.tracing import is_cache
from penstock.model.capture.replay.call_recorder import Recording
from penstock.model.capture.replay.control_notes import Notes
from penstock.model.capture.replay.module_shell import containers_of, make_shell, model_hooks
from penstock.model.capture.replay.stage_player import Part, Play
from penstock.model.example import Call
from penstock.model.graph import Graph
from penstock.model.module_hooks import HOOKS, is_of_library
from penstock.model.preserve.model_state import refill
from penstock.model.stages import HeldTensors
from penstock.model.structure import flatten
from penstock.randomness.draw_names import here, seeded_python

__all__ = ["ReplayProgram", "make_part"]


def make_part(
    recording: Recording, ranges: Sequence[range], held: Sequence[tuple[str, ...]], paths: Sequence[str], index: int
) -> Part:
    """Return which part of the forward a stage plays, given the units and the parameters of all stages."""
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
    return Part(
        start=nodes.start,
        stop=nodes.stop if index < len(ranges) - 1 else 2**60,
        range_of=recording.range_of,
        uncalled=_uncalled(recording, ranges, held, paths),
        template_of=recording.template_of,
        wanted=wanted,
        copied=frozenset(copied),
        is_dynamic=recording.is_read,
        seen_of=recording.seen_of,
        hooked=recording.hooked,
        calls_in=recording.calls_in,
        unimaginable=recording.unimaginable,
        readers=recording.readers,
        draws_python_random=recording.draws_python_random,
        filling=recording.filling,
    )


def _uncalled(
    recording: Recording, ranges: Sequence[range], held: Sequence[tuple[str, ...]], paths: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """Return for each module that was not called a unit of the stage that holds its parameters."""
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
    """Return where a tensor, or another name of its memory, is changed in place."""
    memory = recording.seen[number].known.memory
    return {change for seen in recording.seen if seen.known.memory == memory for change in seen.changes}


class ReplayProgram:
    """What one stage runs, in training or in evaluation: the model's own forward, in a shell of its own."""

    reassigned: tuple[str, ...] = ()

    def __init__(
        self, model: nn.Module, call: Call, graph: Graph, recording: Recording, part: Part,
        *, held_names: tuple[str, ...], index: int, is_last: bool,
    ) -> None:  # fmt: skip
        self.call, self.part, self.held_names, self.is_last = call, part, held_names, is_last
        self.changed = recording.changed.intersection(held_names)  # the buffers that a forward may change
        self.shell = make_shell(model, recording.filled)
        caches = [container for name, container in containers_of(self.shell).items() if name in recording.cached]
        self._caches = [(cache, cache.copy()) for cache in caches]
        self._known_shapes: dict[Any, Any] = {}
        self._num_outputs = len(recording.outputs)
        self.template: object = recording.template  # of what the model returned last
        given = tuple(f"input:{name}" for name in call.names)
        self._given = len(given)
        nodes = range(part.start, min(part.stop, len(graph.nodes)))
        if part.is_dynamic:
            self._from: tuple[str, ...] = (f"notes_{index - 1}",) if index else ()
            own: tuple[str, ...] = (f"notes_{index}",)
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
        self.outputs = tuple(f"output:{i}" for i in range(self._num_outputs)) if is_last else own
        self._places = self._prepare(nodes, graph, recording)

    def _prepare(self, nodes: range, graph: Graph, recording: Recording) -> list[tuple[nn.Module, str, str, str]]:
        """Empty the shell of what other stages hold, and find the modules to have a hand on."""
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
        """Keep the hooks of modules that only earlier stages run from being called here.

        A module may be called under another one, too, that this stage or a later one runs.
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
                        _without_hooks(inner)

    @property
    def draws_python_random(self) -> bool:
        """Whether the forward draws Python's or numpy's random numbers."""
        return self.part.draws_python_random

    def compile(self, options: Options) -> None:  # noqa: ARG002
        """Refuse."""
        raise UsageError("compile: the model's own code runs again, stage by stage: capture_path='export' may do")

    def run(self, held: HeldTensors, values: Sequence[Any], batch_size: int) -> tuple[Any, ...]:
        """Compute the outputs; where the way depends on data, more values than were named may come and go."""
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
            self._tidy(before, held)
        return made

    def as_sent(self, notes: torch.Tensor, made: Sequence[Any]) -> tuple[Any, ...]:
        """Return the outputs of a forward that was run again, chosen and ordered as the first run sent them.

        With gradients on, autograd keeps more tensors alive than the first run had to send.
        """
        tensor_of = {
            tuple(mark): tensor
            for marks, tensor in zip(Notes.from_tensor(made[0]).live, made[1:], strict=True)
            for mark in marks
        }
        sent = [[tuple(mark) for mark in marks] for marks in Notes.from_tensor(notes).live]
        lost = [marks for marks in sent if not any(mark in tensor_of for mark in marks)]
        if lost:
            raise CaptureError(f"a forward that was run again took another way; lost: {lost[0]}; take keep='hold'")
        return (notes, *(next(tensor_of[mark] for mark in marks if mark in tensor_of) for marks in sent))

    def _results(self, play: Play, result: object, held: set[int]) -> tuple[Any, ...]:
        if self.is_last:
            tensors, self.template = flatten(result, drop=is_cache)
            return tuple(tensors)
        if self.part.is_dynamic:
            return (play.notes.to_tensor(), *(_apart(tensor, held) for tensor in play.living))
        return tuple(_apart(play.made[name], held) for name in self.outputs)

    def _tidy(self, before: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]], held: HeldTensors) -> None:
        """Take over buffers that are this stage's own, and undo what the code before the stage left in the modules."""
        owned = {(id(module), key): name for module, kind, key, name in self._places if kind == "_buffers"}
        for module, buffers, attributes in before:
            for key, value in list(vars(module).items()):
                is_new = isinstance(value, torch.Tensor) and attributes.get(key) is not value
                if is_new and (value.is_meta or attributes.get(key) is None):  # what is made once, every run makes
                    vars(module).pop(key)
                    vars(module).update({key: attributes[key]} if key in attributes else {})
            for key, old in buffers.items():
                new = module._buffers[key]
                if new is not old and ((id(module), key) not in owned or new is None or new.is_meta):
                    module._buffers[key] = old
        for cache, content in self._caches:  # what is made once, every run makes: in front of the stage it makes holes
            refill(cache, content)
        for module, kind, key, name in self._places:
            if kind == "_buffers" and module._buffers.get(key) is not held.get(name):
                renew(held, name, cast(torch.Tensor, module._buffers[key]))


def _apart(tensor: torch.Tensor, held: set[int]) -> torch.Tensor:
    """Return a copy of a buffer that is sent: the next micro-batch may change it before it is read."""
    return tensor.clone() if id(tensor) in held else tensor


def _without_hooks(module: nn.Module) -> None:
    """Take the user's hooks off a module, but for those that are part of the model."""
    for key in HOOKS:
        of_model = model_hooks(module, key)
        hooks = vars(module)[key].items()
        vars(module)[key] = OrderedDict(
            (number, hook) for number, hook in hooks if number in of_model or is_of_library(hook, module)
        )
