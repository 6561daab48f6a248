"""Explain: capture, profile, cut and schedule a model, simulate a step, and return all decisions with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING

from penstock.deciding.cut_request import CutRequest, ProfileSource, Progress, explanation_of, name_of
from penstock.errors import UsageError

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
    """Explain how a model would be cut into stages, and predict the time of a step. Nothing is trained.

    `print` the result to see the tables; it also has `to_dict`, `to_json` and `to_html`.

    Args:
        model: any module, unchanged; a list of stage modules; or a name as on the command line, such as `gpt2` or
            `package.module:callable`.
        example: the arguments of the model for one micro-batch: a tensor, a tuple of arguments or a dict of keyword
            arguments. A model given by name can have its own example.
        lanes: number of lanes; 4 by default.
        micro_batches: number of micro-batches per step; 8 by default.
        schedule: a name, or a schedule, which then defines the numbers of lanes and micro-batches.
        stages_per_lane: number of stages per lane, for schedules that leave it open.
        cuts: where cuts must lie: node numbers, or the nodes or modules after the cuts; the others are chosen.
        keep: "hold" or "recompute" the values that the forward saves.
        memory_limit: bytes of each lane for weights, gradients, optimizer state and saved values, such as 16e9 or
            "16GiB"; one value for all lanes or a list.
        cluster: speeds and links of the lanes; by default all lanes are equal and transfers take no time.
        batch_size: number of samples of a micro-batch; by default that of the example.
        training: whether to capture in training mode or in evaluation mode; by default the mode of the model.
        capture_path: "direct", "export" or "replay"; "auto" takes the first that works.
        device: the device on which to measure; by default that of the model.
        profile: an existing profile or its file; then nothing is measured.
        analytic: the rates of a device, or its name: count operations and bytes instead of measuring.
        optimizer_bytes: bytes of optimizer state per byte of a parameter; by default as in the profile (2.0, for Adam).
        progress: called with the current activity, the number of units done, and their total.

    Raises:
        CaptureError: if the model cannot be captured; the message says where it stopped and what to do.
        PartitionError: if the requested cuts are impossible or no cuts fit the memory; the message says what would fit.
        UsageError: if an argument is invalid.
        ScheduleError: if the schedule does not exist or cannot be built.
    """
    request = CutRequest(
        schedule,
        lanes,
        micro_batches,
        stages_per_lane=stages_per_lane,
        cuts=tuple(cuts) if not isinstance(cuts, (str, int)) else (cuts,),
        keep=keep,
        memory_limit=memory_limit,
        cluster=cluster,
    )
    num_stages = request.check().num_stages
    source = ProfileSource(profile, analytic, device=device, batch_size=batch_size)
    source.check()
    from penstock.model.capture.capture import capture  # imports torch, so the checks come first

    report = progress or (lambda what, done, total: None)
    module, call = _model(model, example, batch_size, report)
    report("capture", 0, 1)
    captured = capture(module, call, training=training, path=capture_path, num_stages=num_stages)
    costs = source.profile_of(captured, report)
    if optimizer_bytes is not None:
        costs = replace(costs, optimizer_bytes=optimizer_bytes)
    report("cut and schedule", 0, 1)
    name = model if isinstance(model, str) else name_of(module)
    return explanation_of(name, module, captured, costs, request)


def _model(model: Model | str, example: object, batch_size: int | None, report: Progress) -> tuple[Model, object]:
    from penstock.model.small_models.named_models import load

    if isinstance(model, str):
        report("build the model", 0, 1)
        module, own = load(model, batch_size=batch_size)
        example = own if example is None else example
        if example is None:
            raise UsageError(f"{model} has no example: return a model and example arguments from it")
        return module, example
    if not hasattr(model, "forward") and not isinstance(model, (list, tuple)):
        raise UsageError(f"model: pass a torch.nn.Module, a list of them, or a name; given: {type(model).__name__}")
    if example is None:
        raise UsageError(
            "example: pass the arguments of the model: a tensor, a tuple of arguments or a dict of keywords"
        )
    return model, example
