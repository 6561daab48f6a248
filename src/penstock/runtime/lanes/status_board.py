"""Board: where each lane is in its program, for all to read: who hangs, and what it was doing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.lane_program import Instruction, LaneProgram
from penstock.schedule.actions import Kind

__all__ = ["DATA", "IDLE", "NUM_COLUMNS", "Place", "StatusBoard", "explain_wait"]

IDLE, DATA = -1, -2  # places outside of a program: nothing is done; the lane waits for its data
NUM_COLUMNS = 5  # place, since when, step; and of processes their number, and where their stacks are written
_SENDS = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}


@dataclass(frozen=True)
class Place:
    """What a lane is doing: the place in its program (below 0: none), and for how long."""

    at: int
    seconds: float
    step: int


class StatusBoard:
    """A row a lane, in memory that all lanes see: one process's, or memory that processes share."""

    def __init__(self, rows: NDArray[np.int64]) -> None:
        self.rows = rows

    @classmethod
    def empty(cls, num_lanes: int) -> StatusBoard:
        """Return a board in this process's own memory."""
        return cls(np.full((num_lanes, NUM_COLUMNS), IDLE, dtype=np.int64))

    def row(self, lane: int) -> memoryview:
        """Return a lane's own row, to write its place into: `row[0] = place; row[1] = time.monotonic_ns()`."""
        return memoryview(self.rows[lane])

    def place(self, lane: int) -> Place:
        """Return what a lane is doing."""
        at, since, step = self.rows[lane, :3].tolist()
        return Place(int(at), max(0.0, (time.monotonic_ns() - since) / 1e9), int(step))

    def introduce(self, lane: int, process: int, stack_file: int) -> None:
        """Write down which process a lane is, and where it writes its stack when it is asked."""
        self.rows[lane, 3:] = process, stack_file

    def process(self, lane: int) -> tuple[int, int]:
        """Return which process a lane is, and its file of stacks; -1 for what is not known here."""
        process, stack_file = self.rows[lane, 3:].tolist()
        return int(process), int(stack_file)


def explain_wait(
    board: StatusBoard, lane: int, *, finder: int, program_of: Callable[[int], LaneProgram]
) -> tuple[str, int]:  # fmt: skip
    """Say in words what a lane is doing while another waits for it; one that waits too is followed to who does not.

    Args:
        board: of all lanes.
        lane: that is waited for.
        finder: who waits.
        program_of: of any lane.

    Returns:
        The words, and the lane that they end with: the one that keeps all others waiting.
    """
    words, seen, step = [], {finder}, board.place(finder).step
    while True:
        seen.add(lane)
        place, instructions = board.place(lane), program_of(lane).instructions
        if place.at < 0 or place.at >= len(instructions):
            words.append(_idle(place, step))
            return ", which is ".join(words), lane
        instruction = instructions[place.at]
        in_step = "" if place.step == step else f" of step {place.step}, where this is step {step},"
        words.append(f"at {instruction.action}{in_step} for {place.seconds:.1f} s")
        if instruction.kind not in _SENDS:
            return ", which is ".join(words), lane
        other = instruction.lane
        if _has_sent(board.place(other), place, instruction, program_of(other)):
            words[-1] += f", though lane {other} has sent what it waits for: it is lane {lane} that does not go on"
            return ", which is ".join(words), lane
        words[-1] += f", waiting for lane {other}"
        if other in seen:
            return ", which is ".join(words), lane
        lane = other


def _idle(place: Place, step: int) -> str:
    if place.at == DATA:
        return f"waiting for its data loader for {place.seconds:.1f} s"
    if place.step == IDLE:
        return "not to be seen from here: it has not begun, or runs on another machine"
    what = "has ended this step" if place.step >= step else "has not begun this step"
    return f"doing nothing for {place.seconds:.1f} s: it {what}"


def _has_sent(sender: Place, receiver: Place, receives: Instruction, program: LaneProgram) -> bool:
    """Return whether a lane is past the send that another waits for."""
    if sender.step != receiver.step:
        return sender.step > receiver.step
    what = (_SENDS[receives.kind], receives.peer, receives.mb, receives.stage)
    sends = (at for at, i in enumerate(program.instructions) if (i.kind, i.stage, i.mb, i.peer) == what)
    return sender.at < 0 or sender.at > next(sends, len(program.instructions))
