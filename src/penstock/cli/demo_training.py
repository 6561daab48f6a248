"""Demo training: a small GPT on several lanes, reported step by step, and its step without a pipeline."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError
from penstock.launch.build.small_gpt import load_text, loss_of, make_gpt
from penstock.report.units import show_seconds
from penstock.schedules import describe, load_csv

if TYPE_CHECKING:
    import torch

    from penstock.deciding.cut_request import Progress
    from penstock.pipeline import Pipeline
    from penstock.planning.explain.explanation import Explanation
    from penstock.report.timeline import Timeline
    from penstock.training.callbacks.callback import Reading

BATCH_SIZE, LENGTH = 32, 32  # samples per step, and characters per sample
PROMPT = "The wheel does not care how much"  # as long as a sample: the captured model accepts no other length
LANES, MICRO_BATCHES = 2, 8  # defaults
_SEED, _RATE, _NUM_WRITTEN = 0, 4e-3, 300
_MEASURE_EVERY = 5  # steps, since measuring takes a little time
_WARM, _REPEATS = 2, 7  # of the comparison


@dataclass(frozen=True)
class Settings:
    """The options of the command line.

    Raises:
        UsageError: if there are more micro-batches than samples.
        ScheduleError: if the schedule does not exist.
    """

    steps: int
    schedule: str
    lanes: int | None = None
    micro_batches: int | None = None

    def __post_init__(self) -> None:
        if (self.micro_batches or 1) > BATCH_SIZE:
            raise UsageError(f"--micro-batches: {self.micro_batches}, but a batch has {BATCH_SIZE} samples")
        if not self.is_file:
            describe(self.schedule)

    @property
    def is_file(self) -> bool:
        """Whether the schedule is a CSV file, which defines lanes and micro-batches."""
        return self.schedule.lower().endswith(".csv")

    @property
    def has_updates(self) -> bool:
        """Whether the schedule updates weights within the step."""
        return not self.is_file and not describe(self.schedule).trains_exactly


class Training:
    """A GPT, its pipeline and its optimizer."""

    def __init__(self, settings: Settings, *, progress: Progress) -> None:
        import torch

        self.settings, self.text = settings, load_text()
        self.timelines: list[Timeline] = []
        self._random = torch.Generator().manual_seed(_SEED)
        torch.manual_seed(_SEED)
        self.pipe = self._pipeline(progress)
        self.explanation: Explanation = self.pipe.explain()
        self._optimizers = list(self.pipe.optimizers.values()) or [make_optimizer(list(self.pipe.parameters()))]
        self._rates = [
            torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=settings.steps + 1, pct_start=0.1)
            for optimizer in self._optimizers
        ]

    def _pipeline(self, progress: Progress) -> Pipeline:
        from penstock.pipeline import Pipeline

        given = self.settings
        return Pipeline(
            make_gpt(len(self.text.characters), length=LENGTH),
            example=self.text.batch(BATCH_SIZE, LENGTH, self._random)[0],
            loss=loss_of,
            lanes=given.lanes if given.is_file else given.lanes or LANES,
            micro_batches=given.micro_batches if given.is_file else given.micro_batches or MICRO_BATCHES,
            schedule=load_csv(given.schedule) if given.is_file else given.schedule,
            optimizer=make_optimizer if given.has_updates else None,
            progress=progress,
        )

    def run(self) -> Iterator[Reading]:
        """Train, and yield a reading after each step."""
        from penstock.training.callbacks.callback import Reading
        from penstock.training.callbacks.lane_memory import lane_bytes

        steps = self.settings.steps
        held: tuple[int, ...] = ()
        for step in range(1, steps + 1):
            is_measured = step in (1, steps) or step % _MEASURE_EVERY == 0
            begin, rate = time.perf_counter(), self._optimizers[0].param_groups[0]["lr"]
            loss, norm = self._step(is_measured=is_measured)
            seconds = time.perf_counter() - begin
            if is_measured:
                held = lane_bytes(self.pipe, optimizers=self._optimizers, timeline=self.timelines[-1])
            yield Reading(
                step, steps, 0, loss, norm, (rate,), seconds, BATCH_SIZE, BATCH_SIZE * LENGTH, self.timelines[-1], held
            )

    def _step(self, *, is_measured: bool) -> tuple[float, float]:
        """Run one step; return its loss and the norm of its gradients."""
        batch, target = self.text.batch(BATCH_SIZE, LENGTH, self._random)
        if is_measured:
            with self.pipe.record() as recording:
                loss = self.pipe.step(batch, target)
            self.timelines.append(recording.timeline)
        else:
            loss = self.pipe.step(batch, target)
        norm = math.nan
        if not self.pipe.optimizers:  # otherwise the stages have already updated their weights
            norm = self.pipe.clip_grad_norm_(1.0).item()
            for optimizer in self._optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for rate in self._rates:
            rate.step()
        return loss.item(), norm

    @property
    def timeline(self) -> Timeline:
        """The step with the median time among those measured in the second half of the training."""
        late = sorted(self.timelines[len(self.timelines) // 2 :], key=lambda timeline: timeline.step_seconds)
        return late[len(late) // 2]

    def write(self) -> str:
        """Return what the model writes after the prompt."""
        self.pipe.eval()
        return self.text.write_on(self.pipe.forward, prompt=PROMPT, count=_NUM_WRITTEN, generator=self._random)


@contextmanager
def open_training(settings: Settings, *, progress: Progress) -> Iterator[Training]:
    """Yield a training that is ready to run, with one thread per lane: its matrices are too small for two."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        training = Training(settings, progress=progress)
        with training.pipe:
            yield training
    finally:
        torch.set_num_threads(before)


def make_optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
    """Return the optimizer of the demo."""
    import torch

    return torch.optim.AdamW(parameters, lr=_RATE, betas=(0.9, 0.95))


# ---- the same step without a pipeline, alternating with that of the pipeline


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
