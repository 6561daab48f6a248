"""Validating: the mean loss of a pipeline over data that it does not learn from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError
from penstock.training.stepper import mean_metrics

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline
    from penstock.training.batch_items import Items

__all__ = ["validate"]


def validate(
    pipe: Pipeline, data: Iterable[Any], items: Items, why_to_end: Callable[[], str | None]
) -> tuple[float, dict[str, float], int] | str:
    """Return the mean loss and metrics, a sample counting once, and how many samples there were; or why it was ended.

    Args:
        pipe: the pipeline.
        data: the batches.
        items: how they are split.
        why_to_end: is asked before each batch; a long validation must not use up what a scheduler gives for the
            checkpoint.

    Raises:
        UsageError: when there are no batches.
    """
    total, count, found = 0.0, 0, []
    for item in data:
        if told := why_to_end():
            return told
        call = items.split(item)
        size = max(1, pipe.num_samples(call[0]))
        loss, metrics = pipe.evaluate(*call, metrics=True)
        total, count = total + size * float(loss), count + size
        found.append((size, metrics))
    if not count:
        raise UsageError("validation: it has no batches; what can be iterated over once has none the second time")
    return total / count, mean_metrics(found), count
