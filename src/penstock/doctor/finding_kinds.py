"""Finding kinds: what the doctor can find, with a description and advice for each kind."""

from __future__ import annotations

from enum import Enum
from typing import Self


class Kind(Enum):
    """The kind of a finding; `words` describe it, and `advice` says what to do instead."""

    _value_: str
    words: str
    advice: str

    def __new__(cls, value: str, words: str = "", advice: str = "") -> Self:  # noqa: D102
        kind = object.__new__(cls)
        kind._value_, kind.words, kind.advice = value, words, advice
        return kind

    ITEM = (
        "item",
        "reads a value",
        "The host waits until the GPU has the value. Keep sums on the GPU (total += loss.detach(), or penstock.Metrics)"
        " and read them only every few steps; use torch.where instead of if.",
    )
    PRINT = (
        "print",
        "prints a tensor",
        "Printing a tensor reads it, so the host waits for the GPU. Print only every few steps.",
    )
    TO_HOST = (
        "copy_to_host",
        "copies to the host",
        "The host waits until all work before the copy is done. Copy less often, or into pinned memory with"
        " non_blocking=True, and read it one step later.",
    )
    SHAPE = (
        "shape_from_values",
        "makes a tensor whose size depends on values",
        "The host needs the size, so it waits for the GPU. Keep the size fixed: use torch.where, masked_fill or a"
        " product with the mask, or pass the size to nonzero_static or repeat_interleave(output_size=).",
    )
    UNPINNED = (
        "unpinned_copy",
        "copies from memory that is not pinned",
        "The GPU cannot read this memory directly: the host makes another copy, and waits. Use"
        " DataLoader(pin_memory=True) and .to(device, non_blocking=True), or penstock.feed; create constants on the GPU"
        " (device=).",
    )
    BLOCKING = (
        "blocking_copy",
        "copies to the GPU and waits",
        "The memory is pinned, so with non_blocking=True the host does not wait.",
    )
    WAIT = (
        "synchronize",
        "waits for the GPU",
        "This is rarely needed: streams keep their order, and copies to the host wait by themselves. To measure time,"
        " use penstock.timing.measure.",
    )
    OTHER = ("other_synchronisation", "synchronises", "Torch reports that this line waits for the GPU.")
    REDUCTION = (
        "strided_reduction",
        "reduces a dimension that is not the innermost in memory",
        "Reducing the innermost dimension is fastest, because neighbours in memory are read together. If you can choose"
        " the layout, put the reduced dimension last.",
    )
    LAUNCHES = (
        "launch_bound",
        "the GPU waits for launches",
        "The host needs longer to launch a kernel than the GPU to run it. CUDA graphs launch many kernels at once: use"
        " penstock.Pipeline(graphs=True) or torch.compile(mode='reduce-overhead'). Larger batches help too.",
    )
    STARVED = (
        "data_loader",
        "waits for data",
        "Give the DataLoader more workers (num_workers, prefetch_factor, persistent_workers=True) or do less work per"
        " sample; penstock.feed copies the next batch during the current step.",
    )
