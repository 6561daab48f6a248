"""Custom split: cut batches that do not stack samples, with a function of the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import UsageError
from penstock.model.structure import flatten

# split(batch, target, count) returns at most `count` pairs (batch, target); the target is None if there is none
Split = Callable[[Any, Any, int], Sequence[tuple[Any, Any]]]


def samples_of(sizes: Sequence[int], targets: Sequence[tuple[Any, ...]]) -> list[int]:
    """Return the number of samples that the loss of each micro-batch sees: the rows of its target.

    Without a target, return the sizes; they count the rows of the first argument, which may be tokens or patches.

    >>> import torch
    >>> samples_of([5, 6], [(torch.zeros(2),), (torch.zeros(3),)]), samples_of([5, 6], [(), ()])
    ([2, 3], [5, 6])
    """
    rows = [next((t.shape[0] for t in flatten(target, apart=True)[0] if t.dim()), 0) for target in targets]
    return list(map(int, rows)) if all(rows) else list(sizes)


def split_batch(
    split: Split, batch: object, target: tuple[Any, ...] | None, count: int
) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return the micro-batches that the user's function makes, each with its target.

    >>> split_batch(lambda batch, target, count: [(batch[:2], None), (batch[2:], None)], "abc", (), 2)
    [('ab', ()), ('c', ())]

    Raises:
        UsageError: if it returns anything else.
    """
    if not callable(split):
        raise UsageError(f"split: pass a function split(batch, target, count); given: {split!r:.60}")
    made: Any = split(batch, target[0] if target else None, count)
    if not isinstance(made, (list, tuple)) or not made:
        raise UsageError(f"split: must return a list of (batch, target) pairs; returned: {type(made).__name__}")
    wrong = [pair for pair in made if not isinstance(pair, tuple) or len(pair) != 2]
    if wrong:
        raise UsageError(f"split: must return (batch, target) pairs; one of them is: {wrong[0]!r:.60}")
    if len(made) > count:
        raise UsageError(f"split: returned {len(made)} micro-batches, but at most {count} are allowed")
    return [(piece, (own,) if target else ()) for piece, own in made]
