"""Kinds: what the doctor can find, and what it says about each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["ABOUT", "About", "Kind"]


class Kind(Enum):
    """What was found."""

    ITEM = "item"
    PRINT = "print"
    TO_HOST = "copy_to_host"
    SHAPE = "shape_from_values"
    UNPINNED = "unpinned_copy"
    BLOCKING = "blocking_copy"
    WAIT = "synchronize"
    OTHER = "other_synchronisation"
    REDUCTION = "strided_reduction"
    LAUNCHES = "launch_bound"
    STARVED = "data_loader"


@dataclass(frozen=True)
class About:
    """What is said of a kind: what it does, in a few words, and what to do instead."""

    words: str
    advice: str


ABOUT = {
    Kind.ITEM: About(
        "reads a value",
        "The host waits until the GPU has the value. Keep sums on the GPU (total += loss.detach(), or penstock.Metrics)"
        " and read them every so many steps; decide with torch.where rather than with if.",
    ),
    Kind.PRINT: About(
        "prints a tensor",
        "To print a tensor is to read it: the host waits for the GPU. Print every so many steps.",
    ),
    Kind.TO_HOST: About(
        "copies to the host",
        "The host waits until all work before the copy is done. Copy less often, or into pinned memory with"
        " non_blocking=True, and look at it a step later.",
    ),
    Kind.SHAPE: About(
        "makes a tensor whose size depends on values",
        "The host must know the size, so it waits for the GPU. Keep the size: torch.where, masked_fill, a product with"
        " the mask; nonzero_static and repeat_interleave(output_size=) are told the size.",
    ),
    Kind.UNPINNED: About(
        "copies from memory that is not pinned",
        "The GPU cannot fetch it by itself: the host copies it once more, and waits. Use DataLoader(pin_memory=True)"
        " and .to(device, non_blocking=True), or penstock.feed; make constants on the GPU (device=).",
    ),
    Kind.BLOCKING: About(
        "copies to the GPU and waits",
        "The memory is pinned, so non_blocking=True lets the host go on at once.",
    ),
    Kind.WAIT: About(
        "waits for the GPU",
        "Streams keep their order without it, and copies to the host wait by themselves. To measure time, use"
        " penstock.timing.measure.",
    ),
    Kind.OTHER: About(
        "synchronises",
        "Torch reports that something in this line waits for the GPU.",
    ),
    Kind.REDUCTION: About(
        "reduces a dimension that is not the innermost in memory",
        "Neighbours in memory are read together, so the innermost dimension is the quickest to reduce: where the layout"
        " is yours to choose, put the reduced dimension last.",
    ),
    Kind.LAUNCHES: About(
        "the GPU waits for launches",
        "Kernels are shorter than the host takes to ask for them. CUDA graphs launch many at once:"
        " penstock.Pipeline(graphs=True), or torch.compile(mode='reduce-overhead'). Larger batches help too.",
    ),
    Kind.STARVED: About(
        "waits for data",
        "Give the DataLoader more workers (num_workers, prefetch_factor, persistent_workers=True) or do less per"
        " sample; penstock.feed copies the next batch while this one is computed.",
    ),
}

if set(ABOUT) != set(Kind):
    raise TypeError(f"no words for {set(Kind) - set(ABOUT)}")
