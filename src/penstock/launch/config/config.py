"""Config: the keys of `penstock train`, with the same names in a file and as flags."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.deciding.defaults import KEEP, default_schedule
from penstock.schedule.keep_policies import POLICIES, listed

_GROUPS = {  # of keys, by the first key of each
    "model": "Model and data",
    "steps": "Optimization",
    "lanes": "Execution",
    "folder": "Run folder and logs",
    "nproc": "Processes",
}
ALIASES = {"nproc_per_node": "nproc", "max_steps": "steps", "save_total_limit": "keep_checkpoints"}  # of other tools
HINTS = {  # keys of other tools, and the hint for each
    "learning_rate": "use lr",
    "batch_size": "the data makes its batches: pass the size to your callable, as data_args = {batch_size = 32}",
    "epochs": "use steps, the number of updates",
    "num_epochs": "use steps, the number of updates",
    "output_dir": "use folder",
    "gradient_accumulation_steps": "use accumulate",
}

Count = Annotated[int, Field(ge=1)]
Number = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Table = dict[str, Any]


def _key(default: Any, description: str) -> Any:  # noqa: ANN401 - pydantic's Field returns Any
    return Field(default, description=description)


class Config(BaseModel):
    """The configuration of a training. Each key has a default."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        hide_input_in_errors=True,
    )

    model: str | Table = _key(
        "penstock:gpt",
        "package.module:callable or file.py:callable, which returns a model, or a model and an example batch; or a "
        "transformers config: a model type such as gpt2, a config.json, or a table with model_type. hf:FOLDER is the "
        "model in a folder of save_pretrained; each lane makes and loads only its part.",
    )
    model_args: Table = _key(
        {}, "Keyword arguments of the callable, or settings of the transformers config; for hf: models also dtype."
    )
    weights: str | None = _key(
        None,
        "The file or folder of the model's weights: safetensors, a folder of save_pretrained or a checkpoint of "
        "Penstock. By default the folder of an hf: model; other models are initialised.",
    )
    data: str = _key(
        "penstock:text",
        "package.module:callable or file.py:callable, which returns batches (a DataLoader, or another iterable that can"
        " be iterated again), or a pair of training and validation batches.",
    )
    data_args: Table = _key({}, "Keyword arguments of the callable of data.")
    validation: str | None = _key(
        None, "A callable, as for data, that returns the validation batches; it also gets data_args."
    )
    loss: str = _key(
        "auto",
        "A loss of torch.nn.functional (cross_entropy) or torch.nn (CrossEntropyLoss); package.module:callable with the"
        " arguments (output, target); penstock:next_token; or model, if the model returns its loss. auto works for"
        " models of transformers and for penstock:gpt.",
    )
    weight: str | None = _key(
        None,
        "What the loss of a micro-batch averages over: sum for a loss that sums, or package.module:callable with the "
        "arguments (batch, target). By default it is known for torch's losses, and found by trial for others.",
    )
    loss_over: Literal["micro_batch", "batch"] = _key(
        "micro_batch",
        "The outputs that one call of the loss gets: those of one micro_batch, or those of the whole batch, for losses "
        "that couple samples.",
    )
    batch_dim: Number | dict[str, Number] = _key(
        0, "The batch dimension of the arguments of the model; or a table with one per argument."
    )
    whole: list[str] = _key([], "Arguments of the model that each micro-batch gets whole.")
    callbacks: list[str] = _key([], "Callables, package.module:callable, that each return a penstock.Callback.")

    steps: Count = _key(100, "Total number of weight updates, including those before a resume.")
    optimizer: str = _key(
        "AdamW", "An optimizer of torch.optim, or package.module:callable with the arguments (parameters, lr=, ...)."
    )
    optimizer_args: Table = _key({}, "Further keyword arguments of the optimizer.")
    lr: Positive = _key(1e-3, "The highest learning rate.")
    weight_decay: Annotated[float, Field(ge=0)] | None = _key(
        None, "The weight decay of the optimizer; by default that of torch."
    )
    lr_schedule: str = _key(
        "constant",
        "constant, linear, cosine, one_cycle, or package.module:callable with the arguments (optimizer, steps=).",
    )
    warmup_steps: Number = _key(0, "Steps in which the learning rate rises to lr.")
    clip: Positive | None = _key(None, "Maximum norm of all gradients; they are scaled down to it.")
    accumulate: Count = _key(1, "Batches per update.")
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = _key(
        "fp32", "fp32; bf16 or fp16 with autocast (fp16 also with a gradient scaler for all lanes); or fp64."
    )
    on_nan: Literal["stop", "skip", "rewind", "ignore"] = _key(
        "stop", "If a loss or gradient is not finite: stop, skip the update, rewind to a checkpoint, or ignore."
    )
    on_oom: Literal["split", "stop"] = _key(
        "split", "If memory runs out: split repeats the step with twice the micro-batches; stop ends the training."
    )
    seed: Number = _key(0, "Seed of the weights and of all random numbers.")

    lanes: Count | None = _key(
        None, "Number of lanes, as threads of one process; by default the number of GPUs, or 2 on the CPU."
    )
    devices: str | list[str] | None = _key(None, "The device of each lane, such as cuda:0 or cpu; or one for all.")
    micro_batches: Count | None = _key(
        None, "Micro-batches per step; by default four per lane, but at most one per sample."
    )
    schedule: str | None = _key(
        None,
        "A schedule by name (see penstock simulate --list), or a CSV file; by default 1f1b, or zb_gpipe if loss_over is"
        " batch.",
    )
    plan: str | None = _key(
        None, "A file of `penstock plan --out`. It replaces measuring and deciding; leave out the keys that it decides."
    )
    stages_per_lane: Count | None = _key(None, "Stages per lane, for schedules that leave it open.")
    cuts: list[int | str] = _key([], "Where cuts must lie: the modules or nodes after the cuts; the others are chosen.")
    keep: str | list[str] = _key(
        KEEP,
        f"What stages do with saved values: {listed(POLICIES)}; or one policy per stage.",
    )
    memory_limit: Positive | str | list[Positive | str] | None = _key(
        None, "Memory of each lane in bytes, such as 16e9 or 16GiB; or one value per lane."
    )
    deferred_batch_norm: bool = _key(
        False, "Update the running statistics of batch norm once per step, from the whole batch."
    )
    capture_path: Literal["auto", "direct", "export", "replay"] = _key(
        "auto", "The capture path: direct, export or replay; auto takes the first that works."
    )
    check: bool = _key(
        True, "Run a few samples whole and in micro-batches, and refuse a model or a loss if the results differ."
    )
    graphs: bool | Literal["auto"] = _key(
        "auto", "Whether steps run as CUDA graphs: true, false, or auto (if it works)."
    )
    compile: bool | Table = _key(
        False,
        "Compile the stages with Inductor: true, false, or a table of Inductor options such as "
        "coordinate_descent_tuning = true.",
    )
    timeout: Positive = _key(600.0, "Seconds that a lane waits for a value before it reports a hang.")

    folder: str = _key("run", "The run folder, for all files; one training at a time.")
    resume: str = _key("auto", "auto (from the newest checkpoint in the folder), never, or a folder of a checkpoint.")
    resume_data: bool = _key(
        True, "Continue at the position in the data; false starts a new epoch, for example if the batch size changed."
    )
    checkpoint_every: Number = _key(100, "Steps between checkpoints; 0: only at the end.")
    keep_checkpoints: Count = _key(3, "Number of newest checkpoints to keep.")
    validate_every: Number = _key(0, "Steps between validations; 0: only at the end.")
    log_every: Count = _key(10, "Steps between lines in the log.")
    record_every: Number = _key(100, "Steps between recorded timelines; 0: only the last step.")
    tensorboard: bool = _key(False, "Also write metrics for TensorBoard (pip install 'penstock[tensorboard]').")
    max_seconds: Positive | None = _key(None, "End with a checkpoint after this time.")
    grace_seconds: Positive = _key(30.0, "Seconds for the last checkpoint after SIGTERM or Ctrl-C.")

    nproc: Count | None = _key(
        None, "Number of processes on this machine, one lane each; by default, lanes are threads of this process."
    )
    nnodes: int | str = _key(
        1, "Number of machines, such as 2; or MIN:MAX, such as 1:2, to continue with fewer if one is lost."
    )
    node_rank: Number | None = _key(None, "The number of this machine, for rdzv_backend static.")
    rdzv_backend: str = _key("c10d", "How machines find each other: a rendezvous backend of torchrun.")
    rdzv_endpoint: str | None = _key(None, "HOST:PORT of the rendezvous; by default a free port on this machine.")
    rdzv_id: str | None = _key(None, "The name of the run, the same on all machines.")
    rdzv_conf: Table = _key({}, "Further settings of the rendezvous, such as last_call_timeout=5.")
    max_restarts: Number = _key(3, "Maximum number of restarts per hour after lost or hung processes.")
    spares: bool = _key(True, "Keep one spare process per process ready, with all imports done, for faster restarts.")
    log_dir: str | None = _key(None, "Folder for the output of the processes; by default logs in the run folder.")

    @property
    def schedule_name(self) -> str:
        """The requested schedule, or the default."""
        return self.schedule or default_schedule(self.loss_over)


def keys_by_group() -> dict[str, list[str]]:
    """Return the keys of each group."""
    found: dict[str, list[str]] = {}
    for name in Config.model_fields:
        if name in _GROUPS:
            keys = found[_GROUPS[name]] = []
        keys.append(name)
    return found
