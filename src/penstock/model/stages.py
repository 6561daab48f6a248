"""Stages: the pieces of a model as modules with the model's own parameter names, and the chain that runs them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from penstock.compile.options import Options
from penstock.errors import UsageError
from penstock.model.example import Call, array_hint, parameter_names, read_call
from penstock.model.parameters import aliases_of, buffer_places
from penstock.model.structure import differing_constants, rebuild


class HeldTensors:
    """The tensors that a stage holds, in a tree of plain modules, so that state dicts have the model's own names."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._place_of: dict[str, tuple[dict[str, Any], str]] = {}
        self.shared: Mapping[str, list[tuple[dict[str, Any], str]]] = {}
        self.pieces: list[HeldTensors] = []  # of a compound stage: the tensors of its pieces

    def add(self, name: str, tensor: torch.Tensor, *, is_persistent: bool = True) -> None:
        """Add a parameter or a buffer, and create the modules on its path."""
        *path, last = name.split(".")
        module = self.root
        for part in path:
            if part not in module._modules:
                module._modules[part] = nn.Module()
            module = module._modules[part]  # type: ignore[assignment]
        is_parameter = isinstance(tensor, nn.Parameter)
        place: dict[str, Any] = module._parameters if is_parameter else module._buffers
        place[last] = tensor
        if not is_parameter and not is_persistent:
            module._non_persistent_buffers_set.add(last)
        self._place_of[name] = (place, last)
        if name in self.shared:
            self.shared[name].append((place, last))

    def get(self, name: str) -> torch.Tensor:
        """Return the current tensor of a name; moving a module to a device may have replaced it."""
        place, last = self._place_of[name]
        tensor: torch.Tensor = place[last]
        return tensor

    def set(self, name: str, tensor: torch.Tensor) -> None:
        """Replace a tensor here and everywhere it is shared: in other stages, and in the model itself."""
        place, last = self._place_of[name]
        old, place[last] = place[last], tensor
        for other, key in self.shared.get(name, ()):
            if other.get(key) is old:
                other[key] = tensor
        for piece in self.pieces:
            if name in piece:
                piece.set(name, tensor)

    def share(self, shared: Mapping[str, list[tuple[dict[str, Any], str]]]) -> None:
        """Register these tensors in the table of all places that hold the same buffers."""
        self.shared = shared
        for name, place in self._place_of.items():
            if name in shared:
                shared[name].append(place)

    def tensors(self) -> list[torch.Tensor]:
        """Return all current tensors."""
        return [place[last] for place, last in self._place_of.values()]

    def __contains__(self, name: str) -> bool:
        return name in self._place_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._place_of)


class Program(Protocol):
    """The code that a stage runs, in training or in evaluation."""

    held_names: tuple[str, ...]  # the parameters and buffers that it uses
    reassigned: tuple[str, ...]  # the buffers that it replaces by a new tensor
    inputs: tuple[str, ...]  # the names of the values that it needs
    outputs: tuple[str, ...]  # the names of the values that it makes for later stages or for the caller

    def run(self, held: HeldTensors, values: Sequence[Any], batch_size: int) -> tuple[Any, ...]:
        """Compute the outputs from the inputs."""
        ...

    def compile(self, options: Options) -> None:
        """Let Inductor compile the program at its first run.

        Raises:
            UsageError: if it cannot be compiled.
        """
        ...


