"""Tracing: one trace of a model by torch.export, with a symbolic batch size and with plain tensors as outputs."""

from __future__ import annotations

import builtins
import contextlib
import io
import itertools
import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from penstock.devices.sanitizer import unsanitized
from penstock.errors import CaptureError
from penstock.model.capture.export.symbolic_sizes import ShapeGuards, hint
from penstock.model.example import Call
from penstock.model.parameters import main_device, replaced_tensors, tensor_places
from penstock.model.preserve import TORCH_ATTRIBUTES, RandomStates, preserve_attributes
from penstock.model.source import is_called_by_torch, line_of, line_of_stack, line_of_trace
from penstock.model.structure import flatten, plain_values


@dataclass(frozen=True)
class Traced:
    """A traced model."""

    # torch's program; it returns the tensors of the model's result, then the new tensors of `reassigned`
    program: torch.export.ExportedProgram
    template: object  # the template of the model's result
    num_outputs: int  # the number of tensors in the model's result
    reassigned: tuple[str, ...]  # the names of the buffers to which forward assigns another tensor
    guards: ShapeGuards  # the conditions on the input shapes for which the trace is valid


OpenDims = Sequence[frozenset[int]]


class _TraceRefusedError(Exception):
    """The trace would run, but would not behave as the model does; the text gives the reason."""


class _Reduced(nn.Module):
    """The model with plain tensors as inputs and outputs; it records the structures that contain them."""

    def __init__(self, model: nn.Module, call: Call, remember: Callable[..., None]) -> None:
        super().__init__()
        self.model = model
        self._arguments = call.arguments
        self.put: frozenset[str] = frozenset()  # attributes that hold a test tensor; see _check_kept
        self._remember = remember  # a function, because torch.export restores attributes

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        args, kwargs = self._arguments(tensors)
        buffers, attributes = dict(self.model.named_buffers()), _plain_attributes(self.model)
        random_states, tensors_before = RandomStates(), _tensor_attributes(self.model)
        empty_before = {name for name, _, value in _attributes(self.model) if value is None}
        result = self.model(*args, **kwargs)
        if random_states.have_others_changed():
            raise _TraceRefusedError("forward draws random numbers that are not torch's")
        now = _tensor_attributes(self.model)
        before = {name: tensor for name, tensor in tensors_before.items() if name not in self.put}
        replaced = sorted(name for name, tensor in before.items() if now.get(name) is not tensor)
        if replaced:
            raise _TraceRefusedError(f"forward assigns another tensor to {', '.join(replaced[:3])}")
        plain = _plain_attributes(self.model)
        changed = sorted(name for name in attributes.keys() | plain if attributes.get(name) != plain.get(name))
        if changed:
            raise _TraceRefusedError(f"forward changes {', '.join(changed[:3])}")
        after = dict(self.model.named_buffers())
        reassigned = [name for name, buffer in after.items() if buffers.get(name) is not buffer]
        outputs, template = flatten(result, drop=is_cache)
        if any(isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) for value in plain_values(template)):
            raise _TraceRefusedError("forward returns a number that depends on the batch")
        kept = {name: tensor for name, tensor in now.items() if name in empty_before}
        self._remember(kept={name: (tuple(map(hint, t.shape)), t.dtype, t.device) for name, t in kept.items()})
        self._remember(template=template, num_outputs=len(outputs), reassigned=tuple(reassigned))
        return [*outputs, *(after[name] for name in reassigned)]


def trace(model: nn.Module, call: Call, open_dims: OpenDims = ()) -> Traced:
    """Trace a model in its current mode.

    Args:
        model: the user's model.
        call: the call to trace.
        open_dims: for each tensor, the dimensions besides the batch whose size may differ between calls.

    Raises:
        CaptureError: if torch.export cannot trace the model, or if the trace would not behave as the model does; gives
            the reason, and the line of the model if it is known.
    """
    seen: dict[str, Any] = {}
    reduced = _Reduced(model, call, seen.update)
    try:
        with (
            unsanitized(), _quiet(), refuse_lost_behaviour(), caches_off(model), _symbolic_len(),
            _as_on_cpu(model),
        ):  # fmt: skip
            given = call.map(_off_meta)
            program = _export(reduced, given, open_dims)
            if seen["kept"]:
                _check_kept(reduced, given, seen["kept"])
    except _TraceRefusedError as refusal:
        raise CaptureError(str(refusal)) from None
    except Exception as error:
        where = line_of(error) or "within torch"
        raise CaptureError(f"torch.export stopped {where}: {_first_line(error)}") from error
    _check(program, call, open_dims)
    return Traced(program, seen["template"], seen["num_outputs"], seen["reassigned"], ShapeGuards(program))


