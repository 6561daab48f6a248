"""Bubble causes: the reasons for idle lanes, as shares of the step time that add up to the bubble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.report.units import show_seconds, show_share


class Figure(NamedTuple):
    """One share of `Causes`: its field, its name in tables, and an explanation."""

    field: str
    name: str
    words: str


# The causes add up to the bubble.
CAUSES = (
    Figure("warm_up", "warm-up and cool-down", "the order of the schedule, with equal stages and free transfers"),
    Figure("imbalance", "imbalance", "stages, devices or micro-batches that take different times"),
    Figure("transfers", "transfers", "values in transit between lanes, or to and from the host"),
    Figure("overhead", "runtime overhead", "the inputs were there, but the lane did not start"),
)
# Indicators show which lane to look at. They are not parts of the bubble: a late lane delays others later on.
SIGNS = (
    Figure("waited_for_transfers", "waited for transfers", "the lane was idle while a value was in transit"),
    Figure("stood_ready", "idle but ready", "the lane was idle although its next action had all inputs"),
)
_MOST_LANES = 64


@dataclass(frozen=True)
class Causes:
    """The causes of the bubble of a step, for all lanes or for one; see `planning.attribution` for the method.

    >>> print(Causes.of_lanes(2.0, [Causes(2.0, warm_up=0.25), Causes(2.0, warm_up=0.2, overhead=0.05)]).to_text())
    bubble 25.0 % of 2 lanes × 2 s
      warm-up and cool-down  22.5 %   450 ms  the order of the schedule, with equal stages and free transfers
      imbalance               0.0 %      0 s  stages, devices or micro-batches that take different times
      transfers               0.0 %      0 s  values in transit between lanes, or to and from the host
      runtime overhead        2.5 %    50 ms  the inputs were there, but the lane did not start
    lane  bubble  warm-up and cool-down  imbalance  transfers  runtime overhead  waited for transfers  idle but ready
       0  25.0 %                 25.0 %      0.0 %      0.0 %             0.0 %                 0.0 %           0.0 %
       1  25.0 %                 20.0 %      0.0 %      0.0 %             5.0 %                 0.0 %           0.0 %

    Attributes:
        step_seconds: the makespan to which the shares refer.
        warm_up: caused by the order of the schedule, even with equal stages and free transfers.
        imbalance: added by stages, devices or micro-batches that take different times.
        transfers: added by values in transit.
        overhead: the rest: all inputs were there, but the runtime was late.
        waited_for_transfers: idle time while a value was in transit (an indicator, not a part of the bubble).
        stood_ready: idle time although all inputs were there (an indicator, not a part of the bubble).
        per_lane: the same for each lane.
    """

    step_seconds: float
    warm_up: float = 0.0
    imbalance: float = 0.0
    transfers: float = 0.0
    overhead: float = 0.0
    waited_for_transfers: float = 0.0
    stood_ready: float = 0.0
    per_lane: tuple[Causes, ...] = ()

    @classmethod
    def of_lanes(cls, step_seconds: float, lanes: Sequence[Causes]) -> Causes:
        """Return the causes of a step: the means of those of its lanes."""
        names = [figure.field for figure in (*CAUSES, *SIGNS)]
        means = {name: float(np.mean([getattr(lane, name) for lane in lanes])) for name in names}
        return cls(step_seconds, **means, per_lane=tuple(lanes))

    @property
    def bubble(self) -> float:
        """The share of the time with no compute: the sum of all causes."""
        return self.warm_up + self.imbalance + self.transfers + self.overhead

    def to_text(self) -> str:
        """Return a table of the causes and a table of the lanes."""
        rows = [
            (cause.name, show_share(share), show_seconds(share * self.step_seconds, digits=3), cause.words)
            for cause, share in ((cause, getattr(self, cause.field)) for cause in CAUSES)
        ]
        name, share, seconds = (max(len(row[column]) for row in rows) for column in range(3))
        lines = [f"  {a:<{name}}  {b:>{share}}  {c:>{seconds + 1}}  {d}" for a, b, c, d in rows]
        of_lanes = f" of {len(self.per_lane)} lanes × {show_seconds(self.step_seconds)}" if self.per_lane else ""
        return "\n".join([f"bubble {show_share(self.bubble)}{of_lanes}", *lines, *self._lane_lines()])

    def _lane_lines(self) -> list[str]:
        figures = (Figure("bubble", "bubble", ""), *CAUSES, *SIGNS)
        lines = ["  ".join(["lane", *(figure.name for figure in figures)])] if self.per_lane else []
        for number, lane in enumerate(self.per_lane[:_MOST_LANES]):
            cells = [f"{show_share(getattr(lane, figure.field)):>{len(figure.name)}}" for figure in figures]
            lines.append("  ".join([f"{number:>4}", *cells]))
        if len(self.per_lane) > _MOST_LANES:
            lines.append(f"({len(self.per_lane) - _MOST_LANES} more lanes)")
        return lines
