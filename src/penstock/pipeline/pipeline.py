"""Pipeline: a model cut into stages, with the lanes that train it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast, overload

import torch
from torch import nn

from penstock.compile.options import Compile, compiled, options_of
from penstock.deciding.defaults import KEEP, default_schedule
from penstock.deciding.plan import Plan, check_free, plan_to_run
from penstock.errors import UsageError
from penstock.loading.weight_loader import model_on_meta, open_loader
from penstock.model.capture.capture import Captured, plain_module
from penstock.model.example import BatchLayout, Call
from penstock.model.structure import flatten, rebuild
from penstock.pipeline.batch_reader import BatchReader, Ready
from penstock.pipeline.comparison import Comparison, compare
from penstock.pipeline.exactness.exactness import Exactness
from penstock.pipeline.exactness.lane_runs import LaneRuns
from penstock.pipeline.executor_setup import ExecutorSetup
from penstock.pipeline.graph_steps import GraphsOption, GraphSteps
from penstock.pipeline.internals import Internals
from penstock.pipeline.model_interface import ModelInterface
from penstock.pipeline.planned.arguments import (
    LossOver,
    check_loss_over,
    check_model_options,
    check_seconds,
    check_switches,
    warn_of_cache,
)
from penstock.pipeline.planned.placement import autocast_of, check_devices, choose_lanes, threads_per_lane
from penstock.pipeline.planned.planned_model import Model, Request, module_of, plan_model
from penstock.pipeline.splitting.batch_splits import Split, found_split
from penstock.pipeline.step_recording import Recording
from penstock.pipeline.step_runner import StepRunner
from penstock.pipeline.weights import Weights
from penstock.report.units import show_bytes
from penstock.runtime.exclusive_use import ExclusiveUse
from penstock.runtime.lanes.lane_group import LaneGroup, make_lane_group
from penstock.runtime.losses import (
    LossFunction,
    Weight,
    check_loss,
    check_scale,
    with_refused_backward,
)
from penstock.runtime.micro_batches import join_results, join_rows
from penstock.runtime.step import Batch, Mode
from penstock.schedule.keep_policies import CHOSEN_BY_NODE, Keep, KeepRequest, check_keep, of_stages
from penstock.schedule.schedule import Schedule

if TYPE_CHECKING:
    from penstock.deciding.cut_request import Progress
    from penstock.model.profile import Profile
    from penstock.model.profiling.device_rates import Rates
    from penstock.planning.cluster import Cluster
    from penstock.planning.explain.explanation import Explanation
    from penstock.planning.memory_limits import Limit
    from penstock.runtime.step import Watch

_NOTHING = object()  # marks a missing target; None is a valid target
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _without_gradients(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function without gradients, and outside of inference mode.

    The function may create objects that are kept, such as the program for evaluation. Inference tensors could not be
    used in them later.
    """
    return torch.no_grad()(torch.inference_mode(False)(function))


