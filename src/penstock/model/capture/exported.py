"""The export path: capture a model by torch.export; cuts can lie between any two operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from penstock.errors import CaptureError, PenstockError, UsageError, warn_user
from penstock.model.capture.export.exported_stage import StageBuilder, visit_export
from penstock.model.capture.export.symbolic_sizes import ShapeGuards
from penstock.model.capture.export.traced_graph import ExportGraph, GraphReader
from penstock.model.capture.export.tracing import OpenDims, trace, trace_device
from penstock.model.example import Call
from penstock.model.graph import Graph, held_by_stage, match_cuts
from penstock.model.parameters import StandIns, held_tensors, main_device, stand_in, unsaved_names
from penstock.model.preserve import OriginalDevices, in_mode, on_device
from penstock.model.stages import Chain, Forms, Program, Results, Stage
from penstock.model.visit import Visitor

_MOST_FORMS = 6  # traced forms; batches that fit none of them are replayed


class _Form:
    """The model as traced for some shapes of batches, in training and in evaluation.

    Args:
        model: the user's model.
        original_devices: the devices of its tensors at the first capture.
        call: the call that is traced.
        open_dims: for each tensor, the dimensions whose size may differ from that in the call.
        is_replayed: whether the model is replayed instead of traced; such a form accepts all shapes.
    """

    def __init__(
        self,
        model: nn.Module,
        original_devices: OriginalDevices,
        call: Call,
        open_dims: OpenDims = (),
        *,
        is_replayed: bool = False,
    ) -> None:
        self.call, self.is_replayed = call, is_replayed
        self._original_devices, self._model = original_devices, model
        self._open = tuple(open_dims) or (frozenset[int](),) * len(call.tensors)
        self._made: dict[bool, tuple[ExportGraph, object, ShapeGuards]] = {}
        self._refusals: dict[bool, CaptureError] = {}

    def side(self, training: bool) -> tuple[ExportGraph, object, ShapeGuards]:
        """Return the graph, the template and the guards of a mode; the first call for a mode captures them.

        Raises:
            CaptureError: if torch.export cannot capture the model in that mode.
        """
        if self.is_replayed:
            raise CaptureError("torch.export cannot trace batches of these shapes")
        if training in self._refusals:
            raise self._refusals[training]
        if training not in self._made:
            try:
                with in_mode(self._model, training=training), self._original_devices.restored():
                    traced = trace(self._model, self.call, self._open if any(self._open) else ())
                    graph = GraphReader(traced, self._model, self.call).read()
            except CaptureError as error:
                self._refusals[training] = error
                raise
            self._made[training] = (graph, traced.template, traced.guards)
        return self._made[training]

    def constants(self, training: bool) -> dict[str, torch.Tensor]:
        """Return the constants of a mode's trace; empty if the mode has not been captured."""
        return self._made[training][0].constants if training in self._made else {}

    def opened(self, more: OpenDims) -> list[frozenset[int]]:
        """Return the open dimensions of each tensor, together with more of them."""
        return [own | new for own, new in zip(self._open, more, strict=True)]

    def takes(self, call: Call, training: bool) -> bool:
        """Return whether the form is valid for the shapes of a call; trace the mode if necessary."""
        if self.is_replayed:
            return True
        shapes = [tuple(tensor.shape) for tensor in call.tensors]
        rows = zip(self.call.tensors, shapes, call.batch_dims, self._open, strict=True)
        if not all(_is_like(tuple(own.shape), shape, dim, free) for own, shape, dim, free in rows):
            return False
        if not any(self._open):
            return True
        try:
            return self.side(training)[2].allow(shapes)
        except CaptureError:
            return True  # this mode is replayed


def _is_like(own: Sequence[int], shape: Sequence[int], batch_dim: int | None, free: frozenset[int]) -> bool:
    """Return whether a shape differs only in the batch dimension and in open dimensions larger than one.

    A trace of a larger dimension may be wrong for size one, which is broadcast.
    """
    return len(own) == len(shape) and all(
        mine == given or dim == batch_dim or (dim in free and given > 1)
        for dim, (mine, given) in enumerate(zip(own, shape, strict=True))
    )


