"""Registry: schedules by name. A builder is one function; registering it is one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ScheduleError, nearest
from penstock.schedule.actions import MAX_MBS, MAX_STAGES
from penstock.schedule.counts import check_count
from penstock.schedule.schedule import Schedule

Builder = Callable[..., Schedule]

MAX_FORWARDS = 100_000_000  # lanes × micro-batches; 4 million take 2.5 GiB to simulate


@dataclass(frozen=True)
class Entry:
    """The name of a schedule, its builder, a summary in one line, and its source."""

    name: str
    builder: Builder
    summary: str
    paper: str = ""
    stages_per_lane: int | None = None  # if the definition of the schedule fixes it
    doubles_weights: bool = False  # each stage lives on two lanes
    trains_exactly: bool = True  # gradients are those of the model without a pipeline; False: asynchronous

    @property
    def options(self) -> tuple[str, ...]:
        """The keywords of the builder, without lanes and micro_batches."""
        known = ("lanes", "micro_batches")
        return tuple(name for name in inspect.signature(self.builder).parameters if name not in known)


class Registry:
    """The schedules that can be built by name."""

    def __init__(self, entries: list[Entry], aliases: Mapping[str, str] | None = None) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._aliases = dict(aliases or {})

    def names(self) -> tuple[str, ...]:
        """Return all names in the order of registration."""
        return tuple(self._entries)

    def entry(self, name: str) -> Entry:
        """Return the entry of a name; case and dashes do not matter.

        Raises:
            ScheduleError: if the name is unknown; the message suggests the nearest one.
        """
        if not isinstance(name, str):
            raise ScheduleError(f"the name of a schedule must be a string; given: {name!r}")
        word = name.strip().lower().replace("-", "_")
        word = self._aliases.get(word, word)
        if word not in self._entries:
            known = ", ".join(self._entries)
            raise ScheduleError(f"unknown schedule {name!r}.{nearest(word, self._entries)} Known: {known}")
        return self._entries[word]

    def register(self, entry: Entry) -> None:
        """Add a schedule.

        Raises:
            ScheduleError: if the name is taken, or the builder lacks lanes= or micro_batches=.
        """
        if not isinstance(entry.name, str) or not callable(entry.builder):
            raise ScheduleError("to register a schedule, pass its name and a function that builds it")
        word = entry.name.lower().replace("-", "_")
        if not word.isidentifier() and not word.replace("_", "").isalnum():
            raise ScheduleError(
                f"the name of a schedule may have letters, digits and underscores; name: {entry.name!r}"
            )
        if word in self._entries or word in self._aliases:
            raise ScheduleError(f"the name {entry.name!r} is taken")
        parameters = inspect.signature(entry.builder).parameters
        if not {"lanes", "micro_batches"} <= set(parameters):
            takes = ", ".join(parameters) or "nothing"
            raise ScheduleError(f"the builder of {entry.name!r} must take lanes= and micro_batches=; it takes: {takes}")
        self._entries[word] = entry

    def build(self, name: str, *, lanes: int, micro_batches: int, options: Mapping[str, Any]) -> Schedule:
        """Build a schedule by name; an option that is None takes the default of the builder.

        Raises:
            ScheduleError: if the name is unknown, a count is invalid, or the schedule does not take an option.
        """
        entry = self.entry(name)
        lanes = check_count("lanes", lanes, MAX_STAGES)
        micro_batches = check_count("micro_batches", micro_batches, MAX_MBS)
        if lanes * micro_batches > MAX_FORWARDS:
            raise ScheduleError(
                f"too many actions; lanes × micro_batches: {lanes * micro_batches:,}, at most: {MAX_FORWARDS:,}"
            )
        given = {key: value for key, value in options.items() if value is not None}
        stages = given.get("stages_per_lane")
        if stages is not None:
            given["stages_per_lane"] = stages = check_count("stages_per_lane", stages, MAX_STAGES)
            if entry.stages_per_lane is not None and stages == entry.stages_per_lane:
                del given["stages_per_lane"]
        unused = [key for key in given if key not in entry.options]
        if unused:
            raise ScheduleError(_no_use(entry, unused))
        schedule = entry.builder(lanes=lanes, micro_batches=micro_batches, **given)
        if not isinstance(schedule, Schedule):
            raise ScheduleError(
                f"the builder of {entry.name!r} must return a Schedule; given: {type(schedule).__name__}"
            )
        return schedule


def _no_use(entry: Entry, unused: list[str]) -> str:
    if "stages_per_lane" in unused and entry.stages_per_lane is not None:
        return f"{entry.name} has {entry.stages_per_lane} stage(s) per lane by definition: leave stages_per_lane out"
    takes = ", ".join(entry.options) or "none"
    return f"{entry.name} does not take: {', '.join(unused)}; its options: {takes}"
