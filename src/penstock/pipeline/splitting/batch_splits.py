"""Batch splits: cut batches that do not stack samples, with a function of the user or by the sizes of packed images.

In packed images, the patches of all images follow one another. Qwen2-VL and the models of transformers that follow it
take images and videos in this form: `pixel_values` holds the patches of all images. Each row of `image_grid_thw` holds
the frames, height and width of one image, in patches. Such a batch does not stack samples, but its layout shows where
to cut it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.errors import UsageError
from penstock.model.structure import flatten
from penstock.runtime.micro_batches import cut_structure, sizes_of

_GRID = "grid_thw"
_FIRST = ("input_ids", "inputs_embeds", "attention_mask", "labels")  # inputs with one row per sample
_OF_VIDEOS = ("second_per_grid_ts",)  # inputs with one row per video
_TOKENS = ("{kind}_token_id", "{kind}_token_index")  # in a config: the token of an image or a video

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


@dataclass(frozen=True)
class Pack:
    """Images of one kind in a batch."""

    grid: str  # the name of the input with their sizes
    patches: str  # the name of the input with their patches
    token: int | None  # the token in `input_ids` that represents them; None if it is unknown


@dataclass(frozen=True)
class PackedSplit:
    """A split of packed images; it is called like any `split=`."""

    packs: tuple[Pack, ...]

    @property
    def words(self) -> str:
        """A description of the cuts."""
        return "; ".join(f"{pack.patches} by the images in {pack.grid}" for pack in self.packs)

    def __call__(self, batch: Mapping[str, Any], target: object, count: int) -> list[tuple[Any, Any]]:
        """Return at most `count` micro-batches.

        Raises:
            UsageError: if it is unknown which images belong to a sample.
        """
        num_samples = self.num_samples(batch)
        sizes = sizes_of(num_samples, count)
        bounds = [0, *itertools.accumulate(sizes)]
        pieces: list[dict[str, Any]] = [{} for _ in sizes]
        for pack in self.packs:
            if batch.get(pack.grid) is None:  # a batch of only texts
                continue
            images = _images_of_samples(batch, pack, num_samples)
            if images is None:
                raise UsageError(
                    f"{pack.grid}: {len(batch[pack.grid])} images for {num_samples} samples, but it is unknown "
                    "which image belongs to which sample; pass split= to cut such batches"
                )
            of_image = [0, *itertools.accumulate(batch[pack.grid].prod(-1).tolist())]
            first_image = [0, *itertools.accumulate(images)]
            cuts = [first_image[bound] for bound in bounds]
            along = [name for name in _along_with(batch, pack, num_samples) if name not in pieces[0]]
            for piece, (start, stop) in zip(pieces, itertools.pairwise(cuts), strict=True):
                piece[pack.patches] = batch[pack.patches][of_image[start] : of_image[stop]]
                piece |= {name: batch[name][start:stop] for name in (pack.grid, *along)}
        for name, thing in batch.items():
            if name in pieces[0]:
                continue
            has_batch_in_dim_1 = isinstance(thing, torch.Tensor) and name == "position_ids" and thing.dim() == 3
            for piece, part in zip(
                pieces, cut_structure(thing, num_samples, sizes, int(has_batch_in_dim_1)), strict=True
            ):
                piece[name] = part
        targets = [None] * len(sizes) if target is None else cut_structure(target, num_samples, sizes, 0)
        ordered = [{name: piece[name] for name in batch if name in piece} for piece in pieces]
        return list(zip(ordered, targets, strict=True))

    def num_samples(self, batch: Mapping[str, Any]) -> int:
        """Return the number of samples in a batch; if it has only images, each image is a sample."""
        for name in _FIRST:
            if isinstance(batch.get(name), torch.Tensor):
                return int(batch[name].shape[0])
        grids = [batch[pack.grid] for pack in self.packs if batch.get(pack.grid) is not None]
        if not grids:
            raise UsageError(
                f"the batch has neither {self.packs[0].grid} nor {_FIRST[0]}, so its number of samples is unknown"
            )
        return len(grids[0])


def found_split(example: object, model: nn.Module) -> PackedSplit | None:
    """Return the split for an example with packed images; None if it has none, or if the split is unknown."""
    if not isinstance(example, Mapping) or not all(isinstance(name, str) for name in example):
        return None
    packs = tuple(_packs(example, model))
    split = PackedSplit(packs)
    grids = [name for name in example if name.endswith(_GRID) and isinstance(example[name], torch.Tensor)]
    if not packs or len(packs) < len(grids):
        return None
    num_samples = split.num_samples(example)
    for pack in packs:
        images = _images_of_samples(example, pack, num_samples)
        if images is None:
            return None
        is_even = all(count == 1 for count in images)
        if not is_even and len(example[pack.grid]) == num_samples and _plain_rows(example, num_samples):
            return None  # unclear: one row per image, or one per sample
    return split


def _packs(example: Mapping[str, Any], model: nn.Module) -> Iterator[Pack]:
    config = getattr(model, "config", None)
    taken: set[str] = set()
    for name, grid in example.items():
        is_grid = name.endswith(_GRID) and isinstance(grid, torch.Tensor) and grid.dim() == 2 and grid.shape[1] == 3
        if not is_grid or grid.is_floating_point():
            continue
        kind = name.removesuffix(_GRID).rstrip("_") or "image"
        total = int(grid.prod(-1).sum())
        fits = [
            other
            for other, tensor in example.items()
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dim() and len(tensor) == total
        ]
        fits = [other for other in fits if other not in taken]
        fits.sort(key=lambda other: ("video" in other) != (kind == "video"))  # pixel_values_videos belongs to videos
        if fits:
            taken.add(fits[0])
            ids = (getattr(config, word.format(kind=kind), None) for word in _TOKENS)
            yield Pack(name, fits[0], next((token for token in ids if isinstance(token, int)), None))


def _along_with(batch: Mapping[str, Any], pack: Pack, num_samples: int) -> list[str]:
    """Return the other inputs with one row per image, which are cut like the grid."""
    num_images = len(batch[pack.grid])
    there = [name for name in _OF_VIDEOS if "video" in pack.grid and batch.get(name) is not None]
    known = [name for name in there if len(batch[name]) == num_images]
    if num_images == num_samples:
        return known
    rows = [name for name in _plain_rows(batch, num_images) if name not in known]
    return known + [name for name in rows if name not in (pack.grid, pack.patches)]


def _plain_rows(batch: Mapping[str, Any], count: int) -> list[str]:
    """Return the inputs with `count` values in one dimension, except those whose rows are known."""
    return [
        name
        for name, thing in batch.items()
        if name not in (*_FIRST, *_OF_VIDEOS)
        if (isinstance(thing, torch.Tensor) and thing.dim() == 1 and len(thing) == count)
        or (isinstance(thing, list) and len(thing) == count)
    ]


def _images_of_samples(batch: Mapping[str, Any], pack: Pack, num_samples: int) -> Sequence[int] | None:
    """Return the number of images of each sample; None if it is unknown."""
    patches = batch[pack.grid].prod(-1).tolist()
    ids = batch.get("input_ids")
    if isinstance(ids, torch.Tensor) and pack.token is not None:
        tokens = (ids == pack.token).flatten(1).sum(1).tolist()
        if sum(tokens) and sum(patches) % sum(tokens) == 0:  # the model merges this number of patches into one token
            return _images_per_sample([count // (sum(patches) // sum(tokens)) for count in patches], tokens)
    return [1] * num_samples if len(patches) == num_samples else None


def _images_per_sample(of_images: Sequence[int], of_samples: Sequence[int]) -> list[int] | None:
    """Return the number of images of each sample, from the numbers of tokens; None if these do not match.

    >>> _images_per_sample([4, 2, 2, 4], [4, 0, 8])
    [1, 0, 3]
    >>> _images_per_sample([4, 4], [6, 2])
    """
    counts, images = [], list(of_images)
    for tokens in of_samples:
        count = 0
        while tokens > 0 and images:
            tokens -= images.pop(0)  # noqa: PLW2901 - the tokens that remain
            count += 1
        if tokens:
            return None
        counts.append(count)
    return None if images else counts
