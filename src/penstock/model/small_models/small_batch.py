"""Small batches: inputs for a model of transformers; its signature and its config determine names and shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.small_models.small_config import Config, Setting, configs_of, read

LENGTH, TARGET_LENGTH, LABEL_LENGTH = 16, 12, 4
FIRST_WORD, NUM_WORDS = 20, 80  # a range of the vocabulary without special tokens
GRID = 4  # patches per side of an image, for models that take patches
Batch = dict[str, Any]


@dataclass(frozen=True)
class Maker:
    """A maker of inputs for one model and one batch size."""

    model: Any
    batch_size: int

    @cached_property
    def config(self) -> Config:
        """The model's config."""
        return self.model.config

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of the model's inputs."""
        return tuple(inspect.signature(self.model.forward).parameters)

    @cached_property
    def kind(self) -> str:
        """The name of the model's class."""
        return type(self.model).__name__

    def find(self, *names: str, default: Setting = None, under: Config = None) -> Setting:
        """Return the first attribute of these names in the config or, level by level, in its parts."""
        for config in configs_of(under or self.config):
            for name in names:
                value = read(config, name)
                if value is not None:
                    return value
        return default

    def noise(self, *shape: int) -> Tensor:
        """Return normally distributed noise for each sample."""
        return torch.randn(self.batch_size, *shape)

    def integers(self, limit: int, *shape: int) -> Tensor:
        """Return random integers below a limit for each sample."""
        return torch.randint(limit, (self.batch_size, *shape))

    def ones(self, *shape: int) -> Tensor:
        """Return integer ones for each sample: a mask that hides nothing."""
        return torch.ones(self.batch_size, *shape, dtype=torch.long)

    def rows(self, *values: float) -> Tensor:
        """Return the same row for each sample."""
        return torch.tensor([list(values)] * self.batch_size)

    def words(self, length: int) -> Tensor:
        """Return random tokens, but no special tokens."""
        size = int(self.find("vocab_size", default=100))
        first = min(FIRST_WORD, size // 2)
        return first + self.integers(min(NUM_WORDS, size - first), length)

    def mask(self, length: int) -> Tensor:
        """Return a mask that hides the ends of some rows."""
        lengths = length - torch.arange(self.batch_size) % 3 * 2
        return (torch.arange(length) < lengths[:, None]).long()

    def classes(self, *shape: int) -> Tensor:
        """Return random class labels."""
        return self.integers(max(1, self.config.num_labels), *shape)

    @cached_property
    def vision(self) -> Config:
        """The part of the config that defines the size of images."""
        for config in configs_of(self.config):
            if any(name in vars(config) for name in ("image_size", "patch_size", "num_channels")):
                return config
        return self.config

    @cached_property
    def picture(self) -> tuple[int, int, int]:
        """The channels, height and width of an image."""
        channels = self.find("num_channels", "in_channels", "in_chans", under=self.vision, default=3)
        size = self.find("image_size", "img_size", under=self.vision, default=64)
        high, wide = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        return (channels if isinstance(channels, int) else 3, high, wide)

    def pictures(self, *more: int) -> Tensor:
        """Return random images; `more` dimensions give several images per sample."""
        return self.noise(*more, *self.picture)

    def film(self) -> Tensor:
        """Return a few video frames for each sample."""
        return self.pictures(self.find("num_frames", "frames_per_clip", default=4))

    @cached_property
    def num_bins(self) -> int:
        """The number of frequency bands of a spectrogram."""
        return int(self.find("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", default=80))

    def spectrum(self) -> Tensor:
        """Return spectrograms: bands first for encoders like Whisper's, time first for all others."""
        positions = self.find("max_source_positions")
        if positions and not self.find("input_feat_per_channel"):
            return self.noise(self.num_bins, 2 * positions)
        return self.noise(64, self.num_bins)

    def wave(self, *channels: int) -> Tensor:
        """Return a waveform for each sample."""
        return self.noise(*channels, 6400)

    def patches(self) -> Tensor:
        """Return the patches of all images in one list, for vision towers that take a grid of patches."""
        side = self.find("patch_size", under=self.vision, default=16)
        depth = self.find("temporal_patch_size", "patch_temporal", under=self.vision, default=1)
        return self.noise(GRID * GRID, self.picture[0] * depth * side * side).flatten(0, 1)


def batch_for(model: nn.Module, *, batch_size: int, exceptions: Mapping[str, Mapping[str, Any]]) -> Batch:
    """Return a batch of keyword arguments, with labels if the model can compute a loss."""
    maker = Maker(model, batch_size)
    given = exceptions.get(maker.config.model_type, {}).get("batch", {})
    batch: Batch = {}
    for name in dict.fromkeys([*(name for name in INPUTS if name in maker.inputs), *given]):
        make = given.get(name, INPUTS.get(name))
        value = make(maker) if callable(make) else make
        batch |= {} if value is None else {name: value}
    if "input_ids" in batch and "input_ids" not in given:
        _place_pictures(maker, batch)
    if "labels" in maker.inputs and "labels" not in given:
        make_labels = next((make for part, make in LABELS if part in maker.kind), lambda maker, batch: None)
        labels = make_labels(maker, batch)
        batch |= {} if labels is None else {"labels": labels}
    if "return_loss" in maker.inputs and "input_ids" in batch and len(batch) > 2 and "return_loss" not in given:
        batch["return_loss"] = True
    return batch


def _place_pictures(maker: Maker, batch: Batch) -> None:
    """Insert tokens for images or sound between the words, one per feature vector of the model."""
    for sense, tokens in (("image", ("image_token_id", "image_token_index")), ("audio", ("audio_token_id",))):
        token = maker.find(*tokens)
        features = getattr(maker.model, f"get_{sense}_features", None) or getattr(
            getattr(maker.model, "model", None), f"get_{sense}_features", None
        )
        source = "pixel_values" if sense == "image" else "input_features"
        if token is None or features is None or source not in batch:
            continue
        takes = inspect.signature(features).parameters
        given = {name: value for name, value in batch.items() if name in takes and name != "input_ids"}
        with torch.no_grad():
            found = features(**{source: batch[source], **given})
        count = _num_rows(found) // maker.batch_size
        placed = torch.full((maker.batch_size, count), token)
        batch["input_ids"] = torch.cat([maker.words(4), placed, batch["input_ids"]], 1)
        length = batch["input_ids"].shape[1]
        if "attention_mask" in batch:
            batch["attention_mask"] = maker.mask(length)
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in maker.inputs:
                batch[name] = (batch["input_ids"] == token).long()


def _num_rows(found: Setting) -> int:
    """Return the number of tokens that the features belong to."""
    if isinstance(found, Tensor):
        return found.numel() // found.shape[-1]
    if isinstance(found, list | tuple) and found and all(isinstance(x, Tensor) for x in found):
        return sum(x.numel() // x.shape[-1] for x in found)
    pooled = getattr(found, "pooler_output", None)
    return _num_rows(found.last_hidden_state if pooled is None else pooled)


def _mask(maker: Maker) -> Tensor | None:
    return maker.mask(LENGTH) if "input_ids" in maker.inputs else None


def _pixel_values(maker: Maker) -> Tensor:
    if "image_grid_thw" in maker.inputs or "grid_thw" in maker.inputs:
        return maker.patches()
    return maker.film() if "Video" in maker.kind and "pixel_values_videos" not in maker.inputs else maker.pictures()


def _hidden_states(maker: Maker) -> Tensor | None:
    return maker.patches() if "grid_thw" in maker.inputs else None


def _grid(maker: Maker) -> Tensor:
    return maker.rows(1, GRID, GRID)


# the inputs of all models that take them; None leaves an input out
INPUTS: dict[str, Callable[[Maker], Any]] = {
    "input_ids": lambda maker: maker.words(LENGTH),
    "attention_mask": _mask,
    "bbox": lambda maker: maker.rows(1, 2, 30, 40)[:, None].repeat(1, LENGTH, 1),
    "pixel_values": _pixel_values,
    "image_grid_thw": _grid,
    "grid_thw": _grid,
    "hidden_states": _hidden_states,
    "pixel_values_videos": lambda maker: maker.film() if "pixel_values" not in maker.inputs else None,
    "input_features": lambda maker: maker.spectrum(),
    "input_features_mask": lambda maker: maker.ones(64),
    "input_values": lambda maker: maker.wave(),
}


def _copied(_: Maker, batch: Batch) -> Tensor:
    words: Tensor = batch["input_ids"]
    return words.masked_fill(batch["attention_mask"] == 0, -100) if "attention_mask" in batch else words.clone()


def _answer(maker: Maker, batch: Batch) -> Tensor:
    if "decoder_input_ids" in maker.inputs or "input_ids" not in batch:
        return maker.words(TARGET_LENGTH)
    return _copied(maker, batch)


# by a part of the name of the class; the first match applies
LABELS: tuple[tuple[str, Callable[[Maker, Batch], Any]], ...] = (
    ("ForSequenceClassification", lambda maker, batch: maker.classes()),
    ("ForImageClassification", lambda maker, batch: maker.classes()),
    ("ForVideoClassification", lambda maker, batch: maker.classes()),
    ("ForAudioClassification", lambda maker, batch: maker.classes()),
    ("ForTokenClassification", lambda maker, batch: maker.classes(LENGTH)),
    ("ForSemanticSegmentation", lambda maker, batch: maker.classes(*maker.picture[1:])),
    ("ForCTC", lambda maker, batch: maker.words(LABEL_LENGTH)),
    ("ForMaskedLM", _copied),
    ("ForCausalLM", _copied),
    ("LMHead", _copied),
    ("ForConditionalGeneration", _answer),
    ("EncoderDecoderModel", _answer),
    ("MTModel", _answer),
)
