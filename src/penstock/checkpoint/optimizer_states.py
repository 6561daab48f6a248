"""Optimizers: their states by the names of parameters, so that they fit whatever lane a parameter is on later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.checkpoint.misfit import MisfitError
from penstock.checkpoint.state_as_json import from_plain, to_plain
from penstock.errors import UsageError
from penstock.pipeline.weights import is_stand_in

__all__ = ["OptimizerState", "Optimizers", "class_of", "lost_members", "merged"]

# how an optimizer computes, which is for the device it is on now
_OWN = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
_WHOLE = ("LBFGS",)  # whose state is not of each parameter, but of all of them in a row
_TENSOR = {torch.Tensor}
_ALONE = (
    '. To go on with the weights alone: restore(parts=["model"]), or export them, and import them to another folder '
    "(penstock checkpoint)"
)


class _Form(NamedTuple):
    """What is saved of a state that has nothing but tensors: its keys, as JSON, and the names of the tensors."""

    keys: tuple[str, ...]
    plain: dict[str, Any]
    names: tuple[str, ...]


@dataclass
class OptimizerState:
    """What is to be saved of the optimizers of a process.

    Attributes:
        groups: for each group its optimizer, its place and class there, its options and the names of its parameters.
        params: for each parameter its state; tensors are named.
        tensors: these tensors, by the parameter they belong to.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


class Optimizers:
    """One or several optimizers of a pipeline's parameters.

    Args:
        optimizers: these.
        named: the parameters that are here, with their names; a name may have several, one a device.

    Raises:
        UsageError: when an optimizer has a parameter that is not among them, or that another has too.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], named: Callable[[], Iterable[tuple[str, nn.Parameter]]]
    ) -> None:
        self.optimizers, self._named = list(optimizers), named
        self._forms: dict[str, _Form] = {}
        for optimizer in self.optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise UsageError(f"optimizer: give torch's, or a list of them; given: {type(optimizer).__name__}")
        self._names()

    def _names(self) -> dict[int, str]:
        names = {id(parameter): name for name, parameter in self._named()}
        names |= {id(p): "" for p in self._parameters() if is_stand_in(p)}  # nothing is saved of them
        owners: dict[int, int] = {}
        for number, optimizer in enumerate(self.optimizers):
            for place, group in enumerate(optimizer.param_groups):
                unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
                if unknown:
                    raise UsageError(
                        f"optimizer: group {place} of optimizer {number} has parameters that are not the pipeline's, "
                        f"of shapes {unknown[:3]}; make it of pipe.parameters()"
                    )
                twice = {
                    names[id(p)]: owners[id(p)]
                    for p in group["params"]
                    if owners.setdefault(id(p), number) != number and names[id(p)]
                }
                if twice:
                    raise UsageError(
                        f"optimizer: {_some(list(twice))}: in optimizer {min(twice.values())} and in {number}, "
                        "and a checkpoint keeps one state of each parameter; give each to one optimizer"
                    )
        return names

    def members(self) -> list[str]:
        """Return the names of the parameters that the optimizers here have."""
        return _members(self._parameters(), self._names())

    def _parameters(self) -> list[torch.Tensor]:
        return [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]

    def collect(self, is_saved: Callable[[str], bool], *, is_alone: bool = True) -> OptimizerState:
        """Return groups and states; of parameters that are saved elsewhere too, only those that are saved here.

        Args:
            is_saved: whether a parameter is saved here.
            is_alone: whether all parameters of the model are here.

        Raises:
            UsageError: for a state that cannot be saved.
        """
        names, found = self._names(), OptimizerState()
        for number, optimizer in enumerate(self.optimizers):
            if not is_alone and class_of(optimizer) in _WHOLE:
                raise UsageError(
                    f"optimizer: {class_of(optimizer)} keeps one long row of all its parameters, which cannot be put "
                    "together from processes; run the lanes in one process, or take another optimizer"
                )
            for place, group in enumerate(optimizer.param_groups):
                where = f"optimizer {number}, group {place}"
                options = {key: value for key, value in group.items() if key not in _OWN}
                members = _members(group["params"], names)
                told = {"optimizer": number, "place": place, "class": class_of(optimizer)}
                found.groups.append({**told, "options": to_plain(options, where), "members": members})
                for parameter in group["params"]:
                    name = names[id(parameter)]
                    if name and is_saved(name) and name not in found.params and optimizer.state.get(parameter):
                        self._collect_one(name, optimizer.state[parameter], found)
        return found

    def _collect_one(self, name: str, state: Mapping[str, Any], found: OptimizerState) -> None:
        """Take one parameter's state; where it is of nothing but tensors, as mostly, what it is like is known."""
        form = self._forms.get(name)
        if form is not None and form.keys == tuple(state) and _TENSOR.issuperset(map(type, state.values())):
            found.params[name], found.tensors[name] = form.plain, dict(zip(form.names, state.values(), strict=True))
            return
        own: dict[str, torch.Tensor] = {}

        def keep(where: str, tensor: torch.Tensor) -> str:
            if where in own:
                raise UsageError(f"{where}: two tensors of the optimizer would have this name")
            own[where] = tensor
            return where

        found.params[name] = {key: to_plain(value, f"{name}/{key}", keep) for key, value in state.items()}
        found.tensors[name] = own
        if _TENSOR.issuperset(map(type, state.values())):
            self._forms[name] = _Form(tuple(state), found.params[name], tuple(own))

    def prepare(
        self, saved: Mapping[str, Any] | None, find: Callable[[str], torch.Tensor]
    ) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Return for each optimizer a state dict that it can load, and the states of its parameters as they were.

        Raises:
            MisfitError: when the saved groups are not of these parameters.
        """
        if saved is None:
            return []
        names, made = self._names(), []
        for number, optimizer in enumerate(self.optimizers):
            current = optimizer.state_dict()
            _check_groups(saved["groups"], number, optimizer, names)
            groups, states = [], {}
            for place, (group, told) in enumerate(zip(optimizer.param_groups, current["param_groups"], strict=True)):
                members = [names[id(p)] for p in group["params"]]
                options = _options_of(saved["groups"], number, place, [name for name in members if name])
                groups.append({**told, **from_plain(options), **{key: told[key] for key in _OWN if key in told}})
                for index, name in zip(told["params"], members, strict=True):
                    if name in saved["params"]:
                        states[index] = from_plain(saved["params"][name], find)
            ordered = [states.get(index, {}) for told in current["param_groups"] for index in told["params"]]
            made.append(({"state": states, "param_groups": groups}, ordered))
        return made

    def as_prepared(self) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Return what `load` takes to have everything again as it is now."""
        return [
            (o.state_dict(), [dict(o.state.get(p, {})) for group in o.param_groups for p in group["params"]])
            for o in self.optimizers
        ]

    def load(self, prepared: Sequence[tuple[dict[str, Any], list[dict[str, Any]]]]) -> None:
        """Take over what was prepared."""
        for optimizer, (state, ordered) in zip(self.optimizers, prepared, strict=bool(prepared)):
            optimizer.load_state_dict(state)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for parameter, saved in zip(parameters, ordered, strict=True):
                for key, value in saved.items():  # torch gives states their parameter's dtype: not if they had another
                    there = optimizer.state[parameter][key]
                    if isinstance(value, torch.Tensor) and there.dtype != value.dtype:
                        optimizer.state[parameter][key] = value.to(there.device)


