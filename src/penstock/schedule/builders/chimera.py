"""chimera: two 1f1b pipelines that run towards each other (Li and Hoefler, 2021)."""

from __future__ import annotations

from penstock.schedule.actions import Ints, Kind
from penstock.schedule.builders.ticks import from_ticks
from penstock.schedule.counts import loop, need_even_lanes
from penstock.schedule.schedule import Schedule


def chimera(*, lanes: int, micro_batches: int) -> Schedule:
    """Each lane holds one stage of each way; units of `lanes` micro-batches follow each other without a gap."""
    need_even_lanes("chimera", lanes)

    # k: index of a micro-batch within its unit and way; a unit has lanes/2 of each way and takes 2·lanes ticks
    def start(m: Ints) -> Ints:
        unit, k = (m // 2) // (lanes // 2), (m // 2) % (lanes // 2)
        return 2 * lanes * unit + 2 * k

    ticks = {Kind.F: lambda s, m: start(m) + s, Kind.B: lambda s, m: start(m) + 2 * lanes - 1 - s}
    down = loop(lanes, 1)
    return from_ticks("chimera", [down, down[::-1]], num_mbs=micro_batches, ticks=ticks)
