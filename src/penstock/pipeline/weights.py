"""Weights: the parameters and buffers of a pipeline's lanes, and the gradients of parameters that lanes share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.errors import UsageError
from penstock.loading.pretrained_writer import PretrainedWriter
from penstock.loading.weight_loader import ModelOnMeta, WeightLoader, in_all_processes
from penstock.model.preserve import on_device
from penstock.model.stages import Chain, Stage
from penstock.pipeline.executor_setup import stage_on
from penstock.runtime.lanes.lane_group import LaneGroup
from penstock.schedule.actions import Kind
from penstock.schedule.schedule import Schedule

_BUFFERS = 1 << 20  # the first exchange number of buffers; parameters and statistics have lower numbers


class Weights:
    """The parameters and buffers of the lanes in this process.

    A parameter that stages of several lanes use is on each of these lanes. If the lanes are in one process and on one
    device, they use the same tensor. Otherwise, its gradients are summed once at the end of a step, and are then the
    same on all lanes.
    """

    def __init__(
        self, chains: Sequence[Chain], schedule: Schedule, devices: Sequence[torch.device], lane_group: LaneGroup,
        *, make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None, is_scaled: bool = False,
        on_meta: ModelOnMeta | None = None, loader: WeightLoader | None = None,
    ) -> None:  # fmt: skip
        self._chain, self._schedule, self._lane_group, self._devices = chains[0], schedule, lane_group, devices
        self._stages: dict[tuple[int, int], Stage] = {
            (lane, s): stage_on(chains, schedule, lane, s)
            for lane in lane_group.lanes
            for s in schedule.stages_of(lane)
        }
        self._place()
        self._fill(on_meta, loader)
        self._lanes_holding = self._find_holders(chains[0])
        self._number_of = {name: number for number, name in enumerate(self._lanes_holding)}
        self._unsummed: dict[str, torch.Tensor] = {}  # gradients from steps under no_sync, not summed yet
        self._is_synchronised = True
        # empty; with a scaler it has one element, whose gradient shows the scaler an overflow on another lane
        self._placeholder = _make_placeholder(int(is_scaled), devices[lane_group.lanes[0]])
        self.optimizers = self._make_optimizers(make_optimizer)
        self.groups = _update_groups(schedule)
        self._broadcast_values()

    # ---- placement

    def _place(self) -> None:
        """Move the tensors of each stage to its lane's device; copy those that a lane on another device already has."""
        home_of: dict[int, torch.device] = {}
        self._empty: set[str] = set()  # tensors that were on meta and have no values yet
        for (lane, _), stage in self._stages.items():
            device = self._devices[lane]
            for name in list(stage.held):
                tensor = stage.held.get(name)
                if tensor.is_meta:
                    self._empty.add(name)
                    stage.held.set(name, _materialised(tensor, device))
                elif id(tensor) in home_of and home_of[id(tensor)] != device:
                    stage.held.set(name, _copied(tensor, device))
                elif tensor.device != device:
                    stage.held.set(name, on_device(tensor, device))
                home_of[id(stage.held.get(name))] = device

    def _fill(self, on_meta: ModelOnMeta | None, loader: WeightLoader | None) -> None:
        """Give values to the tensors that were on meta, in all processes or in none; load all tensors of a file."""
        own: dict[str, list[torch.Tensor]] = {}
        for stage in self._stages.values():
            for name in stage.held:
                tensor = stage.held.get(name)
                if all(tensor is not other for other in own.setdefault(name, [])):
                    own[name].append(tensor)
        if loader is not None:
            gc.collect()  # what the capture has left, before memory is filled
            in_all_processes(self._lane_group.control.gather, partial(loader.fill, own))
            self._empty.clear()
        elif on_meta is not None:
            self._empty -= in_all_processes(self._lane_group.control.gather, partial(on_meta.fill, own))

    def _find_holders(self, chain: Chain) -> dict[str, tuple[int, ...]]:
        """Return the parameters that several lanes hold, each with its lanes."""
        lanes_of: dict[str, set[int]] = {}
        for s, stage in enumerate(chain.stages):
            for name, _ in stage.named_parameters():  # includes frozen parameters, which may be unfrozen later
                lanes_of.setdefault(name, set()).update(way[s] for way in self._schedule.ways)
        return {name: tuple(sorted(lanes)) for name, lanes in lanes_of.items() if len(lanes) > 1}

    def lanes_sharing_tensors(self) -> list[tuple[int, ...]]:
        """Return groups of lanes in this process that share tensors, and so must not use them at the same time."""
        lanes_of: dict[int, set[int]] = {}
        for (lane, _), stage in self._stages.items():
            for name in stage.held:
                lanes_of.setdefault(id(stage.held.get(name)), set()).add(lane)
        groups: list[set[int]] = []
        for lanes in lanes_of.values():
            if len(lanes) > 1:
                touching = [group for group in groups if group & lanes]
                groups = [group for group in groups if not group & lanes] + [lanes.union(*touching)]
        return [tuple(sorted(group)) for group in groups]

    @property
    def lacks_values(self) -> bool:
        """Whether parameters have no values yet, because the model was on meta."""
        return bool(self._empty)

    def check(self) -> None:
        """Raise if parameters have no values yet: the model was on meta, and no state dict was loaded."""
        if self._empty:
            names = ", ".join(sorted(self._empty)[:5])
            raise UsageError(
                f"the model was on meta, and these have no values yet: {names}. Pass weights=, the folder or file of "
                "the weights, or call load_state_dict(). A state dict has no non-persistent buffers: build the model "
                "in penstock.empty_weights(), which keeps their values, or add them to the state dict by name"
            )

    def _own(self, name: str) -> list[nn.Parameter]:
        """Return the tensors that lanes in this process hold under a name, each once."""
        found: dict[int, nn.Parameter] = {}
        for stage in self._stages.values():
            if name in stage.held:
                tensor = stage.held.get(name)
                found[id(tensor)] = tensor  # type: ignore[assignment]  # used for parameters only
        return list(found.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the lanes in this process with their names, each once."""
        seen: set[int] = set()
        for stage in self._stages.values():
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters and buffers, without a copy; yield a tensor of several lanes once per lane."""
        for stage in self._stages.values():
            yield from zip(stage.held, stage.held.tensors(), strict=True)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the lanes in this process, each once; with none to train, also the placeholder."""
        trains = self._has_all_lanes
        for _, parameter in self.named_parameters():
            trains = trains or parameter.requires_grad
            yield parameter
        if not trains:
            yield self._placeholder

    # ---- state dict

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers under the model's own names; a shared tensor appears under all of its names."""
        held: dict[str, torch.Tensor] = {}
        for stage in self._stages.values():
            held.update((name, t) for name, t in stage.state_dict().items() if name not in held)
        return held | {alias: held[name] for alias, name in self._chain.aliases.items() if name in held}

    def saved_tensors(self) -> dict[str, torch.Tensor]:
        """Return what this process writes: each tensor once, under its first name; its first lane writes it."""
        mine = set(self._lane_group.lanes)
        held: dict[str, torch.Tensor] = {}
        for (_, index), stage in self._stages.items():
            for name, tensor in stage.state_dict().items():
                lanes = self._lanes_holding.get(name) or sorted({way[index] for way in self._schedule.ways})
                if name not in held and min(lanes) in mine:
                    held[name] = tensor
        return held

    def save_pretrained(self, model: nn.Module, folder: str | PathLike[str], *, most: float, overwrite: bool) -> Path:
        """Write the model in the layout of transformers; all processes write their part."""
        self.check()
        writer = PretrainedWriter(model, self._lane_group.control.gather, is_first=0 in self._lane_group.lanes)
        return writer.write(self.saved_tensors(), Path(folder), max_shard_bytes=most, overwrite=overwrite)

    def load_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool) -> None:
        """Copy values into parameters and buffers, in all processes or in none."""
        if not isinstance(state, Mapping):
            raise UsageError(
                f"state: pass a state dict, a mapping from names to tensors; given: {type(state).__name__}"
            )
        own: dict[str, list[torch.Tensor]] = {}
        for stage in self._stages.values():
            named = stage.state_dict(keep_vars=True)
            named |= {name: stage.held.get(name) for name in self._empty if name in stage.held and name in state}
            for name, tensor in named.items():
                if all(tensor is not other for other in own.setdefault(name, [])):
                    own[name].append(tensor)
        fault = self._faults_of(state, own, strict=strict)
        faults = [told for told in self._lane_group.control.gather(fault) if told]
        if faults:
            raise UsageError(f"the state does not fit the model; {' and '.join(dict.fromkeys(faults))}")
        with torch.no_grad():
            for name, tensors in own.items():
                for tensor in tensors if name in state else ():
                    tensor.copy_(state[name])
        self._empty -= state.keys()

    def _faults_of(
        self, state: Mapping[str, torch.Tensor], own: Mapping[str, list[torch.Tensor]], *, strict: bool
    ) -> str:
        """Return the faults of a state dict for the lanes in this process, as text; empty if it fits."""
        known = {name for stage in self._chain.stages for name in stage.held} | self._chain.aliases.keys()
        missing = [name for name in own if name not in state]
        unknown = [name for name in state if name not in known]
        wrong = [
            f"{name}: {tuple(state[name].shape)} instead of {tuple(tensors[0].shape)}"
            for name, tensors in own.items()
            if name in state and state[name].shape != tensors[0].shape
        ]
        if not (wrong or (strict and (missing or unknown))):
            return ""
        return (
            f"missing: {', '.join(missing) or 'none'}; not in the model: {', '.join(unknown) or 'none'}; "
            f"of another shape: {', '.join(wrong) or 'none'}"
        )

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Set all gradients to None or zero, and discard those that are not summed yet."""
        self._unsummed.clear()
        for _, parameter in self.named_parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    # ---- gradients of several lanes

    @contextmanager
    def unsynchronised(self) -> Iterator[None]:
        """Postpone the sum of the gradients of shared parameters until the first step after this block."""
        before, self._is_synchronised = self._is_synchronised, False
        try:
            yield
        finally:
            self._is_synchronised = before

    @contextmanager
    def summed_over_lanes(self, *, is_scaled: bool) -> Iterator[None]:
        """After the block, which runs a step, sum the gradients of shared parameters over all lanes.

        Only the gradients of this step are summed, because earlier gradients are already the same on all lanes.
        """
        shared = self._separate_copies()
        before = {name: [p.grad for p in self._own(name)] for name in shared}
        for name in shared:
            for place, parameter in enumerate(self._own(name)):
                parameter.grad = self._unsummed.get(f"{place}:{name}")
        try:
            yield
        except BaseException:
            for name, gradients in before.items():
                for parameter, gradient in zip(self._own(name), gradients, strict=True):
                    parameter.grad = gradient
            raise
        if self._is_synchronised:
            self._sum(shared)
            self._unsummed.clear()
        for name, gradients in before.items():
            for place, (parameter, gradient) in enumerate(zip(self._own(name), gradients, strict=True)):
                new = parameter.grad
                if not self._is_synchronised and new is not None:
                    self._unsummed[f"{place}:{name}"], new = new, None
                parameter.grad = new if gradient is None else gradient if new is None else gradient + new
        if is_scaled and not self._has_all_lanes:  # in one process, the scaler sees all gradients
            self._share_overflow()

    def _separate_copies(self) -> list[str]:
        """Return the parameters of this process that several lanes hold as different tensors."""
        mine = set(self._lane_group.lanes)
        return [
            name
            for name, lanes in self._lanes_holding.items()
            if mine & set(lanes) and (not set(lanes) <= mine or len(self._own(name)) > 1)
            if self._own(name)[0].requires_grad
        ]

    def _sum(self, names: Sequence[str]) -> None:
        mine = set(self._lane_group.lanes)
        for name in names:
            own, lanes = self._own(name), self._lanes_holding[name]
            local = _total([p.grad for p in own], own[0].device)
            parts = [local]
            if not set(lanes) <= mine:
                given = self._lane_group.values.exchange(self._number_of[name], _as_plain(local), lanes)
                parts = [_from_plain(one, own[0].shape) for one in given]
            total = _total(parts, own[0].device)
            for parameter in own:
                parameter.grad = None if total is None else total.to(parameter.device)

    def _share_overflow(self) -> None:
        """Show an overflow on one lane to all lanes, so that either all lanes skip the update or none does."""
        own = [parameter for _, parameter in self.named_parameters() if parameter.grad is not None]
        is_finite = all(bool(p.grad.isfinite().all()) for p in own if p.grad is not None)
        # the gradient that the scaler checks on this lane
        self._placeholder.grad = None if own else torch.zeros_like(self._placeholder)
        if all(self._lane_group.control.gather(is_finite)):
            return
        for parameter in (*own, self._placeholder):
            if parameter.grad is not None and parameter.grad.numel():
                parameter.grad.fill_(float("inf"))
                return

    def _broadcast_values(self) -> None:
        """Copy the values of each shared parameter from its first lane to its other lanes."""
        mine = set(self._lane_group.lanes)
        with torch.no_grad():
            for name, lanes in self._lanes_holding.items():
                if mine & set(lanes) and not set(lanes) <= mine:
                    own = self._own(name)
                    first = self._lane_group.values.exchange(self._number_of[name], [own[0].detach()], lanes)[0][0]
                    for parameter in own:
                        parameter.copy_(first)

    def average_buffers(self) -> None:
        """Average the buffers of each stage that lanes of several processes run.

        Each of these lanes has run only its own micro-batches. Within one process, lanes share the tensors. Integer
        buffers get the maximum.
        """
        mine = set(self._lane_group.lanes)
        if len(mine) == self._schedule.num_lanes:
            return
        with torch.no_grad():
            for (_, index), stage in self._stages.items():
                lanes = sorted({way[index] for way in self._schedule.ways})
                names = [] if set(lanes) <= mine else [name for name, _ in stage.named_buffers()]
                if names:
                    own = [stage.held.get(name) for name in names]
                    given = self._lane_group.values.exchange(_BUFFERS + index, own, lanes)
                    for buffer, *copies in zip(own, *given, strict=True):
                        together = torch.stack([copy.to(buffer.device) for copy in copies])
                        is_float = buffer.is_floating_point() or buffer.is_complex()
                        buffer.copy_(together.mean(0) if is_float else together.amax(0))

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale all gradients so that their norm over all lanes is at most `max_norm`; return the previous norm."""
        if not float(max_norm) >= 0 or not float(norm_type) > 0:
            raise UsageError(
                f"clip_grad_norm_: max_norm must be 0 or more, norm_type more than 0; given: {max_norm}, {norm_type}"
            )
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        norms = self._own_norms(norm_type)
        own = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), dtype=torch.float64)
        if self._has_all_lanes:  # the norm stays on the device, so the host does not wait
            total: torch.Tensor = own
        else:
            total = torch.linalg.vector_norm(
                torch.tensor(self._lane_group.control.gather(float(own)), dtype=own.dtype), norm_type
            )
        if float(max_norm) == float("inf"):  # no scaling: inf / inf would make all gradients NaN
            return total
        # as in torch, a NaN norm makes all gradients NaN
        scale = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
        scale_on = {
            device: scale.to(device, non_blocking=device.type == "cuda") for device in {g.device for g in gradients}
        }
        for gradient in gradients:
            gradient.mul_(scale_on[gradient.device].to(gradient.dtype))
        return total

    def _own_norms(self, norm_type: float) -> list[torch.Tensor]:
        """Return the norms of the gradients in this process; a shared parameter counts on its first lane only."""
        seen: set[str] = set()
        norms: list[torch.Tensor] = []
        for name, parameter in self.named_parameters():
            first = min(self._lanes_holding.get(name, self._lane_group.lanes))
            if parameter.grad is not None and first in self._lane_group.lanes and name not in seen:
                seen.add(name)
                gradient = parameter.grad
                is_narrow = gradient.dtype in (torch.float16, torch.bfloat16)
                norm = torch.linalg.vector_norm(
                    gradient, norm_type, dtype=torch.float32 if is_narrow else None
                ).double()
                norms.append(norm if not norms else norm.to(norms[0].device, non_blocking=norms[0].is_cuda))
        return norms

    @property
    def _has_all_lanes(self) -> bool:
        """Whether all lanes run in this process."""
        return len(self._lane_group.lanes) == self._schedule.num_lanes

    def _make_optimizers(
        self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None
    ) -> dict[int, torch.optim.Optimizer]:
        has_updates = Kind.U in self._schedule.kinds
        if has_updates and make is None:
            raise UsageError(
                f"{self._schedule.name} updates weights within the step: pass optimizer=, a function that makes an "
                "optimizer from a list of parameters, such as optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
            )
        if not has_updates and make is not None:
            raise UsageError(f"optimizer: {self._schedule.name} does not update weights within the step; leave it out")
        if make is None:
            return {}
        if self._lanes_holding:
            names = ", ".join(self._lanes_holding)
            raise UsageError(
                f"{self._schedule.name} updates each stage separately, so two stages cannot share a parameter: {names}"
            )
        return {
            index: make([p for p in stage.parameters() if p.requires_grad] or [self._placeholder])
            for (_, index), stage in self._stages.items()
        }


