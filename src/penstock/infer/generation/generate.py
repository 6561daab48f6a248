"""Generate: `generate` and `stream_tokens`, which run the requests of a call on the lanes of a model."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import UsageError
from penstock.infer.generation.decoder_layers import choose_ranges, decoder_start, find_layers, ropes_of_length
from penstock.infer.generation.first_lane import FirstLane
from penstock.infer.generation.generation_job import JobKind, Token
from penstock.infer.generation.group_choice import GroupChoice
from penstock.infer.generation.lane_links import Links, Message, ProcessLinks, ThreadLinks, lane_error
from penstock.infer.generation.prompt_reader import num_prompts, read_prompts
from penstock.infer.generation.request_scheduler import LayerMemory, MemoryPlan, Request, RequestScheduler
from penstock.infer.generation.sampler import Choice, Sampler, TokenPicker, generation_config
from penstock.loading.weight_loader import load_part
from penstock.planning.memory_limits import Limit, limit_per_lane
from penstock.runtime.lanes.lane_group import make_lane_group, process_rank, world_size
from penstock.runtime.lanes.process_lanes import ProcessLanes

if TYPE_CHECKING:
    from penstock.infer.generation.generation_lane import GenerationLane

_LANES = 2  # in one process
_GRACE_SECONDS = 4.0


def generate(
    model: Any,  # noqa: ANN401 - a model of transformers
    prompts: Any,  # noqa: ANN401 - any form
    *,
    max_new_tokens: int | Sequence[int] = 20,
    sampler: Sampler | Sequence[Sampler | None] | None = None,
    stop_tokens: Sequence[int] | int | None = None,
    lanes: int | None = None,
    groups: int | None = None,
    max_requests: int = 16,
    memory_limit: Limit | None = None,
    weights: str | PathLike[str] | None = None,
    num_threads: int | None = None,
    transport: str = "auto",
    timeout: float = 600.0,
) -> list[torch.Tensor]:
    """Generate text with a language model of transformers, with several requests in flight over its lanes.

    Each lane runs its own decoder layers and holds their keys and values. While one lane works on some requests, the
    other lanes work on others. A request joins as soon as there is room, and leaves after its last token.

    The tokens are those of `model.generate(prompt)` for each prompt alone. In one process, each lane is a thread; under
    torchrun, each lane is a process, and each process returns all results.

    Args:
        model: a causal or an encoder-decoder model of transformers, in evaluation mode; it is not changed. Or a
            `penstock.Pipeline` that trains such a model in one process.
        prompts: a list of lists of tokens or of tensors; a 2-D tensor; or what a tokenizer returns. Padding is removed.
        max_new_tokens: the largest number of new tokens; one number, or one per prompt.
        sampler: draws the tokens; None takes the most likely token. Or a list with one per prompt.
        stop_tokens: tokens after which a request ends; by default, the `eos_token_id` of the model.
        lanes: the number of lanes; under torchrun, the number of processes.
        groups: the number of batches into which the requests in flight are divided; by default, Penstock measures a few
            numbers and keeps the fastest.
        max_requests: the largest number of requests in flight.
        memory_limit: the bytes for keys and values on each lane, such as "2GiB"; one value, or one per lane. A request
            that does not fit waits until others have ended.
        weights: the file or folder of the weights of a model on meta, as in `penstock.Pipeline`. Afterwards the model
            has values; in a process, only those that its lane needs.
        num_threads: the number of threads that all lanes may use together; by default those of torch.
        transport: how processes exchange values: "shared", "gloo" or "nccl"; "auto" takes the fastest that works.
        timeout: the seconds that a lane waits before it raises a `HangError`.

    Returns:
        The prompt and the new tokens of each request, as a 1-D tensor. For an encoder-decoder model, the tokens of the
        decoder.

    Raises:
        UsageError: if an argument is invalid, the model cannot be cut, or a request does not fit into the memory.
    """
    arguments = dict(locals())
    del arguments["model"], arguments["prompts"]
    with closing(_Call.of(model, prompts, **arguments)) as call:
        found = [part.tolist() for part in call.starts()]
        for token in call.tokens():
            found[token.request].append(token.token)
        return [torch.tensor(tokens) for tokens in call.shared(found)]


def stream_tokens(
    model: Any,  # noqa: ANN401 - a model of transformers
    prompts: Any,  # noqa: ANN401 - any form
    *,
    max_new_tokens: int | Sequence[int] = 20,
    sampler: Sampler | Sequence[Sampler | None] | None = None,
    stop_tokens: Sequence[int] | int | None = None,
    lanes: int | None = None,
    groups: int | None = None,
    max_requests: int = 16,
    memory_limit: Limit | None = None,
    weights: str | PathLike[str] | None = None,
    num_threads: int | None = None,
    transport: str = "auto",
    timeout: float = 600.0,
) -> Iterator[Token]:
    """Generate text, and yield each token as soon as it is there.

    `prompts` may also be an iterator, even an endless one: a prompt is read when there is room for one more. Under
    torchrun, the first process yields the tokens. The iterators of the other processes run their lanes and yield
    nothing; so every process must iterate. They end when the first process ends or closes its iterator.

    The arguments are those of `generate`.
    """
    arguments = dict(locals())
    del arguments["model"], arguments["prompts"]
    return _streamed(_Call.of(model, prompts, **arguments))


def _streamed(call: _Call) -> Iterator[Token]:
    with closing(call):
        yield from call.tokens()


@dataclass
class _Call:
    """One call of `generate`, with checked arguments."""

    model: Any
    prompts: Sequence[torch.Tensor] | Iterator[torch.Tensor]
    choice: Choice
    lanes: int
    groups: int | None
    max_requests: int
    limits: tuple[float, ...] | None
    num_threads: int | None
    transport: str
    timeout: float
    control: ProcessLanes | None = None

    @classmethod
    def of(
        cls, model: Any, prompts: Any, *, max_new_tokens: int | Sequence[int],  # noqa: ANN401
        sampler: Sampler | Sequence[Sampler | None] | None, stop_tokens: Sequence[int] | int | None, lanes: int | None,
        groups: int | None, max_requests: int, memory_limit: Limit | None, weights: str | PathLike[str] | None,
        num_threads: int | None, transport: str, timeout: float,
    ) -> _Call:  # fmt: skip
        """Check the arguments of a call."""
        count = num_prompts(prompts)
        model, lanes = _unwrapped(model, lanes)
        processes = world_size()
        if processes > 1 and lanes not in (None, processes):
            raise UsageError(f"lanes: {lanes}, but there are {processes} processes, and each is a lane; leave it out")
        num_lanes = processes if processes > 1 else _LANES if lanes is None else lanes
        _check_counts(lanes=num_lanes, max_requests=max_requests, groups=groups, num_threads=num_threads)
        _check_kind(model)
        if weights is not None:
            _load(model, weights, num_lanes)
        _check_weights(model)
        limit = _checked_limits(max_new_tokens, count)
        stop = (stop_tokens,) if isinstance(stop_tokens, int) else None if stop_tokens is None else tuple(stop_tokens)
        choice = Choice(_checked_samplers(sampler, count), stop, limit)
        for number in range(1 if isinstance(choice.sampler, Sampler | None) else count or 0):
            generation_config(model, choice.options(number) if count != 0 else {})
        read = read_prompts(prompts, model)
        limits = None if memory_limit is None else limit_per_lane(memory_limit, num_lanes)
        return cls(
            model, read if count is None else list(read), choice, num_lanes, groups, max_requests, limits, num_threads,
            transport, timeout,
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        found: torch.device = next(weight.device for weight in self.model.parameters() if not weight.is_meta)
        return found

    def starts(self) -> list[torch.Tensor]:
        """Return the tokens that each result begins with."""
        prompts = self.prompts
        if not isinstance(prompts, Sequence):
            self.prompts = prompts = list(prompts)
        if self.model.config.is_encoder_decoder:
            return [decoder_start(self.model, self.device)] * len(prompts)
        return list(prompts)

    def tokens(self) -> Iterator[Token]:
        """Yield the tokens of all requests."""
        if isinstance(self.prompts, Sequence) and not self.prompts:
            return iter(())
        return self._with_threads(self._in_processes() if world_size() > 1 else self._in_threads())

    def shared(self, found: list[list[int]]) -> list[list[int]]:
        """Return the tokens that the first lane found, in all processes."""
        if self.control is None:
            return found
        results: list[list[int]] = self.control.control.gather(found if self.control.lane == 0 else None)[0]
        return results

    def close(self) -> None:
        """Close the connections between processes."""
        if self.control is not None:
            self.control.close()

    # ---- the lanes

    def _lane(self, number: int) -> GenerationLane:
        from penstock.infer.generation.generation_lane import GenerationLane

        name, layers = find_layers(self.model)
        own = choose_ranges(self.model, layers, self.lanes)[number]
        return GenerationLane(self.model, name, own, len(layers), TokenPicker(self.model, self.choice))

    def _in_threads(self) -> Iterator[Token]:
        lanes = [self._lane(number) for number in range(self.lanes)]
        queues: list[queue.SimpleQueue[Message | BaseException]] = [queue.SimpleQueue() for _ in lanes]
        links = [ThreadLinks(number, queues, self.timeout) for number in range(self.lanes)]
        threads = [
            threading.Thread(target=_work, args=(number, lanes[number], links[number]), daemon=True,
                             name=f"penstock-generate-{number}")
            for number in range(1, self.lanes)
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        first = FirstLane(lanes[0], links[0] if threads else None, iter(self.prompts), self.device)
        total = self.num_threads or torch.get_num_threads()
        try:
            yield from self._generate(first, max(1, total // self.lanes), total)
            first.stop()
        except GeneratorExit:  # the caller wants no more tokens
            first.stop()
            raise
        except BaseException as error:
            links[0].fail(error)
            raise
        finally:
            for thread in threads:
                thread.join(_GRACE_SECONDS)

    def _in_processes(self) -> Iterator[Token]:
        group = make_lane_group(
            [self.device] * self.lanes, timeout_seconds=self.timeout, num_threads=None, transport=self.transport
        )
        assert isinstance(group, ProcessLanes)
        self.control = group
        group.give_streams([])
        for transport in group.transports.values():
            transport.on_wait = None
        try:
            lane, links = self._lane(group.lane), ProcessLinks(group)
            if group.lane:
                _loop(lane, links)
                return
            first = FirstLane(lane, links, iter(self.prompts), self.device)
            own = self.num_threads or torch.get_num_threads() * self.lanes
            yield from self._generate(first, max(1, own // self.lanes), min(own, os.cpu_count() or own))
            first.stop()
        except GeneratorExit:  # the caller wants no more tokens
            first.stop()
            raise
        except BaseException as error:
            if not getattr(error, "was_reported", False):
                group.control.fail(error)
            raise

    def _generate(self, first: FirstLane, lane_threads: int, all_threads: int) -> Iterator[Token]:
        memory = None if self.limits is None else self._memory_plan(first.probe(), self.limits)
        count = len(self.prompts) if isinstance(self.prompts, Sequence) else self.max_requests
        if isinstance(self.prompts, Sequence):  # refuse a request before any other one begins
            for number, prompt in enumerate(self.prompts):
                request = self._request(number, len(prompt))
                if memory is not None:
                    memory.check(request)
        is_free = self.groups is None and _may_pad(self.model)
        begin = min(self.lanes, count, self.max_requests) if self.groups is None else self.groups
        scheduler = RequestScheduler(
            begin if _may_pad(self.model) else 0, self.max_requests, memory, lane_threads, all_threads
        )
        choice = GroupChoice(self.lanes) if is_free and self.lanes > 1 else None
        yield from first.generate(scheduler, self._request, self._stop_tokens(), choice)

    @cached_property
    def _longest(self) -> int | None:
        return min(ropes_of_length(self.model).values(), default=None)

    def _request(self, number: int, length: int) -> Request:
        limit = self.choice.limit(number)
        longest = self._longest
        if longest is not None and length + limit > longest:
            raise UsageError(
                f"request {number}: {length} tokens and {limit} new ones; beyond {longest} tokens, the rotary "
                "embeddings of this model change with the length of the batch: lower max_new_tokens, or use "
                "model.generate"
            )
        is_pair = self.model.config.is_encoder_decoder
        return Request(number, length + limit - 1 + (1 if is_pair else 0), limit)

    def _stop_tokens(self) -> tuple[int, ...]:
        if self.choice.stop_tokens is not None:
            return self.choice.stop_tokens
        given = self.model.generation_config.eos_token_id
        return () if given is None else tuple(given) if isinstance(given, (list, tuple)) else (given,)

    def _memory_plan(self, figures: Sequence[Sequence[int]], limits: tuple[float, ...]) -> MemoryPlan:
        from penstock.infer.generation.slot_layers import SPARE_TOKENS

        starts = sorted({start for _, _, start in figures})
        layers = [LayerMemory(size, window, starts.index(start)) for size, window, start in figures]
        return MemoryPlan(layers, limits, SPARE_TOKENS)

    def _with_threads(self, tokens: Iterator[Token]) -> Iterator[Token]:
        """Yield tokens; between them, the caller has its own number of threads."""
        try:
            while True:
                with _same_threads():
                    token = next(tokens, None)
                if token is None:
                    return
                yield token
        finally:
            with _same_threads():
                tokens.close()  # type: ignore[attr-defined]  # a generator


@contextmanager
def _same_threads() -> Iterator[None]:
    """Restore the number of threads after the block."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def _loop(lane: GenerationLane, links: Links) -> None:
    """Run the jobs of a lane until the last one."""
    while True:
        job, values = links.receive()
        if job.kind == JobKind.STOP:
            links.send(job, values)
            return
        links.send(job, lane.run(job, values))


