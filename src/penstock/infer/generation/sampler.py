"""Sampler: the choice of the next token, on the last lane, as `model.generate` makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.errors import UsageError

_SET_BY_US = ("do_sample", "max_new_tokens", "max_length", "eos_token_id", "use_cache", "seed")


class Sampler:
    """Draws tokens at random, as `model.generate(do_sample=True, ...)` does.

    >>> Sampler(seed=3, temperature=0.7, top_k=20)
    Sampler(seed=3, temperature=0.7, top_k=20)

    Each request has its own random numbers. The tokens of request i are those of `torch.manual_seed(seed + i)` and
    `model.generate` with this one prompt. They do not depend on the other requests.

    Args:
        seed: the seed of the first request; each further request has the next seed.
        options: options of `model.generate` that change the choice of a token, such as `temperature`, `top_k`, `top_p`,
            `min_p` or `repetition_penalty`. The default of each is that of the model.
    """

    def __init__(self, seed: int = 0, **options: Any) -> None:  # noqa: ANN401 - options of transformers
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise UsageError(f"seed: {seed!r:.80} must be a whole number of at least 0")
        wrong = [name for name in options if name in _SET_BY_US]
        if wrong:
            raise UsageError(f"Sampler: {', '.join(wrong)} cannot be an option of a sampler; see generate(...)")
        self.seed, self.options = seed, options

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"Sampler(seed={self.seed}{options})"


@dataclass(frozen=True)
class Choice:
    """How the tokens of all requests are chosen.

    Args:
        sampler: the sampler, or one for each request; None takes the most likely token.
        stop_tokens: tokens after which a request ends; None for those of the model.
        max_new_tokens: the largest number of new tokens of each request, or one number for all.
    """

    sampler: Sampler | Sequence[Sampler | None] | None
    stop_tokens: tuple[int, ...] | None
    max_new_tokens: int | Sequence[int]

    def limit(self, request: int) -> int:
        """Return the largest number of new tokens of a request."""
        limits = self.max_new_tokens
        return limits if isinstance(limits, int) else limits[request]

    def sampler_of(self, request: int) -> Sampler | None:
        """Return the sampler of a request."""
        return self.sampler if self.sampler is None or isinstance(self.sampler, Sampler) else self.sampler[request]

    def seed_of(self, request: int) -> int:
        """Return the seed of a request that has a sampler."""
        sampler = self.sampler_of(request)
        assert sampler is not None
        return sampler.seed + (request if isinstance(self.sampler, Sampler) else 0)

    def options(self, request: int) -> dict[str, Any]:
        """Return the options of `model.generate` for a request."""
        sampler = self.sampler_of(request)
        found: dict[str, Any] = {"do_sample": sampler is not None, "max_new_tokens": self.limit(request)}
        if self.stop_tokens is not None:
            found["eos_token_id"] = list(self.stop_tokens)
        return found | ({} if sampler is None else sampler.options)


def generation_config(model: Any, options: Mapping[str, Any]) -> Any:  # noqa: ANN401 - of transformers
    """Return the generation config that `model.generate` would use with these options.

    Raises:
        UsageError: if an option does not exist, or asks for more than one sequence or for a search.
    """
    from transformers.generation.configuration_utils import GenerationMode

    try:
        config, unknown = model._prepare_generation_config(None, **options)
        mode = config.get_generation_mode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"generate: transformers refuses these options: {error}") from error
    if unknown:
        raise UsageError(f"generate: unknown options: {', '.join(sorted(unknown))}")
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE) or config.num_return_sequences != 1:
        raise UsageError(
            f"generate: the options ask for {mode.value} with {config.num_return_sequences} sequences per prompt; "
            "only one sequence per prompt, greedy or sampled, is possible"
        )
    if config.guidance_scale not in (None, 1, 1.0):
        raise UsageError("generate: guidance_scale runs the model a second time, which is not possible here")
    return config


@dataclass
class _Row:
    """The state of one request: its tokens so far, and what changes the scores of the next one."""

    tokens: torch.Tensor
    processors: Any
    generator: torch.Generator | None


@dataclass
class TokenPicker:
    """Chooses the next token of each row; it holds the state of all requests on the last lane."""

    model: Any
    choice: Choice
    _rows: dict[int, _Row] = field(default_factory=dict)

    def start(self, request: int, prompt: torch.Tensor, encoder_tokens: torch.Tensor | None = None) -> None:
        """Begin a request; `prompt` are the tokens that the decoder begins with."""
        config = generation_config(self.model, self.choice.options(request))
        device = prompt.device
        self.model._prepare_special_tokens(config, True, device=device, batch_size=1)
        config.max_length = len(prompt) + self.choice.limit(request)
        if config.min_new_tokens is not None:
            config.min_length = len(prompt) + config.min_new_tokens
        processors = self.model._get_logits_processor(
            generation_config=config, input_ids_seq_length=len(prompt),
            encoder_input_ids=(prompt if encoder_tokens is None else encoder_tokens)[None], device=device,
            model_kwargs={},
        )  # fmt: skip
        generator = None
        if self.choice.sampler_of(request) is not None:
            generator = torch.Generator(device).manual_seed(self.choice.seed_of(request))
        self._rows[request] = _Row(prompt, processors, generator)

    def end(self, requests: Sequence[int]) -> None:
        """Forget requests."""
        for request in requests:
            self._rows.pop(request, None)

    def pick(self, requests: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Return the next token of each request; `logits` has one row for each of them."""
        scores = logits[:, -1].to(copy=True, dtype=torch.float32)
        rows = [self._rows[request] for request in requests]
        if all(row.generator is None and not row.processors for row in rows):
            return torch.argmax(scores, dim=-1)
        picked = [self._pick(row, scores[at : at + 1]) for at, row in enumerate(rows)]
        return torch.cat(picked)

    def _pick(self, row: _Row, scores: torch.Tensor) -> torch.Tensor:
        scores = row.processors(row.tokens[None], scores)
        if row.generator is None:
            token = torch.argmax(scores, dim=-1)
        else:
            shares = torch.nn.functional.softmax(scores, dim=-1)
            token = torch.multinomial(shares, num_samples=1, generator=row.generator).squeeze(1)
        row.tokens = torch.cat([row.tokens, token])
        return token
