"""Pretrained: write the model of a pipeline as transformers and peft do, also if each process holds a part of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from penstock.errors import OutputError, UsageError
from penstock.pipeline.pipeline import Pipeline


def save_pretrained(pipe: Pipeline, folder: str | Path, **more: Any) -> None:
    """Write the model into a folder that `from_pretrained` reads; of a peft model, only the adapter is written.

    Under torchrun, all processes must call this function, and see the folder.

    Args:
        pipe: the pipeline of a model with a method `save_pretrained`.
        folder: the folder.
        more: other arguments of the model's `save_pretrained`, such as `max_shard_size`.

    Raises:
        UsageError: if the model has no method `save_pretrained`.
        OutputError: if a file cannot be written; in all processes.
    """
    save = getattr(pipe.internals.captured.model, "save_pretrained", None)
    if not callable(save):
        raise UsageError(f"pipe: its model, a {type(pipe.internals.captured.model).__name__}, has no save_pretrained")
    with whole_state_dict(pipe, Path(folder)) as state:
        if state is not None:
            save(str(folder), state_dict=state, **more)


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


@contextmanager
def whole_state_dict(pipe: Pipeline, folder: Path) -> Iterator[dict[str, torch.Tensor] | None]:
    """Yield the state dict of the whole model in the process of the first lane, and None in the others.

    Processes pass their parts through files in `folder`, which all of them must see. The files are mapped into memory,
    so the first process does not hold all parts at once. They are gone after the block.

    Raises:
        OutputError: if a file cannot be written; in all processes.
    """
    own = pipe.state_dict()
    if len(pipe.lanes) == pipe.schedule.num_lanes:
        yield own
        return
    parts = [folder / f".part-{lane}.safetensors" for lane in range(pipe.schedule.num_lanes)]
    aliases = pipe.internals.chain.aliases
    fault = _written({name: t for name, t in own.items() if name not in aliases}, parts[pipe.lanes[0]])
    faults = [told for told in pipe.internals.gather(fault) if told]
    try:
        if faults:
            raise OutputError(f"{folder}: cannot be written: {faults[0]}")
        if 0 not in pipe.lanes:
            yield None
        else:
            state = {name: tensor for part in parts for name, tensor in load_file(part).items()}
            yield state | {alias: state[name] for alias, name in aliases.items() if name in state}
    finally:
        pipe.internals.gather(None)  # the first process has read them
        parts[pipe.lanes[0]].unlink(missing_ok=True)


def _written(state: Mapping[str, torch.Tensor], path: Path) -> str:
    """Write a part; return the fault, or an empty string."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, path)
    except OSError as error:
        return str(error)
    return ""
