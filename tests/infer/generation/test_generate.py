"""Generated tokens are those of plain `model.generate`, for every grouping of the requests over the lanes."""

import gc
import subprocess
import sys
import threading
import weakref
from functools import cache

import pytest
import torch
import transformers as hf
from torch import nn

from infer.generation import language_models as models
from infer.generation.language_models import CAUSAL, PAIRS, alone, are_equal, prompts, sampled_alone
from penstock import Pipeline
from penstock.errors import CaptureError, CostError, LaneError, UsageError
from penstock.infer import Sampler, Token, generate, stream_tokens
from penstock.infer.generation.generation_lane import GenerationLane
from penstock.infer.generation.sampler import TokenPicker
from penstock.infer.generation.slot_layers import Slots

GIVEN = prompts(5, 9, 3, 12, 7)
COUNT = 24


@cache
def make(name):
    return models.make(name)


@cache
def wanted(name):
    found = alone(make(name), GIVEN, COUNT)
    assert len({int(token) for tokens in found for token in tokens[-COUNT:]}) > 3  # the tokens vary
    return found


# ---- the tokens


@pytest.mark.parametrize("options", [{"lanes": 2}, {"lanes": 3, "groups": 2, "max_requests": 3}], ids=str)
@pytest.mark.parametrize("name", [*CAUSAL, *PAIRS])
def test_the_tokens_are_those_of_each_prompt_alone(name, options):
    assert are_equal(generate(make(name), GIVEN, max_new_tokens=COUNT, **options), wanted(name))


@pytest.mark.parametrize("groups", [None, 1, 2, 5])
@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_the_tokens_depend_neither_on_lanes_nor_on_groups(lanes, groups):
    found = generate(make("gemma2"), GIVEN, max_new_tokens=COUNT, lanes=lanes, groups=groups)
    assert are_equal(found, wanted("gemma2"))


def test_one_batch_gives_the_logits_of_plain_generate_bit_by_bit(monkeypatch):
    """With equal shapes, not only the tokens but all scores are equal."""
    model, given, seen = make("mistral"), prompts(11, seed=3), []
    pick = TokenPicker.pick

    def spy(self, requests, logits):
        seen.append(logits[:, -1].clone())
        return pick(self, requests, logits)

    monkeypatch.setattr(TokenPicker, "pick", spy)
    generate(model, given, max_new_tokens=COUNT, lanes=2)
    plain = model.generate(
        given[0][None], max_new_tokens=COUNT, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    assert len(seen) == COUNT
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(seen, plain.logits, strict=True))


@pytest.mark.parametrize("name", ["llama", "bloom", "gemma3", "t5"])
def test_sampled_tokens_are_those_of_each_request_alone_with_its_seed(name):
    model, options = make(name), {"temperature": 0.9, "top_k": 20, "top_p": 0.9}
    found = generate(model, GIVEN, max_new_tokens=COUNT, sampler=Sampler(7, **options), max_requests=3)
    assert are_equal(found, sampled_alone(model, GIVEN, COUNT, 7, **options))
    assert not are_equal(found, wanted(name))


def test_each_request_may_have_its_own_sampler_and_its_own_length():
    model = make("llama")
    samplers = [None, Sampler(3), Sampler(3, repetition_penalty=1.5), None, Sampler(9, min_p=0.1)]
    limits = [4, 30, 12, 1, 8]
    found = generate(model, GIVEN, max_new_tokens=limits, sampler=samplers)
    for at, (prompt, sampler) in enumerate(zip(GIVEN, samplers, strict=True)):
        if sampler is None:
            plain = alone(model, [prompt], limits[at])
        else:
            plain = sampled_alone(model, [prompt], limits[at], sampler.seed, **sampler.options)
        assert are_equal([found[at]], plain), at


def test_generation_options_of_the_model_count_as_in_plain_generate():
    model = models.make("llama")
    model.generation_config.repetition_penalty = 1.3
    model.generation_config.no_repeat_ngram_size = 2
    plain = alone(model, GIVEN, COUNT)
    assert are_equal(generate(model, GIVEN, max_new_tokens=COUNT), plain)
    assert not are_equal(plain, wanted("llama"))


