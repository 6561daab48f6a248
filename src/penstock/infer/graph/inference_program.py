"""Inference program: a model in evaluation as torch.export captures it, with its branches; reads the model's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.compile.options import Options
from penstock.infer.graph.branches import Branches, find_branches
from penstock.infer.graph.interpreter import Interpreter
from penstock.infer.graph.program_analysis import analyze_program
from penstock.model.capture.capture import capture
from penstock.model.capture.export.exported_stage import ExportProgram
from penstock.model.example import Call
from penstock.model.structure import rebuild

_OTHER_SIZES = (1, 2, 3)  # other batch sizes, to see what depends on the size; with 1, a dimension may vanish
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Form:
    """What calls with arguments of the same kinds have in common."""

    # the shapes and dtypes of the tensors that the program uses; one graph serves one shape
    shape: tuple[tuple[torch.Size, torch.dtype], ...]
    batch_size: int
    # for each tensor of the example, its index among those of the call: keywords may come in any order
    order: tuple[int, ...]


class Program:
    """A captured model with at most `most` branches; the tensors of the example are on the model's device.

    Raises:
        CaptureError: if torch.export cannot capture the model.
    """

    def __init__(self, model: nn.Module, example: Call, *, most: int) -> None:
        self._chain = capture(model, example, training=False, path="export").split(())
        self._parts: list[tuple[dict[str, Any], str, Any]] = [
            (place, name, part)
            for module in model.modules()
            for place in (module._modules, module._parameters, module._buffers)
            for name, part in place.items()
        ]
        stage = self._chain.stages[0].eval()
        program = stage.program
        assert isinstance(program, ExportProgram)
        self._held, self._held_names, self.reassigned = stage.held, program.held_names, program.reassigned
        names, results = [f"input:{name}" for name in example.names], self._chain.results(False)
        self._template, self._device = results.template, example.tensors[0].device
        self._names = names
        self._used = [names.index(name) for name in program.inputs]
        # inputs that the model returns unchanged come from the call, everything else from the program
        place_of = {name: -1 - at for at, name in enumerate(names)} | {n: at for at, n in enumerate(program.outputs)}
        self._sources = [place_of[name] for name in results.names]
        sizes = [size for size in _OTHER_SIZES if size != example.batch_size][:2]
        others = (self._arguments(example.resized(size)) for size in sizes)
        self.analysis = analyze_program(program, self._arguments(example), others=others)
        self.branches: Branches = find_branches(self.analysis.graph_nodes, most=most)
        self._interpreter = Interpreter(self.analysis, self.branches)

    def interpreter(self, options: Options | None) -> Interpreter:
        """Return the interpreter; with options, a new one, which compiles for the shapes of its first run."""
        if options is None:
            return self._interpreter
        return Interpreter(self.analysis, self.branches, options=options)

    def _arguments(self, call: Call) -> list[Any]:
        return [*self.held(), *self.values(call.tensors), call.batch_size]

    def held(self) -> list[torch.Tensor]:
        """Return the current parameters, buffers and constants that the program uses."""
        return [self._held.get(name) for name in self._held_names]

    def places(self) -> list[int]:
        """Return the addresses of all tensors of the model."""
        return [tensor.data_ptr() for tensor in self._held.tensors()]

    def is_current(self) -> bool:
        """Return whether the model still has the captured parts; changes in place are allowed."""
        return all(place.get(name) is part for place, name, part in self._parts)

    def changed(self) -> list[torch.Tensor]:
        """Return the tensors that a run changes in place."""
        return [self._held.get(name) for name in self.analysis.changed]

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Form, tuple[torch.Tensor, ...]]:
        """Return the form of a call and its tensors.

        Raises:
            UsageError: if the call is not like the example.
        """
        call = self._chain.read(*args, **kwargs)
        place_of = {f"input:{name}": at for at, name in enumerate(call.names)}
        order = tuple(place_of[name] for name in self._names)
        used = [call.tensors[order[at]] for at in self._used]
        return Form(tuple((tensor.shape, tensor.dtype) for tensor in used), call.batch_size, order), call.tensors

    def values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of a call that the program uses."""
        return [tensors[at] for at in self._used]

    def result(self, tensors: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> Any:  # noqa: ANN401
        """Return the model's result, from the tensors of a call and the outputs of the program."""
        # inputs that are returned unchanged may be in host memory
        found = [made[at] if at >= 0 else tensors[-1 - at].to(self._device) for at in self._sources]
        return rebuild(self._template(), found)


def quick_name(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[object, list[torch.Tensor]]:
    """Return a quick key that identifies the form of a call, and the tensors of the call.

    Returns:
        None instead of the key for a call with nested arguments, such as lists.
    """
    tensors: list[torch.Tensor] = []
    kinds: list[object] = [len(args), tuple(kwargs)]
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            kinds.append((value.shape, value.dtype))
        elif isinstance(value, _PLAIN):
            kinds.append((type(value), value))
        else:
            return None, []
    return tuple(kinds), tensors
