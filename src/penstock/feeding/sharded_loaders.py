"""Sharding: find out whether a loader gives each process a share of the data, as for data parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline

__all__ = ["check_not_sharded", "share_of"]

# where loaders keep what draws their order, and what those wrap
_INSIDE = ("sampler", "batch_sampler", "base_sampler", "base_dataloader", "dataset", "state")
_DEEPEST = 4

# how many processes share the data: samplers of torch, Lightning and transformers; shards of accelerate
_COUNTS = ("num_replicas", "num_processes")


def share_of(loader: object) -> str:
    """Return what in a loader gives this process a share of the data, in words; nothing if it gives all of it.

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


def _get(thing: object, name: str) -> Any:  # noqa: ANN401 - whatever is there
    try:
        return getattr(thing, name, None)
    except Exception:  # a property of the user's may raise anything
        return None


def _is_many(count: object) -> bool:
    return isinstance(count, int) and count > 1


def check_not_sharded(loader: object, pipe: Pipeline, what: str) -> None:
    """Raise if a loader gives each process a share of the data, and the lanes of a pipeline are processes.

    Raises:
        UsageError: saying which part of it does so, and what to take instead.
    """
    if len(pipe.lanes) < pipe.schedule.num_lanes and (told := share_of(loader)):
        raise UsageError(
            f"{what}: it gives each process a share of the data ({told}), but the processes are lanes of one model, "
            "and all must be given the same batches. Leave the sharding out: DataLoader(..., shuffle=True), with the "
            "same seed in all processes"
        )
