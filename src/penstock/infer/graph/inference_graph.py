"""Inference graph: a model in evaluation as one CUDA graph, in which parallel branches run at the same time."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn

from penstock.compile.options import Compile, Options, options_of
from penstock.devices.cuda_streams import Event, Stream, current_stream, new_stream
from penstock.devices.graph_capture import CudaGraphs
from penstock.devices.kinds import check_device, has_graphs, kind_of
from penstock.errors import PenstockError, UsageError, warn_user
from penstock.infer.graph.branches import MOST_BRANCHES
from penstock.infer.graph.graph_replay import CallContext, Replay, ShapeCache
from penstock.infer.graph.inference_program import Form, Program, quick_name
from penstock.model.capture.capture import plain_module
from penstock.model.example import Call, read_example
from penstock.model.parameters import main_device
from penstock.model.preserve import in_mode
from penstock.model.structure import flatten, rebuild

_MOST_FORMS = 64  # maximum number of remembered call forms
# one lock per module, because a run in evaluation changes the module's mode temporarily
_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOCKING = threading.Lock()


class Graph:
    """A model in evaluation as one CUDA graph, in which parallel branches run at the same time.

    It is called like the model and returns what the model returns, without gradients. Penstock finds the branches in
    the graph that torch.export captures: the two towers of CLIP become two branches. Each batch size gets its own CUDA
    graph, captured at its first call. On a CPU, and if a CUDA graph is not possible, the model runs unchanged.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> graph = Graph(model, torch.zeros(1, 4))
    >>> graph(torch.zeros(3, 4)).shape
    torch.Size([3, 2])

    Weights may change in place, for example by an optimizer or `load_state_dict`. If weights move to other memory, the
    graphs are captured again. Only one call runs at a time.

    Args:
        model: any module, unchanged and in any mode. With `device`, it is moved there.
        example: an example call: a tensor, a tuple of arguments or a dict of keyword arguments.
        branches: "auto", or the maximum number; 1 runs one operation after the other.
        device: the device; by default that of the model.
        compile: let Inductor compile the branches. This gives fewer kernels, but each batch size must be compiled, and
            results are rounded in another order. Pass a dict to set Inductor's options.
        clone: return copies of the outputs. With False, outputs are in the graph's own memory, which the next call
            overwrites.

    Attributes:
        device: the device.
        obstacle: why there are no CUDA graphs; empty if there are.

    Raises:
        UsageError: for an invalid argument.
    """

    def __init__(
        self, model: nn.Module, example: object, *, branches: int | Literal["auto"] = "auto",
        device: torch.device | str | int | None = None, compile: Compile = False, clone: bool = True,  # noqa: A002
    ) -> None:  # fmt: skip
        if not isinstance(model, nn.Module):
            raise UsageError(f"model: expected an nn.Module; given: {model!r:.60}")
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
        self._unchanged_model = UnchangedModel(self.model)
        self._program: Program | None = None
        self._refusal = ""  # why torch.export could not capture the model
        self._forms: dict[object, Form] = {}
        self._replays: ShapeCache[Replay] = ShapeCache()
        self._maker: CudaGraphs | None = None  # captures graphs with one shared memory pool
        self._streams: list[Stream] | None = None
        self._done: Event | None = None  # recorded after the last call
        self._last: int | None = None  # the stream of the last call, as CUDA's number
        self.obstacle = "" if has_graphs(self.device) else f"CUDA graphs need a GPU, and the model is on {self.device}"
        if not self.obstacle:
            self._decide()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's type
        """Run the model with these arguments."""
        with self._lock, CallContext(self.device):
            return self._run_eagerly(args, kwargs) if self.obstacle else self._run(args, kwargs)

    def explain(self) -> str:
        """Describe the branches as text: their number, nodes and share of the work."""
        with self._lock:
            program, name = self._find_program(), type(self.model).__name__
        if program is None:
            return f"{name} runs without a graph: {self._refusal}"
        if self.obstacle:
            return f"{name} on {self.device} runs without a graph: {self.obstacle}\nas a graph: {_describe(program)}"
        how = "" if self._options is None else ", compiled"
        return f"{name} on {self.device}{how}: {_describe(program)}"

    def __repr__(self) -> str:
        return (
            f"Graph of {type(self.model).__name__} on {self.device}{self.obstacle and ', which runs without a graph'}"
        )

    # ---- capture

    def _find_program(self) -> Program | None:
        """Capture the model and find its branches, once and again after a part of the model was replaced."""
        if self._program is not None and not self._program.is_current():
            self._program = None
            self._forms.clear()
            self._drop_graphs()
        if self._program is None and not self._refusal:
            try:
                with torch.autocast(self.device.type, enabled=False):  # casts belong to a call, not to the capture
                    self._program = Program(self.model, self._example, most=self._most)
            except Exception as error:
                reason = str(error) if isinstance(error, PenstockError) else _summary(error)
                self._refusal = f"torch.export cannot capture it: {reason}"
        return self._program

    def _decide(self) -> None:
        """Decide whether CUDA graphs are possible, and create what they need."""
        program = self._find_program()
        if program is None:
            self._give_up(self._refusal)
        elif program.reassigned:
            self._give_up(f"the model replaces buffers by other tensors: {', '.join(program.reassigned[:3])}")
        elif self.device.type == "cuda":
            self._done = kind_of(self.device).record_event(self.device)
            self._streams = [new_stream(self.device) for _ in range(program.branches.num_streams)]

    def _give_up(self, why: str) -> None:
        self.obstacle = why
        self._drop_graphs()
        warn_user(f"no CUDA graph: {why}. The model runs without one")

    def _drop_graphs(self) -> None:
        """Drop all graphs once the GPU has finished, and their pool: it cannot be reused without a graph."""
        if self._done is not None:
            self._done.synchronize()
        self._replays.clear()
        self._maker = None

    # ---- a call

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - the model's type
        """Run the model, by a graph if possible."""
        assert self._program is not None
        form, given = self._form(args, kwargs)
        if form is None:
            return self._run_eagerly(args, kwargs)
        tensors = [given[at] for at in form.order]
        shape = (form.shape, *self._autocast())
        replay = self._replays.get(shape)
        if replay is not None:
            # Check after the launch, while the GPU works: the graph keeps the memory that it reads alive. But a graph
            # that changes buffers must not run twice, so check it first.
            is_checked_first = bool(self._program.analysis.changed)
            if not is_checked_first or self._is_current(replay):
                made = self._run_graph(replay, tensors)
                if is_checked_first or self._is_current(replay):
                    return self._program.result(tensors, made)
            self._drop_graphs()
        if not self._program.is_current():
            self._decide()
            return self._run_eagerly(args, kwargs) if self.obstacle else self._run(args, kwargs)
        if not self._replays.has_space:
            return self._run_eagerly(args, kwargs)
        try:
            replay = self._compiled_or_not(form, tensors)
        except Exception as error:
            self._drop_graphs()
            result = self._run_eagerly(args, kwargs)  # if this fails too, the call itself is wrong
            self._give_up(_summary(error))
            return result
        self._replays.put(shape, replay)
        return self._program.result(tensors, self._run_graph(replay, tensors))

    def _form(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Form | None, Sequence[torch.Tensor]]:
        """Return the form of a call and its tensors; None for a call that is not like the example."""
        assert self._program is not None
        name, given = quick_name(args, kwargs)
        known = self._forms.get(name)
        if known is not None:
            return known, given
        try:
            form, tensors = self._program.read(args, kwargs)
        except UsageError as error:
            if not self._has_warned:
                warn_user(f"no CUDA graph for a call: {error}. The model runs without one")
                self._has_warned = True
            return None, ()
        if name is not None:
            if len(self._forms) >= _MOST_FORMS:
                self._forms.clear()
            self._forms[name] = form
        return form, tensors

    def _compiled_or_not(self, form: Form, tensors: Sequence[torch.Tensor]) -> Replay:
        """Capture a graph for a form; if compilation fails, capture it uncompiled and stop compiling."""
        if self._options is None:
            return self._capture(form, tensors)
        try:
            return self._capture(form, tensors, options=self._options)
        except Exception as error:
            replay = self._capture(form, tensors)  # if this fails too, the compiler is not the cause
            self._options = None
            warn_user(f"not compiled: {_summary(error)}. The graph runs uncompiled")
            return replay

    def _capture(self, form: Form, tensors: Sequence[torch.Tensor], *, options: Options | None = None) -> Replay:
        """Capture the graph for a form."""
        assert self._program is not None
        if self._done is not None:
            self._done.synchronize()
        self._replays.evict()
        self._maker = self._maker or CudaGraphs()
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
        """Return whether the model is unchanged since a graph was captured, including its addresses."""
        assert self._program is not None
        return self._program.places() == replay.places and self._program.is_current()

    def _run_graph(self, replay: Replay, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run a graph on the caller's stream, after the last run on any stream."""
        assert self._program is not None
        values = self._program.values(tensors)
        if self._done is None:
            return self._outputs(replay(values))
        now = current_stream(self.device)
        if now.cuda_stream != self._last:
            now.wait_event(self._done)
            self._last = now.cuda_stream
        made = self._outputs(replay(values))
        self._done.record(now)
        return made

    def _outputs(self, made: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not self._clone or not made:
            return made
        copies = [torch.empty_like(tensor) for tensor in made]
        torch._foreach_copy_(copies, list(made))  # one kernel for many
        return copies

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - the model's type
        _, tensors = quick_name(args, kwargs)
        if tensors and all(tensor.device == self.device for tensor in tensors):
            return self._unchanged_model(*args, **kwargs)
        found, template = flatten((args, dict(kwargs)))
        args, kwargs = rebuild(template, [tensor.to(self.device, non_blocking=True) for tensor in found])
        return self._unchanged_model(*args, **kwargs)

    def _autocast(self) -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(self.device.type), torch.get_autocast_dtype(self.device.type)


def _check_call(model: nn.Module, call: Call) -> None:
    """Check the example against the signature of the model."""
    args, kwargs = call.arguments()
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"example: {type(model).__name__} cannot be called with it: {error}") from None
    except ValueError:  # it has no readable signature
        pass


