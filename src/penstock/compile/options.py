"""Compile options: the options of `compile=`, the functions that Inductor compiles with them, and their lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from types import CodeType, FunctionType
from typing import Any, TypeVar, get_origin
from weakref import WeakValueDictionary, finalize

import torch
from torch import fx, nn
from torch._guards import TracingContext

from penstock.devices.sanitizer import let_compile
from penstock.errors import PenstockError, UsageError, nearest

Compile = bool | Mapping[str, Any]

_IN_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a string"}


class _Thread(threading.local):
    """Whether torch's limit of variants was raised in this thread; torch keeps its settings per thread."""

    is_set = False


# raised for batches of many lengths: beyond the limit, code runs uncompiled and draws other random numbers
_thread = _Thread()

Run = TypeVar("Run", bound=Callable[..., Any] | None)

_numbers = count()
_MOST_VARIANTS = 64  # of one program, for different shapes and for stages that look alike
_PLAIN = (bool, int, float, str)
_REFUSED = "using FX to symbolically trace"  # a part of torch's error message


class Options(dict[str, Any]):
    """The options with which one pipeline or one graph is compiled; each object has its own number."""

    def __init__(self, given: Mapping[str, Any] = {}) -> None:
        super().__init__(given)
        self.number = next(_numbers)


def options_of(compile: object) -> Options | None:  # noqa: A002 - as torch calls it
    """Return the options that Inductor compiles with; None if nothing is compiled.

    >>> options_of(True), options_of(False)
    ({}, None)

    Raises:
        UsageError: if the argument is neither True nor False nor options of Inductor.
    """
    let_compile()  # called here, because stages may first run in other threads
    if isinstance(compile, bool):
        return Options() if compile else None
    if not isinstance(compile, Mapping):
        raise UsageError(f"compile: {compile!r:.40} is neither True nor False nor a dict of options for Inductor")
    from torch._inductor import config, list_options  # this import takes a second

    known = list_options()
    found = dict(_by_full_names(compile, known))
    for name, value in found.items():
        if str(name).replace("-", "_") not in known:
            raise UsageError(f"compile: Inductor has no option {name!r:.60}.{nearest(str(name), known)}")
        kind = config.get_type(name.replace("-", "_"))  # type: ignore[attr-defined]
        if get_origin(kind) is None and not isinstance(value, kind):  # torch accepts any value for other types
            raise UsageError(f"compile: {name} must be {_IN_WORDS.get(kind, kind.__name__)}; given: {value!r:.60}")
    if found.get("fallback_random", True) is False:
        raise UsageError(
            "compile: fallback_random must stay True, because random numbers must not depend on the cuts; leave it out"
        )
    if found.get("triton.cudagraphs"):
        raise UsageError("compile: triton.cudagraphs conflicts with the CUDA graphs of Penstock; pass graphs= instead")
    return Options(found)


def _by_full_names(options: Mapping[str, Any], known: Sequence[str], group: str = "") -> Iterator[tuple[str, Any]]:
    """Yield options with Inductor's full names; the options of a group may be a nested table, as in TOML."""
    for word, value in options.items():
        name = f"{group}{word}" if group else word
        if isinstance(value, Mapping) and any(other.startswith(f"{name}.") for other in known):
            yield from _by_full_names(value, known, f"{name}.")
        else:
            yield name, value


def compiled(run: Run, options: Options | None, *, is_group: bool = False) -> Run:
    """Return a function that Inductor compiles at the first call with each shape; without options, return `run` itself.

    Functions that look alike are compiled once for the same options.

    Args:
        run: a function or a module.
        options: the options of Inductor.
        is_group: whether `run` is several modules in one. The call raises GroupError if they cannot be one graph, or if
            they draw random numbers.
    """
    if options is None or run is None:
        return run
    from penstock.compile.passes import OwnPass  # imports Inductor

    look = f"group {_look_of(run)}" if is_group else _look_of(run)
    own = OwnPass(look, may_draw=not is_group, behind=options.get("post_grad_custom_pre_pass"))
    # random operations stay separate operations: the pass gives each the part of the model that it draws for
    wanted = {**options, "fallback_random": True, "post_grad_custom_pre_pass": own}
    apart = _apart(run, options.number, look)
    made: Any = torch.compile(apart, dynamic=False, fullgraph=is_group, backend=inductor, options=wanted)
    made = with_compile_lock(_unwrapped(made, is_group=is_group))
    if isinstance(run, nn.Module):
        made._orig_mod = run  # as torch calls it
    return made  # type: ignore[no-any-return]


