"""Demo training: a small GPT on several lanes, reported step by step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError
from penstock.launch.build.small_gpt import load_text, loss_of, make_gpt
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
    """A GPT, its pipeline and its optimizer.

    Args:
        settings: the options.
        progress: called with the current activity before the first step.
    """

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
