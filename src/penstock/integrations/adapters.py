"""Adapters: write the adapter of a peft model from the lanes as peft does, and load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from penstock.errors import UsageError
from penstock.integrations.whole_state import whole_state_dict
from penstock.pipeline.pipeline import Pipeline


def save_adapter(pipe: Pipeline, folder: str | Path, **more: Any) -> None:
    """Write the adapter into a folder that peft reads. For the weights of a whole model, use `pipe.save_pretrained`.

    Under torchrun, all processes must call this function, and see the folder.

    Args:
        pipe: the pipeline of a peft model.
        folder: the folder.
        more: other arguments of the peft model's `save_pretrained`, such as `save_embedding_layers`.

    Raises:
        UsageError: if the model is no peft model.
        OutputError: if a file cannot be written; in all processes.
    """
    model: Any = pipe.internals.captured.model
    if not hasattr(model, "peft_config"):
        raise UsageError(f"pipe: its model, a {type(model).__name__}, is no peft model; use pipe.save_pretrained")
    with whole_state_dict(pipe, Path(folder)) as state:
        if state is not None:
            model.save_pretrained(str(folder), state_dict=state, **more)


def load_adapter(pipe: Pipeline, folder: str | Path, *, adapter: str = "default") -> None:
    """Load the weights of an adapter that peft or `save_pretrained` has written into the lanes.

    Under torchrun, all processes must call this function.

    Args:
        pipe: the pipeline of a peft model with an adapter of the same configuration.
        folder: the folder with `adapter_model.safetensors`.
        adapter: the name of the adapter in the model.

    Raises:
        UsageError: if the file is missing, or has weights that the model lacks.
    """
    path = Path(folder) / "adapter_model.safetensors"
    if not path.is_file():
        raise UsageError(f"folder: {path} does not exist")
    given = load_file(path)
    names = {name: _name_on_disk(name, adapter) for name in pipe.state_dict()}
    found = {name: given[short] for name, short in names.items() if short in given}
    used = {short for told in pipe.internals.gather([names[name] for name in found]) for short in told}
    if unknown := sorted(given.keys() - used):
        raise UsageError(f"folder: {path} has weights that the model lacks: {', '.join(unknown[:5])}")
    pipe.load_state_dict(found, strict=False)


def _name_on_disk(name: str, adapter: str) -> str:
    """Return the name that peft writes for a parameter.

    >>> _name_on_disk("model.q.lora_A.default.weight", "default"), _name_on_disk("head.modules_to_save.a.bias", "a")
    ('model.q.lora_A.weight', 'head.bias')
    """
    parts = name.split(".")
    if adapter not in parts:
        return ""
    return ".".join(part for part in parts if part not in (adapter, "modules_to_save"))
