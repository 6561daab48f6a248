"""Packed images: cut batches in which the patches of all images stand one behind the other, with a grid of their sizes.

That is how Qwen2-VL and the models of transformers that follow it take images and videos: `pixel_values` holds the
patches of all images, and a row of `image_grid_thw` the frames, height and width of each, in patches. Such a batch is
no plain stack of samples, but its layout says how to cut it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.errors import UsageError
from penstock.runtime.micro_batches import cut_thing, sizes_of

__all__ = ["PackedSplit", "found_split"]

_GRID = "grid_thw"
_FIRST = ("input_ids", "inputs_embeds", "attention_mask", "labels")  # inputs that have a row for each sample
_OF_VIDEOS = ("second_per_grid_ts",)  # inputs that have a row for each video
_TOKENS = ("{kind}_token_id", "{kind}_token_index")  # in a config: the token that stands for a patch


@dataclass(frozen=True)
class Pack:
    """Images of one kind in a batch.

    Attributes:
        grid: the input with their sizes.
        patches: the input with their patches.
        token: that stands for them in `input_ids`; None where that is not known.
    """

    grid: str
    patches: str
    token: int | None


@dataclass(frozen=True)
class PackedSplit:
    """Cuts packed images, called as any `split=`."""

    packs: tuple[Pack, ...]

    @property
    def words(self) -> str:
        """Say how batches are cut."""
        return "; ".join(f"{pack.patches} by the images in {pack.grid}" for pack in self.packs)

    def __call__(self, batch: Mapping[str, Any], target: object, count: int) -> list[tuple[Any, Any]]:
        """Return at most so many micro-batches.

        Raises:
            UsageError: when nothing tells which images a sample has.
        """
        num_samples = self.num_samples(batch)
        sizes = sizes_of(num_samples, count)
        bounds = [0, *itertools.accumulate(sizes)]
        pieces: list[dict[str, Any]] = [{} for _ in sizes]
        for pack in self.packs:
            if batch.get(pack.grid) is None:  # texts alone
                continue
            images = _images_of_samples(batch, pack, num_samples)
            if images is None:
                raise UsageError(
                    f"{pack.grid}: {len(batch[pack.grid])} images for {num_samples} samples, and nothing tells which "
                    "are whose; split= cuts such batches"
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
            is_turned = isinstance(thing, torch.Tensor) and name == "position_ids" and thing.dim() == 3
            for piece, part in zip(pieces, cut_thing(thing, num_samples, sizes, int(is_turned)), strict=True):
                piece[name] = part
        targets = [None] * len(sizes) if target is None else cut_thing(target, num_samples, sizes, 0)
        ordered = [{name: piece[name] for name in batch if name in piece} for piece in pieces]
        return list(zip(ordered, targets, strict=True))

    def num_samples(self, batch: Mapping[str, Any]) -> int:
        """Return the samples of a batch; where there are images alone, each is one."""
        for name in _FIRST:
            if isinstance(batch.get(name), torch.Tensor):
                return int(batch[name].shape[0])
        grids = [batch[pack.grid] for pack in self.packs if batch.get(pack.grid) is not None]
        if not grids:
            raise UsageError(f"the batch has neither {self.packs[0].grid} nor {_FIRST[0]}: nothing tells its samples")
        return len(grids[0])


def found_split(example: object, model: nn.Module) -> PackedSplit | None:
    """Return how an example with packed images is cut; None where it has none, or where it is not known."""
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
            return None  # a row for each image, or for each sample?
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
        fits.sort(key=lambda other: ("video" in other) != (kind == "video"))  # pixel_values_videos goes with videos
        if fits:
            taken.add(fits[0])
            ids = (getattr(config, word.format(kind=kind), None) for word in _TOKENS)
            yield Pack(name, fits[0], next((token for token in ids if isinstance(token, int)), None))


def _along_with(batch: Mapping[str, Any], pack: Pack, num_samples: int) -> list[str]:
    """Return other inputs with a row for each image: they are cut as the grid is."""
    num_images = len(batch[pack.grid])
    there = [name for name in _OF_VIDEOS if "video" in pack.grid and batch.get(name) is not None]
    known = [name for name in there if len(batch[name]) == num_images]
    if num_images == num_samples:
        return known
    rows = [name for name in _plain_rows(batch, num_images) if name not in known]
    return known + [name for name in rows if name not in (pack.grid, pack.patches)]


def _plain_rows(batch: Mapping[str, Any], count: int) -> list[str]:
    """Return the inputs that are one row of so many values, of which nothing else says what they belong to."""
    return [
        name
        for name, thing in batch.items()
        if name not in (*_FIRST, *_OF_VIDEOS)
        if (isinstance(thing, torch.Tensor) and thing.dim() == 1 and len(thing) == count)
        or (isinstance(thing, list) and len(thing) == count)
    ]


def _images_of_samples(batch: Mapping[str, Any], pack: Pack, num_samples: int) -> Sequence[int] | None:
    """Return how many images each sample has; None where that cannot be told."""
    patches = batch[pack.grid].prod(-1).tolist()
    ids = batch.get("input_ids")
    if isinstance(ids, torch.Tensor) and pack.token is not None:
        tokens = (ids == pack.token).flatten(1).sum(1).tolist()
        if sum(tokens) and sum(patches) % sum(tokens) == 0:  # so many patches are merged to one token
            return _dealt([count // (sum(patches) // sum(tokens)) for count in patches], tokens)
    return [1] * num_samples if len(patches) == num_samples else None


def _dealt(of_images: Sequence[int], of_samples: Sequence[int]) -> list[int] | None:
    """Return how many images each sample has, from the tokens of both; None where they do not come out even.

    >>> _dealt([4, 2, 2, 4], [4, 0, 8])
    [1, 0, 3]
    >>> _dealt([4, 4], [6, 2])
    """
    counts, images = [], list(of_images)
    for tokens in of_samples:
        count = 0
        while tokens > 0 and images:
            tokens -= images.pop(0)  # noqa: PLW2901 - what is left of them
            count += 1
        if tokens:
            return None
        counts.append(count)
    return None if images else counts
