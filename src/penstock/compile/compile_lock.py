"""Compile lock: while one thread compiles, no other thread begins to run compiled code.

Torch records for the whole process, not per thread, that it traces. If another lane calls compiled code meanwhile,
torch takes the call for a part of the trace and refuses it. So there is one lock: a thread that compiles holds it, and
a thread that calls compiled code waits for it. Torch would compile a backward when it first runs; here the backward is
compiled together with its forward, under the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._guards import TracingContext

_REFUSED = "using FX to symbolically trace"  # a part of torch's error message


class _CompileLock:
    """The lock, and the number of compilations that have begun."""

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
