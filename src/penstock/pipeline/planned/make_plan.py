"""`penstock.plan`: makes a plan for a model without running a step."""

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
from penstock.pipeline.planned.arguments import LossOver, check_model_options
from penstock.pipeline.planned.placement import check_devices, choose_lanes, threads_per_lane
from penstock.pipeline.planned.planned_model import Model, Request, module_of, plan_model
from penstock.pipeline.splitting.batch_splits import Split, found_split
from penstock.schedule.keep_policies import Keep, KeepRequest
from penstock.schedule.schedule import Schedule

if TYPE_CHECKING:
    from penstock.model.profile import Profile
    from penstock.model.profiling.device_rates import Rates
    from penstock.planning.cluster import Cluster
    from penstock.planning.memory_limits import Limit


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
    """Make the plan that `Pipeline` would make with the same arguments, without running a step.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> found = plan(model, example=torch.ones(8, 4), lanes=2, analytic="cpu")
    >>> found.lanes, found.micro_batches, found.schedule.name
    (2, 8, '1f1b')

    Args:
        model: any module, unchanged; or a list of stage modules, each called with the result of the previous one; or
            the result of `penstock.model.capture.capture.capture`.
        example: a typical batch: a tensor, a tuple of positional arguments or a dict of keyword arguments. Penstock
            captures and measures the model with it.
        micro_batches: the number of micro-batches per step; by default four per lane, but at most the number of samples
            in the example.
        schedule: the name of a schedule, a `Schedule`, a CSV file, or "auto", which searches for the best schedule. The
            default is "1f1b", or "zb_gpipe" with `loss_over="batch"`.
        devices: one device per lane, or one device for all lanes; by default all GPUs, or the CPU if there is no GPU.
            Nodes are measured on the first one.
        lanes: the number of lanes. It may exceed the number of devices: nodes are counted with `analytic`, or else
            measured on one device. The default is the number of processes under torchrun, else the number of lanes of a
            given `Schedule`, else the length of `devices`, else the number of GPUs, but at least 2.
        stages_per_lane: the number of stages per lane, for schedules that leave it open.
        cuts: where cuts must lie: node numbers, or the names of the nodes or modules after the cuts. Penstock chooses
            the other cuts.
        keep: what stages do with saved values: "hold", "recompute", "except_last", "offload" or "fit"; one policy, or a
            list with one per stage.
        loss_over: "micro_batch" for one loss per micro-batch; "batch" for one loss on the outputs of all micro-batches.
        batch_dim: the dimension of the batch: one number, or a dict with one number per argument.
        whole: the names of the arguments that every micro-batch gets whole.
        split: a function that cuts batches that are not plain stacks of samples, as in `Pipeline`.
        memory_limit: the bytes of each lane for weights, gradients, optimizer state and saved values, such as 16e9 or
            "16GiB"; one value for all lanes, or a list with one per lane.
        cluster: the speeds of the lanes and the links between them.
        profile: an existing profile or its file; then nothing is measured.
        analytic: the rates of a device, or its name: count operations and bytes instead of measuring.
        capture_path: "direct", "export" or "replay"; "auto" takes the first that works.
        progress: called with the current activity, the number of units done, and their total.

    Raises:
        CaptureError: if the model cannot be captured; the message says where it stopped and what to do.
        PartitionError: if the requested cuts are impossible or no cuts fit the memory; the message says what would fit.
        UsageError: if an argument is invalid.
        ScheduleError: if the schedule does not exist or cannot be built.
    """
    module, captured = module_of(model)
    schedule = default_schedule(loss_over) if schedule is None else schedule
    check_model_options(module, keep, None, memory_limit)
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