# ---- the end of a request


def ends_of(name):
    """Return a token for each of two requests that ends it early."""
    return [int(wanted(name)[at][len(GIVEN[at]) + 5]) for at in (0, 3)]


def test_requests_end_at_different_times_with_a_stop_token():
    ends = ends_of("llama")
    found = generate(make("llama"), GIVEN, max_new_tokens=COUNT, stop_tokens=ends)
    plain = alone(make("llama"), GIVEN, COUNT, eos_token_id=ends)
    assert are_equal(found, plain)
    assert len({len(tokens) - len(prompt) for tokens, prompt in zip(found, GIVEN, strict=True)}) > 1


def test_the_stop_token_of_the_model_is_the_default():
    model = models.make("qwen2")
    model.generation_config.eos_token_id = ends_of("qwen2")
    found = generate(model, GIVEN, max_new_tokens=COUNT, max_requests=2)
    assert are_equal(found, alone(model, GIVEN, COUNT))
    assert min(len(tokens) - len(prompt) for tokens, prompt in zip(found, GIVEN, strict=True)) < COUNT


# ---- streams


def test_a_stream_yields_the_same_tokens_one_by_one():
    found = [prompt.tolist() for prompt in GIVEN]
    last = []
    for token in stream_tokens(make("llama"), GIVEN, max_new_tokens=COUNT):
        assert isinstance(token, Token)
        found[token.request].append(token.token)
        last += [token.request] if token.is_last else []
    assert are_equal(map(torch.tensor, found), wanted("llama"))
    assert sorted(last) == list(range(len(GIVEN)))


def test_a_stream_reads_prompts_when_there_is_room():
    """An endless iterator of prompts: requests join while others run."""
    num_read = 0

    def endless():
        nonlocal num_read
        while True:
            num_read += 1
            yield GIVEN[(num_read - 1) % len(GIVEN)]

    tokens = stream_tokens(make("llama"), endless(), max_new_tokens=6, max_requests=3)
    found = [next(tokens) for _ in range(60)]
    assert num_read <= 60 // 6 + 3 + 1 + 3
    assert max(token.request for token in found) >= 8
    tokens.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-generate")]


def test_the_number_of_threads_of_the_caller_stays():
    before = torch.get_num_threads()
    for _ in stream_tokens(make("llama"), GIVEN, max_new_tokens=4, num_threads=2 if before == 1 else 1):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before


# ---- forms of prompts


def test_left_padding_is_removed():
    model = models.make("llama")
    longest = max(map(len, GIVEN))
    ids = torch.stack([nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in GIVEN])
    mask = torch.stack([torch.arange(longest) >= longest - len(prompt) for prompt in GIVEN])
    for given in (
        {"input_ids": ids, "attention_mask": mask.long()},
        {"input_ids": ids.tolist(), "attention_mask": mask},
    ):
        assert are_equal(generate(model, given, max_new_tokens=COUNT), wanted("llama"))
    model.generation_config.pad_token_id = 0  # without a mask, as in plain generate
    assert are_equal(generate(model, ids, max_new_tokens=COUNT), wanted("llama"))


def test_lists_of_numbers_are_prompts_and_no_prompts_give_no_results():
    assert are_equal(
        generate(make("llama"), [prompt.tolist() for prompt in GIVEN], max_new_tokens=COUNT), wanted("llama")
    )
    assert generate(make("llama"), []) == []


# ---- memory


def peaks(monkeypatch):
    """Return a dict in which the largest memory of each lane's keys and values is kept."""
    found = {}
    note = GenerationLane._note_memory

    def spy(self):
        note(self)
        found[self.own.start] = max(found.get(self.own.start, 0), self.peak_bytes)

    monkeypatch.setattr(GenerationLane, "_note_memory", spy)
    return found


