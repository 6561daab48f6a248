"""Content: collect the state of a pipeline and its optimizers for a checkpoint, and load it back."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from penstock._version import __version__
from penstock.checkpoint.optimizer_states import Optimizers, some
from penstock.checkpoint.state_as_json import from_plain, generator_states, set_generator_states, to_plain
from penstock.errors import UsageError
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.state_snapshot import loss_module
from penstock.schedule.schedule import Schedule
from penstock.schedule.text_format import to_json
from penstock.tensor_files.manifest import MisfitError
from penstock.tensor_files.tensor_shards import check_storable

PARTS = ("model", "optimizer", "scheduler", "scaler", "data", "random")

LOSS = "(loss)."  # prefix of the names of a loss function's own parameters


@dataclass(frozen=True)
class Snapshot:
    """The state that this process saves."""

    files: dict[str, dict[str, torch.Tensor]]  # the tensors of each shard
    part: dict[str, Any]  # as JSON, the data that each process reports to the first
    state: dict[str, Any]  # as JSON, the rest of the state, which only the first process saves


class Content:
    """A pipeline, its optimizers, and everything else that a training needs to resume."""

    def __init__(
        self, pipe: Pipeline, optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any],
        scaler: torch.amp.GradScaler | None, data: Any,  # noqa: ANN401 - anything with a state
    ) -> None:  # fmt: skip
        self.pipe, self.schedulers, self.scaler, self.data = pipe, list(schedulers), scaler, data
        for what, thing in [("scheduler", s) for s in self.schedulers] + [("scaler", scaler), ("data", data)]:
            if thing is not None and not all(
                callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict")
            ):
                raise UsageError(f"{what}: {type(thing).__name__} has no state_dict() and load_state_dict()")
        self.optimizers = Optimizers(optimizers, self._named)
        self._planned: tuple[Schedule, dict[str, Any]] | None = None

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ((name, t) for name, t in self.pipe.internals.held() if isinstance(t, nn.Parameter))
        yield from ((f"{LOSS}{name}", p) for name, p in self._loss.named_parameters())

    @property
    def _loss(self) -> nn.Module:
        return loss_module(self.pipe.internals.loss) or nn.Module()

    @cached_property
    def lane_of(self) -> dict[str, int]:
        """For each tensor of the model, the lane that saves it: the first that holds it."""
        lanes: dict[str, int] = {}
        ways = self.pipe.schedule.ways
        for index, stage in enumerate(self.pipe.internals.stages):
            first = min(way[index] for way in ways)
            for name in stage.state_dict(keep_vars=True):
                lanes[name] = min(first, lanes.get(name, first))
        return lanes

    @cached_property
    def _own(self) -> dict[int, list[str]]:
        """For each lane of this process, the names of the model's tensors that it saves."""
        return {lane: [name for name, other in self.lane_of.items() if other == lane] for lane in self.pipe.lanes}

    def _lane_of(self, name: str) -> int:
        return self.pipe.schedule.ways[0][-1] if name.startswith(LOSS) else self.lane_of[name]

    @property
    def aliases(self) -> dict[str, str]:
        """Additional names of the model's tensors, with the name under which each tensor is stored."""
        return dict(self.pipe.internals.chain.aliases)

    @property
    def plan(self) -> dict[str, Any]:
        """The cuts and the schedule of the pipeline."""
        schedule = self.pipe.schedule
        if self._planned is None or self._planned[0] is not schedule:
            self._planned = (
                schedule,
                {
                    "cuts": list(self.pipe.cuts),
                    "lanes": schedule.num_lanes,
                    "stages": schedule.num_stages,
                    "micro_batches": schedule.num_mbs,
                    "schedule": to_json(schedule),
                },
            )
        return self._planned[1]

    # ---- save

    def collect(self, step: int, notes: Mapping[str, Any]) -> Snapshot:
        """Return the state of this process. The tensors are the live ones, not copies."""
        lanes, count = self.pipe.lanes, self.pipe.schedule.num_lanes
        files: dict[str, dict[str, torch.Tensor]] = {}
        optim: dict[int, dict[str, torch.Tensor]] = {}  # for each lane
        held: dict[str, torch.Tensor] = {}
        for name, tensor in self.pipe.internals.held():
            held.setdefault(name, tensor)  # if several lanes hold it, the first
        for lane in lanes:
            files[f"model-{lane + 1:05d}-of-{count:05d}.safetensors"] = {name: held[name] for name in self._own[lane]}
            files[f"optim-{lane + 1:05d}-of-{count:05d}.safetensors"] = optim[lane] = {}
        if self._lane_of(LOSS) in lanes:
            optim[self._lane_of(LOSS)] |= {LOSS + name: tensor for name, tensor in self._loss.state_dict().items()}
        found = self.optimizers.collect(lambda name: self._lane_of(name) in lanes, is_alone=len(lanes) == count)
        for name, own in found.tensors.items():
            file = optim[self._lane_of(name)]
            if not file.keys().isdisjoint(own):
                both = next(key for key in own if key in file)
                raise UsageError(f"{both}: two tensors of the optimizer have this name")
            file.update(own)
        for tensors in files.values():
            check_storable(tensors)
        part = {"groups": found.groups, "params": found.params, "random": generator_states(self._devices)}
        return Snapshot(files, part, self._state(step, notes))

    def _state(self, step: int, notes: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "step": step,
            "notes": to_plain(dict(notes), "notes"),
            "schedulers": [to_plain(s.state_dict(), f"scheduler {n}") for n, s in enumerate(self.schedulers)],
            "scaler": None if self.scaler is None else to_plain(self.scaler.state_dict(), "scaler"),
            "data": None if self.data is None else to_plain(self.data.state_dict(), "data"),
            "has_optimizer": bool(self.optimizers.optimizers),
        }

    # ---- load

    def misfit(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Return how a saved model differs from this one, or "" if it fits."""
        stages = [stage.state_dict(keep_vars=True) for stage in self.pipe.internals.stages]
        own = {name: tuple(tensor.shape) for stage in stages for name, tensor in stage.items()}
        shapes = {self.aliases.get(name, name): shape for name, shape in shapes.items()}
        missing = sorted(own.keys() - shapes.keys())
        unknown = sorted(shapes.keys() - own.keys())
        wrong = [f"{n}: {shapes[n]}, not {own[n]}" for n in sorted(own.keys() & shapes.keys()) if shapes[n] != own[n]]
        if not (missing or unknown or wrong):
            return ""
        differences = [("not in the checkpoint", missing), ("not in the model", unknown), ("of another shape", wrong)]
        return "; ".join(f"{what}: {some(names, 10)}" for what, names in differences if names)

    def needed(self, stored: Collection[str]) -> dict[str, str]:
        """Return the names of the model's tensors on lanes of this process, and the names they are stored under.

        The checkpoint may store a shared tensor under another of its names.
        """
        aliases = self.aliases
        name_in = {first: alias for alias, first in aliases.items() if alias in stored}
        own = [name for name in self.pipe.state_dict() if name not in aliases]
        return {name: name if name in stored else name_in.get(name, name) for name in own}

    def loss_names(self) -> list[str]:
        """Return the names of the loss function's own tensors."""
        return [LOSS + name for name in self._loss.state_dict()]

    def load_all_but_model(self, prepared: Sequence[Any], state: Mapping[str, Any]) -> Callable[[], None]:
        """Load everything except the model; return a function that restores the previous state.

        User objects can refuse a state, which raises a MisfitError. They are loaded before the model, so a refusal
        changes nothing.
        """
        undo: list[Callable[[], object]] = []

        def undo_all() -> None:
            for step in reversed(undo):
                with suppress(Exception):  # the refusal is the error to report
                    step()

        what = ""
        try:
            for what, load, back in self._loaders(prepared, state):
                if what != "data":
                    undo.append(back)
                load()
                if what == "data":  # a feed that refuses its state keeps its current iteration
                    undo.append(back)
        except Exception as error:  # includes the user's own load_state_dict()
            undo_all()
            raise MisfitError(f"{what}: refuses its saved state: {error or repr(error)}") from error
        return undo_all

    def _loaders(
        self, prepared: Sequence[Any], state: Mapping[str, Any]
    ) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
        """Yield for each part except the model its name, a function that loads it, and one that undoes the load."""

        def one(what: str, thing: Any, plain: Any) -> tuple[str, Callable[[], object], Callable[[], object]]:  # noqa: ANN401
            before: Any = None
            with suppress(Exception):  # it may have no state yet
                before = thing.state_dict()
            saved = from_plain(plain)
            return what, lambda: thing.load_state_dict(saved), lambda: thing.load_state_dict(before)

        if self.data is not None and state["data"] is not None:
            yield one("data", self.data, state["data"])
        if prepared:
            now = self.optimizers.as_prepared()
            yield "optimizer", lambda: self.optimizers.load(prepared), lambda: self.optimizers.load(now)
        for number, (scheduler, plain) in enumerate(zip(self.schedulers, self.scheduler_states(state), strict=False)):
            yield one(f"scheduler {number}", scheduler, plain)
        if self.scaler is not None and state["scaler"] is not None:
            yield one("scaler", self.scaler, state["scaler"])
        if state["random"]:
            own = generator_states(self._devices)
            yield "random states", lambda: self._load_random(state["random"]), lambda: self._load_random([own])

    def load_model(self, tensors: Mapping[str, torch.Tensor], loss: Mapping[str, torch.Tensor]) -> None:
        """Load the model; its tensors are already checked."""
        aliases = {alias: tensors[name] for alias, name in self.aliases.items() if name in tensors}
        self.pipe.load_state_dict({**tensors, **aliases})
        if loss:
            self._loss.load_state_dict({name.removeprefix(LOSS): tensor for name, tensor in loss.items()})

    def scheduler_states(self, state: Mapping[str, Any]) -> list[Any]:
        """Return the saved state of each current scheduler, as JSON.

        Raises:
            MisfitError: if the number of schedulers has changed and their saved states differ.
        """
        saved = state["schedulers"]
        if not saved or len(saved) == len(self.schedulers):
            return list(saved)
        if any(plain != saved[0] for plain in saved):  # one per stage, and the stages have changed
            raise MisfitError(f"{len(saved)} schedulers were saved, but this training has {len(self.schedulers)}")
        return [saved[0] for _ in self.schedulers]

    @property
    def _devices(self) -> list[torch.device]:
        return [self.pipe.devices[lane] for lane in self.pipe.lanes]

    def _load_random(self, states: Sequence[dict[str, Any]]) -> None:
        number = self.pipe.lanes[0] if len(self.pipe.lanes) < self.pipe.schedule.num_lanes else 0
        set_generator_states(states[number] if number < len(states) else states[0], self._devices)


def versions() -> dict[str, str]:
    """Return the versions of Penstock and of the packages that write a checkpoint."""
    return {
        "penstock": __version__,
        "torch": torch.__version__,
        "xxhash": version("xxhash"),
        "python": platform.python_version(),
    }
