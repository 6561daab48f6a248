"""Validation: the mean loss of a pipeline over data that it does not train on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError
from penstock.training.stepper import mean_metrics

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline
    from penstock.training.batch_items import ItemReader


def validate(
    pipe: Pipeline, data: Iterable[Any], items: ItemReader, why_to_end: Callable[[], str | None]
) -> tuple[float, dict[str, float], int] | str:
    """Return the mean loss and metrics per sample and the number of samples; or the reason for an early end.

    Args:
        pipe: the pipeline.
        data: the batches.
        items: reads the items.
        why_to_end: called before each batch; returns a reason to end. A long validation must not use up the time that a
            job scheduler leaves for the checkpoint.

    Raises:
        UsageError: if there are no batches.
    """
    total, count, found = 0.0, 0, []
    for item in data:
        if reason := why_to_end():
            return reason
        call = items.split(item)
        size = max(1, pipe.num_samples(call[0]))
        loss, metrics = pipe.evaluate(*call, metrics=True)
        total, count = total + size * float(loss), count + size
        found.append((size, metrics))
    if not count:
        raise UsageError("validation: has no batches; an iterable that can be used only once is empty the second time")
    return total / count, mean_metrics(found), count
