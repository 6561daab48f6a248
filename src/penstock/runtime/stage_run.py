"""Stage run: the forwards and backwards of one stage, one micro-batch at a time, under its keep policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch

from penstock.errors import UsageError
from penstock.model.stages import Stage
from penstock.randomness.draw_names import enter, here
from penstock.randomness.draws import SeededMode, mix
from penstock.runtime.backward.gradient_accumulation import GradientAccumulation, accumulated_together
from penstock.runtime.backward.split_backward import DeferredWeightGradients
from penstock.runtime.backward.weight_queue import Pending, num_holders
from penstock.runtime.batch_norm import DeferredStatistics
from penstock.runtime.keep.offload import HostPool, Saved, StorageSet
from penstock.runtime.keep.recompute import Recomputed
from penstock.runtime.micro_batches import move_to
from penstock.runtime.step import Step
from penstock.runtime.wiring import Edge, Wiring
from penstock.schedule.keep_policies import POLICIES, Keep

Values = list[Any]

_NOTHING: AbstractContextManager[Any] = nullcontext()


class Record:
    """The data that a forward keeps for its backward.

    Attributes:
        leaves: for each edge into the stage, the received values, detached from the graph that made them.
        given: the inputs from the batch.
        made: the outputs of the stage, with their graph; empty until the recompute if there is one.
        loss: the loss; only in the last stage.
        pending: the postponed weight gradients.
        saved: the saved tensors, if they are offloaded or measured.
        sent: the first output of a forward that will be recomputed; in replay, it lists the sent values.
    """

    __slots__ = ("buffers", "given", "is_pending", "leaves", "loss", "made", "pending", "saved", "sent", "version")

    def __init__(self, leaves: dict[int, Values]) -> None:
        self.leaves = leaves
        self.given: Values = []
        self.made: Sequence[Any] = ()
        self.loss: torch.Tensor | None = None
        self.pending: Pending | None = None
        self.saved: Saved | None = None
        self.sent: Any = None
        self.buffers: dict[str, torch.Tensor] | None = None
        self.version = 0
        self.is_pending = False  # the input gradient has run, the weight gradient has not

    def held_bytes(self) -> int:
        """Return the bytes held on the device: saved and received tensors, or pending weight gradients."""
        if self.is_pending:
            return 0 if self.pending is None else self.pending.num_bytes()
        saved = 0 if self.saved is None else self.saved.num_bytes(on="device")
        return saved + self.arrived_bytes()

    def arrived(self) -> list[torch.Tensor]:
        """Return the tensors received from other stages; they stay until the backward."""
        return [leaf for values in self.leaves.values() for leaf in values if isinstance(leaf, torch.Tensor)]

    def arrived_bytes(self) -> int:
        """Return the bytes of the tensors received from other stages."""
        return sum(leaf.numel() * leaf.element_size() for leaf in self.arrived())


class StageRun:
    """The run of one stage on one lane.

    Args:
        stage: the module of the stage.
        wiring: the values that go from stage to stage.
        device: the device of the stage.
        keep: the policy for saved values.
        lock: a reentrant lock, held while a forward runs, if two lanes share the stage's buffers.
        statistics: collects batch norm's statistics, if their update is postponed to the end of the step.
        host: the host memory for offloaded values.
        accumulation: adds gradients at the end of a backward; None: autograd adds them.
        is_alone: whether no other lane runs a stage with the same parameters.

    Attributes:
        has_drawn: whether a forward has ever drawn random numbers.
    """

    def __init__(
        self, stage: Stage, wiring: Wiring, *, device: torch.device, keep: Keep = "hold",
        lock: AbstractContextManager[Any] | None = None, statistics: DeferredStatistics | None = None,
        host: HostPool | None = None, accumulation: GradientAccumulation | None = None, is_alone: bool = True,
    ) -> None:  # fmt: skip
        self.stage, self.device, self.keep = stage, device, POLICIES[keep]
        self._accumulation, self._is_alone = accumulation, is_alone
        self.index = stage.index
        self.is_last = self.index == len(wiring.feeds) - 1
        self.feeds, self.results = wiring.feeds[self.index], wiring.results
        self.into: tuple[Edge, ...] = wiring.into[self.index]
        self.out_of: tuple[Edge, ...] = wiring.out_of[self.index]
        self._rest_from = next((edge.source for edge in self.into if edge.has_rest), None)
        self._sends_rest = any(edge.has_rest for edge in self.out_of)
        self._num_named = {edge.source: len(edge.names) for edge in self.into}
        self._lock, self._statistics, self._host = lock or nullcontext(), statistics, host
        self._recomputed: Recomputed | None = stage.runner
        self._random: SeededMode | None = None
        self._is_drawing = False
        self.has_drawn = False
        self._has_watched = False  # whether draws were watched for a whole step
        self._losses = [0, 0]  # in this step: all losses, and those with a gradient
        self._changing: list[str] | None = None  # buffers that a forward changes; None: unknown

    # ---- forward

    def forward(
        self, step: Step, mb: int, incoming: Mapping[int, Values], *, is_split: bool, recomputes: bool
    ) -> Record:
        """Run the forward of a micro-batch; received values are detached from the graph that made them."""
        leaves = {source: [_as_leaf(value, self.device) for value in values] for source, values in incoming.items()}
        record = Record(leaves)
        given = step.batch.inputs[mb]
        record.given = [_as_leaf(given[feed.given], self.device) if feed.given else None for feed in self.feeds]
        if not step.mode.has_backward:
            with torch.no_grad():
                self._compute(step, mb, record)
        elif recomputes and step.over_batch is None and self._waits_for_recompute():
            pass
        elif recomputes:
            with self._lock, torch.no_grad():
                before = self._copy_buffers()
                self._compute(step, mb, record)
                if self._changing is None:
                    self._note_changes(before)
            record.sent = record.made[0] if self._sends_rest else None
            record.buffers = {name: before[name] for name in self._changing or ()}
        else:
            self._compute_for_backward(step, mb, record, is_split=is_split)
        if self.is_last and step.over_batch is not None:
            self._add_to_batch(step, mb, record)
        return record

    def _add_to_batch(self, step: Step, mb: int, record: Record) -> None:
        """Add the results to the loss on the batch; after the last micro-batch, compute it and run its backward."""
        batch = step.over_batch
        assert batch is not None
        if not batch.add(mb, self._results(step, mb, record), move_to(self.device, step.targets[mb])):
            return
        has_backward = step.mode.has_backward
        with torch.set_grad_enabled(has_backward), self._forward_context(step, mb), step.mode.cast(self.device):
            enter("loss")
            loss, metrics = batch.compute()
        step.losses[mb] = loss.detach()
        if metrics:
            step.metrics[mb] = metrics
        if has_backward:
            self._losses = [1, int(loss.requires_grad)]
            if loss.requires_grad:
                torch.autograd.backward(loss, _seed(step, mb, loss))
            batch.share()

    def _waits_for_recompute(self) -> bool:
        """Return whether to skip a forward that will be recomputed: no lane waits for the outputs of the last stage.

        A stage whose forward changes buffers does not skip it, so that buffers change in the order of the forwards.
        """
        return self.is_last and self._statistics is None and self._changing == []

    def recompute(self, step: Step, mb: int, record: Record, *, is_split: bool) -> None:
        """Run the forward again, now with a graph; random numbers and buffers are the same as in the first run."""
        if self._statistics is not None:
            self._statistics.collecting = False
        try:
            with self._buffers_of(record):
                self._compute_for_backward(step, mb, record, is_split=is_split)
            if record.sent is not None:
                record.made = cast(Any, self.stage.program).as_sent(record.sent, record.made)
        finally:
            record.buffers = record.sent = None
            if self._statistics is not None:
                self._statistics.collecting = True

    def _compute_for_backward(self, step: Step, mb: int, record: Record, *, is_split: bool) -> None:
        if not self.keep.offloads and not is_split and not step.measures_memory:
            self._compute(step, mb, record)
            return
        with ExitStack() as contexts:
            if self.keep.offloads or step.measures_memory:
                # the batch belongs to the user, and micro-batches share its memory; received values stay in any case
                given = [value for value in record.given if isinstance(value, torch.Tensor)]
                stays = StorageSet([*self._own_tensors, *given, *record.arrived()])
                record.saved = Saved(self._host, keep_storages=stays)
                contexts.enter_context(record.saved.collecting())
            if is_split:
                record.pending = Pending()
                contexts.enter_context(DeferredWeightGradients(record.pending, own_hooks=int(record.saved is not None)))
            self._compute(step, mb, record)

    def _compute(self, step: Step, mb: int, record: Record) -> None:
        values = [
            record.leaves[feed.source][feed.place] if given is None else given
            for feed, given in zip(self.feeds, record.given, strict=True)
        ]
        if self._rest_from is not None:
            values += record.leaves[self._rest_from][self._num_named[self._rest_from] :]
        if self._recomputed is not None:
            self._recomputed.begin(partial(self._part, step, mb, record.pending))
        with self._lock, self._forward_context(step, mb), step.mode.cast(self.device):
            record.made = self.stage(*values, batch_size=step.batch.sizes[mb])
            if self.is_last and step.over_batch is None:
                enter("loss")
                target = move_to(self.device, step.targets[mb])
                record.loss, metrics = step.finish(self._results(step, mb, record), mb, target)
                if metrics:
                    step.metrics[mb] = metrics

    def _forward_context(self, step: Step, mb: int) -> AbstractContextManager[Any]:
        """Return the context of a forward: its own random numbers, and deferred batch norm."""
        statistics = self._statistics if step.mode.is_training and step.mode.has_backward else None
        if step.mode.is_training and self._may_draw():
            return self._drawing(step, mb, statistics or _NOTHING)
        return statistics or _NOTHING

    def reseed(self, step: Step, mb: int) -> Sequence[torch.Generator]:
        """Restart the random numbers of a forward; return the GPU generators that it has drawn from so far."""
        if self._random is None:
            return ()
        self._random.reseed(mix(step.seed, mb))
        return self._random.seed_all()

    @contextmanager
    def _drawing(self, step: Step, mb: int, statistics: AbstractContextManager[Any]) -> Iterator[None]:
        if self._random is None:
            self._random = SeededMode(0, self.device)
        seed = mix(step.seed, mb)
        self._random.reseed(seed)
        enter(f"stage {self.index}")  # programs set more precise names
        here.seed, self._is_drawing = seed, True
        try:
            with statistics, self._random:
                yield
        finally:
            enter("")
            here.seed, self._is_drawing = None, False
            self.has_drawn |= self._random.was_drawn

    @contextmanager
    def _part(self, step: Step, mb: int, pending: Pending | None) -> Iterator[None]:
        """Run a part of the stage; its first run and its recompute have the same context."""
        with ExitStack() as contexts:
            contexts.enter_context(step.mode.cast(self.device))
            if pending is not None:
                contexts.enter_context(DeferredWeightGradients(pending))
            if not self._is_drawing and self._may_draw():
                contexts.enter_context(self._drawing(step, mb, _NOTHING))
            yield

    def _may_draw(self) -> bool:
        """Return whether to watch for random numbers; if a whole step drew none, later steps are assumed to draw none.

        A recompute must draw the same numbers as its forward. So with recompute, this is assumed only for programs
        that always run the same operations.
        """
        runs_again = self.keep.recomputes or self._recomputed is not None
        is_known = not runs_again or getattr(self.stage.program, "is_fixed", False)
        draws_python = getattr(self.stage.program, "draws_python_random", False)
        return self.has_drawn or not self._has_watched or not is_known or draws_python

    def _results(self, step: Step, mb: int, record: Record) -> Values:
        if not self.results:
            return list(record.made)
        found: Values = []
        for feed in self.results:
            if feed.given:
                found.append(_as_leaf(step.batch.inputs[mb][feed.given], self.device))
            elif feed.source == self.index:
                found.append(record.made[feed.place])
            else:
                found.append(record.leaves[feed.source][feed.place])
        return found

    def outputs_for(self, record: Record, edge: Edge) -> Values:
        """Return the outputs for an edge, with their graph."""
        values = [record.made[place] for place in edge.places]
        return [*values, *record.made[len(self.stage.outputs) :]] if edge.has_rest else values

    def outgoing(self, record: Record, edge: Edge, *, recomputes: bool) -> Values:
        """Return the values to send over an edge: detached, and marked if they need a gradient.

        A forward that will be recomputed has no graph, so it marks all floating-point and complex values.
        """
        may_need_gradient = recomputes and (self.index > 0 or any(p.requires_grad for p in self.stage.parameters()))
        return [_outgoing_value(value, may_need_gradient=may_need_gradient) for value in self.outputs_for(record, edge)]

    # ---- backward

    def backward(self, step: Step, mb: int, record: Record, gradients: Mapping[int, Values]) -> dict[int, Values]:
        """Run the backward: B, or I if it is split. Return the gradients for each edge into the stage."""
        outputs: list[torch.Tensor] = []
        seeds: list[torch.Tensor | None] = []
        for edge in self.out_of:
            for value, gradient in zip(self.outputs_for(record, edge), gradients[edge.target], strict=True):
                if gradient is not None and value.requires_grad:
                    outputs.append(value)
                    seeds.append(gradient.to(value.dtype) if gradient.dtype != value.dtype else gradient)
        if record.loss is not None:
            self._losses[0] += 1
            if record.loss.requires_grad:
                self._losses[1] += 1
                outputs.append(record.loss)
                seeds.append(_seed(step, mb, record.loss))
        if self.is_last and step.over_batch is not None:
            for value, gradient in zip(
                self._results(step, mb, record), step.over_batch.gradients_of(mb), strict=True
            ):  # fmt: skip
                if gradient is not None and value.requires_grad:
                    outputs.append(value)
                    seeds.append(gradient)
        if self._accumulation is not None and record.loss is not None:
            self._accumulation.observe(record.loss, self.stage.parameters())
        record.made, record.loss = (), None
        if outputs:
            with self._accumulating(record, outputs):
                torch.autograd.backward(outputs, seeds)
        if record.saved is not None:
            record.saved.clear()
            record.saved = None
        return {source: [_gradient(leaf) for leaf in leaves] for source, leaves in record.leaves.items()}

    def _accumulating(self, record: Record, outputs: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
        if self._accumulation is None or not self._is_alone or record.pending is not None:
            return _NOTHING
        together = self._accumulation.eligible(self.stage.parameters())
        shown = outputs if self._recomputed is None else ()  # recomputed parts hide their parameters
        return accumulated_together(together, shown)

    def end_step(self, step: Step) -> None:
        """Record the end of a step.

        Raises:
            UsageError: if none of its losses requires a gradient.
        """
        self._has_watched |= step.mode.is_training
        (count, with_gradient), self._losses = self._losses, [0, 0]
        if count and not with_gradient:
            raise UsageError("the loss does not depend on any parameter that requires a gradient")

    @property
    def recomputes_parts(self) -> bool:
        """Whether backwards recompute parts of their forwards."""
        return self._recomputed is not None

    @property
    def draws_on_host(self) -> bool:
        """Whether forwards drew random numbers on any device other than that of the stage."""
        return self._random is not None and self._random.draws_on_other_device(self.device)

    # ---- buffers

    @property
    def restores_buffers(self) -> bool:
        """Whether a recompute restores buffers before it runs."""
        return self.keep.recomputes and bool(self._changing)

    def _copy_buffers(self) -> dict[str, torch.Tensor]:
        names = [name for name, _ in self.stage.named_buffers()] if self._changing is None else self._changing
        return {name: self.stage.held.get(name).detach().clone() for name in names}

    def _note_changes(self, before: Mapping[str, torch.Tensor]) -> None:
        """Record which buffers a forward changed."""
        self._changing = [name for name, old in before.items() if not torch.equal(self.stage.held.get(name), old)]

    @contextmanager
    def _buffers_of(self, record: Record) -> Iterator[None]:
        """Run with the buffers from before a forward; then put back the current tensors, which other lanes hold too."""
        if not record.buffers:
            yield
            return
        with self._lock:  # no other lane runs a forward meanwhile
            present = {name: self.stage.held.get(name) for name in record.buffers}
            self._set_buffers(record.buffers)
            try:
                yield
            finally:
                self._set_buffers(present)

    def _set_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in buffers.items():
                # never in place: the backward of another micro-batch may still need the old values
                self.stage.held.set(name, tensor)

    @property
    def _own_tensors(self) -> list[torch.Tensor]:
        return [*self.stage.parameters(), *self.stage.buffers()]


def _seed(step: Step, mb: int, loss: torch.Tensor) -> torch.Tensor:
    """Return the factor of a micro-batch's loss in the gradient."""
    if step.seeds is None:
        if step.factor is None:
            return torch.full_like(loss, step.scales[mb])
        return (step.factor * step.scales[mb]).to(loss.device, loss.dtype, non_blocking=loss.is_cuda)
    return step.seeds[mb].to(loss.dtype)


