"""Walk: run a model's own forward with a hand on every module call and every torch function between them.

A *frame* is a call of a module whose inside is looked at; a *mark* says of a tensor where it came to be: the
how-manieth tensor of which frame, or the how-manieth output of which call. Marks are the same in every process and for
every cut, which is how stages agree on what is sent. docs/design/capture.md tells the whole story.
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

from penstock.randomness.draw_names import enter

__all__ = ["Done", "Frame", "Mark", "Walk", "tensors_in"]

# path of the module, how-manieth call of it, how-manieth tensor; outputs count from -1 down
Mark = tuple[str, int, int]


class Done(BaseException):
    """The stage has done all it has to do: the rest of the forward is for others."""


class _Around:
    """The module call that what happens now belongs to, for random numbers: looked at or not.

    What is drawn between two calls of other modules lies on one stage, wherever the model is cut. So the number of
    calls before it names it.
    """

    __slots__ = ("name", "num_calls")

    def __init__(self, name: str) -> None:
        self.name, self.num_calls = name, 0

    @property
    def place(self) -> str:
        return f"{self.name}:{self.num_calls}" if self.num_calls else self.name


@dataclass
class Frame:
    """A module call whose inside is looked at."""

    path: str
    ordinal: int
    count: int = 0
    reads: int = 0


def tensors_in(thing: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a thing of lists, tuples and dicts: what torch functions take and return."""
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
    """Keep the walks of this thread from filling holes, which something of torch's holds; return those that look."""
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
    """Let a walk see what torch.vmap returns: it is made by no torch function, so it would go unmarked.

    Done once for all threads: it asks for the walk of the thread that it runs in, and does nothing where there is none.
    """
    original = vmap._unwrap_batched
    if getattr(original, "is_seen_by_walks", False):
        return

    def unwrap(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with _no_filling() as walks:
            result = original(*args, **kwargs)
        for walk in walks:
            with walk.switched(on=False):  # vmap still holds its results, so that no hole may be filled yet
                walk.mark_results(result)
        return result

    unwrap.is_seen_by_walks = True  # type: ignore[attr-defined]
    vmap._unwrap_batched = unwrap


def _mark_what_functions_return() -> None:
    """Let a walk see what an autograd function returns, which need not be the tensor that its forward made."""
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
    """One run of a model's forward, looked at. Subclasses say what happens to calls and functions."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []
        self.around = _Around("")
        self.ordinals: dict[str, int] = {}
        self._is_off = False
        self._is_whole = False
        self.depth_of_functions = 0  # how many autograd functions, or ends of a vmap, are running
        _mark_what_vmap_returns()
        _mark_what_functions_return()
        self._token = object()  # tells this walk's marks from those that an earlier one left on buffers

    @property
    def is_looking(self) -> bool:
        """Whether torch functions are looked at now."""
        return not self._is_off and bool(self.frames)

    def marks_of(self, tensor: torch.Tensor) -> list[Mark]:
        """Return where a tensor came to be, and from where else it was handed on; nothing if this walk does not know.

        Some functions return now a new tensor and now the one they got (`contiguous`, `to`, `reshape`), and not always
        the same on data and on holes: so what is handed on gets the mark that a new tensor would get, besides its own.
        """
        token, marks = tensor.__dict__.get("_penstock_marks", (None, []))
        return marks if token is self._token else []

    def set_marks(self, tensor: torch.Tensor, marks: list[Mark]) -> None:
        """Write on a tensor where it came to be."""
        tensor.__dict__["_penstock_marks"] = (self._token, marks)

    def on_call(
        self, path: str, ordinal: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:  # noqa: ANN401
        """Do what is to be done for the call of a module."""
        raise NotImplementedError

    def on_function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Do what is to be done for a torch function between module calls."""
        raise NotImplementedError

    def on_marked(self, tensor: torch.Tensor, mark: Mark) -> None:
        """Learn of a tensor that has come to be, or that has got one more mark."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if self._is_off:
            return function(*args, **(kwargs or {}))
        return self.on_function(function, args, kwargs or {})

    @contextmanager
    def watching(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Have a hand on the calls of some modules, by path, for as long as this lasts."""
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

    def _called(self, path: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        ordinal = self.ordinals.get(path, 0)
        self.ordinals[path] = ordinal + 1  # counted also where nobody looks, so that all stages count alike
        outer = self.around
        self.around = _Around(f"{path}#{ordinal}")
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

    def whole(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Make a call without a look at its inside."""
        self._is_whole = True
        try:
            return call(*args, **kwargs)
        finally:
            self._is_whole = False

    def inside(
        self, path: str, ordinal: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:  # noqa: ANN401
        """Make a call and look at its inside; what it returns and did not get is marked as its output."""
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
        from penstock.model.structure import flatten

        tensors, _ = flatten(result)
        for index, tensor in enumerate(tensors):
            self.mark(tensor, (path, ordinal, -1 - index))
        return tensors

    def mark_results(self, result: object) -> None:
        """Mark what a torch function has returned as the next tensors of the frame."""
        frame = self.frames[-1]
        for tensor in tensors_in(result):
            is_inner = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # inside of vmap: never leaves it
            if not isinstance(tensor, nn.Parameter) and not is_inner:
                self.mark(tensor, (frame.path, frame.ordinal, frame.count))
            frame.count += 1

    def mark(self, tensor: torch.Tensor, mark: Mark) -> None:
        """Write on a tensor where it came to be, or from where it was handed on."""
        self.set_marks(tensor, [*self.marks_of(tensor), mark])
        self.on_marked(tensor, mark)

    @contextmanager
    def switched(self, *, on: bool) -> Iterator[None]:
        """Look at torch functions, or do not; where this is the innermost mode it costs nothing when off."""
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
