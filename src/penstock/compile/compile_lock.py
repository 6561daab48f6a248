"""Turns: while one thread compiles, no other begins to run what was compiled.

Torch notes for the whole process, not for a thread, that it traces. Compiled code that is called meanwhile, by another
lane, is taken for a part of the trace and refused. So there is one lock: who compiles has it, and who calls waits for
it. Torch would compile a backward when it is first run; here it is compiled together with its forward, within the turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._guards import TracingContext

__all__ = ["in_turn", "inductor"]

_REFUSED = "using FX to symbolically trace"  # a part of what torch says then


class _Turns:
    """The lock, and how often somebody has begun to compile."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # what is compiled may itself call what was
        self.num_begun = 0


_turns = _Turns()


def inductor(graph: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile a graph and its backward, as a backend of torch.compile that is called with options of Inductor."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    patches = {name.replace("-", "_"): value for name, value in options.items()}
    with _turns.lock, config.patch(force_non_lazy_backward_lowering=True):
        _turns.num_begun += 1
        made: Any = compile_fx(graph, inputs, inner_compile=_without_donations, config_patches=patches)
        return made  # type: ignore[no-any-return]


def _without_donations(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:  # noqa: ANN401 - torch's
    """Compile a forward or a backward as Inductor does, so that the backward may run twice.

    Inductor lets a backward overwrite what its forward saved, unless the first backward keeps its graph; and it refuses
    to keep the graph later. That first backward is yet to come here, and hooks of the user's may keep it.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    donated: list[int] | None = getattr(metadata, "bw_donated_idxs", None)
    if donated:
        donated.clear()  # in place: torch has the list in two places
    return compile_fx_inner(graph, inputs, **options)


def in_turn(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs compiled code when nobody else compiles."""

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as given
        while True:
            with _turns.lock:
                num_begun = _turns.num_begun
            try:
                return run(*args, **kwargs)
            except RuntimeError as error:
                # it is said before anything has run; unless somebody began in between, it is so
                if _REFUSED not in str(error) or _turns.num_begun == num_begun:
                    raise

    return call
