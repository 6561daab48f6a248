"""Lane values: what travels with a generation job from lane to lane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import CaptureError


@dataclass(frozen=True)
class Values:
    """What travels with a job from lane to lane.

    Args:
        tokens: the tokens to run: rows × tokens.
        form: the form of the output of the lane's last layer: whether it is a tuple, and which items are tensors.
        tensors: the tensors of this output.
        extras: the output of the encoder; or, for a probe, the figures of the lanes so far.
    """

    tokens: torch.Tensor
    form: tuple[int, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()
    extras: tuple[torch.Tensor, ...] = ()

    @property
    def value(self) -> Any:  # noqa: ANN401 - whatever the layers of the model return
        """The output of the layer."""
        if not self.form:
            return None
        tensors = iter(self.tensors)
        items = tuple(next(tensors) if is_tensor else None for is_tensor in self.form[1:])
        return items if self.form[0] else items[0]


def form_of(value: Any) -> tuple[tuple[int, ...], tuple[torch.Tensor, ...]]:  # noqa: ANN401 - of the model
    """Return the form and the tensors of the output of a layer.

    >>> form_of((torch.ones(1), None))
    ((1, 1, 0), (tensor([1.]),))

    Raises:
        CaptureError: if it is neither a tensor nor a tuple of tensors.
    """
    items = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    odd = [type(item).__name__ for item in items if item is not None and not isinstance(item, torch.Tensor)]
    if odd:
        raise CaptureError(f"generate: a decoder layer returns {', '.join(odd)}; only tensors can go to another lane")
    form = (int(isinstance(value, (tuple, list))), *(int(item is not None) for item in items))
    return form, tuple(item for item in items if item is not None)