def _members(parameters: Iterable[torch.Tensor], names: Mapping[int, str]) -> list[str]:
    """Return the names of parameters, each once."""
    return [name for name in dict.fromkeys(names[id(p)] for p in parameters) if name]


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """Return what an optimizer is called; where its class is defined may change."""
    return type(optimizer).__qualname__


def lost_members(saved: Mapping[str, Any] | None, members: Iterable[str]) -> str:
    """Return what is wrong when parameters that were saved with an optimizer have none now."""
    kept = set(members)
    groups = saved["groups"] if saved is not None and kept else []  # without any optimizer only the rest is wanted
    lost = {(g["optimizer"], g["place"]): [n for n in g["members"] if n not in kept] for g in groups}
    told = [f"optimizer {o}, group {p}: {_some(names)}" for (o, p), names in lost.items() if names]
    return f"the optimizers here do not have parameters that were saved with one: {'; '.join(told)}" if told else ""


def _check_groups(
    groups: Sequence[Mapping[str, Any]], number: int, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> None:
    """Raise where an optimizer is not of the class, or has not the groups, that its parameters were saved with."""
    own = class_of(optimizer)
    taken: dict[int, tuple[int, dict[str, Any]]] = {}  # for a saved group, the place and options of who takes from it
    for place, group in enumerate(optimizer.param_groups):
        members = _members(group["params"], names)
        options = {key: value for key, value in group.items() if key not in _OWN}
        for index, saved in enumerate(groups):
            if not set(members) & set(saved["members"]):
                continue
            if saved.get("class", own) != own:  # those of earlier versions do not tell it
                raise MisfitError(f"optimizer {number} is {own}, and {saved['class']} was saved{_ALONE}")
            if own in _WHOLE and members != saved["members"]:
                raise MisfitError(f"optimizer {number}: {own} had other parameters, or in another order{_ALONE}")
            other, others = taken.setdefault(index, (place, options))
            if to_plain(options, "") != to_plain(others, ""):
                raise MisfitError(
                    f"optimizer {number}: groups {other} and {place} were one group when they were saved; make the "
                    f"same groups{_ALONE}"
                )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _options_of(groups: Sequence[Mapping[str, Any]], number: int, place: int, members: Sequence[str]) -> dict[str, Any]:
    """Return the options that were saved for some parameters; they must have been the same for all of them."""
    wanted = set(members)
    found = [group for group in groups if wanted & set(group["members"])]
    missing = wanted - {name for group in found for name in group["members"]}
    if missing:
        raise MisfitError(
            f"optimizer {number}, group {place}: the saved optimizer did not have {_some(sorted(missing))}{_ALONE}"
        )
    if not wanted:
        found = [group for group in groups if (group["optimizer"], group["place"]) == (number, place)][:1]
    if any(group["options"] != found[0]["options"] for group in found):
        raise MisfitError(
            f"optimizer {number}, group {place}: its parameters were in groups with other options when they were "
            f"saved; make the same groups{_ALONE}"
        )
    options: dict[str, Any] = found[0]["options"] if found else {}
    return options


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the groups and states of all processes as one."""
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
