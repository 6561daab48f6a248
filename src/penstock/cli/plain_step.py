"""Plain step: time a step of the demo model without a pipeline, alternating with a step of the pipeline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cli.demo_training import BATCH_SIZE, LENGTH, make_optimizer
from penstock.launch.build.small_gpt import loss_of, make_gpt
from penstock.report.units import show_seconds

if TYPE_CHECKING:
    import torch

    from penstock.cli.demo_training import Training

_WARM, _REPEATS = 2, 7


@dataclass(frozen=True)
class Comparison:
    """The median time of a step without a pipeline and in a pipeline, for the same batch.

    >>> print(Comparison(0.06, 0.05, repeats=7, lanes=2, plain_on="2 threads", pipeline_on="1 thread per lane"))
    The plain model takes 60 ms per step with 2 threads; the pipeline takes 50 ms with 1 thread per lane on 2 lanes, \
1.2 times as fast (medians of 7 steps of the same batch).
    """

    plain_seconds: float
    pipeline_seconds: float
    repeats: int
    lanes: int
    plain_on: str
    pipeline_on: str

    def __str__(self) -> str:
        ratio = self.plain_seconds / self.pipeline_seconds
        return (
            f"The plain model takes {show_seconds(self.plain_seconds, digits=3)} per step with {self.plain_on}; the "
            f"pipeline takes {show_seconds(self.pipeline_seconds, digits=3)} with {self.pipeline_on} on {self.lanes} "
            f"lane{'s' if self.lanes > 1 else ''}, {ratio:.2g} times as fast (medians of {self.repeats} steps of the "
            "same batch)."
        )


def compare_with_plain(training: Training) -> Comparison:
    """Time alternating steps of the plain model and the pipeline; on a CPU, both have the same total of threads.

    A step is a forward and a backward, and also an update if the schedule updates within the step. The weights of the
    pipeline may change, so call this after the training.
    """
    import torch

    pipe = training.pipe
    devices = list(dict.fromkeys(pipe.devices))
    lanes, is_cpu = pipe.schedule.num_lanes, all(device.type == "cpu" for device in devices)
    batch, target = training.text.batch(BATCH_SIZE, LENGTH, torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        plain = _plain_step(training, batch.to(devices[0]), target.to(devices[0]))
    pipe.train()

    def pipelined() -> None:
        pipe.step(batch, target)
        for parameter in pipe.parameters():
            parameter.grad = None

    before = torch.get_num_threads()
    times: dict[str, list[float]] = {"plain": [], "pipeline": []}
    for turn in range(_WARM + _REPEATS):
        for name, step, threads in (("plain", plain, lanes), ("pipeline", pipelined, before)):
            torch.set_num_threads(threads if is_cpu else before)
            try:
                seconds = _seconds_of(step, devices)
            finally:
                torch.set_num_threads(before)
            if turn >= _WARM:
                times[name].append(seconds)
    return Comparison(
        statistics.median(times["plain"]),
        statistics.median(times["pipeline"]),
        repeats=_REPEATS,
        lanes=lanes,
        plain_on=f"{lanes} thread{'s' if lanes > 1 else ''}" if is_cpu else str(devices[0]),
        pipeline_on="1 thread per lane" if is_cpu else ", ".join(map(str, devices)),
    )


def _plain_step(training: Training, batch: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    model = make_gpt(len(training.text.characters), length=LENGTH).to(batch.device)
    optimizer = make_optimizer(list(model.parameters())) if training.settings.has_updates else None

    def step() -> None:
        model.zero_grad()
        loss_of(model(batch), target).backward()  # type: ignore[no-untyped-call]  # untyped in torch
        if optimizer is not None:
            optimizer.step()

    return step


def _seconds_of(step: Callable[[], None], devices: list[torch.device]) -> float:
    from penstock.devices.kinds import kind_of

    def wait() -> None:
        for device in devices:
            kind_of(device).synchronize(device)

    wait()
    begin = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - begin
