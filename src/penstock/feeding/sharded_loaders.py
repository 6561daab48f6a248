"""Sharded loaders: detect loaders that give each process a different part of the data, as for data parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline

# attributes that lead to samplers and wrapped objects
_INSIDE = ("sampler", "batch_sampler", "base_sampler", "base_dataloader", "dataset", "state")
_DEEPEST = 4

# number of processes that share the data: samplers of torch, Lightning and transformers; shards of accelerate
_COUNTS = ("num_replicas", "num_processes")


def share_of(loader: object) -> str:
    """Describe the part of a loader that shards the data; return "" if the loader does not shard.

    >>> from torch.utils.data import DataLoader, DistributedSampler
    >>> data = list(range(8))
    >>> share_of(DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0)))
    'sampler: a DistributedSampler, num_replicas=2'
    >>> share_of(DataLoader(data, shuffle=True))
    ''
    """
    for name, part in _parts(loader, "loader", 0):
        for key in _COUNTS:
            if _is_many(count := _get(part, key)):
                return f"{name}: a {type(part).__name__}, {key}={count}"
        node = _get(part, "_distributed")  # of datasets.distributed.split_dataset_by_node
        if _is_many(count := _get(node, "world_size")):
            return f"{name}: a {type(part).__name__} that is split by node, world_size={count}"
    return ""


def _parts(thing: object, name: str, depth: int) -> Iterator[tuple[str, object]]:
    yield name, thing
    for inside in _INSIDE if depth < _DEEPEST else ():
        part = _get(thing, inside)
        if part is not None and part is not thing:
            yield from _parts(part, inside if depth == 0 else f"{name}.{inside}", depth + 1)


def _get(thing: object, name: str) -> Any:  # noqa: ANN401 - any attribute
    try:
        return getattr(thing, name, None)
    except Exception:  # a user's property may raise anything
        return None


def _is_many(count: object) -> bool:
    return isinstance(count, int) and count > 1


def check_not_sharded(loader: object, pipe: Pipeline, what: str) -> None:
    """Raise a UsageError if a loader shards the data and the lanes of the pipeline are processes."""
    if len(pipe.lanes) < pipe.schedule.num_lanes and (shards := share_of(loader)):
        raise UsageError(
            f"{what}: it gives each process a different part of the data ({shards}), but the processes are lanes of "
            "one model and all need the same batches. Do not shard: use DataLoader(..., shuffle=True) with the same "
            "seed in all processes"
        )
