"""Optimizer states: stored by parameter name, so that they load on any lane."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.checkpoint.state_as_json import from_plain, to_plain
from penstock.errors import UsageError
from penstock.pipeline.weights import is_placeholder
from penstock.tensor_files.manifest import MisfitError

# options that depend on the current device, so they are not saved
_DEVICE_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
_FLAT_STATE = ("LBFGS",)  # optimizers with one flat state for all parameters instead of one per parameter
_TENSOR = {torch.Tensor}
_WEIGHTS_ONLY_HINT = (
    '. To continue with only the weights: call restore(parts=["model"]), or export them and import them into another '
    "folder (penstock checkpoint)"
)


class _Form(NamedTuple):
    """The layout of a state that consists of tensors only: its keys, its JSON form and the names of the tensors."""

    keys: tuple[str, ...]
    plain: dict[str, Any]
    names: tuple[str, ...]


@dataclass
class OptimizerState:
    """The state of a process's optimizers."""

    # of each group: the number of its optimizer, its place there, its class, options and parameter names
    groups: list[dict[str, Any]] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)  # of each parameter, with names in place of tensors
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # the named tensors of each parameter


class Optimizers:
    """One or several optimizers of a pipeline's parameters.

    Args:
        optimizers: the optimizers.
        named: returns the parameters of this process with their names; a name can have one parameter per device.

    Raises:
        UsageError: if an optimizer has a parameter that is not the pipeline's or belongs to another optimizer.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], named: Callable[[], Iterable[tuple[str, nn.Parameter]]]
    ) -> None:
        self.optimizers, self._named = list(optimizers), named
        self._forms: dict[str, _Form] = {}
        for optimizer in self.optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise UsageError(
                    f"optimizer: expected a torch optimizer or a list of them; given: {type(optimizer).__name__}"
                )
        self._names()

    def _names(self) -> dict[int, str]:
        names = {id(parameter): name for name, parameter in self._named()}
        names |= {id(p): "" for p in self._parameters() if is_placeholder(p)}  # nothing is saved for them
        owners: dict[int, int] = {}
        for number, optimizer in enumerate(self.optimizers):
            for place, group in enumerate(optimizer.param_groups):
                unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
                if unknown:
                    raise UsageError(
                        f"optimizer: group {place} of optimizer {number} has parameters that are not the pipeline's, "
                        f"of shapes {unknown[:3]}; make it from pipe.parameters()"
                    )
                twice = {
                    names[id(p)]: owners[id(p)]
                    for p in group["params"]
                    if owners.setdefault(id(p), number) != number and names[id(p)]
                }
                if twice:
                    raise UsageError(
                        f"optimizer: {some(list(twice))}: in optimizer {min(twice.values())} and in {number}, "
                        "but a checkpoint stores one state per parameter; give each parameter to one optimizer"
                    )
        return names

    def members(self) -> list[str]:
        """Return the names of the optimizers' parameters."""
        return _members(self._parameters(), self._names())

    def _parameters(self) -> list[torch.Tensor]:
        return [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]

    def collect(self, is_saved: Callable[[str], bool], *, is_alone: bool = True) -> OptimizerState:
        """Return groups and states; skip the states of parameters that another process saves.

        Args:
            is_saved: whether this process saves a parameter.
            is_alone: whether this process has all parameters of the model.

        Raises:
            UsageError: for a state that cannot be saved.
        """
        names, found = self._names(), OptimizerState()
        for number, optimizer in enumerate(self.optimizers):
            if not is_alone and class_of(optimizer) in _FLAT_STATE:
                raise UsageError(
                    f"optimizer: {class_of(optimizer)} keeps one flat state for all parameters, which cannot be merged "
                    "across processes; run the lanes in one process, or use another optimizer"
                )
            for place, group in enumerate(optimizer.param_groups):
                where = f"optimizer {number}, group {place}"
                options = {key: value for key, value in group.items() if key not in _DEVICE_OPTIONS}
                members = _members(group["params"], names)
                head = {"optimizer": number, "place": place, "class": class_of(optimizer)}
                found.groups.append({**head, "options": to_plain(options, where), "members": members})
                for parameter in group["params"]:
                    name = names[id(parameter)]
                    if name and is_saved(name) and name not in found.params and optimizer.state.get(parameter):
                        self._collect_one(name, optimizer.state[parameter], found)
        return found

    def _collect_one(self, name: str, state: Mapping[str, Any], found: OptimizerState) -> None:
        """Collect the state of one parameter; reuse the known layout if the state has only tensors, which is usual."""
        form = self._forms.get(name)
        if form is not None and form.keys == tuple(state) and _TENSOR.issuperset(map(type, state.values())):
            found.params[name], found.tensors[name] = form.plain, dict(zip(form.names, state.values(), strict=True))
            return
        own: dict[str, torch.Tensor] = {}

        def keep(where: str, tensor: torch.Tensor) -> str:
            if where in own:
                raise UsageError(f"{where}: two tensors of the optimizer have this name")
            own[where] = tensor
            return where

        found.params[name] = {key: to_plain(value, f"{name}/{key}", keep) for key, value in state.items()}
        found.tensors[name] = own
        if _TENSOR.issuperset(map(type, state.values())):
            self._forms[name] = _Form(tuple(state), found.params[name], tuple(own))

    def prepare(
        self, saved: Mapping[str, Any] | None, find: Callable[[str], torch.Tensor]
    ) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Return for each optimizer a state dict to load, and the states of its parameters with their saved dtypes.

        Raises:
            MisfitError: if the saved groups do not fit these parameters.
        """
        if saved is None:
            return []
        names, made = self._names(), []
        for number, optimizer in enumerate(self.optimizers):
            current = optimizer.state_dict()
            _check_groups(saved["groups"], number, optimizer, names)
            groups, states = [], {}
            for place, (group, now) in enumerate(zip(optimizer.param_groups, current["param_groups"], strict=True)):
                members = [names[id(p)] for p in group["params"]]
                options = _options_of(saved["groups"], number, place, [name for name in members if name])
                device_options = {key: now[key] for key in _DEVICE_OPTIONS if key in now}
                groups.append({**now, **from_plain(options), **device_options})
                for index, name in zip(now["params"], members, strict=True):
                    if name in saved["params"]:
                        states[index] = from_plain(saved["params"][name], find)
            ordered = [states.get(index, {}) for now in current["param_groups"] for index in now["params"]]
            made.append(({"state": states, "param_groups": groups}, ordered))
        return made

    def as_prepared(self) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Return the current state in the form that `load` takes."""
        return [
            (o.state_dict(), [dict(o.state.get(p, {})) for group in o.param_groups for p in group["params"]])
            for o in self.optimizers
        ]

    def load(self, prepared: Sequence[tuple[dict[str, Any], list[dict[str, Any]]]]) -> None:
        """Load what `prepare` returned."""
        for optimizer, (state, ordered) in zip(self.optimizers, prepared, strict=bool(prepared)):
            optimizer.load_state_dict(state)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for parameter, saved in zip(parameters, ordered, strict=True):
                for key, value in saved.items():  # undo torch's cast of states to the parameter's dtype
                    there = optimizer.state[parameter][key]
                    if isinstance(value, torch.Tensor) and there.dtype != value.dtype:
                        optimizer.state[parameter][key] = value.to(there.device)