class Exported:
    """A model captured by torch.export.

    Batches may have other shapes than the example. The model is then traced again, with open dimensions where the
    shapes differ. If torch.export cannot do that, these batches are replayed. All forms are cut at the same places.
    """

    path = "export"

    def __init__(self, model: nn.Module, call: Call, *, training: bool) -> None:
        self.model, self.call, self.training = model, call, training
        self._original_devices = OriginalDevices(model)
        self.reason = "torch.export traced the whole model"
        self._forms = [_Form(model, self._original_devices, call)]
        self.form = 0  # the index of the current form
        self.graph: Graph = self._side(training)[0].graph

    def _side(self, training: bool) -> tuple[ExportGraph, object, ShapeGuards]:
        """Return the graph for the example's shapes in a mode."""
        return self._forms[0].side(training)

    def choose(self, call: Call, training: bool, is_fitting: Callable[[], str]) -> None:
        """Select the form that is valid for the shapes of a call; capture one if there is none yet.

        Args:
            call: the call, with its tensors in the example's order.
            training: the mode in which the call will run.
            is_fitting: returns the reason why the stages cannot run the selected form, or an empty string.

        Raises:
            UsageError: if no path can capture such a call.
        """
        for number, form in enumerate(self._forms):
            if form.takes(call, training):
                self.form = number
                return
        before = self.form
        whys: list[str] = []
        for form in self._new_forms(call):
            self._forms.append(form)
            self.form = len(self._forms) - 1
            try:
                if not form.is_replayed:
                    form.side(training)
                is_taken = form.takes(call, training)
                why = is_fitting() if is_taken else "the trace is not valid for the shapes with which it was made"
            except Exception as error:
                why = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
            if not why:
                if form.is_replayed:
                    warn_user(_replay_warning(call, whys))
                return
            whys.append(why)
            self._forms.pop()
        self.form = before
        shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in zip(call.names, call.tensors, strict=True))
        raise UsageError(
            f"the model cannot be captured for a batch with other shapes than the example ({shapes}): "
            f"{'; '.join(whys)}. Pad batches to the example's shapes, or pass capture_path='replay'"
        )

    def _new_forms(self, call: Call) -> Iterator[_Form]:
        """Yield the forms to try for a call; the best form comes first."""
        pairs = list(zip(self.call.tensors, call.tensors, strict=True))
        at_home = replace(call, tensors=tuple(given.detach().to(own.device) for own, given in pairs))
        open_dims = [
            frozenset(d for d, (a, b) in enumerate(zip(own.shape, given.shape, strict=False)) if a != b and d != dim)
            for own, given, dim in zip(self.call.tensors, call.tensors, call.batch_dims, strict=True)
        ]
        if all(own.dim() == given.dim() for own, given in pairs) and len(self._forms) < _MOST_FORMS:
            yield _Form(self.model, self._original_devices, at_home, self._forms[-1].opened(open_dims))
        yield _Form(self.model, self._original_devices, at_home, is_replayed=True)

    def constants(self, training: bool) -> dict[str, torch.Tensor]:
        """Return the constants of a mode's trace, in the current form."""
        return self._forms[self.form].constants(training)

    def split(self, cuts: Sequence[int]) -> Chain:
        """Return the stages between the cuts."""
        self.graph.check_cuts(cuts)
        return _split(self, tuple(cuts))

    def visit(self, visitor: Visitor, *, device: torch.device | None = None, batch_size: int | None = None) -> None:
        """Run the model once, on a device (also "meta") and for a batch size, and pass each node to a visitor."""
        exported = self._side(self.training)[0]
        call = self.call if batch_size is None else self.call.resized(batch_size)
        where = device or main_device(self.model, self.call)
        held = StandIns(held_tensors(self.model) | exported.constants, where)
        visit_export(exported, visitor, call.map(lambda tensor: stand_in(tensor, where)), held, where)

    def programs(self, cuts: tuple[int, ...], training: bool) -> tuple[list[Program], Results]:
        """Return the programs of all stages in a mode, in the current form, and the description of the result."""
        with self._original_devices.restored():
            return self._programs(cuts, training)

    def _programs(self, cuts: tuple[int, ...], training: bool) -> tuple[list[Program], Results]:
        form = self._forms[self.form]
        try:
            exported, template, _ = form.side(training)
        except CaptureError as refusal:
            if training == self.training and self.form == 0:
                raise
            return self._replayed(form.call, cuts, training, str(refusal))
        is_own = training == self.training and self.form == 0
        own = cuts if is_own else match_cuts(self.graph, cuts, exported.graph)
        ranges = exported.graph.stages(own)
        device = trace_device(self.model, self.call)
        programs: list[Program] = [
            StageBuilder(exported, nodes, is_last=index == len(ranges) - 1).cut(device)
            for index, nodes in enumerate(ranges)
        ]
        values = exported.graph.values
        return programs, Results(lambda: template, [values[exported.value_of(node)].name for node in exported.outputs])

    def _replayed(
        self, call: Call, cuts: tuple[int, ...], training: bool, refusal: str
    ) -> tuple[list[Program], Results]:
        """Return the programs by replay, for a mode or for shapes that torch.export cannot trace."""
        from penstock.model.capture.replayed import Replayed

        other = Replayed(self.model, call, training=training, reason=refusal)
        programs, results = other.programs(match_cuts(self.graph, cuts, other.graph), training)
        return list(programs), results