class GroupError(Exception):
    """Several modules cannot be compiled as one graph; none of them has run."""


def _unwrapped(run: Callable[..., Any], *, is_group: bool) -> Callable[..., Any]:
    """Return a function that calls compiled code, and raises Penstock's own errors without torch's wrappers."""
    from torch._dynamo import config
    from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, Unsupported

    from penstock.randomness.placed_draws import UnplacedDrawError

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
            if isinstance(error.inner_exception, UnplacedDrawError):
                raise GroupError from error
            if isinstance(error.inner_exception, PenstockError):
                raise error.inner_exception from None
            raise

    return call


class _Code:
    """A code object that several functions share; when the last of them is deleted, torch's compiled code is freed."""

    def __init__(self, of: Callable[..., Any]) -> None:
        self.code: CodeType = of.__code__.replace()
        finalize(self, _forget, self.code).atexit = False


_codes: WeakValueDictionary[tuple[int, str], _Code] = WeakValueDictionary()


def _forget(code: CodeType) -> None:
    """Free torch's compiled code. It and the code object hold each other, which the garbage collector does not see."""
    from torch._dynamo.eval_frame import reset_code  # type: ignore[attr-defined]

    reset_code(code)


def _apart(run: Callable[..., Any], group: int, look: str) -> Callable[..., Any]:
    """Return a function that calls `run` with its own code object: torch counts compilations per code object.

    All modules of torch's own classes, and all captured graphs, run through the same few lines of torch. Torch does not
    compile the ninth variant of these lines, so the last of many stages would not be compiled. Functions of one group
    that look alike, such as the stages of one pipeline, share their compiled code.
    """

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as given
        return run(*args, **kwargs)

    shared = _codes.setdefault((group, look), _Code(call))
    made = FunctionType(shared.code, call.__globals__, call.__name__, None, call.__closure__)
    made._shared = shared  # type: ignore[attr-defined]  # keeps it alive as long
    return made


def _look_of(run: Callable[..., Any]) -> str:
    """Return a string that differs for functions that torch compiles differently, as far as visible from outside.

    Torch compiles again for each number or string that a module has and uses, such as the number of its layer.
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


class _CompileLock:
    """The lock, and the number of compilations that have begun.

    While one thread compiles, no other thread begins to run compiled code. Torch records for the whole process, not per
    thread, that it traces. If another lane calls compiled code meanwhile, torch takes the call for a part of the trace
    and refuses it. So a thread that compiles holds the lock, and a thread that calls compiled code waits for it. Torch
    would compile a backward when it first runs; here the backward is compiled together with its forward, under the
    lock.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # code being compiled may call compiled code
        self.num_begun = 0


_turns = _CompileLock()


def inductor(graph: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile a graph and its backward; this is a backend of torch.compile that takes Inductor's options."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    patches = {name.replace("-", "_"): value for name, value in options.items()}
    with _turns.lock, config.patch(force_non_lazy_backward_lowering=True):
        _turns.num_begun += 1
        made: Any = compile_fx(graph, inputs, inner_compile=_without_donations, config_patches=patches)
        return made  # type: ignore[no-any-return]


def _without_donations(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:  # noqa: ANN401 - torch's
    """Compile a forward or a backward as Inductor does, but so that the backward can run twice.

    Inductor lets a backward overwrite saved tensors, unless the first backward keeps its graph. Later backwards must
    then not keep it. Here no backward has run yet, and hooks of the user may keep the graph, so nothing is overwritten.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    donated: list[int] | None = getattr(metadata, "bw_donated_idxs", None)
    if donated:
        donated.clear()  # in place: torch has the list in two places
    return compile_fx_inner(graph, inputs, **options)


def with_compile_lock(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs compiled code while no other thread compiles."""

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as given
        while True:
            with _turns.lock:
                num_begun = _turns.num_begun
            try:
                return run(*args, **kwargs)
            except RuntimeError as error:
                # torch refuses before anything has run, so call again if a compilation began in between
                if _REFUSED not in str(error) or _turns.num_begun == num_begun:
                    raise

    return call
