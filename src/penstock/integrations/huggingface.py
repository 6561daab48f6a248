"""Hugging Face: the Trainer of transformers, with a pipeline in place of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from penstock.errors import UsageError
from penstock.integrations.label_counts import count_labels, shifts_labels, uses_num_items
from penstock.integrations.lane_checkpoints import load_lanes, save_lanes
from penstock.integrations.one_process import as_one_process
from penstock.integrations.whole_state import whole_state_dict
from penstock.pipeline.pipeline import Pipeline
from penstock.runtime.loss_weights import CountRule

_STATE = "penstock"  # the folder inside a checkpoint with the weights and the optimizer, for any number of lanes

# arguments that change the model after the capture, or hand its parameters to another library
_REFUSED = {
    "fp16": "use bf16=True",
    "fp16_full_eval": "use bf16=True",
    "bf16_full_eval": "use bf16=True, which also holds in evaluation",
    "gradient_checkpointing": 'pass keep="recompute" to the pipeline',
    "torch_compile": "pass compile=True to the pipeline",
    "use_liger_kernel": "apply the kernels to the model before you make the pipeline",
    "neftune_noise_alpha": "a pipeline does not add noise to embeddings",
    "label_smoothing_factor": "pass loss=nn.CrossEntropyLoss(label_smoothing=...) to the pipeline",
    "auto_find_batch_size": "pass more micro_batches to the pipeline",
    "fsdp": "the pipeline places the parameters",
    "deepspeed": "the pipeline places the parameters",
    "parallelism_config": "the pipeline places the parameters",
}


class PipelineTrainer(Trainer):
    """A `transformers.Trainer` whose model is a pipeline.

    Arguments, callbacks, logging, evaluation and checkpoints are those of the Trainer. Losses and weights are those of
    the Trainer with the plain model. `gradient_accumulation_steps` averages over the labels of all batches of an
    update, also for models that ignore `num_items_in_batch`, for which the plain Trainer adds the losses of the
    batches. Under torchrun, each process is a lane, and all processes get the same batches.

    Args:
        pipe: the pipeline of a model of transformers (or of a peft model). Its example is a batch of the collator.
        args: the arguments of the Trainer.
        more: the other arguments of the Trainer, such as `train_dataset`, `data_collator` and `callbacks`.

    Raises:
        UsageError: for arguments that a pipeline cannot follow; the message names what to use instead.
    """

    def __init__(self, pipe: Pipeline, args: TrainingArguments, **more: Any) -> None:
        if not isinstance(pipe, Pipeline):
            raise UsageError(f"pipe: expected a penstock.Pipeline; given: {type(pipe).__name__}")
        _check(pipe, args, more)
        self.pipe = pipe
        self.plain: Any = pipe.internals.captured.model
        self._ends_with_labels = True  # whether the last batch of the update runs
        with as_one_process(args, is_first=0 in pipe.lanes, device=pipe.devices[pipe.lanes[0]]):
            super().__init__(model=self.plain, args=args, **more)

    # ---- set-up

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Leave batches where the loader makes them: the pipeline copies them to its lanes."""
        return {**super()._build_accelerator_args(**kwargs), "device_placement": False}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where the pipeline has placed it."""

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Return the pipeline: the loop calls its `zero_grad`, `train` and `eval`."""
        return self.pipe

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Return the names of the model's parameters with weight decay."""
        return list(super().get_decay_parameter_names(self.plain))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make the optimizer from the parameters of the lanes in this process."""
        return super().create_optimizer(self.pipe)

    def is_world_process_zero(self) -> bool:
        """Return whether this process has the first lane, and so writes output."""
        return 0 in self.pipe.lanes

    # ---- steps

    def training_step(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Run forward and backward of a batch; return its part in the loss of the update."""
        self.pipe.train()
        switch = getattr(self.optimizer, "train", None)  # of optimizers that need no schedule
        if callable(switch):
            switch()
        scale = self._scale(inputs, num_items_in_batch)
        if scale == 0:  # no label in this batch
            return torch.zeros((), device=self.args.device)
        waits = self._ends_with_labels and not self.accelerator.sync_gradients
        with self.pipe.no_sync() if waits else nullcontext(), self._autocast():
            loss = self.pipe.step(*self._call(inputs), scale=scale)
        return (loss * scale).to(self.args.device)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """Return the batches of an update, and the number of labels that its loss is divided by."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if num_items is not None and not uses_num_items(self.plain):
            num_items = sum(self._count(batch) for batch in batches)
        self._ends_with_labels = num_items is None or self._count(batches[-1]) > 0
        return batches, num_items

    def _scale(self, inputs: Mapping[str, Any], num_items: torch.Tensor | int | None) -> float:
        """Return the share of a batch in the loss of its update: its share of the labels, or of the batches."""
        if num_items is None or self.loss_is_scaled_for_ga is False:
            return 1 / self.current_gradient_accumulation_steps
        return self._count(inputs) / max(float(num_items), 1.0)

    def _count(self, inputs: Mapping[str, Any]) -> int:
        """Return the number of labels that the loss of a batch averages over."""
        return count_labels(inputs, is_shifted=self._is_shifted)

    @cached_property
    def _is_shifted(self) -> bool:
        weight = self.pipe.internals.weight
        return weight.is_shifted if isinstance(weight, CountRule) else shifts_labels(self.plain)

    def prediction_step(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return the loss, the outputs and the labels of a batch. Outputs need a second forward."""
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        loss, logits, labels = None, None, None
        with self._autocast():
            if has_labels:
                loss = self.pipe.evaluate(*self._call(inputs)).to(self.args.device)
                num_items = self._get_num_items_in_batch([inputs], self.args.device)
                if num_items is not None and uses_num_items(self.plain):  # which is not always the number that counts
                    loss = loss * self._scale(inputs, num_items)
            if not prediction_loss_only:
                self.pipe.eval()
                logits = self._outputs(self.pipe.forward(self._call(inputs)[0]), ignore_keys)
        if has_labels and not prediction_loss_only:
            found = tuple(inputs[name].to(self.args.device) for name in self.label_names)
            labels = found[0] if len(found) == 1 else found
        return loss, logits, labels

    def _outputs(self, output: Any, ignore_keys: list[str] | None) -> Any:
        """Return the outputs of the model without its loss."""
        if ignore_keys is None:
            ignore_keys = getattr(self.plain.config, "keys_to_ignore_at_inference", ["past_key_values"])
        if isinstance(output, Mapping):
            found = tuple(value for key, value in output.items() if key not in [*ignore_keys, "loss"])
        else:
            found = output if isinstance(output, tuple) else (output,)
        moved = tuple(value.to(self.args.device) if isinstance(value, torch.Tensor) else value for value in found)
        return moved[0] if len(moved) == 1 else moved

    def _call(self, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what `pipe.step` takes: the batch, and its labels if the loss is the pipeline's."""
        batch = dict(inputs)
        if self.pipe.internals.loss is None:
            return (batch,)
        labels = [batch.pop(name) for name in self.label_names if name in batch]
        return (batch, labels[0] if len(labels) == 1 else labels)

    def _autocast(self) -> Any:
        if not self.args.bf16:
            return nullcontext()
        return torch.autocast(self.pipe.devices[0].type, dtype=torch.bfloat16, cache_enabled=False)

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        """Clip the gradients of all lanes; return their norm before."""
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the norm of the gradients of all lanes."""
        return self.pipe.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # ---- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model as `save_pretrained` does; under torchrun, all processes call this method."""
        folder = Path(output_dir or self.args.output_dir or ".")
        with whole_state_dict(self.pipe, folder) as state:
            if state is not None:
                self._save(str(folder), state_dict=state)
        if self.args.push_to_hub and not _internal_call and 0 in self.pipe.lanes:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write weights, optimizer and scheduler by name, so that any number of lanes can continue."""
        save_lanes(
            Path(output_dir) / _STATE,
            self.pipe,
            self.state.global_step,
            optimizer=self._plain_optimizer,
            scheduler=self.lr_scheduler,
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the optimizer and the scheduler of a checkpoint."""
        if checkpoint is not None:
            self._load_parts(checkpoint, ("optimizer", "scheduler"), optimizer=self._plain_optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint."""
        self._load_parts(resume_from_checkpoint, ("model",))

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint."""
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_parts(self, folder: str, parts: tuple[str, ...], *, optimizer: Any = None) -> None:
        scheduler = self.lr_scheduler if "scheduler" in parts else None
        if not load_lanes(Path(folder) / _STATE, self.pipe, parts, optimizer=optimizer, scheduler=scheduler):
            raise UsageError(
                f"resume_from_checkpoint: {folder} has no folder {_STATE!r}. PipelineTrainer did not write it, or it "
                "did so with save_only_model=True. Load its weights with from_pretrained"
            )

    @property
    def _plain_optimizer(self) -> Any:
        """The optimizer without the wrapper of accelerate."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _save_rng_state(self, output_dir: str) -> None:
        """Write the random state once: it is the same in all processes."""
        if self.args.should_save:
            super()._save_rng_state(output_dir)
        self.pipe.internals.gather(None)  # no process reads it before it is there


def _check(pipe: Pipeline, args: TrainingArguments, more: Mapping[str, Any]) -> None:
    """Raise one error that names all arguments which a pipeline cannot follow."""
    model = pipe.internals.captured.model
    faults = [f"{name}: {instead}" for name, instead in _REFUSED.items() if getattr(args, name, None)]
    for name, instead in (
        ("model", "the pipeline has it"),
        ("model_init", "the pipeline has the model"),
        ("compute_loss_func", "pass loss= to the pipeline"),
    ):
        if more.get(name) is not None:
            faults.append(f"{name}: {instead}")
    if pipe.optimizers:
        faults.append(f"schedule: {pipe.schedule.name} updates weights within the step, and the Trainer updates too")
    if pipe.internals.scaler is not None:
        faults.append("scaler: the Trainer does not know it; use bf16=True")
    if args.load_best_model_at_end and (args.save_only_model or args.save_strategy == SaveStrategy.NO):
        faults.append("save_only_model: load_best_model_at_end needs whole checkpoints")
    base = getattr(model, "get_base_model", lambda: model)()
    if not isinstance(base, PreTrainedModel):
        faults.append(f"pipe: its model is a {type(model).__name__}, not a model of transformers or peft")
    if faults:
        raise UsageError(f"PipelineTrainer does not support these settings. {'; '.join(faults)}")
