"""Lane program: the actions of one lane of a lowered schedule, in the form that the executor runs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from penstock.schedule.actions import KINDS, Action, Kind
from penstock.schedule.lower import Lowered

_FORWARD = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F})
_COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.U})


class Instruction(NamedTuple):
    """One action of a lane."""

    place: int  # the index in the lowered lanes, which identifies the action in a timeline
    kind: Kind  # the kind of the action
    stage: int  # the stage of the action
    mb: int  # the micro-batch of the action
    peer: int  # for a transfer, the stage at the other end
    lane: int  # for a transfer, the lane of that stage
    version: int  # the version of the weights that the action uses; for an update, the version that it makes

    @property
    def action(self) -> Action:
        """The action of this instruction."""
        return Action(self.kind, self.stage, self.mb)


@dataclass(frozen=True)
class LaneProgram:
    """The instructions of one lane for a step."""

    lane: int  # the number of the lane
    instructions: tuple[Instruction, ...]  # the instructions in order
    split: frozenset[tuple[int, int]]  # the (stage, micro-batch) pairs whose backward has two parts
    recomputed: frozenset[tuple[int, int]]  # the (stage, micro-batch) pairs whose forward is recomputed
    # for each (stage, version of weights), the index of the last instruction that needs it
    last_use: dict[tuple[int, int], int]


def make_program(lowered: Lowered, lane: int, *, forward_only: bool = False) -> LaneProgram:
    """Return the program of one lane; with `forward_only`, only its forwards and their transfers."""
    rows, schedule = lowered.rows, lowered.schedule
    begin, end = (int(n) for n in rows.starts[lane : lane + 2])
    columns = (rows.kind, rows.stage, rows.mb, rows.peer)
    # the version of the weights for each compute action of a lane, in the order of the lowered lane
    versions = repeat(0) if schedule.versions is None else iter(schedule.versions[lane].tolist())
    made: list[Instruction] = []
    for place, (kind, stage, mb, peer) in enumerate(zip(*(c[begin:end].tolist() for c in columns), strict=True), begin):
        what = KINDS[kind]
        version = next(versions) if what in _COMPUTE else 0
        if not forward_only or what in _FORWARD:
            to_lane = schedule.home(peer, mb) if peer >= 0 else -1
            made.append(Instruction(place, what, stage, mb, peer, to_lane, version))
    return LaneProgram(
        lane,
        tuple(made),
        frozenset((i.stage, i.mb) for i in made if i.kind is Kind.W),
        frozenset((i.stage, i.mb) for i in made if i.kind is Kind.RECOMPUTE),
        {(i.stage, i.version): at for at, i in enumerate(made) if i.kind in _COMPUTE},
    )
