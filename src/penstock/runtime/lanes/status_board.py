"""Status board: the current action of every lane, which all lanes can read; it shows which lane hangs, and where."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.lane_program import Instruction, LaneProgram
from penstock.schedule.actions import Kind

IDLE, DATA = -1, -2  # places outside of a program: the lane does nothing; the lane waits for its data
NUM_COLUMNS = 5  # place, start time, step; for processes also the process ID and the file for stacks
_SENDS = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}


@dataclass(frozen=True)
class Place:
    """A lane's current place in its program (below 0: none), the seconds that it has been there, and its step."""

    at: int
    seconds: float
    step: int


class StatusBoard:
    """One row per lane, in memory that all lanes can read: memory of one process, or shared memory."""

    def __init__(self, rows: NDArray[np.int64]) -> None:
        self.rows = rows

    @classmethod
    def empty(cls, num_lanes: int) -> StatusBoard:
        """Return a board in this process's own memory."""
        return cls(np.full((num_lanes, NUM_COLUMNS), IDLE, dtype=np.int64))

    def row(self, lane: int) -> memoryview:
        """Return a lane's own row, where it writes its place: `row[0] = place; row[1] = time.monotonic_ns()`."""
        return memoryview(self.rows[lane])

    def place(self, lane: int) -> Place:
        """Return the current place of a lane."""
        at, since, step = self.rows[lane, :3].tolist()
        return Place(int(at), max(0.0, (time.monotonic_ns() - since) / 1e9), int(step))

    def introduce(self, lane: int, process: int, stack_file: int) -> None:
        """Write the process ID of a lane, and the file where it writes its stack on request."""
        self.rows[lane, 3:] = process, stack_file

    def process(self, lane: int) -> tuple[int, int]:
        """Return the process ID of a lane and its file for stacks; -1 for a value that is unknown here."""
        process, stack_file = self.rows[lane, 3:].tolist()
        return int(process), int(stack_file)


def explain_wait(
    board: StatusBoard, lane: int, *, finder: int, program_of: Callable[[int], LaneProgram]
) -> tuple[str, int]:  # fmt: skip
    """Describe the action of a lane that another lane waits for. If it waits too, describe the lane that it waits for.

    Args:
        board: the board of all lanes.
        lane: the lane that another lane waits for.
        finder: the lane that waits.
        program_of: returns the program of any lane.

    Returns:
        The description, and the last lane in it, which keeps all others waiting.
    """
    words, seen, step = [], {finder}, board.place(finder).step
    while True:
        seen.add(lane)
        place, instructions = board.place(lane), program_of(lane).instructions
        if place.at < 0 or place.at >= len(instructions):
            words.append(_idle(place, step))
            return ", which is ".join(words), lane
        instruction = instructions[place.at]
        in_step = "" if place.step == step else f" of step {place.step} (this is step {step})"
        words.append(f"at {instruction.action}{in_step} for {place.seconds:.1f} s")
        if instruction.kind not in _SENDS:
            return ", which is ".join(words), lane
        other = instruction.lane
        if _has_sent(board.place(other), place, instruction, program_of(other)):
            words[-1] += f", although lane {other} has sent this value: lane {lane} itself does not continue"
            return ", which is ".join(words), lane
        words[-1] += f", waiting for lane {other}"
        if other in seen:
            return ", which is ".join(words), lane
        lane = other


def _idle(place: Place, step: int) -> str:
    if place.at == DATA:
        return f"waiting for its data loader for {place.seconds:.1f} s"
    if place.step == IDLE:
        return "not visible from here: it has not begun, or it runs on another machine"
    what = "has ended this step" if place.step >= step else "has not begun this step"
    return f"idle for {place.seconds:.1f} s: it {what}"


def _has_sent(sender: Place, receiver: Place, receives: Instruction, program: LaneProgram) -> bool:
    """Return whether a lane is past the send that another lane waits for."""
    if sender.step != receiver.step:
        return sender.step > receiver.step
    what = (_SENDS[receives.kind], receives.peer, receives.mb, receives.stage)
    sends = (at for at, i in enumerate(program.instructions) if (i.kind, i.stage, i.mb, i.peer) == what)
    return sender.at < 0 or sender.at > next(sends, len(program.instructions))
