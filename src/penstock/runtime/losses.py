"""Losses: the loss in the output of a model, and the share of each micro-batch in the loss of the batch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from penstock.errors import UsageError, warn_user
from penstock.model.structure import flatten
from penstock.runtime.loss_weights import IGNORED

LossFunction = Callable[..., Any]
# a function from a micro-batch and its target to the count that the loss averages over; "sum" for a loss that is a sum
Weight = Callable[[Any, Any], Any] | Literal["sum"] | None


def find_loss(output: object, loss: LossFunction | None, target: Sequence[Any]) -> torch.Tensor:
    """Return the loss of one micro-batch; see `read_loss`."""
    return read_loss(output, loss, target)[0]


def read_loss(
    output: object, loss: LossFunction | None, target: Sequence[Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss, and the named numbers that are returned with it (see `_metrics`).

    Without `loss`, the output is the loss or contains it. The sequence `target` contains the target, if there is one.

    Raises:
        UsageError: if there is no loss.
    """
    found: Any = output if loss is None else loss(output, *target)
    metrics = _metrics(found)
    if not isinstance(found, torch.Tensor):
        for inner in (getattr(found, "loss", None), _first(found)):
            if isinstance(inner, torch.Tensor):
                found = inner
                break
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        said = "the model returns" if loss is None else "loss(output, target) returns"
        do = "pass loss=, or let the model return .loss" if loss is None else "reduce it, for example with .mean()"
        raise UsageError(f"no loss: {said} {what}, but a loss is a tensor with one element: {do}")
    return found.reshape(()) if found.dim() else found, metrics


def _metrics(found: object) -> dict[str, torch.Tensor]:
    """Return the numbers in a mapping: the output itself, or the first mapping after the loss in a tuple or list.

    >>> _metrics((torch.ones(()), {"accuracy": 0.5})), _metrics({"loss": torch.ones(()), "logits": torch.ones(2)})
    ({'accuracy': tensor(0.5000, dtype=torch.float64)}, {})
    """
    if isinstance(found, (tuple, list)):
        found = next((item for item in found[1:] if isinstance(item, Mapping)), None)
    if not isinstance(found, Mapping):
        return {}
    return {
        str(name): _one_number(value)
        for name, value in found.items()
        if name != "loss"
        and (isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1))
    }


