"""Charts: the names of a training's figures in TensorBoard and in Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# the part before the slash groups the charts
_NAMES = {
    "loss": "train/loss",
    "mean_loss": "train/mean_loss",
    "gradient_norm": "train/gradient_norm",
    "step_seconds": "speed/step_seconds",
    "samples_per_second": "speed/samples_per_second",
    "tokens_per_second": "speed/tokens_per_second",
    "bubble": "pipeline/bubble",
}


def charted(figures: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the figures of a log, each with the name of its chart.

    >>> dict(charted({"loss": 2.0, "lr": [0.1, 0.2], "lane_bytes": [7], "metrics": {"right": 0.5}}))
    {'train/loss': 2.0, 'train/right': 0.5, 'train/lr': 0.1, 'train/lr_1': 0.2, 'memory/lane_0': 7}
    """
    yield from ((_NAMES[name], value) for name, value in figures.items() if name in _NAMES)
    yield from ((f"train/{name}", value) for name, value in figures.get("metrics", {}).items())
    rates = figures.get("lr", ())
    for number, rate in enumerate(rates if isinstance(rates, (list, tuple)) else [rates]):
        yield ("train/lr" if not number else f"train/lr_{number}"), rate
    yield from ((f"memory/lane_{lane}", size) for lane, size in enumerate(figures.get("lane_bytes", ())))


def charted_validation(figures: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the results of a validation, each with the name of its chart."""
    yield "validation/loss", figures["validation_loss"]
    yield from ((f"validation/{name}", value) for name, value in figures.get("metrics", {}).items())