def _check_branches(branches: object) -> int:
    if branches == "auto":
        return MOST_BRANCHES
    if isinstance(branches, bool) or not isinstance(branches, int) or not 1 <= branches <= MOST_BRANCHES:
        raise UsageError(f"branches: {branches!r} is neither 'auto' nor a number from 1 to {MOST_BRANCHES}")
    return branches


def _describe(program: Program) -> str:
    branches, count = program.branches, program.branches.num_streams
    lines = [f"{count} branches" if count > 1 else "1 branch", *branches.to_text().splitlines()]
    lines.append(f"computed once, because they are the same in every call: {len(program.analysis.once)} nodes")
    if program.analysis.num_products:
        lines.append(f"convolutions over patches, computed as matrix products: {program.analysis.num_products}")
    if program.analysis.num_fewer:
        lines.append(f"operations that compute only the rows that are used: {program.analysis.num_fewer}")
    if count > 1:
        gain = branches.total_seconds / branches.seconds
        lines.append(
            f"waits between them: {len(branches.awaited)}; estimated {gain:.2f} times as fast as on one stream"
        )
    return "\n  ".join(lines)


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


# ---- without a graph


class UnchangedModel:
    """A model in evaluation and without gradients; one call at a time.

    A model that is already in evaluation is simply called: a pass over its modules takes longer than a small model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self._locks = model, _locks_of(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's type
        """Run the model."""
        if len(self._locks) == 1:
            with self._locks[0]:
                return self._run(args, kwargs)
        with ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - the model's type
        if not self.model.training:
            with torch.no_grad():
                return self.model(*args, **kwargs)
        with torch.no_grad(), in_mode(self.model, training=False):
            return self.model(*args, **kwargs)


def _locks_of(model: nn.Module) -> list[threading.RLock]:
    """Return the locks of a model's modules, in a global order: models may share modules."""
    with _LOCKING:
        modules = list(model.modules())
        found = {id(lock): lock for module in modules if (lock := _LOCKS.get(module)) is not None}
        locks = [found[number] for number in sorted(found)] or [threading.RLock()]
        for module in modules:
            _LOCKS.setdefault(module, locks[0])
        return locks