def _replay_warning(call: Call, whys: Sequence[str]) -> str:
    shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in zip(call.names, call.tensors, strict=True))
    return (
        f"a batch has other shapes than the example ({shapes}), and torch.export cannot trace it: "
        f"{'; '.join(whys) or f'{_MOST_FORMS} forms were traced already'}. From now on, such batches run by replay, "
        "which accepts all shapes. To use replay from the start, pass capture_path='replay'"
    )


def _split(exported: Exported, cuts: tuple[int, ...]) -> Chain:
    made: dict[tuple[bool, int], tuple[list[Program], Results]] = {}
    stages: list[Stage] = []
    hidden: dict[str, torch.Tensor] = {}
    unsaved = unsaved_names(exported.model)

    def side(training: bool) -> tuple[list[Program], Results]:
        key = (training, exported.form)
        if key not in made:
            made[key] = exported.programs(cuts, training)
            hidden.update(exported.constants(training))
            for stage, program in zip(stages, made[key][0], strict=False):
                _hold(stage, program)
        return made[key]

    def choose(call: Call, training: bool) -> None:
        exported.choose(call, training, lambda: _misfit(stages, exported.programs(cuts, training)[0], training))

    def _hold(stage: Stage, program: Program) -> None:
        """Add the tensors that a program uses to its stage; evaluation may use more of them than training."""
        tensors = held_tensors(exported.model) | hidden
        where = next((tensor.device for tensor in stage.held.tensors()), None)  # a lane may have moved the stage
        for name in (*program.held_names, *program.reassigned):
            if name not in stage.held:
                tensor = tensors[name]
                holders = [other for other in stages if name in other.held]
                if tensor.is_meta and holders:  # only the lanes have its values
                    tensor = holders[0].held.get(name)
                if holders:
                    _check_place(name, tensor, where)
                tensor = tensor if where is None else on_device(tensor, where)
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
    forms = Forms(lambda: exported.form, choose)
    return Chain(exported.model, stages, example=exported.call, results=lambda training: side(training)[1], forms=forms)


def _misfit(stages: Sequence[Stage], programs: Sequence[Program], training: bool) -> str:
    """Return why stages cannot train with other programs; empty if every stage keeps its own parameters."""
    for stage, program in zip(stages, programs, strict=True):
        held = {name for name, _ in stage.named_parameters()}
        others = {name for other in stages if other is not stage for name, _ in other.named_parameters()}
        strange = sorted((set(program.held_names) & others) - held)
        if training and strange:
            return f"stage {stage.index} would use parameters of other stages: {', '.join(strange[:3])}"
    return ""


def _check_place(name: str, tensor: torch.Tensor, device: torch.device | None) -> None:
    """Refuse a tensor of another stage that is not here: in another process, or a parameter on another device."""
    if tensor.is_meta and device not in (None, tensor.device):
        raise CaptureError(
            f"in evaluation a stage uses {name}, but in training only a stage in another process does, and the model "
            "was on meta: cut the model elsewhere, or build it with its weights"
        )
    if isinstance(tensor, nn.Parameter) and not tensor.is_meta and device not in (None, tensor.device):
        raise CaptureError(
            f"in evaluation a stage on {device} uses {name}, but in training only a stage on {tensor.device} does: "
            "cut the model elsewhere, or evaluate it without the pipeline"
        )