def _work(number: int, lane: GenerationLane, links: ThreadLinks) -> None:
    try:
        _loop(lane, links)
    except BaseException as error:  # goes to the thread that reads the tokens
        links.fail(lane_error(number, error))


# ---- arguments


def _unwrapped(model: Any, lanes: int | None) -> tuple[Any, int | None]:  # noqa: ANN401 - of transformers
    """Return the model of a pipeline, and the number of its lanes; another model as it is."""
    if callable(getattr(model, "prepare_inputs_for_generation", None)):
        return model, lanes
    from penstock.pipeline.pipeline import Pipeline

    if not isinstance(model, Pipeline):
        return model, lanes
    if world_size() > 1:
        raise UsageError(
            "generate: in each process, a pipeline holds the trained weights of its own lane only: gather them with "
            "a checkpoint, load them into the model, and pass the model"
        )
    if lanes not in (None, model.schedule.num_lanes):
        raise UsageError(f"lanes: {lanes}, but the pipeline has {model.schedule.num_lanes}; leave it out")
    return model.internals.captured.model, model.schedule.num_lanes


def _load(model: Any, weights: str | PathLike[str], lanes: int) -> None:  # noqa: ANN401 - of transformers
    """Give a model on meta its weights; in a process, those that its lane needs."""
    name, layers = find_layers(model)
    own = range(len(layers))
    if world_size() > 1:
        own = choose_ranges(model, layers, lanes)[process_rank()]
    foreign = tuple(f"{name}.{at}." for at in range(len(layers)) if at not in own)
    load_part(model, weights, lambda tensor: not tensor.startswith(foreign), device=torch.device("cpu"))