def _outgoing_value(value: Any, *, may_need_gradient: bool) -> Any:  # noqa: ANN401 - a tensor, or a plain number
    if not isinstance(value, torch.Tensor):
        return value
    wants = value.requires_grad or (may_need_gradient and (value.is_floating_point() or value.is_complex()))
    return value.detach().requires_grad_(wants)


def _as_leaf(value: Any, device: torch.device) -> Any:  # noqa: ANN401 - a tensor, or a plain number
    if not isinstance(value, torch.Tensor):
        return value
    leaf = value.detach()
    if leaf.device != device:
        leaf = leaf.to(device, non_blocking=device.type == "cuda")
    return leaf.requires_grad_(value.requires_grad)


def dtype_hint(arrived: Mapping[int, Values], stage: Stage) -> str:
    """Return a hint for an error if a stage sent values of another type than the parameters here; otherwise ""."""
    own = {parameter.dtype for parameter in stage.parameters()}
    if len(own) != 1:
        return ""
    (dtype,) = own
    odd = [
        f"; stage {source} sent {value.dtype} {tuple(value.shape)} to stage {stage.index}, whose parameters are {dtype}"
        for source, values in arrived.items()
        for value in values
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype
    ]
    return "".join(odd[:1])


def _gradient(leaf: Any) -> torch.Tensor | None:  # noqa: ANN401 - a tensor, or a plain number
    if not isinstance(leaf, torch.Tensor):
        return None
    gradient, leaf.grad = leaf.grad, None
    # autograd may use the same memory for a parameter's gradient, to which the next micro-batch adds in place
    return gradient.clone() if gradient is not None and num_holders(gradient) > 1 else gradient
