"""Generation lane: runs the jobs of one lane with its decoder layers and their caches."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.utils import GenerationMixin

from penstock.errors import LaneError
from penstock.infer.generation.decoder_layers import LaneOutput, Received, decoder_start, lane_model
from penstock.infer.generation.generation_job import Job, JobKind
from penstock.infer.generation.group_cache import GroupCache, empty_cache, joined
from penstock.infer.generation.lane_values import Values, form_of
from penstock.infer.generation.sampler import TokenPicker
from penstock.infer.generation.slot_layers import window_of


class GenerationLane:
    """One lane: its part of the model, and the caches of the requests."""

    def __init__(self, model: Any, name: str, own: range, num_layers: int, picker: TokenPicker) -> None:  # noqa: ANN401
        self._received, self.own = Received(), own
        self._model: Any = lane_model(model, name, own, self._received)
        self._picker = picker
        self.is_first, self.is_last = own.start == 0, own.stop == num_layers
        self._config = model.config.get_text_config(decoder=True)
        self._has_encoder = bool(model.config.is_encoder_decoder)
        self._takes = inspect.signature(type(model).forward).parameters
        # a model that prepares nothing in its own way; it must not be compiled with a static cache, which none here is
        prepare: Any = GenerationMixin.prepare_inputs_for_generation
        self._is_plain = type(model).prepare_inputs_for_generation is prepare and not self._has_encoder
        self._homes: dict[int, GroupCache] = {}  # the cache that holds each request
        self._groups: dict[int, GroupCache] = {}
        self.peak_bytes = 0

    @torch.inference_mode()
    def run(self, job: Job, values: Values) -> Values:
        """Run a job; return what the next lane needs, or on the last lane the chosen tokens."""
        if torch.get_num_threads() != job.num_threads:
            torch.set_num_threads(job.num_threads)
        self._free(job.ended)
        if job.kind == JobKind.DECODE:
            group = self._group(job)
            return self._forward(job, group, values)
        request = job.rows[0]
        group = empty_cache(request, self._config, self.own, has_encoder=self._has_encoder)
        if self.is_last and job.kind == JobKind.PREFILL:
            self._start(request, values.tokens[0])
        made = self._forward(job, group, values)
        if job.kind == JobKind.PROBE:
            return self._probed(group, made, values)
        self._keep(request, group)
        return made

    def _start(self, request: int, prompt: torch.Tensor) -> None:
        if self._has_encoder:
            self._picker.start(request, decoder_start(self._model, prompt.device), encoder_tokens=prompt)
        else:
            self._picker.start(request, prompt)

    # ---- the caches

    def _keep(self, request: int, group: GroupCache) -> None:
        """Keep the cache of a prompt until the request joins a group."""
        self._homes[request] = group
        self._note_memory()

    def _free(self, ended: Sequence[int]) -> None:
        for request in ended:
            self._homes.pop(request, None)
        if ended:
            self._picker.end(ended)
            self._drop_empty_groups()

    def _drop_empty_groups(self) -> None:
        homes = {id(cache) for cache in self._homes.values()}
        self._groups = {number: cache for number, cache in self._groups.items() if id(cache) in homes}

    def _group(self, job: Job) -> GroupCache:
        """Return the cache of a group; make it again if other requests are in it now."""
        group = self._groups.get(job.group)
        if group is None or group.requests != job.rows or group.capacity < job.capacity:
            sources = [(request, self._homes[request]) for request in job.rows]
            staying = {id(home) for request, home in self._homes.items() if request not in job.rows}
            left = {id(home): home for _, home in sources if id(home) not in staying}
            group = joined(sources, self._config, job.capacity, left=list(left.values()))
            self._groups[job.group] = group
            self._homes.update(dict.fromkeys(job.rows, group))
            self._drop_empty_groups()
            self._note_memory()
        return group

    def _note_memory(self) -> None:
        caches = {id(cache): cache for cache in (*self._homes.values(), *self._groups.values())}
        self.peak_bytes = max(self.peak_bytes, sum(cache.num_bytes() for cache in caches.values()))

    # ---- the forward

    def _forward(self, job: Job, group: GroupCache, values: Values) -> Values:
        tokens, extras = values.tokens, values.extras
        if self._has_encoder and job.kind != JobKind.DECODE:
            extras, tokens = self._encode(group, values), decoder_start(self._model, tokens.device)[None]
        self._received.value = values.value
        try:
            output = self._model(**self._inputs(group, tokens, is_first=job.kind != JobKind.DECODE))
        except LaneOutput as end:
            form, tensors = form_of(end.value)
            return Values(values.tokens, form, tensors, extras)
        finally:
            self._received.value = None
            group.advance(tokens.shape[1])
        if job.kind == JobKind.PROBE:
            return Values(values.tokens)
        if job.kind == JobKind.PREFILL and bool(output.logits.isnan().all()):
            raise LaneError(
                "all scores of a prompt are NaN: the weights are NaN, or the model reads the embedding of its tokens "
                "on this lane, where it is on the meta device"
            )
        return Values(self._picker.pick(job.rows, output.logits))

    def _inputs(self, group: GroupCache, tokens: torch.Tensor, *, is_first: bool) -> dict[str, Any]:
        """Return the arguments of the forward, as `model.generate` prepares them."""
        given: dict[str, Any] = {"past_key_values": group.cache, "use_cache": True, "is_first_iteration": is_first}
        if self._has_encoder:
            given["encoder_outputs"] = group.extras["encoder_outputs"]
        elif is_first:
            given["attention_mask"] = None
            given["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
        else:
            mask = group.mask()
            given["attention_mask"] = None if mask is None else mask.to(tokens.device)
            given["position_ids"] = group.positions().to(tokens.device)
        if "position_ids" not in self._takes:
            given.pop("position_ids", None)
        if "logits_to_keep" in self._takes:
            given["logits_to_keep"] = 1
        if self._is_plain and not is_first:  # what `prepare_inputs_for_generation` returns then, without its cost
            del given["is_first_iteration"]
            return {"input_ids": tokens, **given, "return_dict": True}
        length = None if is_first else 1
        inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(tokens, next_sequence_length=length, **given)
        return {**inputs, "return_dict": True}

    def _encode(self, group: GroupCache, values: Values) -> tuple[torch.Tensor, ...]:
        """Run the encoder on the first lane; on the others, take its output from there."""
        from transformers.modeling_outputs import BaseModelOutput

        if self.is_first:
            encoded = self._model.get_encoder()(input_ids=values.tokens, return_dict=True).last_hidden_state
        else:
            encoded = values.extras[0]
        group.extras["encoder_outputs"] = BaseModelOutput(last_hidden_state=encoded)
        return (encoded, *values.extras[int(not self.is_first) :])

    def _probed(self, group: GroupCache, made: Values, values: Values) -> Values:
        """Return the values of a probe with one more row of figures per layer: bytes of a token, window, own range."""
        figures = torch.tensor(
            [
                [sum(part[0, :, :1].nbytes for part in (layer.keys, layer.values)), window_of(layer), self.own.start]
                for layer in group.layers
            ]
        )
        sofar = values.extras[-1:] if not self.is_first else ()
        figures = torch.cat([*sofar, figures])
        if self.is_last:
            return Values(figures)
        return Values(made.tokens, made.form, made.tensors, (*made.extras[: int(self._has_encoder)], figures))
