"""Graph: a model in evaluation as one CUDA graph, in which parallel branches run at the same time."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from penstock.compile.options import Compile, Options, options_of
from penstock.devices.cuda_streams import Event, Stream, current_stream, new_stream
from penstock.devices.device_names import check_device, has_graphs
from penstock.devices.graph_capture import Maker, make_graphs
from penstock.devices.kinds import kind_of
from penstock.errors import PenstockError, UsageError
from penstock.infer.graph.branches import MOST_BRANCHES
from penstock.infer.graph.call_context import Around
from penstock.infer.graph.graph_replay import Replay
from penstock.infer.graph.inference_program import Form, Program, quick_name
from penstock.infer.graph.shape_cache import Shapes
from penstock.infer.graph.unchanged_model import Plain
from penstock.model.capture.capture import plain_module
from penstock.model.example import Call, read_example
from penstock.model.parameters import main_device
from penstock.model.structure import flatten, rebuild

__all__ = ["Graph"]

_MOST_FORMS = 64  # of calls that are remembered


class Graph:
    """A model in evaluation as one CUDA graph, in which parallel branches run at the same time.

    Called as the model is, it returns what the model returns, without gradients. The branches are found in the graph
    that torch.export captures: two towers, as in CLIP, become two. Each batch size has a CUDA graph of its own,
    captured when it first comes. On a CPU, and where a graph cannot be, the model runs as it is.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> graph = Graph(model, torch.zeros(1, 4))
    >>> graph(torch.zeros(3, 4)).shape
    torch.Size([3, 2])

    Weights may be changed in place, as an optimizer or `load_state_dict` does; where they are put elsewhere, the graphs
    are captured anew. One call runs at a time.

    Args:
        model: any module, unchanged; in any mode. With `device`, it is moved there.
        example: how it is called: a tensor, a tuple of arguments or a dict of keyword arguments.
        branches: "auto", or the most there may be; 1 runs one operation after the other.
        device: where it runs; by default where the model is.
        compile: let Inductor compile the branches: fewer kernels, for the price of compiling for each batch size, and
            of results that are rounded in another order. A dict of its options to compile with these.
        clone: outputs are copies, which the caller may keep. False hands out the graph's own memory, which the next
            call overwrites.

    Attributes:
        device: where it runs.
        obstacle: why there are no CUDA graphs; empty where there are.

    Raises:
        UsageError: when an argument cannot be right.
    """

    def __init__(
        self, model: nn.Module, example: object, *, branches: int | Literal["auto"] = "auto",
        device: torch.device | str | int | None = None, compile: Compile = False, clone: bool = True,  # noqa: A002
    ) -> None:  # fmt: skip
        if not isinstance(model, nn.Module):
            raise UsageError(f"model: give an nn.Module, not {model!r:.60}")
        self._most = _check_branches(branches)
        self.model = plain_module(model)
        call = read_example(example, self.model)
        _check_call(self.model, call)
        place = main_device(self.model, call) if device is None else device
        self.device: torch.device = check_device(place)
        if device is not None:
            self.model.to(self.device)
        self._example = call.map(lambda tensor: tensor.detach().to(self.device))
        self._clone, self._lock, self._has_warned = clone, threading.RLock(), False
        self._options = options_of(compile)
        self._plain = Plain(self.model)
        self._program: Program | None = None
        self._refusal = ""  # why torch.export could not take the model
        self._forms: dict[object, Form] = {}
        self._replays: Shapes[Replay] = Shapes()
        self._maker: Maker | None = None  # makes graphs with one pool of memory
        self._streams: list[Stream] | None = None
        self._done: Event | None = None  # behind the last call
        self._last: int | None = None  # the stream that it was on, as CUDA numbers them
        self.obstacle = "" if has_graphs(self.device) else f"CUDA graphs need a GPU, and the model is on {self.device}"
        if not self.obstacle:
            self._decide()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the model
        """Return what the model returns for these arguments."""
        with self._lock, Around(self.device):
            return self._eagerly(args, kwargs) if self.obstacle else self._serve(args, kwargs)

    def explain(self) -> str:
        """Return in words how many branches there are, and the nodes and the share of the work on each."""
        with self._lock:
            program, name = self._find_program(), type(self.model).__name__
        if program is None:
            return f"{name} runs as it is: {self._refusal}"
        if self.obstacle:
            return f"{name} on {self.device} runs as it is: {self.obstacle}\nas a graph it would have {_told(program)}"
        how = "" if self._options is None else ", compiled"
        return f"{name} on {self.device}{how}: {_told(program)}"

    def __repr__(self) -> str:
        return f"Graph of {type(self.model).__name__} on {self.device}{self.obstacle and ', which runs as it is'}"

    # ---- once

    def _find_program(self) -> Program | None:
        """Capture the model and find its branches: once, and again when something was put in the place of a part."""
        if self._program is not None and not self._program.is_current():
            self._program = None
            self._forms.clear()
            self._forget()
        if self._program is None and not self._refusal:
            try:
                with torch.autocast(self.device.type, enabled=False):  # casts come with a call, not with the capture
                    self._program = Program(self.model, self._example, most=self._most)
            except Exception as error:
                told = str(error) if isinstance(error, PenstockError) else _in_short(error)
                self._refusal = f"torch.export cannot take it: {told}"
        return self._program

    def _decide(self) -> None:
        """See whether there can be graphs, and make what they need."""
        program = self._find_program()
        if program is None:
            self._give_up(self._refusal)
        elif program.reassigned:
            self._give_up(f"the model puts other tensors in the place of buffers: {', '.join(program.reassigned[:3])}")
        elif self.device.type == "cuda":
            self._done = kind_of(self.device).record_event(self.device)
            self._streams = [new_stream(self.device) for _ in range(program.branches.num_streams)]

    def _give_up(self, why: str) -> None:
        self.obstacle = why
        self._forget()
        warnings.warn(f"no CUDA graph: {why}. The model runs as it is", stacklevel=4)

    def _forget(self) -> None:
        """Let all graphs go, when the GPU is done with them, and their pool: without any it cannot be used again."""
        if self._done is not None:
            self._done.synchronize()
        self._replays.clear()
        self._maker = None

    # ---- a call

    def _serve(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as the model
        """Return what the model returns, by a graph if there is one, or can be."""
        assert self._program is not None
        form, given = self._form(args, kwargs)
        if form is None:
            return self._eagerly(args, kwargs)
        tensors = [given[at] for at in form.order]
        shape = (form.shape, *self._autocast())
        replay = self._replays.get(shape)
        if replay is not None:
            # looked at behind the launch, while the GPU works: the graph holds what it reads; but what changes
            # something that stays may not be run twice
            is_looked_at_first = bool(self._program.reading.changed)
            if not is_looked_at_first or self._is_current(replay):
                made = self._replayed(replay, tensors)
                if is_looked_at_first or self._is_current(replay):
                    return self._program.result(tensors, made)
            self._forget()
        if not self._program.is_current():
            self._decide()
            return self._eagerly(args, kwargs) if self.obstacle else self._serve(args, kwargs)
        if not self._replays.has_room:
            return self._eagerly(args, kwargs)
        try:
            replay = self._compiled_or_not(form, tensors)
        except Exception as error:
            self._forget()
            result = self._eagerly(args, kwargs)  # where this fails as well, it is the call that is wrong
            self._give_up(_in_short(error))
            return result
        self._replays.put(shape, replay)
        return self._program.result(tensors, self._replayed(replay, tensors))

    def _form(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Form | None, Sequence[torch.Tensor]]:
        """Return what kind of call this is, and its tensors; None for one that is not like the example."""
        assert self._program is not None
        name, given = quick_name(args, kwargs)
        known = self._forms.get(name)
        if known is not None:
            return known, given
        try:
            form, tensors = self._program.read(args, kwargs)
        except UsageError as error:
            if not self._has_warned:
                warnings.warn(f"no CUDA graph for a call: {error}. The model runs it as it is", stacklevel=4)
                self._has_warned = True
            return None, ()
        if name is not None:
            if len(self._forms) >= _MOST_FORMS:
                self._forms.clear()
            self._forms[name] = form
        return form, tensors

    def _compiled_or_not(self, form: Form, tensors: Sequence[torch.Tensor]) -> Replay:
        """Return the graph for calls of one form; not compiled, and from now on none is, where that cannot be."""
        if self._options is None:
            return self._capture(form, tensors)
        try:
            return self._capture(form, tensors, options=self._options)
        except Exception as error:
            replay = self._capture(form, tensors)  # where this fails as well, it is not the compiler's fault
            self._options = None
            warnings.warn(f"not compiled: {_in_short(error)}. The graph is as it would be without", stacklevel=5)
            return replay

    def _capture(self, form: Form, tensors: Sequence[torch.Tensor], *, options: Options | None = None) -> Replay:
        """Return the graph for calls of one form."""
        assert self._program is not None
        if self._done is not None:
            self._done.synchronize()
        self._replays.make_room()
        self._maker = self._maker or make_graphs()
        is_cast, dtype = self._autocast()
        with torch.autocast(self.device.type, enabled=is_cast, dtype=dtype, cache_enabled=False):
            return Replay(
                self._program.interpreter(options),
                held=self._program.held(),
                places=self._program.places(),
                changed=self._program.changed(),
                values=self._program.values(tensors),
                batch_size=form.batch_size,
                device=self.device,
                maker=self._maker,
                streams=self._streams,
            )

    def _is_current(self, replay: Replay) -> bool:
        """Return whether the model is still where and what it was when a graph was captured."""
        assert self._program is not None
        return self._program.places() == replay.places and self._program.is_current()

    def _replayed(self, replay: Replay, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run a graph on the caller's stream, behind the last run on whatever stream that was."""
        assert self._program is not None
        values = self._program.values(tensors)
        if self._done is None:
            return self._handed_out(replay(values))
        now = current_stream(self.device)
        if now.cuda_stream != self._last:
            now.wait_event(self._done)
            self._last = now.cuda_stream
        made = self._handed_out(replay(values))
        self._done.record(now)
        return made

    def _handed_out(self, made: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not self._clone or not made:
            return made
        copies = [torch.empty_like(tensor) for tensor in made]
        torch._foreach_copy_(copies, list(made))  # one kernel for many
        return copies

    def _eagerly(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as the model
        _, tensors = quick_name(args, kwargs)
        if tensors and all(tensor.device == self.device for tensor in tensors):
            return self._plain(*args, **kwargs)
        found, template = flatten((args, dict(kwargs)))
        args, kwargs = rebuild(template, [tensor.to(self.device, non_blocking=True) for tensor in found])
        return self._plain(*args, **kwargs)

    def _autocast(self) -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(self.device.type), torch.get_autocast_dtype(self.device.type)


def _check_call(model: nn.Module, call: Call) -> None:
    """Raise where a model cannot be called as in the example, as far as its signature tells.

    Raises:
        UsageError: saying why.
    """
    args, kwargs = call.arguments()
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"example: {type(model).__name__} cannot be called so: {error}") from None
    except ValueError:  # it has none that could be read
        pass


def _check_branches(branches: object) -> int:
    if branches == "auto":
        return MOST_BRANCHES
    if isinstance(branches, bool) or not isinstance(branches, int) or not 1 <= branches <= MOST_BRANCHES:
        raise UsageError(f"branches: {branches!r} is neither 'auto' nor a number from 1 to {MOST_BRANCHES}")
    return branches


def _told(program: Program) -> str:
    branches, count = program.branches, program.branches.num_streams
    lines = [f"{count} branches" if count > 1 else "1 branch", *branches.to_text().splitlines()]
    lines.append(f"made once, for they are the same in every call: {len(program.reading.once)} nodes")
    if program.reading.num_products:
        lines.append(f"convolutions over patches, as products of matrices: {program.reading.num_products}")
    if program.reading.num_fewer:
        lines.append(f"operations that leave out rows which nobody asks for: {program.reading.num_fewer}")
    if count > 1:
        gain = branches.total_seconds / branches.seconds
        lines.append(f"waits between them: {len(branches.awaited)}; by estimate {gain:.2f}× as fast as on one stream")
    return "\n  ".join(lines)


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
