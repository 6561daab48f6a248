"""Compiling: what Inductor is asked to compile, and with which of its options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from types import CodeType, FunctionType
from typing import Any, TypeVar, get_origin
from weakref import WeakValueDictionary, finalize

import torch
from torch import fx, nn

from penstock.errors import UsageError, nearest
from penstock.model.sanitizer import let_compile
from penstock.model.turns import in_turn, inductor

__all__ = ["Compile", "Options", "compiled", "options_of"]

Compile = bool | Mapping[str, Any]

_IN_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}

Run = TypeVar("Run", bound=Callable[..., Any] | None)

_numbers = count()
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


def compiled(run: Run, options: Options | None) -> Run:
    """Return what Inductor compiles when it runs first, for every shape anew; without options, what is given.

    What looks alike is compiled once, for the same options.
    """
    if options is None or run is None:
        return run
    from penstock.model.own_pass import OwnPass  # brings Inductor

    own = OwnPass(look=_look_of(run), behind=options.get("post_grad_custom_pre_pass"))
    # random operations stay operations of their own: the pass lets each say which part of the model it draws for
    wanted = {"fallback_random": True, **options, "post_grad_custom_pre_pass": own}
    apart = _apart(run, options.number)
    made: Any = in_turn(torch.compile(apart, dynamic=False, backend=inductor, options=wanted))
    if isinstance(run, nn.Module):
        made._orig_mod = run  # as torch calls it
    return made  # type: ignore[no-any-return]


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


def _apart(run: Callable[..., Any], group: int) -> Callable[..., Any]:
    """Return a function that calls what is given, with code of its own: torch counts by code.

    All modules of torch's own kinds, and all captured graphs, run by the same few lines of torch. What comes by these
    for the ninth time is no longer compiled, so of a pipeline of many stages the last ones would not be. Those of a
    group that look alike, as the stages of one pipeline, share what is compiled.
    """

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as given
        return run(*args, **kwargs)

    shared = _codes.setdefault((group, _look_of(run)), _Code(call))
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
