"""Shared values: losses, outputs and parameters, which lanes exchange outside of the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.runtime.lanes.control_plane import ProcessControl
from penstock.runtime.step import Step
from penstock.runtime.wire.process_transport import ProcessTransport
from penstock.runtime.wire.transport import Key
from penstock.schedule.schedule import Schedule

Results = Mapping[int, list[Any]]  # by micro-batch


class OneProcessValues:
    """The shared values of a single process, whose lanes hold the same tensors; see `ProcessValues`."""

    def exchange(self, number: int, tensors: Sequence[Any], lanes: Sequence[int]) -> list[list[Any]]:  # noqa: ARG002
        """Return the given tensors."""
        return [list(tensors)]

    def losses(self, step: Step, schedule: Schedule) -> Mapping[int, torch.Tensor]:  # noqa: ARG002
        """Return the loss of every micro-batch."""
        return step.losses

    def outputs(
        self, own: Results, num_mbs: int, schedule: Schedule, *, to_all: bool  # noqa: ARG002
    ) -> Results | None:  # fmt: skip
        """Return the results of every micro-batch."""
        return own


class ProcessValues:
    """The exchange of values between lanes that are processes, outside of their programs; they send copies."""

    def __init__(self, transport: ProcessTransport, control: ProcessControl) -> None:
        self._transport, self._control, self._lane = transport, control, transport.lane

    def exchange(self, number: int, tensors: Sequence[Any], lanes: Sequence[int]) -> list[list[Any]]:
        """Return the tensors of each of the given lanes, in order; all these lanes call it with the same number."""
        plain = [thing.detach() if isinstance(thing, torch.Tensor) else thing for thing in tensors]
        with self._control.coordinated():
            for lane in lanes:
                if lane != self._lane:
                    self._transport.send(Key("R", self._lane, number, 0), lane, plain)
            return [
                list(plain) if lane == self._lane else list(self._transport.receive(Key("R", lane, number, 0), lane))
                for lane in lanes
            ]

    def losses(self, step: Step, schedule: Schedule) -> Mapping[int, torch.Tensor]:
        """Return the loss of every micro-batch, and write the metrics of all micro-batches to the step.

        The lanes with the last stage send them to all others.
        """
        with self._control.coordinated():
            losses = self._share_losses(step, schedule)
        self._control.end_call()
        return losses

    def _share_losses(self, step: Step, schedule: Schedule) -> Mapping[int, torch.Tensor]:
        ends = sorted({schedule.home(schedule.num_stages - 1, mb) for mb in range(step.batch.num_mbs)})
        name = f"losses {step.number}"
        if self._lane in ends:
            told = {
                mb: [
                    float(loss),
                    str(loss.dtype).removeprefix("torch."),
                    {name: float(value) for name, value in step.metrics.get(mb, {}).items()},
                ]
                for mb, loss in step.losses.items()
            }
            for other in self._transport.links.peers:
                self._transport.send_message(other, name, told)
        found = dict(step.losses)
        for lane in ends:
            if lane != self._lane:
                for mb, (loss, dtype, metrics) in self._transport.receive_message(lane, name).items():
                    found[int(mb)] = torch.tensor(loss, dtype=getattr(torch, dtype))
                    step.metrics[int(mb)] = {
                        key: torch.tensor(value, dtype=torch.float64) for key, value in metrics.items()
                    }
        return found

    def outputs(self, own: Results, num_mbs: int, schedule: Schedule, *, to_all: bool) -> Results | None:
        """Return the results of every micro-batch, or None if only other lanes get them.

        If several lanes have results, each of them gets all results.
        """
        with self._control.coordinated():
            found = self._share_outputs(own, num_mbs, schedule, to_all=to_all)
        self._control.end_call()
        return found

    def _share_outputs(self, own: Results, num_mbs: int, schedule: Schedule, *, to_all: bool) -> Results | None:
        lane_of = {mb: schedule.home(schedule.num_stages - 1, mb) for mb in range(num_mbs)}
        wanted_by = {self._lane, *self._transport.links.peers} if to_all else set(lane_of.values())
        found = dict(own)
        for mb, values in own.items():
            for other in wanted_by - {self._lane}:
                self._transport.send(Key("R", lane_of[mb], schedule.num_stages, mb), other, values)
        if self._lane not in wanted_by:
            return None
        for mb, lane in lane_of.items():
            if mb not in found:
                received = self._transport.receive(Key("R", lane, schedule.num_stages, mb), lane)
                found[mb] = [value.clone() for value in received]  # copied, because the user may keep them for long
        return found