def _make_placeholder(size: int, device: torch.device) -> nn.Parameter:
    """Return a parameter for the optimizer of a lane without trainable parameters: torch refuses an empty list."""
    made = nn.Parameter(torch.zeros(size, device=device))
    made.is_placeholder = True  # type: ignore[attr-defined]
    return made


def is_placeholder(parameter: torch.Tensor) -> bool:
    """Return whether a parameter was made by `_make_placeholder`, so that it is not a parameter of the model."""
    return getattr(parameter, "is_placeholder", False)


def _update_groups(schedule: Schedule) -> list[list[int]] | None:
    """Return the micro-batches of each update within the step; None if the schedule has no updates."""
    if Kind.U not in schedule.kinds:
        return None
    groups: list[list[int]] = [[]]
    for action in schedule.lanes[schedule.lane_of[-1]]:
        if action.stage == schedule.num_stages - 1 and action.kind in (Kind.B, Kind.W):
            groups[-1].append(action.mb)
        elif action.stage == schedule.num_stages - 1 and action.kind is Kind.U:
            groups.append([])
    return [group for group in groups if group]


def _total(gradients: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor | None:
    # dense first: torch cannot add a dense tensor to a sparse one in place
    there = sorted((g.to(device) for g in gradients if g is not None), key=lambda g: g.is_sparse)
    if not there:
        return None
    total = there[0].clone()
    for gradient in there[1:]:
        total += gradient
    return total


def _as_plain(gradient: torch.Tensor | None) -> list[Any]:
    """Return a gradient as tensors that can be sent: a sparse gradient as its indices and values."""
    if gradient is None or not gradient.is_sparse:
        return [gradient]
    gradient = gradient.coalesce()
    return [gradient.indices(), gradient.values()]


def _from_plain(given: Sequence[torch.Tensor | None], shape: torch.Size) -> torch.Tensor | None:
    """Return the gradient that `_as_plain` converted."""
    if len(given) == 1:
        return given[0]
    indices, values = (part for part in given if part is not None)
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True)


def _materialised(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return _like(tensor, torch.empty_like(tensor, device=device))


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return _like(tensor, tensor.detach().to(device, copy=True))


def _like(tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made