def _one_number(value: float | torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(())
    return torch.tensor(float(value), dtype=torch.float64)


def total_metrics(
    metrics: Mapping[int, Mapping[str, torch.Tensor]], shares: Sequence[float], *, is_sum: bool
) -> dict[str, torch.Tensor]:
    """Return the metrics of the batch: those of its micro-batches, added up with the weights of their losses."""
    names = dict.fromkeys(name for mb in sorted(metrics) for name in metrics[mb])
    total = {}
    for name in names:
        mbs = [mb for mb in sorted(metrics) if name in metrics[mb] and shares[mb]]
        if not mbs:
            continue
        whole = 1.0 if is_sum else sum(shares[mb] for mb in mbs)
        device = metrics[mbs[0]][name].device
        total[name] = sum(
            (metrics[mb][name].to(device).double() * (shares[mb] / whole) for mb in mbs[1:]),
            metrics[mbs[0]][name].double() * (shares[mbs[0]] / whole),
        )
    return total


class SumReductionMode(TorchFunctionMode):
    """A mode that computes means over classes as sums, which can be divided later by a count that is on the device.

    >>> with SumReductionMode():
    ...     torch.nn.functional.cross_entropy(torch.zeros(3, 2), torch.tensor([0, 1, -100])).item()
    1.3862943649291992
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - as the function
        """Call a function; compute a mean over classes as a sum."""
        kwargs = kwargs or {}
        if func in _OVER_CLASSES and kwargs.get("reduction", "mean") == "mean" and len(args) <= 2:
            kwargs = {**kwargs, "reduction": "sum"}
        return func(*args, **kwargs)


_OVER_CLASSES = (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)


def total_loss(
    losses: Mapping[int, torch.Tensor], shares: Sequence[float], sizes: Sequence[int], *, is_updated_within: bool
) -> torch.Tensor:
    """Return the loss of the batch; if weights change within the step, the mean of all losses, weighted by samples."""
    counted = [mb for mb, share in enumerate(shares) if share]
    if is_updated_within:
        total = sum(sizes[mb] for mb in counted)
        parts = [sizes[mb] / total for mb in counted]
    else:
        parts = [shares[mb] for mb in counted]
    if len(counted) == 1:
        return losses[counted[0]] * parts[0]
    device = losses[counted[0]].device  # in a schedule with two ways, the model ends on two lanes
    together = torch.stack([losses[mb].to(device) for mb in counted])
    if len(set(parts)) == 1:
        return (together * parts[0]).sum()
    weights = torch.tensor(parts, dtype=together.dtype)
    if together.is_cuda:  # so that the host does not wait
        weights = weights.pin_memory().to(together.device, non_blocking=True)
    return (together * weights).sum()


def with_refused_backward(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss whose backward has already run: its `backward` raises. It can be saved like any tensor."""
    loss.backward = _refuse_backward  # type: ignore[method-assign]
    loss.__getstate__ = _no_state  # type: ignore[method-assign]  # otherwise pickle would save `backward`
    return loss


def _refuse_backward(*_: object, **__: object) -> None:
    raise UsageError(
        "loss.backward(): pipe.step has run the backward already, and all gradients are computed: remove this line"
    )


def _no_state() -> None:
    return None


def check_loss(loss: object, weight: object) -> None:
    """Check a loss and its weight before anything runs."""
    if isinstance(loss, type):
        raise UsageError(f"loss: {loss.__name__} is a class; pass {loss.__name__}()")
    if loss is not None and not callable(loss):
        raise UsageError(f"loss: pass a function loss(output, target); given: {type(loss).__name__}")
    if weight is not None and weight != "sum" and not callable(weight):
        raise UsageError(f'weight: pass a function weight(batch, target), or "sum"; given: {weight!r:.60}')


def check_scale(scale: object) -> None:
    """Check the factor of a loss in the gradients."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise UsageError(f"scale: give a finite number, such as 1 / accumulate; given: {scale!r:.60}")


def needs_target(loss: LossFunction) -> bool:
    """Return whether a loss cannot be called with the output alone; False if its signature is unknown."""
    try:
        inspect.signature(getattr(loss, "forward", loss)).bind(None)
    except TypeError:
        return True
    except ValueError:
        return False
    return False


def _first(found: object) -> object:
    if isinstance(found, Mapping):
        return found.get("loss")
    return found[0] if isinstance(found, (tuple, list)) and found else None


def counts_of(weight: Weight, batches: Sequence[Any], targets: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """Return the count that the loss of each micro-batch averages over; without a weight function, its samples."""
    if weight is None or weight == "sum":
        return [float(size) for size in sizes]
    told = [weight(batch, target) for batch, target in zip(batches, targets, strict=True)]
    if all(isinstance(count, torch.Tensor) and count.numel() == 1 and count.is_cuda for count in told):
        told = torch.stack([count.reshape(()) for count in told]).tolist()  # the host waits only once
    counts = [_number(count) for count in told]
    wrong = [count for count in counts if not 0 <= count < float("inf")]
    if wrong:
        raise UsageError(f"weight: must return the count that the loss averages over, 0 or more; returned: {wrong[0]}")
    if not any(counts):
        raise UsageError(
            "the loss would be a mean over nothing: all labels of this batch are ignored, or the count that the loss "
            "averages over (from weight=, if given) is 0 in all micro-batches. Leave out such batches"
        )
    return counts


def loss_factors(weight: Weight, counts: Sequence[float]) -> list[float]:
    """Return the factor of each micro-batch's loss; the sum of the losses times their factors is the loss of the batch.

    >>> loss_factors(None, [3.0, 1.0]), loss_factors("sum", [3.0, 1.0]), loss_factors(None, [0.0])
    ([0.75, 0.25], [1.0, 1.0], [0.0])
    """
    total = sum(counts)
    return [1.0 if weight == "sum" else count / total if total else 0.0 for count in counts]


def _number(count: Any) -> float:  # noqa: ANN401 - a number, or a tensor of one
    try:
        return float(count)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"weight: must return a number; returned: {count!r:.60}") from None


def warn_of_uneven_tokens(loss: LossFunction | None, batches: Sequence[Any], targets: Sequence[Any]) -> bool:
    """Warn if a mean over tokens would be wrong with micro-batches weighted by samples; return whether it warned."""
    if getattr(loss, "reduction", "mean") != "mean":
        return False
    ignored = getattr(loss, "ignore_index", IGNORED)
    has_target = any(target is not None for target in targets)
    things = targets if has_target else batches
    counts = [[int((tensor != ignored).sum()) for tensor in _labels(thing)] for thing in things]
    for place, of_each in enumerate(zip(*counts, strict=False)):
        sizes = [tensors[place].numel() for tensors in map(list, map(_labels, things))]
        if len({count / size for count, size in zip(of_each, sizes, strict=True) if size}) > 1:
            warn_user(
                f"micro-batches have different shares of targets that are not {ignored}: {list(of_each)}. A loss that "
                "averages over these targets is exact only with weight=, for example weight=lambda batch, target: "
                f"(target != {ignored}).sum(). If the loss is a sum, pass weight='sum'"
            )
            return True
    return False


def _labels(thing: object) -> Iterator[torch.Tensor]:
    """Yield the integer tensors of a structure that could be class labels, some of them ignored."""
    tensors, _ = flatten(thing, apart=True)
    yield from (t for t in tensors if t.dtype in (torch.int64, torch.int32) and t.dim() and t.numel())