def trace_device(model: nn.Module, call: Call) -> torch.device:
    """Return the device that the operations of a trace name: that of the model, or the CPU if the model is on meta."""
    device = main_device(model, call)
    return torch.device("cpu") if device.type == "meta" else device


@contextlib.contextmanager
def _as_on_cpu(model: nn.Module) -> Iterator[None]:
    """Let a model on meta look as if it were on the CPU.

    Some models ask for the device of a tensor and take another branch on meta, or make tensors on the CPU, which
    cannot be combined with tensors on meta. Fake tensors have a device, but no memory.
    """
    places = tensor_places(model)
    tensors = {name: kind[key] for name, ((kind, key), *_) in places.items()}
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            made = torch.empty_like(tensor, device="cpu")
        return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    with replaced_tensors(places, {name: fake(tensor) for name, tensor in tensors.items() if tensor.is_meta}):
        yield


def _off_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return an input of the example; zeros if it is on meta."""
    return torch.zeros_like(tensor, device="cpu", requires_grad=tensor.requires_grad) if tensor.is_meta else tensor


def _export(reduced: _Reduced, call: Call, open_dims: OpenDims = ()) -> torch.export.ExportedProgram:
    """Export with an unusual batch size, so that a number in the trace that was computed from it can be recognized.

    A single symbol stands for the batch size of all inputs. torch.export rejects this if the model treats their batch
    sizes differently. The model is then traced twice with the dynamic dimensions that torch finds by itself, and both
    traces must be equal.
    """

    def export(batch_size: int, size: object) -> torch.export.ExportedProgram:
        free = open_dims or (frozenset[int](),) * len(call.tensors)
        shapes = tuple(
            dict.fromkeys(dims, torch.export.Dim.AUTO) | ({} if dim is None else {dim: size}) or None
            for dim, dims in zip(call.batch_dims, free, strict=True)
        )
        tensors = call.resized(batch_size).tensors
        with preserve_attributes(reduced.model):
            return torch.export.export(reduced, tensors, dynamic_shapes=(shapes,), strict=False)

    unusual, another = _unusual_sizes(reduced, call)
    try:
        program = export(unusual, torch.export.Dim("batch"))
        if _may_contain_batch_size(program, unusual):  # from the batch size, or a multiple by coincidence
            _check_equal(program, export(another, torch.export.Dim("batch")))
        return program
    except Exception as error:
        if "Constraints violated" not in str(error):
            raise
        small = max(3, call.batch_size)  # with two samples, [:2] would take the whole batch
        program = export(small, torch.export.Dim.AUTO)
        _check_equal(program, export(small + 1, torch.export.Dim.AUTO))
        return program


def _may_contain_batch_size(program: torch.export.ExportedProgram, unusual: int) -> bool:
    """Return whether a trace contains a multiple of the batch size with which it was made."""
    if any(number and abs(number) < 2**31 and number % unusual == 0 for _, number in _numbers(program)):
        return True
    return any(isinstance(t, torch.Tensor) and _has_multiple(t, unusual) for t in program.constants.values())


def _check_equal(program: torch.export.ExportedProgram, again: torch.export.ExportedProgram) -> None:
    """Refuse traces that were made with different batch sizes and differ: the batch size is written into them."""
    if [str(node.target) for node in program.graph.nodes] != [str(node.target) for node in again.graph.nodes]:
        raise _TraceRefusedError("forward runs different operations for different batch sizes") from None
    constants = {name: t for name, t in program.constants.items() if isinstance(t, torch.Tensor)}
    for name, tensor in constants.items():
        other = again.constants.get(name)
        if not isinstance(other, torch.Tensor) or tensor.shape != other.shape:
            raise _TraceRefusedError(f"the batch size is written into a tensor of the trace ({name})") from None
        if type(tensor) is not FakeTensor and not torch.equal(tensor, other):
            raise _TraceRefusedError(f"the batch size is written into a tensor of the trace ({name})") from None
    for (node, number), (_, other_number) in zip(_numbers(program), _numbers(again), strict=True):
        if number != other_number:
            raise _TraceRefusedError(f"the batch size is written into the trace {_where(node)}") from None


def _has_multiple(tensor: torch.Tensor, unusual: int) -> bool:
    """Return whether a small constant contains a multiple of the batch size with which the trace was made."""
    is_plain = type(tensor) is torch.Tensor and not tensor.is_meta
    if not is_plain or tensor.numel() > 64 or tensor.is_complex() or tensor.dtype == torch.bool:
        return False
    numbers = tensor.detach().double().flatten()
    return bool(((numbers != 0) & (numbers.abs() < 2**31) & (torch.remainder(numbers, unusual) == 0)).any())


def _unusual_sizes(reduced: _Reduced, call: Call) -> tuple[int, int]:
    """Return two primes that divide no dimension of the model's tensors and of its inputs, except the batch size."""
    sizes = {size for tensor in (*reduced.parameters(), *reduced.buffers()) for size in tensor.shape}
    for tensor, dim in zip(call.tensors, call.batch_dims, strict=True):
        sizes |= {size for place, size in enumerate(tensor.shape) if place != dim}
    candidates = (n for n in itertools.count(23, 2) if all(n % d for d in range(3, int(n**0.5) + 1, 2)))
    fitting = (prime for prime in candidates if not any(size and size % prime == 0 for size in sizes))
    return next(fitting), next(fitting)


