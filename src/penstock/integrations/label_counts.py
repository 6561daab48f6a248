"""Label counts: how many labels the loss of a model of transformers averages over, and whether it takes the number."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from penstock.runtime.loss_weights import IGNORED


def uses_num_items(model: nn.Module) -> bool:
    """Return whether a model divides its loss by `num_items_in_batch`.

    The Trainer passes the number to every model that accepts any keyword. Only the models that pass their keywords on
    to `loss_function` use it.
    """
    code = inspect.unwrap(type(_base(model)).forward).__code__
    return "loss_function" in code.co_names and bool(code.co_flags & inspect.CO_VARKEYWORDS)


def shifts_labels(model: nn.Module) -> bool:
    """Return whether the loss of a model leaves out the first label of each row, as causal language models do."""
    base = _base(model)
    is_encoder_decoder = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    return uses_num_items(base) and base.loss_function is ForCausalLMLoss and not is_encoder_decoder


def count_labels(inputs: Mapping[str, Any], *, is_shifted: bool) -> int:
    """Return the number of labels of a batch that are not ignored.

    >>> import torch
    >>> count_labels({"labels": torch.tensor([[1, 2, -100]])}, is_shifted=True)
    1
    """
    labels = inputs.get("shift_labels")
    if labels is None:
        labels = inputs["labels"][..., 1:] if is_shifted else inputs["labels"]
    return int((labels != IGNORED).sum())


def _base(model: nn.Module) -> Any:
    """Return the model inside of a peft model."""
    get = getattr(model, "get_base_model", None)
    return model if get is None else get()
