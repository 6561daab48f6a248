"""Empty weights: build a model whose parameters have no memory, and whose buffers have their values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def empty_weights() -> Iterator[None]:
    """Put the parameters of all modules that are built inside the block on meta; buffers keep their values.

    >>> with empty_weights():
    ...     model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    >>> model[0].weight.is_meta, model[1].running_var.is_meta
    (True, False)

    `Pipeline(model, weights=...)` then gives the parameters their values, in each process only those of its stages.
    With `torch.device("meta")` buffers have no values either. This block is for models whose buffers are not in their
    files, and that no function of the model can compute again.
    """
    handle = register_module_parameter_registration_hook(_on_meta)  # type: ignore[arg-type]  # its stub forgets results
    try:
        yield
    finally:
        handle.remove()


def _on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:  # noqa: ARG001
    if parameter is None or parameter.is_meta:  # tied parameters stay tied
        return None
    made = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made