class Stage(nn.Module):
    """A piece of a model between two cuts.

    Its parameters and buffers are those of the model, under the same names. `stage(*values)` takes the values that
    `inputs` names and returns the values that `outputs` names. Both can differ between training and evaluation.
    """

    def __init__(
        self,
        index: int,
        *,
        tensors: Mapping[str, torch.Tensor],
        program_of: Callable[[bool], Program],
        unsaved: Iterable[str] = (),
    ) -> None:
        super().__init__()
        self.index = index
        self.held = HeldTensors(self)
        self.runner: Any = None  # of a compound stage: runs its special pieces
        self._program_of = program_of
        self.compile_options: Options | None = None  # None: Inductor does not compile the programs
        self._compiled: set[Program] = set()
        hidden = set(unsaved)
        for name, tensor in tensors.items():
            self.held.add(name, tensor, is_persistent=name not in hidden)

    @property
    def program(self) -> Program:
        """The program of the current mode."""
        program = self._program_of(self.training)
        if self.compile_options is not None and program not in self._compiled:
            self._compiled.add(program)
            program.compile(self.compile_options)
        return program

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the values that it needs."""
        return self.program.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the values that it makes."""
        return self.program.outputs

    def forward(self, *values: Any, batch_size: int) -> tuple[Any, ...]:  # noqa: ANN401 - tensors, mostly
        """Compute the outputs of a micro-batch of `batch_size` samples."""
        return self.program.run(self.held, values, batch_size)


@dataclass(frozen=True)
class Forms:
    """The forms of the stages: one set of programs for each group of batch shapes."""

    now: Callable[[], int]  # returns the number of the form that the stages run
    # selects the form for the shapes of a call in a mode, and captures it if there is none yet
    choose: Callable[[Call, bool], None]