def _check_kind(model: Any) -> None:  # noqa: ANN401 - whatever was given
    if not isinstance(model, torch.nn.Module) or not callable(getattr(model, "prepare_inputs_for_generation", None)):
        raise UsageError(f"model: {type(model).__name__} is not a language model of transformers that can generate")
    if model.training:
        raise UsageError("model: it is in training mode, in which dropout changes the tokens: call model.eval()")
    if not model._supports_default_dynamic_cache():  # type: ignore[operator]
        raise UsageError(f"model: {type(model).__name__} has its own kind of cache, which cannot be cut: use generate")


def _check_weights(model: Any) -> None:  # noqa: ANN401 - of transformers
    devices = {weight.device for weight in model.parameters() if not weight.is_meta}
    if len(devices) != 1:
        listed = ", ".join(sorted(map(str, devices))) or "meta"
        raise UsageError(f"model: its weights are on {listed}; all weights must be on one device")
    from penstock.infer.generation.slot_layers import check_layers

    _, layers = find_layers(model)
    check_layers(model.config.get_text_config(decoder=True), len(layers))


def _may_pad(model: Any) -> bool:  # noqa: ANN401 - of transformers
    """Return whether prompts of different lengths can be rows of one batch, with padding on the left.

    Positions must then not depend on the padding: the forward takes them, or the model has none but linear biases.
    """
    import inspect

    if model.config.is_encoder_decoder:
        return False
    has_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    return has_positions or model.config.model_type in ("bloom", "mpt")


