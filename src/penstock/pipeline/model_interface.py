"""Model interface: the methods that a pipeline has in common with its model: parameters, gradients and state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

import torch
from torch import nn

from penstock.errors import UsageError
from penstock.pipeline.planned.planned_model import PlannedModel
from penstock.pipeline.weights import Weights
from penstock.report.units import parse_bytes


class ModelInterface:
    """The parameters and buffers of the lanes in this process, under the model's own names."""

    _weights: Weights
    _planned: PlannedModel

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the lanes in this process, each once.

        Under torchrun, a lane without trainable parameters also yields an empty parameter, because torch cannot make an
        optimizer without parameters.
        """
        yield from self._weights.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the lanes in this process with their names in the model, each once."""
        yield from self._weights.named_parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, or to zero if `set_to_none` is False."""
        self._weights.zero_grad(set_to_none=set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over all stages is at most `max_norm`.

        Returns:
            the norm before the scaling.
        """
        return self._weights.clip_grad_norm_(max_norm, norm_type)

    @property
    def optimizers(self) -> Mapping[int, torch.optim.Optimizer]:
        """The optimizer of each stage, if the schedule updates weights within the step; otherwise empty."""
        return self._weights.optimizers

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of the lanes in this process, under the model's own names."""
        return self._weights.state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Load a state dict of the whole model, or the part of this lane; names of other lanes are ignored.

        Args:
            state: the state dict.
            strict: whether missing and unknown names are errors.

        Raises:
            UsageError: if the state dict does not fit the model. Nothing is copied then.
        """
        self._weights.load_state_dict(state, strict=strict)

    def save_pretrained(
        self, folder: str | PathLike[str], *, max_shard_size: float | str = "5GB", overwrite: bool = False
    ) -> Path:
        """Save the model as safetensors files with their index, and the config of a model of transformers.

        `from_pretrained`, and `weights=` of a pipeline, load the folder. Under torchrun, all processes must call this
        method; each writes the tensors of its lanes. The folder appears when it is complete.

        Args:
            folder: a new or empty folder.
            max_shard_size: the maximum bytes of a file, such as 2e9 or "5GB".
            overwrite: whether to replace a model in the folder.

        Returns:
            the folder.

        Raises:
            OutputError: if the folder cannot be written, or contains something else.
            UsageError: if a tensor cannot be stored.
        """
        try:
            most = parse_bytes(str(max_shard_size))
        except ValueError:
            most = 0.0
        if not most > 0:
            raise UsageError(f"max_shard_size: {max_shard_size!r} is not a positive number of bytes, such as '5GB'")
        return self._weights.save_pretrained(self._planned.captured.model, folder, most=most, overwrite=overwrite)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Postpone the sum of the gradients of shared parameters until the first step after this block.

        This saves communication when gradients accumulate over several steps.
        """
        with self._weights.unsynchronised():
            yield
