"""Small configs of transformers: the default config of a model family, reduced by rules on attribute names."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

WIDTH, HEADS, LAYERS, EXPERTS = 64, 4, 4, 4
HEAD_WIDTH = WIDTH // HEADS
INNER = 2 * WIDTH
VOCABULARY = 192
CODES = 64  # entries of a code book; a power of two
IMAGE, PATCH = 64, 16
POSITIONS = 256

Config = Any  # any config of transformers
Setting = Any  # the value of a config's attribute
Rule = Callable[[Setting], Setting]


def at_most(limit: int) -> Rule:
    """Return a rule that limits numbers; zero and negative numbers have other meanings, so they stay."""
    return lambda value: _mapped(value, lambda number: min(number, limit) if number > 0 else number)


def exactly(wanted: int) -> Rule:
    """Return a rule that sets numbers, except zero and negative numbers."""
    return lambda value: _mapped(value, lambda number: wanted if number > 0 else number)


def keep(value: Setting) -> Setting:
    """Return the value unchanged."""
    return value


def heads(value: Setting) -> Setting:
    """Return a number of heads; a list, for stages of growing width, is divided by its greatest common divisor."""
    return exactly(HEADS)(value) if isinstance(value, int) else _divided(value, math.gcd(*_numbers(value)) or 1)


def within_layers(value: Setting) -> Setting:
    """Return indices of existing layers; if one is too large, take as many of the last layers instead."""
    if not isinstance(value, list | tuple) or max(_numbers(value), default=0) < LAYERS:
        return value
    return type(value)(range(LAYERS - min(len(value), LAYERS), LAYERS))


def rope_sections(value: Setting) -> Setting:
    """Return the division of a head's rotary half between time, height and width."""
    if not isinstance(value, list | tuple):
        return value
    return type(value)([2, 3, 3] if len(value) == 3 else [HEAD_WIDTH // 2 // len(value)] * len(value))


def _numbers(value: Setting) -> list[int]:
    if isinstance(value, list | tuple):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


def _mapped(value: Setting, change: Callable[[int], int]) -> Setting:
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change) for item in value)
    return change(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _divided(value: Setting, divisor: int) -> Setting:
    return _mapped(value, lambda number: number // divisor)


WIDTHS = (
    r".*(hidden_sizes?|d_model|n_embd|dims?|width|hidden_dims?|hidden|channels|num_filters|_units|classifier_proj_size"
    r"|embed_dims?|embedding_size|projection_size|proj_size|emb_size|output_size|channel_list|embed_dim_per_stage).*"
)
# the first row whose pattern matches the whole name applies; all other attributes stay unchanged
RULES: tuple[tuple[str, Rule], ...] = (
    (
        r".*ignore_(index|value)|seed|.*dropout.*|num_feat_extract_layers|vision_feature_layers?|.*mel.*|acoustic.*",
        keep,
    ),
    (
        r"input_dim|feature_projection_input_dim|num_channels.*|.*num_channels|in_chans|audio_channels|n_channels|query_dim|feature_size|state_dim",
        keep,
    ),
    (r"vocab_offset", at_most(4)),
    (r"num_(.*_)?labels|num_filters", at_most(8)),
    (r"codebook_size|num_embeddings|num_embeds|.*codebook_vocab_size", at_most(CODES)),
    (r".*vocab_size.*|n_words|.*_vocab|.*num_clusters", at_most(VOCABULARY)),
    (r"max_source_positions", at_most(32)),
    (r"(.*_)?max_(.*_)?positions?.*|n_positions|n_ctx|max_seq_len.*|.*max_length|.*_pos_emb", at_most(POSITIONS)),
    (r"num_position_embeddings|seq_len", at_most(POSITIONS)),
    (r"mrope_section", rope_sections),
    # mixtures of experts
    (r"(n|num|moe_num)_shared_experts|first_k_dense_replace|num_dense_layers|.*_layer_start_index", at_most(1)),
    (r".*experts", at_most(EXPERTS)),
    (r".*(experts_per_tok(en)?|top_?k(_experts)?|moe_k)|topk_group|n_group|num_expert_groups?", at_most(2)),
    # layers
    (r".*(period|interval|every_n_layers|pattern|_freq|frequency|sparse_step)", at_most(2)),
    (r".*layer_offset|num_kv_shared_layers", at_most(1)),
    (r"(num_)?(hidden_|attention_)?layers|n_layers?|num_(encoder|decoder)(_hidden)?_layers", exactly(LAYERS)),
    (r"(encoder|decoder)_(num_)?(hidden_)?layers", exactly(LAYERS)),
    (r"depths|.*num_block_repeats|.*blocks_per_stage|stage_num_blocks|block_repeats", at_most(2)),
    (r".*_layers|.*num_layers|(.*_)?depth|num_.*_?blocks|n_blocks|.*hidden_layers", at_most(LAYERS)),
    (r".*(indices|indexes|hook_ids|_idxs|layer_ids)", within_layers),
    # heads; `KEY_HEADS` matches those of keys and values
    (r".*mamba.*heads|mamba_num_heads", exactly(INNER // HEAD_WIDTH)),
    (r"(.*_)?(num_.*heads|n_heads?|heads|nhead|attention_heads|num_attention_heads_per_stage)", heads),
    (r"(.*_)?qk_rope_head_dim|rotary_dim|.*rope_dim", at_most(HEAD_WIDTH // 2)),
    (r".*head_(dim|size).*|d_head|d_kv|kv_channels|.*dim_head|.*headdim|.*size_per_head|.*d_head", at_most(HEAD_WIDTH)),
    (r".*rank|.*(state_size|d_state)|ssm_.*|chunk_size|mamba_chunk_size", at_most(16)),
    (r".*n_?groups|o_groups", at_most(2)),
    (r"(sliding|attention|local)_?.*window.*|.*sliding_window|local_attention|.*attn_chunk_length", at_most(8)),
    # images and sound
    (r"(.*_)?(image|img|input|crop)_size|resolution", at_most(IMAGE)),
    (r"patch_size", lambda value: _mapped(value, lambda number: PATCH if number >= 12 else number)),
    (r"window_size", lambda value: _mapped(value, lambda number: IMAGE if number >= IMAGE else min(number, 2))),
    (r"mm_tokens_per_image", at_most(4)),
    (r"mask_(time|feature)_length", at_most(2)),
    (r"num_quer(ies|y_tokens)|.*n(um)?_latents.*|num_detection_tokens|.*num_proposals|latent_query_num", at_most(12)),
    (r"num_frames|frames_per_clip|num_conv_pos_embedding_groups", at_most(4)),
    (r"num_conv_pos_embeddings", at_most(16)),
    # widths; all become equal, except those that a config has as a list
    (
        r".*intermediate.*(size|dim)|.*ffn_.*(dim|size)|.*ffn_dim|d_ff|dff|d_inner|.*inner_dim|n_inner|dim_ff",
        at_most(INNER),
    ),
    (r".*dim_feedforward|.*feed_?forward.*(dim|size)|.*mlp_(dim|hidden_size|hidden_dim)", at_most(INNER)),
    (WIDTHS, at_most(WIDTH)),
)
KEY_HEADS = re.compile(r".*(num_query_groups|(key_value|kv)_.*heads).*")
TOKEN = re.compile(
    r"(?!num_|max_|n_|mm_)((.*_)?token(_id|_index|_idx)?s?|.*token_(ids?|index).*|(pad|bos|eos|sep|mask|unk|cls)(_index|_id))"
)


@dataclass
class Shrink:
    """One reduction of a config; a special token gets the same new number in all places, so it keeps its meaning."""

    exceptions: Mapping[str, Mapping[str, Any]]
    moved: dict[int, int] = field(default_factory=dict)

    def config(self, config: Config, *, given: Mapping[str, Any]) -> Setting:
        """Return a small config of the same kind; `given` sets attributes, also of parts, as `part.attribute`."""
        given = {**self.exceptions.get(config.model_type, {}).get("config", {}), **given}
        changed: dict[str, Any] = {}
        for entry in dataclasses.fields(config):
            if entry.name in _inherited():
                continue
            value = read(config, entry.name)
            prefix = f"{entry.name}."
            inner = {name.removeprefix(prefix): x for name, x in given.items() if name.startswith(prefix)}
            small = self._value(config, entry, value, inner)
            if small is not value or (isinstance(value, bool | str) and value != entry.default):
                changed[entry.name] = small
        small = type(config)(**{**changed, **{name: x for name, x in given.items() if "." not in name}})
        _fill(small)
        return small

    def _value(self, config: Config, entry: Setting, value: Setting, given: Mapping[str, Any]) -> Setting:
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            return self.config(value, given=given)
        if isinstance(value, Mapping) and "mrope_section" in value:
            return {**value, "mrope_section": rope_sections(value["mrope_section"])}
        if isinstance(value, bool | str | float) or not _numbers(value):
            return False if entry.name == "use_cache" and value is True else value
        if entry.default is None and not (isinstance(value, list | tuple) and re.fullmatch(WIDTHS, entry.name)):
            return value  # transformers derives it from the others
        return self._number(config, entry.name, value)

    def _number(self, config: Config, name: str, value: Setting) -> Setting:
        if TOKEN.fullmatch(name):
            return _mapped(value, self._token)
        if KEY_HEADS.fullmatch(name):
            return HEADS if value in (_heads_of(config), None) else min(value, 2)
        if name == "out_indices" and any(
            isinstance(vars(config).get(x), list | tuple) for x in ("depths", "hidden_sizes")
        ):
            return value  # indices of stages, not of layers
        for pattern, rule in RULES:
            if re.fullmatch(pattern, name):
                return _in_proportion(config, name, value) if pattern is WIDTHS else rule(value)
        return value

    def _token(self, number: int) -> int:
        if number < 16:
            return number
        return self.moved.setdefault(number, VOCABULARY - 1 - len(self.moved))


def _heads_of(config: Config) -> Setting:
    return next((n for name in ("num_attention_heads", "num_heads", "n_head") if (n := read(config, name))), None)


def _in_proportion(config: Config, name: str, value: Setting) -> Setting:
    """Return a small width.

    All widths become equal. Lists of growing widths are scaled so that their greatest common divisor becomes 8.
    """
    if name == "embed_dim" and isinstance(value, int) and isinstance(vars(config).get("depths"), list | tuple):
        return at_most(16)(value)  # doubles with each stage
    lists = [x for other, x in vars(config).items() if isinstance(x, list | tuple) and re.fullmatch(WIDTHS, other)]
    numbers = [number for x in lists for number in _numbers(x) if number > 4]
    if isinstance(value, int) and value not in numbers:
        return at_most(WIDTH)(value)
    own = [number for number in _numbers(value) if number > 4]
    divisor = next((d for d in (math.gcd(*numbers), math.gcd(*own)) if d > 8), 1)
    return _mapped(value, lambda number: number // divisor * 8 if number > 4 and divisor > 1 else number)


def read(config: Config, name: str) -> Setting:
    """Return the stored value of an attribute; getattr fails on configs whose layers differ."""
    return vars(config).get(type(config).attribute_map.get(name, name))


def _fill(config: Config) -> None:
    """Set the attributes that only the config of a checkpoint defines."""
    for name, value in (("head_dim", HEAD_WIDTH), ("num_key_value_heads", HEADS), ("vocab_size", VOCABULARY)):
        if name in vars(config) and vars(config)[name] is None:
            setattr(config, name, value)
    for name in ("pad_token_id", "decoder_start_token_id"):
        if config.is_encoder_decoder and getattr(config, name, None) is None:
            setattr(config, name, getattr(config, "pad_token_id", None) or 0)


@cache
def _inherited() -> frozenset[str]:
    from transformers import PreTrainedConfig

    return frozenset(entry.name for entry in dataclasses.fields(PreTrainedConfig))


def configs_of(config: Config) -> Iterator[Any]:
    """Yield a config and its parts, level by level; the part for text comes first."""
    level = [config]
    while level:
        yield from level
        parts = [(name, value) for one in level for name, value in vars(one).items() if hasattr(value, "model_type")]
        level = [value for _, value in sorted(parts, key=lambda part: part[0] != "text_config")]


def shrunk(config: Config, exceptions: Mapping[str, Mapping[str, Any]]) -> Setting:
    """Return a config of the same kind for a model with few layers, which runs in milliseconds."""
    return Shrink(exceptions).config(config, given={})
