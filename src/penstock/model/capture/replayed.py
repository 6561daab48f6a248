"""The replay path: capture a model that every stage runs by its own forward; cuts lie between module calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import CaptureError
from penstock.model.capture.replay.call_recorder import Recording, Seen, record
from penstock.model.capture.replay.replayed_stage import ReplayProgram, make_part
from penstock.model.capture.replay.replayed_visit import visit_replay
from penstock.model.example import Call
from penstock.model.graph import Graph, Node, Size, Value, held_by_stage, match_cuts
from penstock.model.parameters import (
    held_tensors,
    main_device,
    module_signature,
    read_parameters,
    unsaved_names,
)
from penstock.model.preserve import OriginalDevices, in_mode, preserve_state
from penstock.model.stages import Chain, Results, Stage
from penstock.model.visit import Visitor


class Replayed:
    """A model captured by replay."""

    path = "replay"

    def __init__(self, model: nn.Module, call: Call, *, training: bool, reason: str = "") -> None:
        self.model, self.call, self.training, self.reason = model, call, training, reason
        self._recording_of: dict[bool, Recording] = {}
        self._original_devices = OriginalDevices(model)
        self._graph_of: dict[bool, Graph] = {}
        self.graph = self._graph(training)

    def _graph(self, training: bool) -> Graph:
        if training not in self._graph_of:
            with in_mode(self.model, training=training), self._original_devices.restored():
                recording = record(self.model, self.call)
                other = _second(self.model, self.call)
                self._recording_of[training] = recording
                if other is not None and _ways(other) != _ways(recording):  # for example, code that loops over samples
                    recording.reads_data = True
                recording.seen_of = _seen_of(recording, other, self.call.batch_size)
                self._graph_of[training] = _read_graph(recording, other, self.model, self.call)
        return self._graph_of[training]

    @property
    def is_dynamic(self) -> bool:
        """Whether control flow or shapes depend on data, random numbers or the batch size, so that runs may differ."""
        self._graph(self.training)
        return self._recording_of[self.training].reads_data

    def split(self, cuts: Sequence[int]) -> Chain:
        """Return the stages between the cuts."""
        self.graph.check_cuts(cuts)
        made: dict[bool, tuple[list[ReplayProgram], Results]] = {}

        def side(training: bool) -> tuple[list[ReplayProgram], Results]:
            if training not in made:
                made[training] = self.programs(tuple(cuts), training)
            return made[training]

        tensors = held_tensors(self.model)
        stages = [
            Stage(
                index,
                tensors={name: tensors[name] for name in program.held_names},
                unsaved=unsaved_names(self.model),
                program_of=lambda training, index=index: side(training)[0][index],  # type: ignore[misc]
            ).train(self.training)
            for index, program in enumerate(side(self.training)[0])
        ]
        return Chain(self.model, stages, example=self.call, results=lambda training: side(training)[1])

    def visit(self, visitor: Visitor, *, device: torch.device | None = None, batch_size: int | None = None) -> None:
        """Run the model once, on a device (also "meta") and for a batch size, and pass each unit to a visitor."""
        call = self.call if batch_size is None else self.call.resized(batch_size)
        with in_mode(self.model, training=self.training), preserve_state(self.model):
            visit_replay(self.model, self.graph, call, visitor, device=device or main_device(self.model, self.call))

    def programs(self, cuts: tuple[int, ...], training: bool) -> tuple[list[ReplayProgram], Results]:
        """Return the programs of all stages in a mode, and the description of the model's result."""
        graph, recording = self._graph(training), self._recording_of[training]
        ranges = graph.stages(cuts if training == self.training else match_cuts(self.graph, cuts, graph))
        held = held_by_stage(self.graph, cuts)
        paths = [path for path, _ in self.model.named_modules()]
        with in_mode(self.model, training=training), self._original_devices.restored():
            parts = [make_part(recording, ranges, held, paths, index) for index in range(len(ranges))]
            programs = [ReplayProgram(self.model, self.call, graph, part) for part in parts]
        return programs, Results(
            lambda: programs[-1].template, [f"output:{i}" for i in range(len(recording.outputs))], takes_all=True
        )


def _second(model: nn.Module, call: Call) -> Recording | None:
    """Record again with another batch size, to learn how shapes depend on it; None if the model fails with it."""
    try:
        return record(model, call.resized(call.batch_size + 1))
    except Exception:
        return None