def in_flight(model, **options):
    """Return the largest number of requests that had begun and not ended."""
    running, most = set(), 0
    for token in stream_tokens(model, GIVEN, max_new_tokens=COUNT, **options):
        running.add(token.request)
        most = max(most, len(running))
        if token.is_last:
            running.discard(token.request)
    return most


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_keys_and_values_stay_within_the_limit_and_requests_wait(name, monkeypatch):
    model, limit = make(name), 40_000
    most = in_flight(model)
    free = peaks(monkeypatch)
    generate(model, GIVEN, max_new_tokens=COUNT)
    assert max(free.values()) > limit or name != "llama"
    used = peaks(monkeypatch)
    found = generate(model, GIVEN, max_new_tokens=COUNT, memory_limit=limit)
    assert are_equal(found, wanted(name))
    assert 0 < max(used.values()) <= limit
    assert most == len(GIVEN)
    if name == "llama":
        assert in_flight(model, memory_limit=limit) < most


def test_the_limit_also_holds_while_a_request_joins(monkeypatch):
    """While a group is made again, one layer after another is in memory twice."""
    alive, most = weakref.WeakSet(), 0
    begin = Slots.__init__

    def spy(self, *args):
        nonlocal most
        begin(self, *args)
        alive.add(self)
        gc.collect()
        most = max(most, sum(part.nbytes for slots in alive for part in slots.memory))

    monkeypatch.setattr(Slots, "__init__", spy)
    limit = 60_000
    found = generate(make("llama"), GIVEN, max_new_tokens=COUNT, lanes=1, memory_limit=limit)
    assert are_equal(found, wanted("llama"))
    assert limit / 2 < most <= limit


def test_a_request_that_never_fits_is_refused():
    with pytest.raises(UsageError, match=r"memory_limit: request 3 needs .* raise memory_limit"):
        generate(make("llama"), GIVEN, max_new_tokens=COUNT, memory_limit=12_800)
    with pytest.raises(CostError, match="memory_limit"):
        generate(make("llama"), GIVEN, memory_limit="much")


# ---- other models


def test_the_model_does_not_change():
    model = models.make("gpt2")
    before = {name: id(part) for name, part in model.named_modules()}
    generate(model, GIVEN, max_new_tokens=4, lanes=3)
    assert {name: id(part) for name, part in model.named_modules()} == before
    assert are_equal(alone(model, GIVEN, COUNT), wanted("gpt2"))


def test_rotary_embeddings_that_change_with_the_length_are_refused_beyond_their_first_length():
    with pytest.raises(UsageError, match=r"request 3: 12 tokens and 37 new ones; beyond 48 tokens"):
        generate(make("phi3"), GIVEN, max_new_tokens=37)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = hf.LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        rope_parameters=rope, max_position_embeddings=32, eos_token_id=None,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config).eval()
    assert are_equal(generate(model, GIVEN, max_new_tokens=20), alone(model, GIVEN, 20))
    with pytest.raises(UsageError, match=r"request 3: .* beyond 32 tokens"):
        generate(model, GIVEN, max_new_tokens=21)


def test_the_model_can_be_trained_afterwards():
    model = models.make("phi3")
    generate(model, GIVEN, max_new_tokens=COUNT)
    batch = torch.stack(prompts(20, 20))
    model.train()(input_ids=batch, labels=batch).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_pipeline_generates_with_the_weights_that_it_trains():
    model = models.make("gpt2").train()
    batch = {"input_ids": torch.stack(prompts(8, 8, 8, 8)), "labels": torch.stack(prompts(8, 8, 8, 8, seed=2))}
    with Pipeline(model, example=batch, lanes=2, micro_batches=2) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        pipe.step(batch)
        optimizer.step()
        model.eval()
        assert are_equal(generate(pipe, GIVEN, max_new_tokens=COUNT), alone(model, GIVEN, COUNT))
        with pytest.raises(UsageError, match="lanes: 3, but the pipeline has 2"):
            generate(pipe, GIVEN, lanes=3)
    assert not are_equal(alone(model, GIVEN, COUNT), wanted("gpt2"))


