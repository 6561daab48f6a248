"""Schedule: the lanes of actions and the lane of each stage, as frozen data."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.actions import KIND_INDEX, Action, Codes, Ints, Kind, Lane, decode


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """The lanes of actions of one step.

    Most schedules have one way: stage `s` lives on `lane_of[s]`. In a bidirectional schedule, a stage lives on one
    lane per way. Micro-batch `mb` takes way `way_of[mb]`; `ways[way][stage]` is the lane.

    Attributes:
        lanes: the actions of each lane in the order in which it runs them.
        ways: for each way, the lane of each stage.
        num_mbs: number of micro-batches of a step.
        way_of: the way of each micro-batch; by default, ways alternate.
        overlaps: (lane, index) of the first of two neighbours that run at the same time.
        versions: for each action of each lane, the version of the stage's weights that it uses (U: that it makes);
            None if weights do not change within a step.
        name: the name in tables and messages.
    """

    lanes: tuple[Lane, ...]
    ways: tuple[tuple[int, ...], ...]
    num_mbs: int
    way_of: tuple[int, ...] = ()
    overlaps: frozenset[tuple[int, int]] = frozenset()
    versions: tuple[Ints, ...] | None = field(default=None, repr=False)
    name: str = "schedule"

    def __post_init__(self) -> None:
        self._normalise()
        if not self.lanes or not self.ways or not self.ways[0]:
            raise ScheduleError("a schedule needs at least one lane and one stage")
        if self.num_mbs < 1:
            raise ScheduleError(f"a schedule needs at least one micro-batch; micro-batches: {self.num_mbs}")
        if len({len(way) for way in self.ways}) > 1:
            raise ScheduleError("each way must name a lane for each stage")
        outside = sorted({lane for way in self.ways for lane in way if not 0 <= lane < len(self.lanes)})
        if outside:
            raise ScheduleError(f"stages are placed on lanes that do not exist: {outside}; lanes: {len(self.lanes)}")
        if not self.way_of:
            turns = tuple(mb % len(self.ways) for mb in range(self.num_mbs))
            object.__setattr__(self, "way_of", turns)
        if len(self.way_of) != self.num_mbs or not set(self.way_of) <= set(range(len(self.ways))):
            raise ScheduleError(
                f"way_of must name one of {len(self.ways)} ways for each of {self.num_mbs} micro-batches"
            )
        if self.versions is not None and [len(v) for v in self.versions] != [len(lane) for lane in self.lanes]:
            raise ScheduleError("versions must hold one number for each action of each lane")

    def _normalise(self) -> None:
        """Convert lists to tuples, texts to lanes and NumPy integers to Python integers."""
        try:
            values = {
                "lanes": tuple(Lane.of(lane) for lane in self.lanes),
                "ways": tuple(tuple(operator.index(lane) for lane in way) for way in self.ways),
                "num_mbs": operator.index(self.num_mbs),
                "way_of": tuple(operator.index(way) for way in self.way_of),
                "overlaps": frozenset((operator.index(lane), operator.index(at)) for lane, at in self.overlaps),
                "versions": None if self.versions is None else tuple(_frozen(used) for used in self.versions),
            }
        except (TypeError, ValueError, OverflowError) as error:
            raise ScheduleError(f"a schedule consists of lanes of actions and whole numbers: {error}") from None
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, lanes: Iterable[str | Iterable[Action | str]], *, name: str = "schedule") -> Schedule:
        """Make a schedule from lanes of actions or texts, which also determine the lane of each stage.

        >>> Schedule.of(["0F0 0B0", "1F0 1B0"]).lane_of
        (0, 1)
        """
        from penstock.schedule.text_format import read_lanes

        if isinstance(lanes, str):
            raise ScheduleError("pass a list of lanes, one text per lane")
        return read_lanes([lane if isinstance(lane, str) else " ".join(map(str, lane)) for lane in lanes], name=name)

    @property
    def lane_of(self) -> tuple[int, ...]:
        """The lane of each stage (in a bidirectional schedule: on the first way)."""
        return self.ways[0]

    @property
    def num_lanes(self) -> int:
        """Number of lanes."""
        return len(self.lanes)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.ways[0])

    @property
    def num_actions(self) -> int:
        """Number of actions of all lanes."""
        return sum(len(lane) for lane in self.lanes)

    @property
    def is_bidirectional(self) -> bool:
        """Whether the schedule has more than one way."""
        return len(self.ways) > 1

    def home(self, stage: int, mb: int) -> int:
        """Return the lane that runs a stage for a micro-batch."""
        return self.ways[self.way_of[mb]][stage]

    def stages_of(self, lane: int) -> tuple[int, ...]:
        """Return the stages that live on a lane, on any way."""
        return tuple(s for s in range(self.num_stages) if any(way[s] == lane for way in self.ways))

    @cached_property
    def home_table(self) -> Ints:
        """The lane of each stage (row) on each way (column)."""
        return np.array(self.ways, dtype=np.int32).T.copy()

    @cached_property
    def way_table(self) -> Ints:
        """The way of each micro-batch."""
        return np.array(self.way_of, dtype=np.int32)

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds that occur."""
        present = np.unique(np.concatenate([np.unique(decode(lane.codes)[0]) for lane in self.lanes]))
        return frozenset(kind for kind, index in KIND_INDEX.items() if index in present)

    def codes(self) -> Codes:
        """Return the actions of all lanes as integers, lane after lane."""
        return np.concatenate([lane.codes for lane in self.lanes])

    def version(self, lane: int, index: int) -> int:
        """Return the version of the weights that an action uses; 0 if weights do not change within a step."""
        return 0 if self.versions is None else int(self.versions[lane][index])

    def __iter__(self) -> Iterator[Lane]:
        return iter(self.lanes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        # names and unused ways do not count
        mine = (self.lanes, self.num_stages, self.num_mbs, self.overlaps)
        theirs = (other.lanes, other.num_stages, other.num_mbs, other.overlaps)
        return mine == theirs and self._homes_as(other) and _same(self.versions, other.versions)

    def _homes_as(self, other: Schedule) -> bool:
        if (self.ways, self.way_of) == (other.ways, other.way_of):
            return True
        return np.array_equal(self.home_table[:, self.way_table], other.home_table[:, other.way_table])

    def __hash__(self) -> int:
        return hash((self.lanes, self.num_mbs))

    def __repr__(self) -> str:
        counts = f"{self.num_lanes} lanes, {self.num_stages} stages, {self.num_mbs} micro-batches"
        return f"Schedule({self.name!r}, {counts}, {self.num_actions} actions)"

    def __str__(self) -> str:
        from penstock.schedule.text_format import to_text

        return to_text(self)

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the compute actions as a CSV file of torch.distributed.pipelining; the write is atomic."""
        from penstock.schedule.text_format import write_csv

        write_csv(self, path)


def _frozen(used: Ints) -> Ints:
    numbers = np.array(used, dtype=np.int32)
    numbers.flags.writeable = False
    return numbers


def _same(a: Sequence[Ints] | None, b: Sequence[Ints] | None) -> bool:
    if a is None or b is None:
        return a is b
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
