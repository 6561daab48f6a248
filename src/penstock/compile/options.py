"""Compiling: what Inductor is asked to compile, and with which of its options."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from types import CodeType, FunctionType
from typing import Any, TypeVar, get_origin
from weakref import WeakValueDictionary, finalize

import torch
from torch import fx, nn

from penstock.compile.compile_lock import in_turn, inductor
from penstock.devices.sanitizer import let_compile
from penstock.errors import PenstockError, UsageError, nearest

__all__ = ["Compile", "GroupError", "Options", "compiled", "options_of"]

Compile = bool | Mapping[str, Any]

_IN_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


class _Thread(threading.local):
    """Whether torch's limit of variants was raised in this thread: its settings are each thread's own."""

    is_set = False


# batches of many lengths: what comes in more shapes runs as it is, and draws other numbers than what is compiled
_thread = _Thread()

Run = TypeVar("Run", bound=Callable[..., Any] | None)

_numbers = count()
_MOST_VARIANTS = 64  # shapes, and stages that look alike, for which a program is compiled
_PLAIN = (bool, int, float, str)


class Options(dict[str, Any]):
    """What one pipeline, or one graph, is compiled with; each has its number."""

    def __init__(self, given: Mapping[str, Any] = {}) -> None:
        super().__init__(given)
        self.number = next(_numbers)


def options_of(compile: object) -> Options | None:  # noqa: A002 - as torch calls it
    """Return the options that Inductor compiles with; None where nothing is compiled.

    >>> options_of(True), options_of(False)
    ({}, None)

    Raises:
        UsageError: for what is neither True nor False nor options of Inductor.
    """
    let_compile()  # here, for stages may run first in other threads
    if isinstance(compile, bool):
        return Options() if compile else None
    if not isinstance(compile, Mapping):
        raise UsageError(f"compile: {compile!r:.40} is neither True nor False nor a dict of options for Inductor")
    from torch._inductor import config, list_options  # takes a second

    known = list_options()
    found = dict(_by_full_names(compile, known))
    for name, value in found.items():
        if str(name).replace("-", "_") not in known:
            raise UsageError(f"compile: Inductor has no option {name!r:.60}.{nearest(str(name), known)}")
        kind = config.get_type(name.replace("-", "_"))  # type: ignore[attr-defined]
        if get_origin(kind) is None and not isinstance(value, kind):  # of others torch itself takes what is given
            raise UsageError(f"compile: {name} must be {_IN_WORDS.get(kind, kind.__name__)}; given: {value!r:.60}")
    if found.get("fallback_random", True) is False:
        raise UsageError(
            "compile: fallback_random must stay True, for random numbers must not follow the cuts; leave it out"
        )
    if found.get("triton.cudagraphs"):
        raise UsageError("compile: triton.cudagraphs would capture graphs within ours; leave it out, graphs= has ours")
    return Options(found)


def _by_full_names(options: Mapping[str, Any], known: Sequence[str], group: str = "") -> Iterator[tuple[str, Any]]:
    """Yield options by Inductor's own names: those of a group may be a table of their own, as in TOML."""
    for word, value in options.items():
        name = f"{group}{word}" if group else word
        if isinstance(value, Mapping) and any(other.startswith(f"{name}.") for other in known):
            yield from _by_full_names(value, known, f"{name}.")
        else:
            yield name, value


def compiled(run: Run, options: Options | None, *, is_group: bool = False) -> Run:
    """Return what Inductor compiles when it runs first, for every shape anew; without options, what is given.

    What looks alike is compiled once, for the same options.

    Args:
        run: a function or a module.
        options: of Inductor.
        is_group: it is several modules in one; where they cannot be one graph, or draw, the call raises GroupError.
    """
    if options is None or run is None:
        return run
    from penstock.compile.passes import OwnPass  # brings Inductor

    look = f"group {_look_of(run)}" if is_group else _look_of(run)
    own = OwnPass(look, may_draw=not is_group, behind=options.get("post_grad_custom_pre_pass"))
    # random operations stay operations of their own: the pass lets each say which part of the model it draws for
    wanted = {**options, "fallback_random": True, "post_grad_custom_pre_pass": own}
    apart = _apart(run, options.number, look)
    made: Any = torch.compile(apart, dynamic=False, fullgraph=is_group, backend=inductor, options=wanted)
    made = in_turn(_unwrapped(made, is_group=is_group))
    if isinstance(run, nn.Module):
        made._orig_mod = run  # as torch calls it
    return made  # type: ignore[no-any-return]


class GroupError(Exception):
    """Several modules cannot be compiled as one; nothing of them has run."""


def _unwrapped(run: Callable[..., Any], *, is_group: bool) -> Callable[..., Any]:
    """Return a function that calls compiled code, and raises our own errors as they are."""
    from torch._dynamo import config
    from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, Unsupported

    from penstock.randomness.placed_draws import DrawsError

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as given
        if not _thread.is_set:
            config.recompile_limit = max(config.recompile_limit, _MOST_VARIANTS)
            _thread.is_set = True
        try:
            return run(*args, **kwargs)
        except (Unsupported, FailOnRecompileLimitHit) as error:
            if is_group:
                raise GroupError from error
            raise
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, DrawsError):
                raise GroupError from error
            if isinstance(error.inner_exception, PenstockError):
                raise error.inner_exception from None
            raise

    return call


class _Code:
    """A code object that functions of ours share; when the last of them goes, so does what torch compiled for it."""

    def __init__(self, of: Callable[..., Any]) -> None:
        self.code: CodeType = of.__code__.replace()
        finalize(self, _forget, self.code).atexit = False


_codes: WeakValueDictionary[tuple[int, str], _Code] = WeakValueDictionary()


def _forget(code: CodeType) -> None:
    """Let go of what torch compiled: it holds the code, and the code what was compiled, unseen by the collector."""
    from torch._dynamo.eval_frame import reset_code  # type: ignore[attr-defined]

    reset_code(code)


def _apart(run: Callable[..., Any], group: int, look: str) -> Callable[..., Any]:
    """Return a function that calls what is given, with code of its own: torch counts by code.

    All modules of torch's own kinds, and all captured graphs, run by the same few lines of torch. What comes by these
    for the ninth time is no longer compiled, so of a pipeline of many stages the last ones would not be. Those of a
    group that look alike, as the stages of one pipeline, share what is compiled.
    """

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as given
        return run(*args, **kwargs)

    shared = _codes.setdefault((group, look), _Code(call))
    made = FunctionType(shared.code, call.__globals__, call.__name__, None, call.__closure__)
    made._shared = shared  # type: ignore[attr-defined]  # lives as long
    return made


def _look_of(run: Callable[..., Any]) -> str:
    """Return what tells apart what is compiled in different ways, as far as it can be seen from outside.

    Torch compiles anew for each number or text that a module has and uses, such as the number of its layer.
    """
    if isinstance(run, fx.GraphModule):
        return f"graph: {run.code}"
    if not isinstance(run, nn.Module):
        return f"{type(run).__qualname__} {id(run)}"
    plain = [
        (name, sorted((key, value) for key, value in vars(module).items() if isinstance(value, _PLAIN)))
        for name, module in run.named_modules()
    ]
    return f"{[type(module).__qualname__ for module in run.modules()]} {plain}"
