"""Whole state: the state dict of the whole model in the first process, also if each process holds a part of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from penstock.errors import OutputError
from penstock.pipeline.pipeline import Pipeline


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
