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
