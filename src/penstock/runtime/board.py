"""Board: where each lane is in its program, for all to read: who hangs, and what it was doing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.program import LaneProgram
from penstock.schedule.actions import Kind

__all__ = ["Board", "Place", "describe"]

IDLE = -1


@dataclass(frozen=True)
class Place:
    """What a lane is doing: the place in its program (-1: none), and for how long."""

    at: int
    seconds: float
    step: int


class Board:
    """A row a lane, in memory that all lanes see: one process's, or memory that processes share."""

    def __init__(self, rows: NDArray[np.int64]) -> None:
        self.rows = rows

    @classmethod
    def empty(cls, num_lanes: int) -> Board:
        """Return a board in this process's own memory."""
        return cls(np.full((num_lanes, 3), IDLE, dtype=np.int64))

    def row(self, lane: int) -> memoryview:
        """Return a lane's own row, to write its place into: `row[0] = place; row[1] = time.monotonic_ns()`."""
        return memoryview(self.rows[lane])

    def place(self, lane: int) -> Place:
        """Return what a lane is doing."""
        at, since, step = self.rows[lane].tolist()
        return Place(int(at), max(0.0, (time.monotonic_ns() - since) / 1e9), int(step))


def describe(board: Board, lane: int, step: int, program_of: Callable[[int], LaneProgram]) -> str:
    """Say in words what a lane is doing while another waits for it; one that waits too is followed to who does not."""
    words, seen = [], set()
    while lane not in seen:
        seen.add(lane)
        place, instructions = board.place(lane), program_of(lane).instructions
        if place.at == IDLE or place.at >= len(instructions):
            what = "has ended this step" if place.step >= step else "has not begun this step"
            words.append(f"doing nothing for {place.seconds:.1f} s: it {what}")
            break
        instruction = instructions[place.at]
        in_step = "" if place.step == step else f" of step {place.step}, where this is step {step},"
        words.append(f"at {instruction.action}{in_step} for {place.seconds:.1f} s")
        if instruction.kind not in (Kind.RECV_F, Kind.RECV_B):
            break
        lane = instruction.lane
        words[-1] += f", waiting for lane {lane}"
    return ", which is ".join(words)
