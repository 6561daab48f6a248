"""ModelFace: what a pipeline offers as its model does: parameters, gradients and state, by the model's own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from penstock.pipeline.weights import Weights

__all__ = ["ModelInterface"]


class ModelInterface:
    """The weights of the lanes that run here."""

    _weights: Weights

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the lanes that run here, each once.

        Under torchrun, a lane that trains none has an empty parameter beside them, so that an optimizer can be made.
        """
        yield from self._weights.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the lanes that run here under the model's own names, each once."""
        yield from self._weights.named_parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self._weights.zero_grad(set_to_none=set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over all stages is at most so much; return the norm as it was."""
        return self._weights.clip_grad_norm_(max_norm, norm_type)

    @property
    def optimizers(self) -> Mapping[int, torch.optim.Optimizer]:
        """The optimizers of stages, where the schedule updates weights within the step."""
        return self._weights.optimizers

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers of the lanes that run here, under the model's own names."""
        return self._weights.state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Load the model's own state dict, or a lane's part of it; names that other lanes hold are passed over."""
        self._weights.load_state_dict(state, strict=strict)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of parameters that several lanes hold unsummed until the first step outside."""
        with self._weights.unsynchronised():
            yield