def _members(parameters: Iterable[torch.Tensor], names: Mapping[int, str]) -> list[str]:
    """Return the names of parameters, each once."""
    return [name for name in dict.fromkeys(names[id(p)] for p in parameters) if name]


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the class name of an optimizer, without its module, which may change."""
    return type(optimizer).__qualname__


def lost_members(saved: Mapping[str, Any] | None, members: Iterable[str]) -> str:
    """Return a fault if parameters that were saved with an optimizer now have none, otherwise ""."""
    kept = set(members)
    # without any optimizer, only the other parts are loaded
    groups = saved["groups"] if saved is not None and kept else []
    lost = {(g["optimizer"], g["place"]): [n for n in g["members"] if n not in kept] for g in groups}
    faults = [f"optimizer {o}, group {p}: {some(names)}" for (o, p), names in lost.items() if names]
    return f"these parameters were saved with an optimizer and have none now: {'; '.join(faults)}" if faults else ""


def _check_groups(
    groups: Sequence[Mapping[str, Any]], number: int, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> None:
    """Raise if an optimizer's class or groups are not those that its parameters were saved with."""
    own = class_of(optimizer)
    # for each saved group, the position and options of a group that loads it
    taken: dict[int, tuple[int, dict[str, Any]]] = {}
    for place, group in enumerate(optimizer.param_groups):
        members = _members(group["params"], names)
        options = {key: value for key, value in group.items() if key not in _DEVICE_OPTIONS}
        for index, saved in enumerate(groups):
            if not set(members) & set(saved["members"]):
                continue
            if saved.get("class", own) != own:  # older checkpoints have no class
                raise MisfitError(f"optimizer {number} is {own}, but {saved['class']} was saved{_WEIGHTS_ONLY_HINT}")
            if own in _FLAT_STATE and members != saved["members"]:
                raise MisfitError(
                    f"optimizer {number}: {own} was saved with other parameters or another order{_WEIGHTS_ONLY_HINT}"
                )
            other, others = taken.setdefault(index, (place, options))
            if to_plain(options, "") != to_plain(others, ""):
                raise MisfitError(
                    f"optimizer {number}: groups {other} and {place} were saved as one group; use the same groups"
                    f"{_WEIGHTS_ONLY_HINT}"
                )


def some(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _options_of(groups: Sequence[Mapping[str, Any]], number: int, place: int, members: Sequence[str]) -> dict[str, Any]:
    """Return the options that were saved for some parameters; they must be the same for all of them."""
    wanted = set(members)
    found = [group for group in groups if wanted & set(group["members"])]
    missing = wanted - {name for group in found for name in group["members"]}
    if missing:
        raise MisfitError(
            f"optimizer {number}, group {place}: the checkpoint lacks {some(sorted(missing))}{_WEIGHTS_ONLY_HINT}"
        )
    if not wanted:
        found = [group for group in groups if (group["optimizer"], group["place"]) == (number, place)][:1]
    if any(group["options"] != found[0]["options"] for group in found):
        raise MisfitError(
            f"optimizer {number}, group {place}: its parameters were saved in groups with different options; use the "
            f"same groups{_WEIGHTS_ONLY_HINT}"
        )
    options: dict[str, Any] = found[0]["options"] if found else {}
    return options


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the groups and states of all processes."""
    groups: list[dict[str, Any]] = []
    params: dict[str, Any] = {}
    for part in parts:
        params |= part["params"]
        for group in part["groups"]:
            keys = [key for key in group if key != "members"]
            same = next((g for g in groups if all(g.get(key) == group[key] for key in keys)), None)
            if same is None:
                groups.append(dict(group))
            else:
                same["members"] = list(dict.fromkeys([*same["members"], *group["members"]]))
    return {"groups": groups, "params": params}
