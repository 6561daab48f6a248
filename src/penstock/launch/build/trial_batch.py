"""Trial batch: check that the model and the data fit together, with messages in terms of the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import CaptureError, PenstockError, UsageError, error_in_short
from penstock.model.example import arguments_of
from penstock.model.source import line_of

if TYPE_CHECKING:
    from penstock.launch.config.config import Config

_MOST = 6  # maximum number of parts of a batch to show


def check_pair(config: Config, item: Any) -> None:  # noqa: ANN401 - an item of the data
    """Refuse an item that is not (batch, target) with a UsageError, if the loss takes a target."""
    if not (isinstance(item, (tuple, list)) and len(item) == 2):
        raise UsageError(
            f"data: {config.data} yields {_kind(item)}, but loss = {config.loss!r} takes a target: yield (batch, "
            f"target), or a batch alone with loss = 'model' if the model returns its loss; the first item: "
            f"{show_batch(item)}"
        )


@contextmanager
def explain_bad_batches(config: Config, model: Any, example: Any) -> Iterator[None]:  # noqa: ANN401 - as users give them
    """If capturing or measuring fails inside, call the plain model; raise a UsageError if this fails too."""
    try:
        yield
    except Exception as error:
        if isinstance(error, CaptureError) or not isinstance(error, PenstockError):
            _call(config, model, example)
        raise


def _call(config: Config, model: Any, example: Any) -> None:  # noqa: ANN401 - as users give them
    is_half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)
    try:
        args, kwargs = arguments_of(example)
        with torch.no_grad(), nullcontext() if is_half is None else torch.autocast("cpu", dtype=is_half):
            for module in model if isinstance(model, list) else [model]:
                made = module(*args, **kwargs)
                args, kwargs = made if isinstance(made, tuple) else (made,), {}
    except Exception as error:
        where = line_of(error)
        raise UsageError(
            f"the model raises on the first batch of data ({show_batch(example)}): {error_in_short(error)}"
            f"{where and ' '}{where}; this also happens without a pipeline. Check the batches of {config.data} and the"
            " model"
        ) from None


def show_batch(batch: Any) -> str:  # noqa: ANN401 - whatever the data yields
    """Return the types and shapes of a batch, without values.

    >>> show_batch((torch.zeros(2, 3), {"y": torch.zeros(2, dtype=torch.int64)}))
    '(float32 [2, 3], {y: int64 [2]})'
    """
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key}: {show_batch(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, (tuple, list)):
        few = [show_batch(part) for part in batch[:_MOST]] + (["…"] if len(batch) > _MOST else [])
        return ("({})" if isinstance(batch, tuple) else "[{}]").format(", ".join(few))
    return type(batch).__name__


def _kind(item: Any) -> str:  # noqa: ANN401 - an item of the data
    if isinstance(item, (tuple, list)):
        return f"{type(item).__name__}s of {len(item)}"
    return f"items of type {type(item).__name__}"
