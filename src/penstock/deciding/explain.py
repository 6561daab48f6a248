"""explain: capture a model, profile it, cut it, build the schedule and simulate a step; say what came out and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING

from penstock.deciding.cut_request import CutRequest, ProfileSource, Progress, explanation_of, name_of

if TYPE_CHECKING:
    from torch import device as Device  # noqa: N812
    from torch import nn

    from penstock.model.profile import Profile
    from penstock.model.profiling.device_rates import Rates
    from penstock.planning.cluster import Cluster
    from penstock.planning.explain.explanation import Explanation
    from penstock.planning.memory_limits import Limit
    from penstock.schedule.schedule import Schedule

    Model = nn.Module | Sequence[nn.Module]

__all__ = ["explain"]


def explain(
    model: Model | str,
    example: object = None,
    *,
    lanes: int | None = None,
    micro_batches: int | None = None,
    schedule: str | Schedule = "1f1b",
    stages_per_lane: int | None = None,
    cuts: Sequence[int | str] = (),
    keep: str = "hold",
    memory_limit: Limit | None = None,
    cluster: Cluster | None = None,
    batch_size: int | None = None,
    training: bool | None = None,
    capture_path: str = "auto",
    device: Device | str | None = None,
    profile: Profile | str | PathLike[str] | None = None,
    analytic: Rates | str | None = None,
    optimizer_bytes: float | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """Say how a model would be cut into stages and what a step would take. Nothing is trained.

    `print` the result for the tables; it also has `to_dict`, `to_json` and `to_html`.

    Args:
        model: any module, unchanged; or a list of stage modules; or a name as the command line takes it, as `gpt2` or
            `package.module:callable`.
        example: how the model is called with a micro-batch: a tensor, a tuple of arguments or a dict of keyword
            arguments. A model by name may bring its own.
        lanes: how many; 4 if nothing is said.
        micro_batches: a step has; 8 if nothing is said.
        schedule: a name, or a schedule, which then says how many lanes and micro-batches.
        stages_per_lane: for schedules that leave it open.
        cuts: where cuts must lie: numbers of nodes, or nodes or modules that they lie before; the rest is chosen.
        keep: "hold" what the forward saves, or "recompute" it.
        memory_limit: bytes each lane has for weights, gradients, optimizer state and saved values, as 16e9 or "16GiB";
            one value for all lanes or a list.
        cluster: speeds and links of the lanes; by default all alike, and transfers take no time.
        batch_size: the samples of a micro-batch; by default those of the example.
        training: capture in training or in evaluation; by default as the model is.
        capture_path: "direct", "export" or "replay" to have one of these; "auto" takes the first that works.
        device: where to measure; by default where the model is.
        profile: one that was made before, or the file it was saved in; then nothing is measured.
        analytic: rates of a device, or the name of a known one: count operations and bytes, measure nothing.
        optimizer_bytes: optimizer state for each byte of a parameter; by default as in the profile (2.0, for Adam).
        progress: is told what is being done, how much is done, and of how much.

    Raises:
        CaptureError: when the model cannot be captured; says where it stopped, and what to do.
        PartitionError: when no cuts are as asked for, or none fit the memory; says what would.
        UsageError: for arguments that cannot be right.
        ScheduleError: for a schedule that does not exist or cannot be built.
    """
    ask = CutRequest(
        schedule,
        lanes,
        micro_batches,
        stages_per_lane=stages_per_lane,
        cuts=tuple(cuts) if not isinstance(cuts, (str, int)) else (cuts,),
        keep=keep,
        memory_limit=memory_limit,
        cluster=cluster,
    )
    num_stages = ask.check().num_stages
    source = ProfileSource(profile, analytic, device=device, batch_size=batch_size)
    source.check()
    from penstock.model.capture.capture import (
        capture,  # needs torch: what is wrong so far is told without waiting for it
    )

    tell = progress or (lambda what, done, total: None)
    module, call = _model(model, example, batch_size, tell)
    tell("capture", 0, 1)
    captured = capture(module, call, training=training, path=capture_path, num_stages=num_stages)
    costs = source.profile_of(captured, tell)
    if optimizer_bytes is not None:
        costs = replace(costs, optimizer_bytes=optimizer_bytes)
    tell("cut and schedule", 0, 1)
    name = model if isinstance(model, str) else name_of(module)
    return explanation_of(name, module, captured, costs, ask)


def _model(model: Model | str, example: object, batch_size: int | None, tell: Progress) -> tuple[Model, object]:
    from penstock.errors import UsageError
    from penstock.model.small_models.named_models import load

    if isinstance(model, str):
        tell("build the model", 0, 1)
        size = {} if batch_size is None else {"batch_size": batch_size}
        module, own = load(model, **size)
        example = own if example is None else example
        if example is None:
            raise UsageError(f"{model} gives no example: let it return a model and an example of how it is called")
        return module, example
    if not hasattr(model, "forward") and not isinstance(model, (list, tuple)):
        raise UsageError(f"model: give a torch.nn.Module, a list of them, or a name; given: {type(model).__name__}")
    if example is None:
        raise UsageError("example: say how the model is called: a tensor, a tuple of arguments or a dict of keywords")
    return model, example
