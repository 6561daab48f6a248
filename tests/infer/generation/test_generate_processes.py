"""Generation with lanes that are processes gives the tokens of lanes that are threads."""

import pytest
import torch

import processes
from infer.generation.language_models import make, prompts
from penstock.infer import Sampler, generate, stream_tokens

LENGTHS = (5, 9, 3, 12, 7)
COUNT = 16


def tokens_of(name, sampler, options):
    found = generate(make(name), prompts(*LENGTHS), max_new_tokens=COUNT, sampler=sampler, **options)
    return [tokens.tolist() for tokens in found]


@pytest.mark.parametrize(
    ("name", "count", "options"),
    [
        ("gemma3", 2, {"groups": 2}),
        ("bloom", 2, {"transport": "gloo", "max_requests": 3}),
        ("t5", 2, {}),
        ("llama", 3, {"memory_limit": 30_000}),
    ],
    ids=str,
)
def test_processes_generate_the_tokens_of_threads(name, count, options):
    sampler = Sampler(5, temperature=0.8) if name == "llama" else None
    found = processes.run(tokens_of, count, name, sampler, options)
    assert found == [tokens_of(name, sampler, {"lanes": 1})] * count


def two_calls_and_a_stream():
    """One call after another, and a stream that ends early."""
    model, given = make("llama"), prompts(*LENGTHS)
    first = generate(model, given, max_new_tokens=COUNT)
    stream = stream_tokens(model, given, max_new_tokens=COUNT)
    some = [token for token, _ in zip(stream, range(7), strict=False)]
    stream.close()
    again = generate(model, given, max_new_tokens=COUNT)
    return [tokens.tolist() for tokens in first], len(some), [tokens.tolist() for tokens in again]


def test_calls_follow_each_other_and_a_stream_may_end_early():
    (one, num_one, again), (other, num_other, _) = processes.run(two_calls_and_a_stream, 2)
    assert one == other == again
    assert (num_one, num_other) == (7, 0)


def with_weights_of_its_own_lane(rank_layers):
    """Each process has the weights of its own part only; the others are on the meta device."""
    rank = torch.distributed.get_rank()
    model = make("llama")
    for at, layer in enumerate(model.model.layers):
        if at not in rank_layers[rank]:
            layer.to("meta")
    for module in (model.model.embed_tokens,) if rank else (model.model.norm, model.lm_head):
        module.to("meta")
    return [tokens.tolist() for tokens in generate(model, prompts(*LENGTHS), max_new_tokens=COUNT)]


def test_a_lane_needs_only_its_own_weights():
    found = processes.run(with_weights_of_its_own_lane, 2, [[0, 1], [2, 3]])
    assert found == [tokens_of("llama", None, {"lanes": 1})] * 2


def one_fails():
    model = make("llama")
    if torch.distributed.get_rank():
        model.model.layers[3].register_forward_hook(broken)
    generate(model, prompts(*LENGTHS), max_new_tokens=COUNT)


def broken(*_):
    raise ValueError("broken layer")


def test_a_failure_reaches_all_processes():
    first, second = processes.finish(processes.start(one_fails, 2), may_fail=True)
    assert "broken layer" in first
    assert "broken layer" in second
