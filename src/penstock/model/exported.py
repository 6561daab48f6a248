"""The first path: a model captured by torch.export, which can be cut between any two operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from penstock.errors import CaptureError
from penstock.model.example import Call
from penstock.model.export_graph import ExportGraph, read_graph
from penstock.model.export_stage import cut_program
from penstock.model.export_trace import trace
from penstock.model.export_visit import visit_export
from penstock.model.graph import Graph
from penstock.model.homes import Homes, on_device
from penstock.model.match import held_by_stage, match_cuts
from penstock.model.modes import in_mode
from penstock.model.parameters import held_tensors, main_device, unsaved_names
from penstock.model.stages import Chain, Program, Results, Stage, make_chain
from penstock.model.visit import Visitor

__all__ = ["Exported"]


class Exported:
    """A model captured by torch.export."""

    path = "export"

    def __init__(self, model: nn.Module, call: Call, *, training: bool) -> None:
        self.model, self.call, self.training = model, call, training
        self._side_of: dict[bool, tuple[ExportGraph, object]] = {}
        self._homes = Homes(model)
        self.reason = "torch.export took the whole model"
        self.graph: Graph = self._side(training)[0].graph

    def _side(self, training: bool) -> tuple[ExportGraph, object]:
        """Return the graph in training or evaluation; the other one is captured when it is first asked for."""
        if training not in self._side_of:
            with in_mode(self.model, training=training):
                traced = trace(self.model, self.call)
            self._side_of[training] = (read_graph(traced, self.model, self.call), traced.template)
        return self._side_of[training]

    def constants(self, training: bool) -> dict[str, torch.Tensor]:
        """Return the tensors that are part of the model's code in a mode."""
        side = self._side_of.get(training)
        return side[0].constants if side else {}

    def split(self, cuts: Sequence[int]) -> Chain:
        """Return the stages between the cuts."""
        self.graph.check_cuts(cuts)
        return _split(self, tuple(cuts))

    def visit(self, visitor: Visitor, *, device: torch.device | None = None, batch_size: int | None = None) -> None:
        """Run the model once, node by node, on a device (also "meta") and for a batch size; show each to a visitor."""
        exported, _ = self._side(self.training)
        call = self.call if batch_size is None else self.call.resized(batch_size)
        held = held_tensors(self.model) | exported.constants
        where = device or main_device(self.model, self.call)
        visit_export(
            exported,
            visitor,
            inputs=[tensor.to(where) for tensor in call.tensors],
            held={name: tensor.to(where) for name, tensor in held.items()},
            batch_size=call.batch_size,
            device=where,
        )

    def programs(self, cuts: tuple[int, ...], training: bool) -> tuple[list[Program], Results]:
        """Return the programs of all stages in a mode, and what the model returns."""
        with self._homes.visited():
            return self._programs(cuts, training)

    def _programs(self, cuts: tuple[int, ...], training: bool) -> tuple[list[Program], Results]:
        try:
            exported, template = self._side(training)
        except CaptureError as refusal:
            if training == self.training:
                raise
            return self._replayed(cuts, training, str(refusal))
        own = cuts if training == self.training else match_cuts(self.graph, cuts, exported.graph)
        ranges = exported.graph.stages(own)
        device = main_device(self.model, self.call)
        programs: list[Program] = [
            cut_program(exported, nodes, is_last=index == len(ranges) - 1, device=device)
            for index, nodes in enumerate(ranges)
        ]
        values = exported.graph.values
        return programs, Results(lambda: template, [values[exported.value_of(node)].name for node in exported.outputs])

    def _replayed(self, cuts: tuple[int, ...], training: bool, refusal: str) -> tuple[list[Program], Results]:
        """Return the programs of the other mode by replay, where torch.export takes only the one."""
        from penstock.model.replayed import Replayed

        other = Replayed(self.model, self.call, training=training, reason=refusal)
        programs, results = other.programs(match_cuts(self.graph, cuts, other.graph), training)
        return list(programs), results


def _split(exported: Exported, cuts: tuple[int, ...]) -> Chain:
    made: dict[bool, tuple[list[Program], Results]] = {}
    stages: list[Stage] = []
    hidden: dict[str, torch.Tensor] = {}
    unsaved = unsaved_names(exported.model)

    def side(training: bool) -> tuple[list[Program], Results]:
        if training not in made:
            made[training] = exported.programs(cuts, training)
            hidden.update(exported.constants(training))
            for stage, program in zip(stages, made[training][0], strict=False):
                _hold(stage, program)
        return made[training]

    def _hold(stage: Stage, program: Program) -> None:
        """Let a stage hold what a program uses: in evaluation that may be more than in training."""
        tensors = held_tensors(exported.model) | hidden
        where = next((tensor.device for tensor in stage.held.tensors()), None)  # a lane may have moved the others
        for name in (*program.held_names, *program.reassigned):
            if name not in stage.held:
                if any(name in other.held and other is not stage for other in stages):
                    _check_place(name, tensors[name], where)
                tensor = tensors[name] if where is None else on_device(tensors[name], where)
                stage.held.add(name, tensor, is_persistent=name not in hidden and name not in unsaved)

    programs, _ = side(exported.training)
    held = held_by_stage(exported.graph, cuts)
    for index, program in enumerate(programs):
        tensors = held_tensors(exported.model) | hidden
        stage = Stage(
            index,
            tensors={name: tensors[name] for name in held[index]},
            program_of=lambda training, index=index: side(training)[0][index],  # type: ignore[misc]
            unsaved={*hidden, *unsaved},
        )
        _hold(stage, program)
        stages.append(stage.train(exported.training))
    return make_chain(
        exported.model,
        stages,
        example=exported.call,
        results_of=lambda training: side(training)[1],
        has_fixed_shapes=True,
    )


def _check_place(name: str, tensor: torch.Tensor, device: torch.device | None) -> None:
    """Raise where another stage holds a parameter on another device: it cannot be in two places.

    Raises:
        CaptureError: names it.
    """
    if isinstance(tensor, nn.Parameter) and not tensor.is_meta and device not in (None, tensor.device):
        raise CaptureError(
            f"in evaluation a stage on {device} uses {name}, which in training a stage on {tensor.device} uses alone: "
            "cut the model elsewhere, or evaluate it without the pipeline"
        )
