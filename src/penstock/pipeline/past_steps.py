"""Past: how the last training steps were run, so that one of them can be run again as it was."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from penstock.runtime.step import Mode, Step

__all__ = ["PastStep", "PastSteps"]

_MOST = 64  # steps: an update may take several


@dataclass(frozen=True)
class PastStep:
    """One step: its number, what its random numbers follow from, its mode, the scaler's factor and its sizes."""

    batch: int  # the id of what the user gave
    number: int
    seed: int
    mode: Mode
    factor: torch.Tensor | None
    sizes: tuple[int, ...]  # of its micro-batches, in samples


class PastSteps:
    """The last steps."""

    def __init__(self) -> None:
        self._steps: deque[PastStep] = deque(maxlen=_MOST)

    def note(self, batch: object, step: Step) -> None:
        """Remember a step; not its batch, which is the user's."""
        self._steps.append(PastStep(id(batch), step.number, step.seed, step.mode, step.factor, tuple(step.batch.sizes)))

    @property
    def last(self) -> PastStep | None:
        """The last step, whether it came to its end or not."""
        return self._steps[-1] if self._steps else None

    def find(self, batch: object) -> PastStep | None:
        """Return the last step that was given this very batch; else the last step; None where there was none."""
        # the batch is alive since it was given, so no other object after it had its id
        return next((past for past in reversed(self._steps) if past.batch == id(batch)), self.last)
