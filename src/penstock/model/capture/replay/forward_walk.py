"""Forward walk: run a model's own forward, and intercept every module call and every torch function between them.

A *frame* is a module call that the walk looks into. A *mark* is the name of a tensor: a module call, and a number that
counts the tensors made in this call, or its outputs. Marks are the same in every process and for every cut, so that the
stages agree on the tensors that they send. See docs/design/capture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._functorch import vmap
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from penstock.model.structure import flatten
from penstock.randomness.draw_names import enter

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
ModuleCall = tuple[str, int]  # the path of the module, and the ordinal of the call: 0 for its first call, and so on

# the path of the module, the ordinal of the call, the number of the tensor; outputs have the numbers -1, -2, ...
Mark = tuple[str, int, int]


class Done(BaseException):
    """The signal that a stage is done; later stages run the rest of the forward."""


class _DrawPlace:
    """The module call to which the current code belongs; names the places that draw random numbers.

    Code between two calls of submodules lies on a single stage for every choice of cuts. So its name is the module call
    and the number of submodule calls before it.
    """

    __slots__ = ("name", "num_calls")

    def __init__(self, name: str) -> None:
        self.name, self.num_calls = name, 0

    @property
    def place(self) -> str:
        return f"{self.name}:{self.num_calls}" if self.num_calls else self.name


@dataclass
class Frame:
    """A module call that the walk looks into; `count` and `reads` count its tensors and its reads of data."""

    path: str
    ordinal: int
    count: int = 0
    reads: int = 0


def tensors_in(thing: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dicts, the structures that torch functions take and return."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, (list, tuple)):
        for item in thing:
            yield from tensors_in(item)
    elif isinstance(thing, dict):
        for item in thing.values():
            yield from tensors_in(item)


@contextmanager
def _no_filling() -> Iterator[list[Walk]]:
    """Stop the walks of this thread from filling holes while torch refers to them; return the active walks."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    walks = [walk for walk in stack if isinstance(walk, Walk) and walk.is_looking]
    for walk in walks:
        walk.depth_of_functions += 1
    try:
        yield walks
    finally:
        for walk in walks:
            walk.depth_of_functions -= 1


def _mark_what_vmap_returns() -> None:
    """Make walks mark the results of torch.vmap, which no torch function returns.

    This wraps a function of torch once for all threads. The wrapper finds the walks of its own thread, and does nothing
    if there are none.
    """
    original = vmap._unwrap_batched
    if getattr(original, "is_seen_by_walks", False):
        return

    def unwrap(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with _no_filling() as walks:
            result = original(*args, **kwargs)
        for walk in walks:
            with walk.switched(on=False):  # vmap still refers to its results, so holes stay empty
                walk.mark_results(result)
        return result

    unwrap.is_seen_by_walks = True  # type: ignore[attr-defined]
    vmap._unwrap_batched = unwrap


def _mark_what_functions_return() -> None:
    """Make walks mark the results of autograd functions, which may be other tensors than their forwards returned."""
    original: Any = torch.autograd.Function.__dict__["apply"]
    if getattr(original, "is_seen_by_walks", False) or getattr(original.__func__, "is_seen_by_walks", False):
        return

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with _no_filling() as walks:
            result = original.__get__(None, cls)(*args, **kwargs)
        for walk in walks:
            walk.mark_results(result)
        return result

    apply.is_seen_by_walks = True  # type: ignore[attr-defined]
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]


