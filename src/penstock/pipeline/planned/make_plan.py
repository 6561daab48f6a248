"""plan: decide how a model would be cut and run, and run nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import nn

from penstock.deciding.cut_request import Progress
from penstock.deciding.defaults import KEEP, default_schedule
from penstock.deciding.plan import Plan
from penstock.model.example import BatchLayout
from penstock.pipeline.planned.arguments import LossOver, check_words
from penstock.pipeline.planned.placement import check_devices, choose_lanes, threads_per_lane
from penstock.pipeline.planned.planned_model import Model, Request, module_of, plan_model
from penstock.pipeline.splitting.custom_split import Split
from penstock.pipeline.splitting.packed_images import found_split
from penstock.schedule.keep_policies import Keep, KeepRequest
from penstock.schedule.schedule import Schedule

if TYPE_CHECKING:
    from penstock.model.profile import Profile
    from penstock.model.profiling.device_rates import Rates
    from penstock.planning.cluster import Cluster
    from penstock.planning.memory_limits import Limit

__all__ = ["plan"]


def plan(
    model: Model,
    *,
    example: object,
    micro_batches: int | None = None,
    schedule: str | Schedule | PathLike[str] | None = None,
    devices: Sequence[torch.device | str | int] | None = None,
    lanes: int | None = None,
    stages_per_lane: int | None = None,
    cuts: Sequence[int | str] = (),
    keep: KeepRequest | Sequence[Keep] = KEEP,
    loss_over: LossOver = "micro_batch",
    batch_dim: int | Mapping[str, int] = 0,
    whole: Sequence[str] = (),
    split: Split | None = None,
    memory_limit: Limit | None = None,
    cluster: Cluster | None = None,
    profile: Profile | str | PathLike[str] | None = None,
    analytic: Rates | str | None = None,
    capture_path: str = "auto",
    progress: Progress | None = None,
) -> Plan:
    """Decide how a model is cut and run: what `Pipeline` does with the same arguments before it runs anything.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> found = plan(model, example=torch.ones(8, 4), lanes=2, analytic="cpu")
    >>> found.lanes, found.micro_batches, found.schedule.name
    (2, 8, '1f1b')

    Args:
        model: any module, unchanged; or a list of stage modules, each called with what the one before returns.
        example: how the model is called with a batch: a tensor, a tuple of arguments or a dict of keyword arguments.
        micro_batches: so many per step; by default four per lane, as far as the example has samples.
        schedule: a name, a Schedule, a CSV file, or "auto"; by default 1f1b, and zb_gpipe for a loss over the batch.
        devices: one per lane; the first is where nodes are measured. By default all GPUs, else the CPU.
        lanes: how many; by default as devices, else 2. They need not exist: give `analytic`, or measure on one device.
        stages_per_lane: for schedules that leave it open.
        cuts: where cuts must lie: numbers of nodes, or nodes or modules that they lie before; the rest is chosen.
        keep: what stages do with saved values: "hold", "recompute", "except_last", "offload" or "fit".
        loss_over: "batch" for a loss that sees the outputs of all micro-batches at once.
        batch_dim: the dimension of the batch: one number, or a dict with one per argument.
        whole: names of arguments that every micro-batch gets whole.
        split: for batches that are no plain stacks, as for `Pipeline`.
        memory_limit: bytes each lane has for weights, gradients, optimizer state and saved values, as 16e9 or "16GiB".
        cluster: speeds and links of the lanes.
        profile: one that was made before, or its file: nothing is measured.
        analytic: rates of a device, or the name of one: count instead of measure.
        capture_path: "direct", "export" or "replay" to have one of these.
        progress: called with what is being done, how much is done, and of how much.

    Raises:
        CaptureError: when the model cannot be captured; says where it stopped, and what to do.
        PartitionError: when no cuts are as asked for, or none fit the memory.
        UsageError: for arguments that cannot be right.
        ScheduleError: for a schedule that does not exist or cannot be built.
    """
    module, captured = module_of(model)
    schedule = default_schedule(loss_over) if schedule is None else schedule
    check_words(module, keep, None, memory_limit)
    num_lanes = choose_lanes(lanes, devices, schedule, is_run=False)
    places = check_devices(devices, num_lanes)
    if split is None and isinstance(module, nn.Module):
        split = found_split(example, module)
    request = Request(
        module, example, schedule, num_lanes, micro_batches, stages_per_lane,
        (cuts,) if isinstance(cuts, (str, int)) else tuple(cuts), keep if isinstance(keep, str) else tuple(keep),
        memory_limit, cluster, profile, analytic, capture_path, places[0], progress, threads_per_lane(places),
        BatchLayout(batch_dim, whole), split, None, captured,
    )  # fmt: skip
    return plan_model(request, lambda captured, schedule: None, measures=True).plan
