"""Prompt reader: the prompts of a call, in any form, as one tensor of tokens each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from penstock.errors import UsageError

_FORMS = "pass a list of lists of token numbers or of 1-D tensors, a 2-D tensor, or what a tokenizer returns"


def read_prompts(prompts: Any, model: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - any form
    """Yield the tokens of each prompt, without padding.

    Raises:
        UsageError: if a prompt is not a list of token numbers, or is empty.
    """
    mask = None
    if isinstance(prompts, Mapping):
        if "input_ids" not in prompts:
            raise UsageError(f"prompts: the mapping has no input_ids; {_FORMS}")
        prompts, mask = prompts["input_ids"], prompts.get("attention_mask")
    if isinstance(prompts, torch.Tensor):
        prompts = _rows_of(prompts, mask, model)
    elif mask is not None:
        prompts = _masked(prompts, mask)
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise UsageError(f"prompts: {type(prompts).__name__} is not a list of prompts; {_FORMS}")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return (_tokens(number, prompt, vocabulary) for number, prompt in enumerate(prompts))


def num_prompts(prompts: Any) -> int | None:  # noqa: ANN401 - any form
    """Return the number of prompts; None if it is unknown."""
    if isinstance(prompts, Mapping):
        prompts = prompts.get("input_ids", ())
    return len(prompts) if hasattr(prompts, "__len__") else None


def _rows_of(prompts: torch.Tensor, mask: Any, model: Any) -> list[torch.Tensor]:  # noqa: ANN401 - of a tokenizer
    """Return the rows of a 2-D tensor without padding; without a mask, pad tokens are padding, as in `generate`."""
    if prompts.dim() != 2:
        raise UsageError(f"prompts: a tensor with {prompts.dim()} dimensions; {_FORMS}")
    if mask is None:
        config = model.generation_config
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        pad = config.pad_token_id
        if pad is None or pad in ends:
            return list(prompts)
        mask = prompts != pad
    return list(_masked(prompts, mask))


def _masked(prompts: Iterable[Any], mask: Iterable[Any]) -> Iterator[torch.Tensor]:
    for prompt, row in zip(prompts, mask, strict=True):
        yield torch.as_tensor(prompt)[torch.as_tensor(row).bool()]


def _tokens(number: int, prompt: Any, vocabulary: int) -> torch.Tensor:  # noqa: ANN401 - any form
    """Return one prompt as a tensor of tokens."""
    try:
        if isinstance(prompt, (str, bytes)):
            raise TypeError
        tokens = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"prompt {number}: {prompt!r:.60} is not a list of token numbers; {_FORMS}") from None
    if tokens.dim() != 1 or (tokens.numel() and (tokens.is_floating_point() or tokens.dtype == torch.bool)):
        raise UsageError(f"prompt {number}: {prompt!r:.60} is not a list of token numbers; {_FORMS}")
    if not tokens.numel():
        raise UsageError(f"prompt {number}: it is empty; give at least one token")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise UsageError(
            f"prompt {number}: token {int(tokens.min() if tokens.min() < 0 else tokens.max())} is not in the "
            f"vocabulary, which has {vocabulary} tokens"
        )
    return tokens.to(torch.int64)
