"""Past steps: everything needed to run one of the last training steps again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from penstock.runtime.step import Mode, Step

_MOST = 64  # steps; an update may consist of several


@dataclass(frozen=True)
class PastStep:
    """One past step: its number, the seed of its random numbers, its mode, the factor of its losses, and its sizes."""

    batch: int  # the id() of the user's batch
    number: int
    seed: int
    mode: Mode
    factor: torch.Tensor | None
    sizes: tuple[int, ...]  # samples of each micro-batch


class PastSteps:
    """The last training steps."""

    def __init__(self) -> None:
        self._steps: deque[PastStep] = deque(maxlen=_MOST)

    def note(self, batch: object, step: Step) -> None:
        """Store a step, without its batch."""
        self._steps.append(PastStep(id(batch), step.number, step.seed, step.mode, step.factor, tuple(step.batch.sizes)))

    @property
    def last(self) -> PastStep | None:
        """The last step, finished or failed; None if there is none."""
        return self._steps[-1] if self._steps else None

    def find(self, batch: object) -> PastStep | None:
        """Return the last step with this batch object, or else the last step; None if there is none."""
        # the caller still holds the batch, so no later object has its id
        return next((past for past in reversed(self._steps) if past.batch == id(batch)), self.last)
