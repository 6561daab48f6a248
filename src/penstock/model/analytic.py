"""Analytic: the profile of a captured model from operations and bytes, without a device and without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from penstock.model.profile import Profile
from penstock.model.rates import Rates
from penstock.model.saved import num_bytes, storage_bytes, storage_of
from penstock.model.survey import Progress, survey
from penstock.model.trial import Backward, Trial

if TYPE_CHECKING:
    from penstock.model.capture import Captured

__all__ = ["analytic"]

aten = torch.ops.aten

_GATHERS = {aten.embedding, aten.index, aten.index_select, aten.gather}  # read of the first argument what they return
_WRITES_NOTHING = ("empty", "new_empty", "_reshape_alias", "detach", "alias", "lift_fresh")


def analytic(
    captured: Captured,
    *,
    rates: Rates | str = "cpu",
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Return what each node takes by its operations and bytes, for a device that need not be there.

    The model is run once on meta tensors, which have shapes and no memory, so it may be larger than any machine. Each
    operation takes the longer of its arithmetic and its memory traffic, and a launch; views take nothing. The weight
    gradient includes the addition to `.grad`. Attention counts as a fused kernel. Where a fused backward is cheaper than
    input and weight gradient apart, both are scaled to it, as in `measure`.

    Args:
        captured: the model; it may itself be on "meta".
        rates: of the device, or the name of a known one.
        batch_size: the samples of a micro-batch; by default those of the example.
        progress: is told nodes done, nodes in all and a node's name.

    Raises:
        UsageError: when an argument cannot be right.
    """
    chosen = Rates.of(rates) if isinstance(rates, str) else rates
    with _FusedAttention():
        result = survey(
            captured, _Counter(chosen), device=torch.device("meta"), batch_size=batch_size, progress=progress
        )
    costs = np.array([(cost.forward, cost.input_grad, cost.weight_grad) for cost in result.found]).reshape(-1, 3)
    return Profile(
        graph=captured.graph,
        batch_size=captured.graph.batch_size if batch_size is None else batch_size,
        forward=costs[:, 0],
        input_grad=costs[:, 1],
        weight_grad=costs[:, 2],
        saved_bytes=np.array(result.saved_bytes),
        pending_bytes=np.array(result.pending_bytes),
        device=chosen.name,
        method="analytic",
    )


@dataclass(frozen=True)
class _Cost:
    forward: float
    input_grad: float = 0.0
    weight_grad: float = 0.0


class _Counter:
    """The examiner that counts."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates

    def examine(self, trial: Trial) -> _Cost:
        forward = self._seconds(trial.forward)
        backward = trial.backward()
        if backward is None:
            return _Cost(forward)
        inputs = self._gradient(backward, trial.wanted_inputs, [])
        weights = self._gradient(backward, [], trial.wanted_parameters)
        if not inputs or not weights:
            return _Cost(forward, inputs, weights)
        scale = self._gradient(backward, trial.wanted_inputs, trial.wanted_parameters) / (inputs + weights)
        return _Cost(forward, inputs * scale, weights * scale)

    def guess(self, trial: Trial, seconds: float) -> _Cost:  # noqa: ARG002 - no clock counts here
        moved = sum(num_bytes(tensor) for tensor in (*trial.inputs, *trial.parameters))
        once = self.rates.seconds(flops=0.0, num_bytes=moved)
        return _Cost(once, once * bool(trial.wanted_inputs), once * bool(trial.wanted_parameters))

    def _seconds(self, call: Callable[[], object]) -> float:
        with _Tally(self.rates) as tally:
            call()
        return tally.seconds

    def _gradient(self, backward: Backward, inputs: list[torch.Tensor], parameters: list[torch.Tensor]) -> float:
        if not inputs and not parameters:
            return 0.0
        added = [
            self.rates.seconds(flops=0.0, num_bytes=3 * num_bytes(tensor))  # read both, write one
            for tensor in parameters
        ]
        return self._seconds(lambda: backward.gradient([*inputs, *parameters])) + sum(added)


class _Tally(TorchDispatchMode):
    """Adds up what the operations take that run under it."""

    def __init__(self, rates: Rates) -> None:
        super().__init__()
        self.rates = rates
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        given, made = list(_tensors((args, kwargs))), list(_tensors(result))
        if not _is_free(func, given, made):
            packet = func._overloadpacket
            formula = _FLOPS.get(packet) or flop_registry.get(packet)
            flops = formula(*args, **(kwargs or {}), out_val=result) if formula else 0
            is_float32 = any(tensor.dtype in (torch.float32, torch.float64) for tensor in made)
            self.seconds += self.rates.seconds(
                flops=float(flops), num_bytes=_traffic(packet, given, made), is_float32=is_float32
            )
        return result


def _tensors(thing: object) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(thing) if isinstance(leaf, torch.Tensor))


def _is_free(func: Any, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> bool:
    """Return whether an operation only looks at memory that is there, or takes some without filling it."""
    if func._schema.is_mutable:
        return False
    if func.is_view or func._schema.name.removeprefix("aten::").startswith(_WRITES_NOTHING) or not made:
        return True
    there = {storage_of(tensor) for tensor in given}
    return all(storage_of(tensor) in there for tensor in made)


def _traffic(packet: object, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> int:
    """Return the bytes that an operation reads and writes; what is expanded is read once."""
    written = sum(_moved(tensor) for tensor in made)
    if packet in _GATHERS:
        return 2 * written + sum(_moved(tensor) for tensor in given[1:])
    return written + sum(_moved(tensor) for tensor in {id(tensor): tensor for tensor in given}.values())


def _moved(tensor: torch.Tensor) -> int:
    return min(num_bytes(tensor), storage_bytes(tensor))


class _FusedAttention(TorchFunctionMode):
    """Lets attention on meta tensors run as one kernel: torch would take it apart, and keep what no device keeps."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func in (aten.scaled_dot_product_attention.default, torch.nn.functional.scaled_dot_product_attention):
            fused = _fused(*args, **(kwargs or {}))
            if fused is not None:
                return fused
        return func(*args, **(kwargs or {}))


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001 - fused kernels draw their mask again in the backward
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001 - seen from the shapes
) -> torch.Tensor | None:
    """Return fused attention, through the one fused operation that takes masks and meta tensors; None if it cannot."""
    if not query.is_meta or query.dim() != 4 or not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        return None
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    mask = None if attn_mask is None else attn_mask.to(query.dtype)
    result, _ = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return result


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward_flops(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


_FLOPS: dict[object, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
