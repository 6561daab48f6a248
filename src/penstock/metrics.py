"""Metrics: means of numbers over several steps, computed on the device and read without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError

if TYPE_CHECKING:
    import torch

Tell = Callable[[int, dict[str, float]], None]


class Metrics:
    """Means of numbers over windows of steps.

    `add` adds each number on its own device. At the end of a window, the means are copied to the host asynchronously.
    A later `add` calls `tell` when they have arrived. The host never waits, so the means come a few steps late.

    >>> import torch
    >>> metrics = Metrics(every=2, tell=lambda step, means: print(step, means))
    >>> for loss in (1.0, 3.0, 5.0):
    ...     metrics.add(loss=torch.tensor(loss))
    2 {'loss': 2.0}
    >>> last = metrics.flush()
    3 {'loss': 5.0}

    Args:
        every: number of steps per window.
        tell: called with the number of the last step of the window and the means.

    Attributes:
        latest: the last means that have arrived.
        step: number of steps added.
    """

    def __init__(self, every: int = 50, tell: Tell | None = None) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"every: {every!r} must be a number of steps, at least 1")
        if tell is not None and not callable(tell):
            raise UsageError(f"tell: pass a function of a step and its means; given: {type(tell).__name__}")
        self.every, self._tell = every, tell
        self.latest: dict[str, float] = {}
        self.step = 0
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._pending: deque[tuple[int, dict[str, _Reading]]] = deque()

    def add(self, **numbers: torch.Tensor | float) -> None:
        """Add the numbers of one step: tensors of one element on any device, or plain numbers."""
        import torch

        for name, number in numbers.items():  # check all of them before adding any
            if isinstance(number, torch.Tensor) and number.numel() != 1:
                raise UsageError(
                    f"{name}: a metric is one number per step; given: a tensor of shape {tuple(number.shape)}"
                )
            if not isinstance(number, (torch.Tensor, Real)):
                raise UsageError(f"{name}: a metric is one number per step; given: {type(number).__name__}")
        for name, number in numbers.items():
            # copy, since the caller may change the tensor, and use float64, since sums of narrow types overflow
            is_tensor = isinstance(number, torch.Tensor)
            value: Any = number.detach().reshape(()).double() if is_tensor else float(number)  # type: ignore[union-attr]
            before = self._sums.get(name)
            self._sums[name] = value + 0 if before is None else before + value
            self._counts[name] = self._counts.get(name, 0) + 1
        self.step += 1
        if self.step % self.every == 0:
            self._send()
        self.poll()

    def _send(self) -> None:
        """Start copying the means of a window to the host."""
        if self._sums:
            means = {name: total / self._counts[name] for name, total in self._sums.items()}
            self._pending.append((self.step, {name: _Reading(mean) for name, mean in means.items()}))
        self._sums, self._counts = {}, {}

    def poll(self) -> None:
        """Report the means that have arrived, without waiting."""
        while self._pending and all(reading.has_arrived() for reading in self._pending[0][1].values()):
            self._report_first()

    def flush(self) -> Mapping[str, float]:
        """End the window, wait for all pending means and report them; return the last means."""
        self._send()
        while self._pending:
            self._report_first()
        return self.latest

    def _report_first(self) -> None:
        step, readings = self._pending.popleft()
        self.latest = {name: reading.value() for name, reading in readings.items()}
        if self._tell is not None:
            self._tell(step, self.latest)


class _Reading:
    """A number that is being copied to the host."""

    def __init__(self, number: Any) -> None:  # noqa: ANN401 - a tensor, or a plain number
        import torch

        from penstock.devices.kinds import kind_of

        self._number, self._event = number, None
        if isinstance(number, torch.Tensor) and number.is_cuda:
            self._number = torch.empty((), dtype=number.dtype, pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._event = kind_of(number.device).record_event(number.device)

    def has_arrived(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def value(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return float(self._number)
