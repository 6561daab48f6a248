"""Accelerate: an Accelerator for a loop around a pipeline, in threads and under torchrun."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from penstock.errors import UsageError
from penstock.integrations.one_process import without_torchrun
from penstock.pipeline.pipeline import Pipeline

_REFUSED = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "parallelism_config")


def make_accelerator(pipe: Pipeline, **options: Any) -> Accelerator:
    """Return an Accelerator that leaves models and batches where they are, and gives all lanes the same batches.

    Prepare the optimizer, the scheduler and the loaders with it, but not the model. Only the process of the first lane
    is its main process.

    Args:
        pipe: the pipeline.
        options: the arguments of Accelerator, such as `gradient_accumulation_steps` and `log_with`.

    Raises:
        UsageError: for options that a pipeline cannot follow.
    """
    if not isinstance(pipe, Pipeline):
        raise UsageError(f"pipe: expected a penstock.Pipeline; given: {type(pipe).__name__}")
    faults = [f"{name}: the pipeline places the parameters" for name in _REFUSED if options.get(name) is not None]
    if options.get("mixed_precision") not in (None, "no", "bf16"):
        faults.append('mixed_precision: use "bf16"')
    if pipe.optimizers:
        faults.append(f"pipe: {pipe.schedule.name} updates weights within the step")
    if faults:
        raise UsageError(f"make_accelerator: {'; '.join(faults)}")
    with without_torchrun():
        AcceleratorState._reset_state(reset_partial_state=True)
        is_on_cpu = all(device.type == "cpu" for device in pipe.devices)
        accelerator = Accelerator(**{"device_placement": False, "cpu": is_on_cpu, **options})
    if 0 not in pipe.lanes:
        state = PartialState()
        state.process_index = state.local_process_index = pipe.lanes[0]
    return accelerator