class Chain:
    """All stages in order. It takes the same arguments as the model and returns the same result.

    A buffer that one stage replaces is replaced in all of them.

    Args:
        model: the user's model.
        stages: the stages, in order.
        example: the call that was captured.
        results: returns the description of the model's result in training (True) or evaluation.
        forward_of: the module whose forward names the arguments; by default the model.
        forms: the programs for other shapes; None: the programs hold for all shapes.
    """

    def __init__(
        self, model: nn.Module, stages: Sequence[Stage], *, example: Call, results: Callable[[bool], Results],
        forward_of: nn.Module | None = None, forms: Forms | None = None,
    ) -> None:  # fmt: skip
        shared = buffer_places(model)
        for stage in stages:
            stage.held.share(shared)
        self.stages: list[Stage] = list(stages)
        self.training = stages[0].training
        self.example, self._parameter_names = example, parameter_names(forward_of or model)
        self.aliases, self.results = aliases_of(model), results
        self.has_fixed_shapes, self._forms = forms is not None, forms

    @property
    def form(self) -> int:
        """The number of the form that the stages run; other batch shapes can need another form."""
        return 0 if self._forms is None else self._forms.now()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the model
        """Run all stages on a batch."""
        call = self.read(*args, **kwargs)
        return self.run(call, lambda stage, values: stage(*values, batch_size=call.batch_size))

    def compile_stages(self, options: Options | None) -> None:
        """Let Inductor compile the programs of all stages; None leaves them uncompiled."""
        for stage in self.stages:
            stage.compile_options = options

    def with_stages(self, stages: Sequence[Stage]) -> Chain:
        """Return a chain of the same model with other stages."""
        made = copy.copy(self)
        made.stages, made.training = list(stages), stages[0].training
        return made

    def train(self, mode: bool = True) -> Chain:
        """Put all stages into training, or into evaluation if `mode` is False."""
        self.training = mode
        for stage in self.stages:
            stage.train(mode)
        return self

    def eval(self) -> Chain:
        """Put all stages into evaluation."""
        return self.train(False)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors of all stages under the model's names; a shared tensor appears under each of its names."""
        held = {name: tensor for stage in self.stages for name, tensor in stage.state_dict().items()}
        return held | {alias: held[name] for alias, name in self.aliases.items() if name in held}

    def read(self, *args: Any, **kwargs: Any) -> Call:  # noqa: ANN401 - as the model
        """Read a batch.

        Raises:
            UsageError: if it has other tensors or other plain values than the example, or other shapes than those
                captured.
        """
        return self._read(args, kwargs, has_fixed_shapes=self.has_fixed_shapes)

    def read_any(self, *args: Any, **kwargs: Any) -> Call:  # noqa: ANN401 - as the model
        """Read a batch of any shapes, and select the form for them.

        Raises:
            UsageError: as in `read`, but other shapes are an error only if no capture path accepts them.
        """
        call = self._read(args, kwargs, has_fixed_shapes=False)
        self.choose(call)
        return call

    def choose(self, call: Call) -> None:
        """Select the form for the shapes of a call, in the current mode."""
        if self._forms is not None:
            place_of = {name: place for place, name in enumerate(call.names)}
            tensors = tuple(call.tensors[place_of[name]] for name in self.example.names)
            alike = replace(self.example, tensors=tensors, batch_size=call.batch_size)
            self._forms.choose(alike, self.training)

    def names(self, *args: Any, **kwargs: Any) -> tuple[str, ...]:  # noqa: ANN401 - as the model
        """Return the names of a batch's tensors."""
        return read_call(args, kwargs, self._parameter_names, like=self.example).names

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_fixed_shapes: bool) -> Call:
        call = read_call(args, kwargs, self._parameter_names, like=self.example)
        faults = list(self._faults(call, has_fixed_shapes=has_fixed_shapes))
        if faults:
            raise UsageError(f"the batch is not like the example that was captured: {'; '.join(faults)}")
        return call

    def _faults(self, call: Call, *, has_fixed_shapes: bool) -> Iterator[str]:
        """Yield each difference between a batch and the example that would make the stages compute a wrong result."""
        example = self.example
        missing = [name for name in example.names if name not in call.names]
        unknown = [name for name in call.names if name not in example.names]
        if missing or unknown:
            if missing:
                yield f"it lacks {', '.join(missing)}, which the example had"
            if unknown:
                yield f"it has {', '.join(unknown)}, which was not a tensor in the example: include it in the example"
            return
        for name in sorted(example.constants.keys() | call.constants.keys()):
            one, other = example.constants.get(name), call.constants.get(name)
            places = differing_constants(one, other, name)
            for place in places:
                hint = array_hint(other) or " (pass it as a tensor, or leave it out if the model does not read it)"
                yield f"another plain value of {place}{hint}"
        tensor_of = dict(zip(call.names, call.tensors, strict=True))
        for name, tensor, dim in zip(example.names, example.tensors, example.batch_dims, strict=True):
            given = tensor_of[name]
            if dim is not None and given.shape[dim : dim + 1] != (call.batch_size,):
                size = given.shape[dim] if given.dim() > dim else "missing"
                yield f"{name}: dimension {dim} is {size}, but the batch has {call.batch_size} samples"
            is_other_type = self.has_fixed_shapes and given.dtype != tensor.dtype
            if is_other_type or (has_fixed_shapes and _without(given.shape, dim) != _without(tensor.shape, dim)):
                yield f"{name}: {given.dtype} {tuple(given.shape)}, captured as {tensor.dtype} {tuple(tensor.shape)}"

    def run(self, call: Call, run_stage: Callable[[Stage, list[Any]], Sequence[Any]]) -> Any:  # noqa: ANN401
        """Run all stages in order, each through `run_stage`, and return the model's result."""
        values: dict[str, Any] = {
            f"input:{name}": tensor for name, tensor in zip(call.names, call.tensors, strict=True)
        }
        extra: tuple[Any, ...] = ()
        made: Sequence[Any] = ()
        for stage in self.stages:
            made = run_stage(stage, [values[name] for name in stage.inputs] + list(extra))
            named = len(stage.outputs)
            values.update(zip(stage.outputs, made[:named], strict=False))
            extra = tuple(made[named:])
        results = self.results(self.training)
        tensors = made if results.takes_all else [values[name] for name in results.names]
        return rebuild(results.template(), tensors)


def _without(shape: Sequence[int], dim: int | None) -> list[int]:
    return [size for place, size in enumerate(shape) if place != dim]


@dataclass(frozen=True)
class Results:
    """The model's result: its template after a run, and the names of the values that fill it.

    With `takes_all`, all outputs of the last stage fill it; their number can differ from that of the capture.
    """

    template: Callable[[], object]
    names: Sequence[str]
    takes_all: bool = False