def _seen_of(recording: Recording, other: Recording | None, size: int) -> dict[tuple[str, int], list[list[Any]]]:
    """Return the descriptions of each call's results, with dimensions as functions of the batch size, from two runs."""
    found = {}
    for key, items in recording.shapes_of.items():
        others = other.shapes_of.get(key) if other is not None else None
        if others is None or [len(a[0]) for a in items] != [len(b[0]) for b in others]:
            continue
        found[key] = [
            a if a[0] == "in" else [[Size.seen(m, n, size) for m, n in zip(a[0], b[0], strict=True)], a[2]]
            for a, b in zip(items, others, strict=True)
        ]
    return found


def _ways(recording: Recording) -> list[object]:
    """Return the marks of all tensors; they are equal if two runs took the same branches of the model's code."""
    return [seen.marks for seen in recording.seen]


def _read_graph(recording: Recording, other: Recording | None, model: nn.Module, call: Call) -> Graph:
    if not recording.units:
        raise CaptureError("replay cuts between module calls, but the model calls no modules")
    parameters, first_of = read_parameters(model)
    if other is not None and _ways(other) != _ways(recording):
        other = None
    values: list[Value] = []
    index_of: dict[int, int] = {}
    for index, seen in enumerate(recording.seen):
        if seen.producer < 0 or max(seen.uses, default=-1) > seen.producer or index in recording.outputs:
            index_of[index] = len(values)
            values.append(_value(index, seen, other.seen[index] if other else None, call))
    nodes = tuple(_nodes(recording, model, index_of, first_of))
    return Graph(
        nodes=nodes,
        values=tuple(values),
        inputs=tuple(range(len(call.tensors))),
        outputs=tuple(dict.fromkeys(index_of[index] for index in recording.outputs)),
        parameters=parameters,
        batch_size=call.batch_size,
        uncuttable=_uncuttable(recording),
    )


def _value(index: int, seen: Seen, other: Seen | None, call: Call) -> Value:
    shape = [Size(size) for size in seen.shape]
    if other is not None and len(other.shape) == len(seen.shape):
        shape = [Size.seen(a, b, call.batch_size) for a, b in zip(seen.shape, other.shape, strict=True)]
    name = f"input:{call.names[index]}" if seen.producer < 0 else f"value_{index}"
    return Value(
        name=name,
        producer=seen.producer,
        shape=tuple(shape),
        dtype=str(seen.known.dtype).removeprefix("torch."),
        item_bytes=seen.known.dtype.itemsize,
        has_grad=seen.known.has_grad,
        is_dynamic=other is None,
    )


def _nodes(
    recording: Recording, model: nn.Module, index_of: Mapping[int, int], first_of: Mapping[str, str]
) -> list[Node]:
    name_of = {id(tensor): first_of[name] for name, tensor in held_tensors(model).items()}
    modules = dict(model.named_modules())
    used: list[list[int]] = [list(unit.inputs) for unit in recording.units]
    made: list[list[int]] = [[] for _ in recording.units]
    for index, seen in enumerate(recording.seen):
        if index in index_of:
            if seen.producer >= 0:
                made[seen.producer].append(index_of[index])
            for use in seen.uses:
                if index not in used[use] and use > seen.producer:
                    used[use].append(index)
    nodes = []
    for index, unit in enumerate(recording.units):
        module = modules[unit.path]
        held = [name_of[id(tensor)] for tensor in held_tensors(module).values()]
        held += [name_of[key] for key in unit.held]
        nodes.append(
            Node(
                name=unit.path if unit.ordinal == 0 else f"{unit.path}#{unit.ordinal}",
                op=type(module).__name__,
                module=unit.path,
                inputs=tuple(index_of[i] for i in used[index] if i in index_of and recording.seen[i].producer < index),
                outputs=tuple(made[index]),
                parameters=tuple(dict.fromkeys(held)),
                signature=module_signature(module),
            )
        )
    return nodes


def _uncuttable(recording: Recording) -> frozenset[int]:
    """Return the cuts that two tensors with the same memory would cross, if one of them is changed in place later."""
    families: dict[int, list[Seen]] = {}
    for seen in recording.seen:
        families.setdefault(seen.known.memory, []).append(seen)
    cuts: set[int] = set(recording.uncuttable)
    for family in families.values():
        changes = [change for seen in family for change in seen.changes]
        for cut in range(1, max(changes, default=0) + 1):
            if sum(seen.producer < cut <= max(seen.uses, default=-1) for seen in family) > 1:
                cuts.add(cut)
        for seen in family:
            for change in changes:
                last = max(seen.uses, default=-1)
                if seen.producer < change < last:  # used later: the stage that changes it must also send it
                    first, end = (change + 1, last) if seen.producer < 0 else (seen.producer + 1, change)
                    cuts |= set(range(first, end + 1))
    return frozenset(cut for cut in cuts if 0 < cut < len(recording.units))
