"""Lightning: a strategy that trains a LightningModule on the lanes of a pipeline."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

from penstock.errors import UsageError
from penstock.integrations.lane_checkpoints import load_lanes, save_lanes
from penstock.integrations.late_gradients import step_before_backward
from penstock.integrations.whole_state import whole_state_dict
from penstock.pipeline.pipeline import Pipeline

_LANES = ".lanes"  # the ending of the folder beside a checkpoint, with the optimizer for any number of lanes


class PipelineStrategy(SingleDeviceStrategy):
    """A strategy of Lightning whose steps run on a pipeline.

    The LightningModule holds the model as an attribute. Its `training_step` calls `self.trainer.strategy.step`, and
    its `configure_optimizers` uses `self.trainer.strategy.pipe.parameters()`. Accumulation, clipping, logging,
    callbacks and checkpoints stay those of Lightning. Under torchrun, each process is a lane, and all processes get the
    same batches.

    Args:
        pipe: the pipeline of the model.

    Raises:
        UsageError: if the object is no pipeline, or its schedule updates weights within the step.
    """

    strategy_name = "penstock"

    def __init__(self, pipe: Pipeline) -> None:
        if not isinstance(pipe, Pipeline):
            raise UsageError(f"pipe: expected a penstock.Pipeline; given: {type(pipe).__name__}")
        if pipe.optimizers:
            raise UsageError(f"pipe: {pipe.schedule.name} updates weights within the step, and Lightning updates too")
        super().__init__(device=pipe.devices[pipe.lanes[0]])
        self.pipe = pipe
        self._read = Path()  # the checkpoint that was read last

    def step(self, batch: object, *target: object) -> torch.Tensor:
        """Run a step in `training_step`; return the loss, whose backward Lightning calls.

        Args:
            batch: a batch like the example of the pipeline.
            target: the second argument of the loss; leave it out if the loss takes none.
        """
        return step_before_backward(self.pipe, batch, *target)

    # ---- set-up

    def setup(self, trainer: Any) -> None:
        """Check the settings and set up the optimizers; the model stays where the pipeline has placed it."""
        plugin = self.precision_plugin
        if type(plugin) is not Precision and not (type(plugin) is MixedPrecision and plugin.scaler is None):
            raise UsageError(f'precision: use "32-true" or "bf16-mixed" with a pipeline; given: {plugin.precision}')
        if int(getattr(trainer, "num_devices", 1)) > 1:
            raise UsageError("devices: the pipeline has its devices already; pass devices=1 to Lightning")
        self._prefix()
        plugin.clip_grad_by_norm = MethodType(self._clip, plugin)
        super().setup(trainer)

    def _clip(self, _: object, optimizer: object, clip_val: float) -> None:
        """Clip by the norm of the gradients of all lanes."""
        if clip_val > 0:
            self.pipe.clip_grad_norm_(clip_val)

    def model_to_device(self) -> None:
        """Leave the model where the pipeline has placed it."""

    def teardown(self) -> None:
        """End without moving the model to the CPU."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ---- processes

    @property
    def is_global_zero(self) -> bool:
        """Whether this process has the first lane, and so writes output."""
        return 0 in self.pipe.lanes

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the other processes."""
        self.pipe.internals.gather(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one process, in all of them."""
        if len(self.pipe.lanes) == self.pipe.schedule.num_lanes:
            return obj
        return self.pipe.internals.gather(str(obj) if isinstance(obj, Path) else obj)[src]

    # ---- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is read after `setup`: True, since the optimizers are needed."""
        return True

    def _prefix(self) -> str:
        """Return the name of the model in the LightningModule, with a dot."""
        model = self.pipe.internals.captured.model
        assert self.lightning_module is not None
        for name, module in self.lightning_module.named_modules():
            if module is model:
                return f"{name}." if name else ""
        raise UsageError("pipe: its model is no attribute of the LightningModule; set self.model = model there")

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the LightningModule with the weights of all lanes; empty in the other processes."""
        assert self.lightning_module is not None
        folder = Path(self.lightning_module.trainer.default_root_dir)
        with whole_state_dict(self.pipe, folder) as state:
            if state is None:
                return {}
            prefix = self._prefix()
            return {**self.lightning_module.state_dict(), **{prefix + name: t for name, t in state.items()}}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: `save_checkpoint` writes the states of all lanes by name, beside the checkpoint."""
        return {}

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: Any,
        storage_options: Any | None = None,
    ) -> None:
        """Write a checkpoint and, beside it, a folder with the states of the optimizers."""
        step = int(checkpoint.get("global_step", 0))
        save_lanes(_beside(filepath), self.pipe, step, optimizer=self.optimizers)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint and its folder."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint."""
        self._read = Path(checkpoint_path)
        return dict(super().load_checkpoint(checkpoint_path, weights_only=weights_only))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of the lanes of this process."""
        prefix = self._prefix()
        state = {n.removeprefix(prefix): t for n, t in checkpoint["state_dict"].items() if n.startswith(prefix)}
        self.pipe.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers."""
        folder = _beside(self._read)
        if not load_lanes(folder, self.pipe, ("optimizer",), optimizer=self.optimizers):
            raise UsageError(
                f"{self._read}: has no folder {folder.name} with the states of the optimizers. Load the weights only: "
                "pipe.load_state_dict"
            )


def _beside(path: Any) -> Path:
    file = Path(path)
    return file.with_name(file.name + _LANES)