class Pipeline(ModelInterface):
    """A model that is cut into stages, which several lanes train at the same time.

    In one process, each lane is a worker thread. Under torchrun, each lane is a process. The loss and the gradients are
    those of the model on the whole batch, for every schedule that does not update weights within the step.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> batch, target = torch.ones(6, 4), torch.zeros(6, 1)
    >>> with Pipeline(model, example=batch, loss=nn.MSELoss(), lanes=2, micro_batches=3, cuts=[2]) as pipe:
    ...     loss = pipe.step(batch, target)
    >>> bool((loss - nn.functional.mse_loss(model(batch), target)).abs() < 1e-6)
    True

    Args:
        model: any module, unchanged; a list of stage modules, each called with the result of the previous one; or the
            result of `penstock.model.capture.capture.capture`.
        example: a typical batch: a tensor, a tuple of positional arguments or a dict of keyword arguments. Penstock
            captures and measures the model with it.
        loss: a function `loss(output, target)`; None if the model returns its loss, or an output with `.loss`.
        micro_batches: the number of micro-batches per step; by default four per lane, but at most the number of samples
            in the example.
        schedule: the name of a schedule, a `Schedule`, a CSV file, or "auto", which searches for the best schedule. The
            default is "1f1b", or "zb_gpipe" with `loss_over="batch"`.
        devices: one device per lane, or one device for all lanes; by default all GPUs, or the CPU if there is no GPU.
        lanes: the number of lanes. Under torchrun, it is the number of processes. In one process, the default is the
            number of lanes of a given `Schedule`, else the length of `devices`, else the number of GPUs, at least 2.
        stages_per_lane: the number of stages per lane, for schedules that leave it open.
        cuts: where cuts must lie: node numbers, or the names of the nodes or modules after the cuts. Penstock chooses
            the other cuts.
        keep: what stages do with saved values: "hold", "recompute", "except_last" or "offload"; one policy, or a list
            with one per stage. "fit" recomputes only as many nodes as `memory_limit` requires.
        weight: what the loss averages over: a function `weight(batch, target)` that returns the number of items, or
            their total weight, in a micro-batch; "sum" for a loss that sums. By default, Penstock reads the weight from
            torch's own losses, and finds it by trial for other losses.
        loss_over: "micro_batch" to compute one loss per micro-batch; "batch" to compute one loss on the outputs of all
            micro-batches, for losses that couple samples. With "batch", all outputs are in memory at the same time.
        batch_dim: the dimension of the batch: one number, or a dict with one number per argument.
        whole: the names of the arguments that every micro-batch gets whole.
        split: for batches that are not plain stacks of samples: a function `split(batch, target, count)` that returns
            at most `count` pairs (batch, target), one per micro-batch. The model is then captured by replay. The number
            of samples of a micro-batch is the first dimension of its target, or of its batch if there is no target.
        check: whether to compare the results for a few samples of the example, as a whole and in parts. If they differ,
            the model or the loss is refused.
        autocast: the dtype in which forwards run; by default that of the `torch.autocast` around the call.
        scaler: a `torch.amp.GradScaler` for fp16. `step` scales the loss with it, and all lanes see an overflow on any
            lane.
        optimizer: for schedules that update weights within the step: a function that makes an optimizer from a list of
            parameters. It is called once per stage.
        deferred_batch_norm: whether batch norm updates its running statistics once per step, from the whole batch.
        memory_limit: the bytes of each lane for weights, gradients, optimizer state and saved values, such as 16e9 or
            "16GiB"; one value for all lanes, or a list with one per lane.
        cluster: the speeds of the lanes and the links between them, for the choice of the cuts.
        profile: an existing profile or its file; then nothing is measured.
        plan: a `Plan` or its JSON file; then nothing is measured or decided. Or a run folder: its plan is used again if
            it was made for the same model and settings. Otherwise a warning names the differences, and a new plan is
            made.
        weights: the folder or file of the model's weights: a folder of transformers' `save_pretrained`, a safetensors
            file, or a checkpoint of Penstock. Each process reads only the tensors of its own stages, so build the model
            on meta: `with torch.device("meta"): model = ...`. Tensors that are in no file are initialised by the model.
        analytic: the rates of a device, or its name: count operations and bytes instead of measuring.
        capture_path: "direct", "export" or "replay"; "auto" takes the first that works.
        transport: how processes exchange values: "shared" for shared memory, "gloo" or "nccl"; "auto" takes the fastest
            that works between these processes.
        graphs: whether to run training steps as CUDA graphs; "auto" uses graphs if possible.
        compile: whether Inductor compiles the stages and the loss; a dict sets options of Inductor.
        timeout: the seconds that a lane waits for a value before it raises a `HangError`.
        progress: called with the current activity, the number of units done, and their total.

    Raises:
        CaptureError: if the model cannot be captured; the message says where it stopped and what to do.
        PartitionError: if the requested cuts are impossible or no cuts fit the memory; the message says what would fit.
        UsageError: if an argument is invalid.
        ScheduleError: if the schedule does not exist, cannot be built or cannot run.
    """

    def __init__(
        self,
        model: Model,
        *,
        example: object,
        loss: LossFunction | None = None,
        micro_batches: int | None = None,
        schedule: str | Schedule | PathLike[str] | None = None,
        devices: Sequence[torch.device | str | int] | None = None,
        lanes: int | None = None,
        stages_per_lane: int | None = None,
        cuts: Sequence[int | str] = (),
        keep: KeepRequest | Sequence[Keep] = KEEP,
        weight: Weight = None,
        loss_over: LossOver = "micro_batch",
        batch_dim: int | Mapping[str, int] = 0,
        whole: Sequence[str] = (),
        split: Split | None = None,
        check: bool = True,
        autocast: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        deferred_batch_norm: bool = False,
        memory_limit: Limit | None = None,
        cluster: Cluster | None = None,
        profile: Profile | str | PathLike[str] | None = None,
        plan: Plan | str | PathLike[str] | None = None,
        weights: str | PathLike[str] | None = None,
        analytic: Rates | str | None = None,
        capture_path: str = "auto",
        transport: str = "auto",
        graphs: GraphsOption = "auto",
        compile: Compile = False,  # noqa: A002 - the name that torch uses
        timeout: float = 600.0,
        progress: Progress | None = None,
    ) -> None:
        module, captured = module_of(model)
        given = plan_to_run(plan)
        if given is not None:
            check_free(
                given,
                {
                    "schedule": schedule, "lanes": lanes, "micro_batches": micro_batches,
                    "stages_per_lane": stages_per_lane, "cuts": cuts or None, "keep": None if keep == KEEP else keep,
                    "memory_limit": memory_limit, "cluster": cluster, "profile": profile, "analytic": analytic,
                    "capture_path": None if capture_path == "auto" else capture_path,
                },
            )  # fmt: skip
            schedule, cuts, capture_path = given.schedule, given.cuts, given.capture_path
            keep = cast("Keep", given.keep)
            memory_limit = given.memory_limit
        elif schedule is None:
            schedule = default_schedule(loss_over)
        num_lanes = choose_lanes(lanes, devices, schedule)
        self.devices = check_devices(devices, num_lanes)
        check_loss(loss, weight)
        check_model_options(module, keep, optimizer, memory_limit)
        check_switches(graphs=graphs, autocast=autocast, scaler=scaler, deferred_batch_norm=deferred_batch_norm)
        options = options_of(compile)
        if split is None and isinstance(module, nn.Module):
            split = found_split(example, module)
        request = Request(
            module, example, schedule, num_lanes, micro_batches, stages_per_lane,
            (cuts,) if isinstance(cuts, (str, int)) else tuple(cuts), keep if isinstance(keep, str) else tuple(keep),
            memory_limit, cluster, profile, analytic, capture_path, self.devices[0], progress,
            threads_per_lane(self.devices), BatchLayout(batch_dim, whole), split,
            plan if given is None else given, captured,
        )  # fmt: skip
        self._lane_group: LaneGroup = make_lane_group(
            self.devices, timeout_seconds=check_seconds(timeout), num_threads=threads_per_lane(self.devices),
            transport=transport,
        )  # fmt: skip
        weakref.finalize(self, self._lane_group.close)
        self._use = ExclusiveUse()
        exactness = Exactness(loss, weight, over_batch=loss_over == "batch", is_compiled=options is not None)

        on_meta = model_on_meta(module)

        def check_exactness(captured: Captured, schedule: Schedule) -> None:
            check_loss_over(loss_over, schedule, loss=loss, weight=weight)
            if check and schedule.num_mbs > 1 and on_meta is None:
                exactness.check(captured.split(()), captured.model, example=example, split=split)

        with (
            nullcontext() if on_meta is None else on_meta.emptied(),
            open_loader(module, weights, on_meta, progress, self._lane_group.control.gather) as loader,
        ):
            self._planned = plan_model(request, check_exactness, self._lane_group)
            self.schedule, self.cuts = self.plan.schedule, self.plan.cuts
            if keep == CHOSEN_BY_NODE and self.schedule.versions is not None:
                raise UsageError(
                    f'keep: "fit" cannot be used with {self.schedule.name}, whose weights change within the step'
                )
            self._chains = [self._planned.split() for _ in self.schedule.ways]
            for chain in self._chains:
                chain.compile_stages(options)
            self._cast = partial(autocast_of, autocast, self.devices[0])
            self._weights = Weights(
                self._chains, self.schedule, self.devices, self._lane_group, make_optimizer=optimizer,
                is_scaled=scaler is not None, on_meta=on_meta, loader=loader,
            )  # fmt: skip
        self._lane_group.give_streams(self._weights.lanes_sharing_tensors())
        setup = ExecutorSetup(
            self._chains,
            self.schedule,
            check_keep(of_stages(keep), self.schedule.num_stages),
            self.devices,
            self._lane_group,
            optimizers=self._weights.optimizers,
            defers_batch_norm=deferred_batch_norm,
            is_compiled=options is not None,
        )
        exactness.device = self.devices[self.schedule.ways[0][-1]]
        self._steps = StepRunner(
            self._chains[0], setup, self._lane_group, self._weights,
            GraphSteps(graphs, setup, self._weights, loss, progress),
            BatchReader(self._chains[0], self.schedule.num_mbs, loss=loss, exactness=exactness, split=split),
            compiled(loss, options), scaler, loss_over == "batch",
        )  # fmt: skip
        self._timeout, self._has_looked_for_caches = timeout, False
        self.training = True
        self._followed = plain_module(module) if isinstance(module, nn.Module) else module[0]
        self._followed_mode = self._followed.training
        self.train(self._followed_mode)
        self._check_loaded: Callable[[object], None] | None = None
        if check and on_meta is not None and self.schedule.num_mbs > 1:
            self._check_loaded = partial(self._check_on_lanes, exactness, split)
            self._check_if_loaded(example)

    def _check_if_loaded(self, example: object) -> None:
        """Check a model that was on meta with a batch, once both have values."""
        if self._check_loaded is None or any(tensor.is_meta for tensor in flatten(example)[0]):
            return
        if not any(self._lane_group.control.gather(self._weights.lacks_values)):  # a lane may need no weights
            todo, self._check_loaded = self._check_loaded, None
            todo(example)

    def _check_on_lanes(self, exactness: Exactness, split: Split | None, example: object) -> None:
        runs = LaneRuns(self._chains[0], example, self._run_whole)
        exactness.check(runs, self._planned.captured.model, example=example, split=split)

    @_without_gradients
    def _run_whole(self, call: Call) -> Any:  # noqa: ANN401 - the output of the model
        """Run a call as a single micro-batch in evaluation mode; return the output, in every process."""
        outputs: dict[int, list[Any]] = {}
        batch = Batch([dict(zip(call.names, call.tensors, strict=True))], [call.batch_size])
        with self._in_mode(False):
            try:
                template = self._chains[0].results(False).template()  # captures the model in evaluation mode
            except Exception as error:
                self._lane_group.control.refuse(self._steps.number + 1, error)
                raise
            step = self._steps.begin(Ready(batch, [()], [1.0]), Mode(False, False, self._cast()), outputs=outputs)
            self._steps.run(step)
        made = self._lane_group.values.outputs(outputs, 1, self.schedule, to_all=True)
        assert made is not None
        return rebuild(template, made[0])

    @overload
    def step(
        self, batch: object, target: object = ..., *, metrics: Literal[False] = False, scale: float = 1.0
    ) -> torch.Tensor: ...

    @overload
    def step(
        self, batch: object, target: object = ..., *, metrics: Literal[True], scale: float = 1.0
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...

    def step(
        self, batch: object, target: object = _NOTHING, *, metrics: bool = False, scale: float = 1.0
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Run the forward and the backward of all micro-batches; return the loss of the batch.

        The gradients are added to the existing ones, as `(loss * scale).backward()` does.

        Args:
            batch: a batch like the example.
            target: the second argument of the loss; leave it out if the loss takes none.
            metrics: whether to also return, by name, the single numbers that the loss function returns beside the loss.
                The numbers of the micro-batches are averaged or summed, like their losses.
            scale: the factor of the loss in the gradients, such as `1 / n` to average over `n` steps per update. Under
                torchrun, all processes pass the same number.

        Returns:
            the loss, which `scale` does not change; with `metrics=True`, a tuple of the loss and the numbers.

        Raises:
            UsageError: if the batch is not like the example, or the scale is no finite number. Nothing has run then.
            LaneError: if an action failed.
        """
        with self._use:
            self._follow_model()
            self._check_if_loaded(batch)
            if not self.training:
                raise UsageError(
                    "step() trains, but the pipeline is in evaluation mode: call train(), or use evaluate()"
                )
            check_scale(scale)
            ready = self._steps.read(batch, _given(target), adds_gradients=True)
            mode, given = Mode(True, True, self._cast()), (batch, *_given(target))
            step = self._steps.begin(ready, mode, given=given, scale=scale)
            self._steps.train(step, batch)
            loss = with_refused_backward(self._steps.total(step, ready))
            return (loss, self._steps.total_metrics(step, ready)) if metrics else loss

    @overload
    def evaluate(self, batch: object, target: object = ..., *, metrics: Literal[False] = False) -> torch.Tensor: ...

    @overload
    def evaluate(
        self, batch: object, target: object = ..., *, metrics: Literal[True]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...

    @_without_gradients
    def evaluate(
        self, batch: object, target: object = _NOTHING, *, metrics: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a batch in evaluation mode, like `step`; gradients and the current mode do not change."""
        with self._use:
            with self._in_mode(False):
                ready = self._steps.read(batch, _given(target))
                step = self._steps.begin(ready, Mode(False, False, self._cast()), given=(batch, *_given(target)))
                self._steps.run(step)
            loss = self._steps.total(step, ready)
            return (loss, self._steps.total_metrics(step, ready)) if metrics else loss

    @_without_gradients
    def forward(self, batch: object, *, gather: str = "all") -> Any:  # noqa: ANN401 - the output of the model
        """Return the output of the model for a batch, without gradients, in the current mode.

        The output has no caches of keys and values, because a pipeline does not generate text. A warning says so once.

        Args:
            batch: a batch like the example.
            gather: under torchrun, the processes that get the output: "all" processes, or only the "last" one; the
                others get None.

        Raises:
            UsageError: if the batch is not like the example. Nothing has run then.
            LaneError: if an action failed.
        """
        with self._use:
            self._follow_model()
            if gather not in ("all", "last"):
                raise UsageError(f"gather: {gather!r} is not one of all, last")
            ready = self._steps.read(batch, None)
            outputs: dict[int, list[Any]] = {}
            step = self._steps.begin(ready, Mode(self.training, False, self._cast()), given=(batch,), outputs=outputs)
            self._steps.run(step)
            made = self._lane_group.values.outputs(outputs, ready.batch.num_mbs, self.schedule, to_all=gather == "all")
            if made is None:
                return None
            results, sizes = [made[mb] for mb in range(ready.batch.num_mbs)], ready.batch.sizes
            with torch.autocast(self.devices[0].type, enabled=False):  # it must not change the dtype of the results
                if self._steps.reader.is_split and len(results) > 1:
                    joined = join_rows(results, sizes)
                else:
                    joined = join_results(results, sizes, self._chains[0].example.batch_dim)
            output = rebuild(self._chains[0].results(self.training).template(), joined)
            if not self._has_looked_for_caches:
                self._has_looked_for_caches = True
                warn_of_cache(output, self._planned.captured)
            return output

    __call__ = forward

    def _follow_model(self) -> None:
        """Adopt the mode of the user's model if model.train() or model.eval() has changed it."""
        now = self._followed.training
        if now is not self._followed_mode:
            self._followed_mode = now
            self.train(now)

    def train(self, mode: bool = True) -> Pipeline:
        """Set all stages to training mode, or to evaluation mode with `mode=False`; return the pipeline.

        Calling `train()` or `eval()` on the model itself has the same effect.
        """
        self.training = mode
        for chain in self._chains:
            chain.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Set all stages to evaluation mode; return the pipeline."""
        return self.train(False)

    @contextmanager
    def _in_mode(self, training: bool) -> Iterator[None]:
        before = self.training
        self.train(training)
        try:
            yield
        finally:
            self.train(before)

    @property
    def plan(self) -> Plan:
        """All decisions about the model. `pipe.plan.to_json(path)` saves them; `Pipeline(..., plan=path)` uses them."""
        plan, found = self._planned.plan, self._planned.explainer.kept
        return plan if found is None or plan.explanation is not None else replace(plan, explanation=found)

    @property
    def internals(self) -> Internals:
        """The parts that checkpoints, faults, feeding and training use; see `penstock.pipeline.internals`."""
        return Internals(self)

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lanes in this process: all lanes, or a single one under torchrun."""
        return self._lane_group.lanes

    @property
    def watch(self) -> Watch | None:
        """The object that sees every action before and after it runs; see `penstock.runtime.step`."""
        return self._steps.watch

    @watch.setter
    def watch(self, watch: Watch | None) -> None:
        self._steps.watch = watch

    @property
    def timeout(self) -> float:
        """The seconds that a lane waits for a value before it raises a `HangError`."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._lane_group.set_timeout(check_seconds(seconds))
        self._timeout = seconds

    @contextmanager
    def record(self, *, memory: bool = False) -> Iterator[Recording]:
        """Measure the steps inside the block; the yielded object is the timeline of the last of these steps.

        Args:
            memory: whether to also count the memory of saved and pending values after each action. This makes the step
                slower.

        Raises:
            UsageError: if another recording is open.
        """
        if self._steps.recording is not None:
            raise UsageError("record() is already open: a pipeline makes one recording at a time")
        recording = Recording(self.schedule, self._planned.held_bytes, memory=memory)
        self._steps.recording = recording
        try:
            yield recording
        finally:
            self._steps.recording = None

    def num_samples(self, batch: object) -> int:
        """Return the number of samples of a batch: its size along `batch_dim`."""
        return self._steps.reader.num_samples(batch)

    def check(self, batch: object, target: object = _NOTHING) -> Comparison:
        """Compare a batch in micro-batches with the same batch as a whole: the loss and all gradients.

        Print the largest differences, and return all of them. Dropout is off, and batch norm uses its running
        statistics. Gradients, buffers and random states do not change. Under torchrun, all processes must call this
        method; the first one prints.

        Args:
            batch: a batch like the example.
            target: the second argument of the loss; leave it out if the loss takes none.

        Raises:
            UsageError: if the batch is not like the example, or if the schedule updates weights within the step.
        """
        found = compare(self, batch, _given(target))
        if 0 in self.lanes:
            sys.stdout.write(f"{found}\n")
        return found

    def explain(self) -> Explanation:
        """Return the cuts, the time and memory of each stage, and the predicted step; `print` it to see the tables."""
        found = self._planned.explain()
        if not self._steps.loss_over_batch:
            return found
        size, count = int(found.profile.batch_size), self.schedule.num_mbs
        held = sum(found.graph.values[value].bytes_at(size) for value in found.graph.outputs) * count
        note = (
            f"loss over the whole batch: the last lane also holds the outputs of all {count} micro-batches and their "
            f"gradients, {show_bytes(2 * held)} in total, and the values that the loss itself saves"
        )
        return replace(found, notes=(*found.notes, note))

    def close(self) -> None:
        """Stop the lanes; this also happens when the pipeline is garbage-collected."""
        self._steps.is_closed = True
        self._lane_group.close()
        self._steps.graphs.forget()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:  # noqa: ANN401 - nothing is returned
        raise UsageError(
            "a pipeline cannot be copied or pickled, because its lanes are threads or processes; save pipe.state_dict()"
        )

    def __repr__(self) -> str:
        return f"Pipeline({self.schedule!r}, cuts={list(self.cuts)})"


def _given(target: object) -> tuple[Any, ...]:
    return () if target is _NOTHING else (target,)