def test_models_that_cannot_be_cut_are_refused():
    mamba = hf.MambaForCausalLM(hf.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2)).eval()
    with pytest.raises(UsageError, match="LinearAttentionLayer"):
        generate(mamba, [[1, 2]])
    with pytest.raises(UsageError, match="Linear is not a language model"):
        generate(nn.Linear(2, 2), [[1, 2]])
    with pytest.raises(UsageError, match="training mode"):
        generate(models.make("llama").train(), [[1, 2]])
    with pytest.raises(UsageError, match="lanes: 5, but the model has 4 decoder layers"):
        generate(make("llama"), [[1, 2]], lanes=5)


WRONG = [
    ({"prompts": "text"}, "str is not a list of prompts"),
    ({"prompts": ["text"]}, "prompt 0: 'text' is not a list"),
    ({"prompts": [[1], []]}, "prompt 1: it is empty"),
    ({"prompts": [[1], [200]]}, "prompt 1: token 200 is not in the vocabulary, which has 128"),
    ({"prompts": [[-1]]}, "prompt 0: token -1"),
    ({"prompts": [[0.5]]}, "prompt 0: .* is not a list of token numbers"),
    ({"prompts": [1, 2, 3]}, "prompt 0: 1 is not a list"),
    ({"prompts": {"ids": [1]}}, "no input_ids"),
    ({"prompts": torch.ones(3, dtype=torch.long)}, "a tensor with 1 dimensions"),
    ({"max_new_tokens": 0}, "max_new_tokens: 0 must be"),
    ({"max_new_tokens": [1, 2, 3]}, "max_new_tokens: 3 values for 2 prompts"),
    ({"max_new_tokens": 1.5}, "max_new_tokens: 1.5 is neither"),
    ({"lanes": 0}, "lanes: 0 must be"),
    ({"groups": -1, "max_requests": True}, "max_requests: True must be .*; groups: -1 must be"),
    ({"sampler": [None]}, "sampler: 1 values for 2 prompts"),
    ({"sampler": [1, 2]}, "sampler: the list must contain samplers"),
    ({"sampler": Sampler(tempo=1)}, "unknown options: tempo"),
    ({"sampler": Sampler(num_beams=3)}, "only one sequence per prompt"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_arguments_get_one_message(wrong, message):
    with pytest.raises(UsageError, match=message):
        generate(make("llama"), **{"prompts": [[1, 2], [3]], "max_new_tokens": 2, **wrong})


def test_wrong_samplers_get_one_message():
    with pytest.raises(UsageError, match="seed: -1"):
        Sampler(-1)
    with pytest.raises(UsageError, match="max_new_tokens cannot be an option of a sampler"):
        Sampler(max_new_tokens=3)


def test_transformers_is_imported_only_to_generate():
    code = "import sys, penstock.infer; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- failures


@pytest.mark.parametrize("layer", [0, 3])
def test_a_layer_that_fails_ends_all_lanes(layer):
    model = models.make("llama")
    num_calls = 0

    def fail(*_):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 12:
            raise ValueError("broken layer")

    model.model.layers[layer].mlp.register_forward_pre_hook(fail)
    with pytest.raises((LaneError, ValueError), match="broken layer"):
        generate(model, GIVEN, max_new_tokens=COUNT)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-generate")]


def test_scores_that_are_nan_are_an_error():
    model = models.make("llama")
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    with pytest.raises(LaneError, match="all scores of a prompt are NaN"):
        generate(model, GIVEN, max_new_tokens=4)


def test_layers_that_run_in_another_order_are_refused():
    model = models.make("llama")
    forward = type(model.model).forward

    class Reversed(type(model.model)):
        def forward(self, *args, **kwargs):
            part = self.layers
            self._modules["layers"] = nn.ModuleList(reversed(part))
            try:
                return forward(self, *args, **kwargs)
            finally:
                self._modules["layers"] = part

    model.model.__class__ = Reversed
    with pytest.raises((CaptureError, LaneError), match="in their order"):
        generate(model, GIVEN, max_new_tokens=4)