def _numbers(program: torch.export.ExportedProgram) -> Iterator[tuple[torch.fx.Node, float]]:
    """Yield the numbers in a trace, each with its node."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            found: list[float] = []

            def note(argument: Any, found: list[float] = found) -> None:  # noqa: ANN401
                if type(argument) in (int, float):
                    found.append(argument)

            torch.fx.node.map_aggregate((node.args, node.kwargs), note)
            yield from ((node, number) for number in found)


def _check(program: torch.export.ExportedProgram, call: Call, open_dims: OpenDims) -> None:
    """Refuse a trace that depends on data, or is valid for only one size of the batch or of an open dimension."""
    names = set(program.graph_signature.user_inputs)
    inputs = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    for node, name, dim in zip(inputs, call.names, call.batch_dims, strict=True):
        if dim is not None and not _is_symbolic(node.meta["val"].shape[dim]):
            raise CaptureError(
                f"the trace is valid for only one batch size: it contains the size of input {name} as a number"
            )
    for node, name, dims in zip(inputs, call.names, open_dims, strict=bool(open_dims)):
        fixed = [str(dim) for dim in sorted(dims) if not _is_symbolic(node.meta["val"].shape[dim])]
        if fixed:
            raise CaptureError(f"the trace is valid for only one size of dimension {', '.join(fixed)} of {name}")
    sizes = [node.meta["val"].shape[d] for node, d in zip(inputs, call.batch_dims, strict=True) if d is not None]
    of_batch = {symbol for size in sizes for symbol in size.node.expr.free_symbols}
    for symbol, bounds in program.range_constraints.items():
        if symbol in of_batch and bounds.upper < 4096:  # higher bounds come from kernels with 32-bit indices
            raise CaptureError(f"the trace is valid only for batches of at most {bounds.upper} samples ({symbol})")
    for node in program.graph.nodes:
        if "_add_batch_dim" in str(node.target):
            raise CaptureError(f"a trace with torch.vmap cannot be cut {_where(node)}")
        if _is_unbacked(node.meta.get("val")):
            raise CaptureError(f"a shape or number depends on data {_where(node)}")


def _is_symbolic(size: object) -> bool:
    """Return whether a size may vary; it has no free symbols if the model's code turned it into a number."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


def _is_unbacked(value: object) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    items = value if isinstance(value, (list, tuple)) else [value]
    return any(
        free_unbacked_symbols(item)
        for item in items
        if isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool, torch.Tensor))
    )


def _where(node: torch.fx.Node) -> str:
    return line_of_trace(node.meta.get("stack_trace") or "")


def is_cache(thing: object) -> bool:
    """Return whether an object is a cache of keys and values, or of states; training does not use such an output."""
    name = type(thing).__name__
    return hasattr(thing, "get_seq_length") or name.endswith("Cache") or name.endswith("CacheParams")