class Walk(TorchFunctionMode):
    """One run of a model's forward, observed; subclasses define the handling of module calls and torch functions."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []
        self.around = _DrawPlace("")
        self.ordinals: dict[str, int] = {}
        self._is_off = False
        self._is_whole = False
        self.depth_of_functions = 0  # running autograd functions and unwrappings of vmap
        _mark_what_vmap_returns()
        _mark_what_functions_return()
        self._token = object()  # identifies the marks of this walk; buffers may have marks of earlier walks

    @property
    def is_looking(self) -> bool:
        """Whether the walk handles torch functions now."""
        return not self._is_off and bool(self.frames)

    def marks_of(self, tensor: torch.Tensor) -> list[Mark]:
        """Return the marks of a tensor; empty if this walk has not marked it.

        Some functions (`contiguous`, `to`, `reshape`) return either a new tensor or their argument, and can differ
        between data and holes. So a returned argument also gets the mark that a new tensor would get.
        """
        token, marks = tensor.__dict__.get("_penstock_marks", (None, []))
        return marks if token is self._token else []

    def set_marks(self, tensor: torch.Tensor, marks: list[Mark]) -> None:
        """Set the marks of a tensor."""
        tensor.__dict__["_penstock_marks"] = (self._token, marks)

    def on_call(self, path: str, ordinal: int, call: Function, args: Args, kwargs: Kwargs) -> Any:  # noqa: ANN401
        """Handle the call of a module; return its result."""
        raise NotImplementedError

    def on_function(self, function: Function, args: Args, kwargs: Kwargs) -> Any:  # noqa: ANN401
        """Handle a torch function between module calls; return its result."""
        raise NotImplementedError

    def on_marked(self, tensor: torch.Tensor, mark: Mark) -> None:
        """Handle a tensor that has got a mark."""

    def __torch_function__(self, function: Function, _: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:  # noqa: ANN401
        if self._is_off:
            return function(*args, **(kwargs or {}))
        return self.on_function(function, args, kwargs or {})

    @contextmanager
    def watching(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Temporarily intercept the calls of these modules, and all torch functions."""
        before = {path: module._compiled_call_impl for path, module in modules.items()}
        for path, module in modules.items():
            original = before[path] or module._call_impl
            vars(module)["_compiled_call_impl"] = partial(self._called, path, original)
        try:
            with self:
                yield
        finally:
            for path, module in modules.items():
                vars(module)["_compiled_call_impl"] = before[path]

    def _called(self, path: str, call: Function, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        ordinal = self.ordinals.get(path, 0)
        self.ordinals[path] = ordinal + 1  # also counted inside whole calls: all stages count alike
        outer = self.around
        self.around = _DrawPlace(f"{path}#{ordinal}")
        enter(self.around.place)
        try:
            if self._is_whole:
                return call(*args, **kwargs)
            with self.switched(on=False):
                return self.on_call(path, ordinal, call, args, kwargs)
        finally:
            outer.num_calls += 1
            self.around = outer
            enter(outer.place)

    def whole(self, call: Function, args: Args, kwargs: Kwargs) -> Any:  # noqa: ANN401
        """Make a call without looking into it."""
        self._is_whole = True
        try:
            return call(*args, **kwargs)
        finally:
            self._is_whole = False

    def inside(self, path: str, ordinal: int, call: Function, args: Args, kwargs: Kwargs) -> Any:  # noqa: ANN401
        """Make a call and look into it; mark the tensors that it returns as its outputs."""
        self.frames.append(Frame(path, ordinal))
        try:
            with self.switched(on=True):
                result = call(*args, **kwargs)
        finally:
            self.frames.pop()
        self.mark_outputs(result, path, ordinal)
        return result

    def mark_outputs(self, result: object, path: str, ordinal: int) -> list[torch.Tensor]:
        """Mark the tensors that a call returns as its outputs; return them."""
        tensors, _ = flatten(result)
        for index, tensor in enumerate(tensors):
            self.mark(tensor, (path, ordinal, -1 - index))
        return tensors

    def mark_results(self, result: object) -> None:
        """Mark the tensors that a torch function returned as the next tensors of the frame."""
        frame = self.frames[-1]
        for tensor in tensors_in(result):
            is_inner = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # exists only inside vmap
            if not isinstance(tensor, nn.Parameter) and not is_inner:
                self.mark(tensor, (frame.path, frame.ordinal, frame.count))
            frame.count += 1

    def mark(self, tensor: torch.Tensor, mark: Mark) -> None:
        """Add a mark to a tensor."""
        self.set_marks(tensor, [*self.marks_of(tensor), mark])
        self.on_marked(tensor, mark)

    @contextmanager
    def switched(self, *, on: bool) -> Iterator[None]:
        """Switch the handling of torch functions on or off; off costs nothing if this is the innermost mode."""
        was_off = self._is_off
        self._is_off = not on
        can_pop = not on and not was_off and _get_current_function_mode() is self  # type: ignore[no-untyped-call]
        if can_pop:
            _pop_mode()  # type: ignore[no-untyped-call]
        must_push = on and was_off and not self._is_pushed()
        if must_push:
            _push_mode(self)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if can_pop:
                _push_mode(self)  # type: ignore[no-untyped-call]
            if must_push:
                _pop_mode()  # type: ignore[no-untyped-call]
            self._is_off = was_off

    def _is_pushed(self) -> bool:
        stack: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        return any(mode is self for mode in stack)
