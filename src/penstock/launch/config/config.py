"""Config: all that `penstock train` can be told; the same names in a file and as flags."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["ALIASES", "GROUPS", "HINTS", "Config", "group_of"]

GROUPS = ("What to train", "How to learn", "How to run it", "When and where", "Processes")
ALIASES = {"nproc_per_node": "nproc", "max_steps": "steps", "save_total_limit": "keep_checkpoints"}  # of other tools
HINTS = {  # what other tools have, and what to give here
    "learning_rate": "give lr",
    "batch_size": "the data makes its batches: give it to your callable, as data_args = {batch_size = 32}",
    "epochs": "give steps, the number of updates",
    "num_epochs": "give steps, the number of updates",
    "output_dir": "give folder",
    "gradient_accumulation_steps": "give accumulate",
}

Count = Annotated[int, Field(ge=1)]
Number = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Table = dict[str, Any]


def _key(default: Any, group: int, description: str) -> Any:  # noqa: ANN401 - as pydantic's Field
    extra: dict[str, Any] = {"group": GROUPS[group]}
    if isinstance(default, (dict, list)):
        return Field(default_factory=lambda: type(default)(default), description=description, json_schema_extra=extra)
    return Field(default=default, description=description, json_schema_extra=extra)


class Config(BaseModel):
    """What to train, and how. Every key has a default: nothing need be given."""

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
        0,
        "package.module:callable or file.py:callable, which returns a model, or a model and an example batch; or a "
        "transformers config: a model type as gpt2, a config.json, or a table with model_type.",
    )
    model_args: Table = _key({}, 0, "Keyword arguments of the callable, or settings of the transformers config.")
    data: str = _key(
        "penstock:text",
        0,
        "package.module:callable or file.py:callable, which returns batches (a DataLoader, or whatever can be iterated "
        "over anew), or (training, validation) batches.",
    )
    data_args: Table = _key({}, 0, "Keyword arguments of the data's callable.")
    validation: str | None = _key(
        None, 0, "A callable, as for data, that returns the batches to validate with; it gets data_args too."
    )
    loss: str = _key(
        "auto",
        0,
        "A loss of torch.nn.functional (cross_entropy) or torch.nn (CrossEntropyLoss), package.module:callable taking "
        "(output, target), penstock:next_token, or model where the model returns its loss; auto knows those of "
        "transformers and of penstock:gpt.",
    )
    weight: str | None = _key(
        None,
        0,
        "What the loss averages over in a micro-batch: sum for a loss that adds up, or package.module:callable taking "
        "(batch, target). By default it is read off torch's own losses, and found out by trial for others.",
    )
    loss_over: Literal["micro_batch", "batch"] = _key(
        "micro_batch",
        0,
        "What one call of the loss sees: micro_batch, or batch: the outputs of the whole batch at once, for losses "
        "that couple samples.",
    )
    batch_dim: Number | dict[str, Number] = _key(
        0, 0, "The dimension of the batch in what the model is called with; or a table with one per argument."
    )
    whole: list[str] = _key([], 0, "Arguments of the model that every micro-batch gets whole.")
    callbacks: list[str] = _key([], 0, "Callables, package.module:callable, each returning a penstock.Callback.")

    steps: Count = _key(100, 1, "Updates of the weights, those before a resume counted in.")
    optimizer: str = _key(
        "AdamW",
        1,
        "An optimizer of torch.optim, or package.module:callable taking (parameters, lr=, ...).",
    )
    optimizer_args: Table = _key({}, 1, "More keyword arguments of the optimizer.")
    lr: Positive = _key(1e-3, 1, "The learning rate, at its highest.")
    weight_decay: Annotated[float, Field(ge=0)] | None = _key(None, 1, "As the optimizer takes it; by default its own.")
    lr_schedule: str = _key(
        "constant", 1, "constant, linear, cosine, one_cycle, or package.module:callable taking (optimizer, steps=)."
    )
    warmup_steps: Number = _key(0, 1, "Steps in which the learning rate rises to lr.")
    clip: Positive | None = _key(None, 1, "The most that the norm of all gradients may be.")
    accumulate: Count = _key(1, 1, "Batches of an update.")
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = _key(
        "fp32", 1, "fp32; bf16 or fp16 by autocast (fp16 with a gradient scaler over all lanes); fp64: all in double."
    )
    on_nan: Literal["stop", "skip", "rewind", "ignore"] = _key(
        "stop",
        1,
        "For a loss or gradient that is not finite: stop, skip the update, rewind to a checkpoint, or ignore.",
    )
    on_oom: Literal["split", "stop"] = _key(
        "split", 1, "When memory runs out: split runs the step again with twice the micro-batches; stop ends."
    )
    seed: Number = _key(0, 1, "Of weights and of all that is drawn.")

    lanes: Count | None = _key(None, 2, "Lanes, as threads of one process; by default as many as GPUs, 2 on the CPU.")
    devices: str | list[str] | None = _key(None, 2, "Of each lane, as cuda:0, cpu; or one for all.")
    micro_batches: Count | None = _key(None, 2, "Micro-batches a step; by default four a lane.")
    schedule: str | None = _key(
        None,
        2,
        "A schedule's name (penstock simulate --list), or a CSV file; by default 1f1b, and zb_gpipe for loss_over "
        "batch.",
    )
    plan: str | None = _key(
        None,
        2,
        "A file that `penstock plan --out` wrote: nothing is measured or decided anew; then leave out what it holds.",
    )
    stages_per_lane: Count | None = _key(None, 2, "For schedules that leave it open.")
    cuts: list[int | str] = _key(
        [], 2, "Where cuts must lie: modules or nodes that they lie before; others are chosen."
    )
    keep: str | list[str] = _key(
        "hold", 2, "What stages do with saved values: hold, recompute, except_last, offload, fit; or one a stage."
    )
    memory_limit: Positive | str | list[Positive | str] | None = _key(
        None, 2, "Bytes a lane has, as 16e9 or 16GiB; or one a lane."
    )
    deferred_batch_norm: bool = _key(
        False, 2, "Update running statistics of batch norm once a step, as the whole batch would."
    )
    capture_path: Literal["auto", "direct", "export", "replay"] = _key(
        "auto", 2, "How the model is captured: direct, export or replay; auto takes the first that works."
    )
    check: bool = _key(
        True, 2, "Compare a few samples, whole and in micro-batches, and refuse a model or a loss where they differ."
    )
    graphs: bool | Literal["auto"] = _key("auto", 2, "Steps as CUDA graphs: true, false, or auto: wherever that works.")
    compile: bool | Table = _key(
        False,
        2,
        "Let Inductor compile the stages; a table of its options, as coordinate_descent_tuning = true, with these.",
    )
    timeout: Positive = _key(600.0, 2, "Seconds that a lane waits for a value before it says that the other hangs.")

    folder: str = _key("run", 3, "Where everything goes; one training at a time.")
    resume: str = _key("auto", 3, "auto: from the folder's newest checkpoint; never; or the folder of a checkpoint.")
    resume_data: bool = _key(
        True, 3, "Go on in the data where it was; false begins an epoch anew, as for batches of another size."
    )
    checkpoint_every: Number = _key(100, 3, "Steps between checkpoints; 0: only at the end.")
    keep_checkpoints: Count = _key(3, 3, "How many of the newest checkpoints stay.")
    validate_every: Number = _key(0, 3, "Steps between validations; 0: only at the end.")
    log_every: Count = _key(10, 3, "Steps between lines of the log.")
    record_every: Number = _key(100, 3, "Steps between recorded timelines; 0: only the last step's.")
    tensorboard: bool = _key(False, 3, "Write metrics for TensorBoard too (pip install 'penstock[tensorboard]').")
    max_seconds: Positive | None = _key(None, 3, "End, with a checkpoint, after so long.")
    grace_seconds: Positive = _key(30.0, 3, "What a training that is told to end has for its checkpoint.")

    nproc: Count | None = _key(None, 4, "Processes on this machine, each a lane; by default none beside this one.")
    nnodes: int | str = _key(1, 4, "Machines, as 2, or MIN:MAX, as 1:2: then it goes on with fewer when one is lost.")
    node_rank: Number | None = _key(None, 4, "The number of this machine, for rdzv_backend static.")
    rdzv_backend: str = _key("c10d", 4, "How machines find each other, as torchrun names it.")
    rdzv_endpoint: str | None = _key(None, 4, "HOST:PORT where they meet; by default this machine, any free port.")
    rdzv_id: str | None = _key(None, 4, "A name of this run, the same on all machines.")
    rdzv_conf: Table = _key({}, 4, "More settings of the rendezvous, as last_call_timeout=5.")
    max_restarts: Number = _key(3, 4, "Restarts an hour, after processes that were lost or hung.")
    spares: bool = _key(
        True, 4, "Keep as many processes ready, with everything imported, so that a restart takes less time."
    )
    log_dir: str | None = _key(None, 4, "Where what the processes print goes; by default logs in the folder.")

    @property
    def schedule_name(self) -> str:
        """The schedule that is asked for, or the default."""
        return self.schedule or ("zb_gpipe" if self.loss_over == "batch" else "1f1b")


def group_of(name: str) -> str:
    """Return the group that a key belongs to."""
    extra = Config.model_fields[name].json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["group"])
