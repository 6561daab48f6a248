"""View figures: the current speed of a training, and its loss as a line of bars."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.report.units import show_seconds

if TYPE_CHECKING:
    from penstock.training.callbacks.callback import Reading

_RECENT = 20  # steps that count for the current speed
_BARS = "▁▂▃▄▅▆▇█"


class Pace:
    """The speed of a training over its last steps; a single step varies too much.

    >>> from penstock.training.callbacks.callback import Reading
    >>> pace = Pace()
    >>> for step in (1, 2):
    ...     pace.add(Reading(step, 10, 0, 1.0, 1.0, (0.1,), step / 10, 6, 60))
    >>> round(pace.step_seconds, 3), round(pace.seconds_to_go, 3), pace.speed_text
    (0.15, 1.2, '400 tokens/s')
    """

    def __init__(self, readings: Iterable[Reading] = ()) -> None:
        self._recent: deque[Reading] = deque(maxlen=_RECENT)
        for reading in readings:
            self.add(reading)

    def add(self, reading: Reading) -> None:
        """Add a step."""
        if self._recent and reading.step <= self._recent[-1].step:
            self._recent.clear()  # the training was rewound
        self._recent.append(reading)

    @property
    def step_seconds(self) -> float:
        """The mean time of the last steps."""
        return math.fsum(r.seconds for r in self._recent) / len(self._recent) if self._recent else 0.0

    @property
    def samples_per_second(self) -> float:
        """The samples per second over the last steps."""
        return self._per_second(sum(reading.num_samples for reading in self._recent))

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens per second over the last steps, if tokens are counted."""
        counts = [reading.num_tokens for reading in self._recent]
        return self._per_second(sum(filter(None, counts))) if counts and None not in counts else None

    @property
    def speed_text(self) -> str:
        """The tokens per second, or the samples per second if no tokens are counted."""
        tokens = self.tokens_per_second
        speed, what = (self.samples_per_second, "samples") if tokens is None else (tokens, "tokens")
        return _speed(speed, what)

    @property
    def seconds_to_go(self) -> float | None:
        """The remaining time at the current speed; None before the first step."""
        if not self._recent:
            return None
        last = self._recent[-1]
        return (last.steps - last.step) * self.step_seconds

    def _per_second(self, count: int) -> float:
        seconds = math.fsum(reading.seconds for reading in self._recent)
        return count / seconds if seconds else 0.0


class Totals:
    """The totals over all steps of this run."""

    def __init__(self) -> None:
        self.first_loss: float | None = None
        self._num_steps, self._num_samples, self._num_tokens, self._seconds = 0, 0, 0, 0.0

    def add(self, reading: Reading) -> None:
        """Add a step."""
        if self.first_loss is None:
            self.first_loss = reading.loss
        self._num_steps += 1
        self._num_samples += reading.num_samples
        self._num_tokens += reading.num_tokens or 0
        self._seconds += reading.seconds

    @property
    def speed_text(self) -> str:
        """The speed over all steps; empty if no step ran."""
        if not self._seconds:
            return ""
        count, what = (self._num_tokens, "tokens") if self._num_tokens else (self._num_samples, "samples")
        seconds = show_seconds(self._seconds / self._num_steps, digits=3)
        return f"{_speed(count / self._seconds, what)}, {seconds} per step"


class Sparkline:
    """A curve as a line of at most `width` bars, for any number of values.

    >>> spark = Sparkline(8)
    >>> for value in (8, 7, 6, 5, 4, 3, 2, 1):
    ...     spark.add(value)
    >>> str(spark)
    '█▇▆▅▄▃▂▁'
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._bars: list[tuple[float, int]] = []  # sum and count of the values of each bar
        self._size = 1  # values per bar

    def add(self, value: float) -> None:
        """Add a value; ignore values that are not finite."""
        if not math.isfinite(value):
            return
        if self._bars and self._bars[-1][1] < self._size:
            total, count = self._bars[-1]
            self._bars[-1] = (total + value, count + 1)
            return
        if len(self._bars) == self._width:  # merge pairs of bars
            halves = zip(self._bars[::2], self._bars[1::2], strict=False)
            odd = self._bars[-1:] if self._width % 2 else []
            self._bars = [(a + b, m + n) for (a, m), (b, n) in halves] + odd
            self._size *= 2
            self.add(value)
            return
        self._bars.append((value, 1))

    def __str__(self) -> str:
        means = [total / count for total, count in self._bars]
        if len(means) < 2:
            return ""
        low, high = min(means), max(means)
        scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
        return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _speed(speed: float, what: str) -> str:
    return f"{speed:,.0f} {what}/s" if speed >= 100 else f"{speed:.3g} {what}/s"
