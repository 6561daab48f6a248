"""Optimizers: their states by the names of parameters, so that they fit whatever lane a parameter is on later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from penstock.checkpoint.misfit import MisfitError
from penstock.checkpoint.plain import from_plain, to_plain
from penstock.errors import UsageError

__all__ = ["OptimizerState", "Optimizers", "merged"]

# how an optimizer computes, which is for the device it is on now
_OWN = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


@dataclass
class OptimizerState:
    """What is to be saved of the optimizers of a process.

    Attributes:
        groups: for each group its optimizer, its place there, its options and the names of its parameters.
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
        UsageError: when an optimizer has a parameter that is not among them.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], named: Callable[[], Iterable[tuple[str, nn.Parameter]]]
    ) -> None:
        self.optimizers, self._named = list(optimizers), named
        for optimizer in self.optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise UsageError(f"optimizer: give torch's, or a list of them; given: {type(optimizer).__name__}")
        self._names()

    def _names(self) -> dict[int, str]:
        names = {id(parameter): name for name, parameter in self._named()}
        for number, optimizer in enumerate(self.optimizers):
            for place, group in enumerate(optimizer.param_groups):
                unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
                if unknown:
                    raise UsageError(
                        f"optimizer: group {place} of optimizer {number} has parameters that are not the pipeline's, "
                        f"of shapes {unknown[:3]}; make it of pipe.parameters()"
                    )
        return names

    def collect(self, is_saved: Callable[[str], bool]) -> OptimizerState:
        """Return groups and states; of parameters that are saved elsewhere too, only those that are saved here."""
        names, found = self._names(), OptimizerState()
        for number, optimizer in enumerate(self.optimizers):
            for place, group in enumerate(optimizer.param_groups):
                where = f"optimizer {number}, group {place}"
                options = {key: value for key, value in group.items() if key not in _OWN}
                members = list(dict.fromkeys(names[id(p)] for p in group["params"]))
                found.groups.append(
                    {"optimizer": number, "place": place, "options": to_plain(options, where), "members": members}
                )
                for parameter in group["params"]:
                    name = names[id(parameter)]
                    if is_saved(name) and name not in found.params and optimizer.state.get(parameter):
                        self._collect_one(name, optimizer.state[parameter], found)
        return found

    def _collect_one(self, name: str, state: Mapping[str, Any], found: OptimizerState) -> None:
        own: dict[str, torch.Tensor] = {}

        def keep(where: str, tensor: torch.Tensor) -> str:
            own[where] = tensor.detach()
            return where

        found.params[name] = {key: to_plain(value, f"{name}/{key}", keep) for key, value in state.items()}
        found.tensors[name] = own

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
            groups, states = [], {}
            for place, (group, told) in enumerate(zip(optimizer.param_groups, current["param_groups"], strict=True)):
                members = [names[id(p)] for p in group["params"]]
                options = _options_of(saved["groups"], number, place, members)
                groups.append({**told, **from_plain(options), **{key: told[key] for key in _OWN if key in told}})
                for index, name in zip(told["params"], members, strict=True):
                    if name in saved["params"]:
                        states[index] = from_plain(saved["params"][name], find)
            ordered = [states.get(index, {}) for told in current["param_groups"] for index in told["params"]]
            made.append(({"state": states, "param_groups": groups}, ordered))
        return made

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


def _options_of(groups: Sequence[Mapping[str, Any]], number: int, place: int, members: Sequence[str]) -> dict[str, Any]:
    """Return the options that were saved for some parameters; they must have been the same for all of them."""
    wanted = set(members)
    found = [group for group in groups if wanted & set(group["members"])]
    missing = wanted - {name for group in found for name in group["members"]}
    if missing:
        raise MisfitError(
            f"optimizer {number}, group {place}: the saved optimizer did not have {', '.join(sorted(missing)[:5])}"
        )
    if not wanted:
        found = [group for group in groups if (group["optimizer"], group["place"]) == (number, place)][:1]
    if any(group["options"] != found[0]["options"] for group in found):
        raise MisfitError(
            f"optimizer {number}, group {place}: its parameters were in groups with other options when they were "
            "saved; make the same groups"
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
            same = next((g for g in groups if all(g[k] == group[k] for k in ("optimizer", "place", "options"))), None)
            if same is None:
                groups.append(dict(group))
            else:
                same["members"] = list(dict.fromkeys([*same["members"], *group["members"]]))
    return {"groups": groups, "params": params}
