"""Comparison: the losses and all gradients of a batch, in micro-batches and as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import UsageError
from penstock.model.example import arguments_of
from penstock.model.preserve import in_mode, preserve_attributes
from penstock.pipeline.state_snapshot import preserved_state
from penstock.runtime.losses import find_loss
from penstock.runtime.step import Mode

if TYPE_CHECKING:
    from penstock.pipeline.batch_reader import BatchReader
    from penstock.pipeline.pipeline import Pipeline

_SHOWN = 8
_TOLERANCES = {"float64": 1e-9, "float32": 1e-4}  # the largest that rounding explains; 3e-2 for 16-bit types
_TINY = 1e-3  # differences are divided by at least this share of the largest norm: smaller gradients may be rounding

Gradients = dict[str, torch.Tensor | None]
Found = tuple[float, Gradients]


@dataclass(frozen=True)
class Difference:
    """The difference between two gradients of one parameter.

    Attributes:
        name: the name of the parameter.
        relative: the norm of the difference, divided by the norm of the gradient.
        dtype: the dtype of the gradient.
    """

    name: str
    relative: float
    dtype: str

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains the difference."""
        return self.relative <= _TOLERANCES.get(self.dtype, 3e-2)


@dataclass(frozen=True)
class Comparison:
    """The result of `Pipeline.check`. Print it to see a table.

    Attributes:
        loss: the loss in micro-batches.
        whole_loss: the loss of the batch as a whole.
        reference: the way in which the whole batch ran, as text.
        differences: one per parameter, the largest first.
    """

    loss: float
    whole_loss: float
    reference: str
    differences: tuple[Difference, ...]

    @property
    def loss_difference(self) -> float:
        """The difference between the losses, divided by the loss of the whole batch."""
        return abs(self.loss - self.whole_loss) / max(abs(self.whole_loss), 1e-30)

    @property
    def is_exact(self) -> bool:
        """Whether the loss and all gradients are equal up to rounding."""
        dtype = self.differences[0].dtype if self.differences else "float32"
        return Difference("loss", self.loss_difference, dtype).is_rounding and all(
            difference.is_rounding for difference in self.differences
        )

    def __str__(self) -> str:
        lines = [
            f"{'exact up to rounding' if self.is_exact else 'NOT EXACT'}: micro-batches compared with {self.reference},"
            " in evaluation mode (no dropout; batch norm uses its running statistics)",
            f"loss: {self.loss:.8g} in micro-batches, {self.whole_loss:.8g} as a whole; relative difference: "
            f"{self.loss_difference:.2g}",
        ]
        if self.differences:
            lines.append(f"gradients of {len(self.differences)} parameters; the largest relative differences:")
            shown = self.differences[:_SHOWN]
            width = max(len(difference.name) for difference in shown)
            lines += [
                f"  {d.name:<{width}}  {d.relative:.2g}{'' if d.is_rounding else '  <- more than rounding'}"
                for d in shown
            ]
        if not self.is_exact:
            lines.append(
                "weight= sets what the loss averages over; loss_over='batch' computes one loss on all micro-batches; "
                "batch_dim=, whole= and split= set how a batch is cut"
            )
        return "\n".join(lines)


def compare(pipe: Pipeline, batch: object, target: tuple[Any, ...]) -> Comparison:
    """Run a batch in micro-batches and as a whole, in evaluation mode; compare the losses and gradients.

    The plain model runs the whole batch if this process holds the entire model on one device. Otherwise the pipeline
    runs it as a single micro-batch. Gradients, buffers and random states do not change. Under torchrun, all processes
    must call this function.

    Raises:
        UsageError: if the schedule updates weights within the step.
    """
    if pipe.schedule.versions is not None:
        raise UsageError(
            f"check: {pipe.schedule.name} updates weights within the step, so it cannot equal the plain model"
        )
    with preserved_state(pipe):
        loss, found = _run(pipe, pipe._steps.reader, batch, target)
        plain = _plain(pipe, batch, target)
        if plain is None:
            reference = "the whole batch as a single micro-batch of the pipeline"
            whole_loss, wanted = _run(pipe, pipe._steps.reader.with_micro_batches(1), batch, target)
        else:
            reference = "the plain model on the whole batch"
            whole_loss, wanted = plain()
    everyone = pipe._lane_group.control.gather([asdict(one) for one in _differences(found, wanted)])
    rows = {row["name"]: Difference(**row) for lane in everyone for row in lane}
    differences = sorted(rows.values(), key=lambda one: -one.relative)
    return Comparison(loss, whole_loss, reference, tuple(differences))


def _run(pipe: Pipeline, reader: BatchReader, batch: object, target: tuple[Any, ...]) -> Found:
    """Run one step in evaluation mode with gradients; return the loss and the gradients by name."""
    _forget_gradients(pipe)
    ready = pipe._steps.read(batch, target, reader=reader)
    with pipe._in_mode(False):
        step = pipe._steps.begin(ready, Mode(False, True, pipe._cast()))
        pipe._steps.run_untracked(step, gathers=True)
        loss = pipe._steps.total(step, ready)
    return float(loss), _gradients(pipe)


def _plain(pipe: Pipeline, batch: object, target: tuple[Any, ...]) -> Callable[[], Found] | None:
    """Return a function that runs the plain model; None if this process does not hold all of it on one device."""
    model = pipe._planned.captured.model
    own = {id(parameter) for parameter in pipe.parameters()}
    is_whole = len(pipe.lanes) == pipe.schedule.num_lanes and len(set(pipe.devices)) == 1
    if not is_whole or isinstance(model, torch.nn.ModuleList) or any(id(p) not in own for p in model.parameters()):
        return None

    def run() -> Found:
        _forget_gradients(pipe)
        args, kwargs = arguments_of(batch, "batch")
        with (
            in_mode(model, training=False),
            preserve_attributes(model),
            Mode(False, True, pipe._cast()).cast(pipe.devices[0]),
        ):
            loss = find_loss(model(*args, **kwargs), pipe._steps.loss, target)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        return float(loss.detach()), _gradients(pipe)

    return run


def _forget_gradients(pipe: Pipeline) -> None:
    for parameter in pipe.parameters():
        parameter.grad = None


def _gradients(pipe: Pipeline) -> Gradients:
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in pipe.named_parameters()}


def _differences(found: Gradients, wanted: Gradients) -> list[Difference]:
    norms = [float(gradient.norm()) for gradient in wanted.values() if gradient is not None]
    least = max(_TINY * max(norms, default=0.0), 1e-30)
    rows = []
    for name, want in wanted.items():
        got = found[name]
        known = want if want is not None else got
        if known is None:
            continue
        off = (torch.zeros_like(known) if got is None else got) - (torch.zeros_like(known) if want is None else want)
        scale = max(least, 0.0 if want is None else float(want.norm()))
        rows.append(Difference(name, float(off.norm()) / scale, str(known.dtype).removeprefix("torch.")))
    return rows