def _check_counts(**given: object) -> None:
    """Raise a UsageError for a number that is not a whole number of at least 1; None is the default."""
    faults = [
        f"{name}: {value!r:.80} must be a whole number of at least 1"
        for name, value in given.items()
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1)
    ]
    if faults:
        raise UsageError("; ".join(faults))


def _checked_limits(max_new_tokens: int | Sequence[int], count: int | None) -> int | Sequence[int]:
    if isinstance(max_new_tokens, int):
        _check_counts(max_new_tokens=max_new_tokens)
        return max_new_tokens
    _check_length("max_new_tokens", max_new_tokens, count)
    for limit in max_new_tokens:
        _check_counts(max_new_tokens=limit)
    return tuple(max_new_tokens)


def _checked_samplers(
    sampler: Sampler | Sequence[Sampler | None] | None, count: int | None
) -> Sampler | Sequence[Sampler | None] | None:
    if sampler is None or isinstance(sampler, Sampler):
        return sampler
    _check_length("sampler", sampler, count)
    if not all(one is None or isinstance(one, Sampler) for one in sampler):
        raise UsageError("sampler: the list must contain samplers, or None for the most likely token")
    return tuple(sampler)


def _check_length(name: str, given: object, count: int | None) -> None:
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise UsageError(f"{name}: {given!r:.80} is neither one value nor a list with one per prompt")
    if count is not None and len(given) != count:
        raise UsageError(f"{name}: {len(given)} values for {count} prompts; give one value, or one per prompt")