def _attributes(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield the attributes of all modules: the full name, the own name, and the value."""
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            yield (f"{path}.{key}" if path else key), key, value


def _tensor_attributes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors in plain attributes, which are neither parameters nor buffers."""
    return {name: value for name, _, value in _attributes(model) if isinstance(value, torch.Tensor)}


def _plain_attributes(model: nn.Module) -> dict[str, object]:
    """Return the plain Python values that the modules hold; a trace would lose a change of one of them."""
    plain = (int, float, str, list, dict, set, tuple, deque)
    return {
        name: _outline(value)
        for name, key, value in _attributes(model)
        if key not in TORCH_ATTRIBUTES and isinstance(value, plain)
    }


def _outline(value: object, depth: int = 0) -> object:
    """Return plain data that shows later whether a value has changed, or whether the content of a container has."""
    if isinstance(value, dict) and depth < 2:
        return [(key, _outline(item, depth + 1)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, deque)) and depth < 2:
        return [_outline(item, depth + 1) for item in value]
    return value if isinstance(value, (int, float, str)) else id(value)


def _check_kept(reduced: _Reduced, call: Call, kept: dict[str, tuple[Any, ...]]) -> None:
    """Refuse a model whose forward replaces None by a tensor in an attribute, and reads it in the next call.

    The model is traced again with tensors in these attributes. If the trace uses one of them, it is state. Otherwise
    forward only stores a value for later in the same call, such as a loss, and the trace handles this.
    """
    model = reduced.model
    put = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype, device) in kept.items()}
    with preserve_attributes(model):
        for name, tensor in put.items():
            path, _, key = name.rpartition(".")
            vars(model.get_submodule(path))[key] = tensor
        reduced.put = frozenset(put)
        try:
            read = [id(constant) for constant in _export(reduced, call).constants.values()]
        except Exception:  # with the tensor, forward takes another branch
            read = [id(tensor) for tensor in put.values()]
    kept_on = [name for name, tensor in put.items() if id(tensor) in read]
    if kept_on:
        raise _TraceRefusedError(f"forward keeps a tensor in {', '.join(kept_on[:3])} between calls")


@contextlib.contextmanager
def _symbolic_len() -> Iterator[None]:
    """Make `len(tensor)` return the symbol of the first dimension; Python's own `len` can only return an int."""
    original = builtins.len

    def length(thing: Any) -> Any:  # noqa: ANN401
        return thing.shape[0] if isinstance(thing, torch.Tensor) and thing.dim() else original(thing)

    builtins.len = length
    try:
        yield
    finally:
        builtins.len = original


@contextlib.contextmanager
def caches_off(model: nn.Module) -> Iterator[None]:
    """Switch off caches of keys and values if the model's configuration has a switch; training does not read them."""
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in found if getattr(config, "use_cache", None) is True}
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


@contextlib.contextmanager
def refuse_lost_behaviour() -> Iterator[None]:
    """Refuse code that a trace drops: custom autograd functions, gradient hooks, and inference mode."""
    original: Callable[..., Any] = torch.autograd.Function.__dict__["apply"]

    def refuse(cls: type, /, *args: object, **kwargs: object) -> object:
        if cls.__module__.startswith("torch.") and cls.__name__ != "CheckpointFunction":
            return original.__get__(None, cls)(*args, **kwargs)
        raise _TraceRefusedError(f"{cls.__name__} is an autograd function with a custom backward")

    def refuse_hook(*_: object, **__: object) -> object:
        raise _TraceRefusedError(f"forward registers a gradient hook at {line_of_stack()}")

    def refuse_inference(mode: torch.inference_mode) -> None:
        if not is_called_by_torch():
            raise _TraceRefusedError(f"forward uses inference mode at {line_of_stack()}")
        enter(mode)

    register, enter = torch.Tensor.register_hook, torch.inference_mode.__enter__
    torch.inference_mode.__enter__ = refuse_inference  # type: ignore[method-assign]
    torch.autograd.Function.apply = classmethod(refuse)  # type: ignore[assignment,method-assign]
    torch.Tensor.register_hook = refuse_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
        torch.Tensor.register_hook = register  # type: ignore[method-assign]
        torch.inference_mode.__enter__ = enter  # type: ignore[method-assign]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's log lines and warnings during a trace, and run compiled parts of the model eagerly."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # each logger of torch has a level of its own
    try:
        silence = contextlib.redirect_stderr(io.StringIO())  # on a failure, torch prints the graph so far
        with silence, warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _first_line(error: Exception) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text if len(text) < 200 else f"{text[:197]}..."
