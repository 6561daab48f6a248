"""Generation with a model on meta: every process loads the weights that its lane needs."""

import pytest
import torch

import processes
from infer.generation.language_models import CAUSAL, PAIRS, make, prompts
from penstock.errors import PenstockError
from penstock.infer import generate

LENGTHS, COUNT = (5, 9, 3), 12


def on_meta(name):
    kind, config = {**CAUSAL, **PAIRS}[name]()
    with torch.device("meta"):
        return kind(config).eval()


def expected(name, folder):
    make(name).save_pretrained(folder, max_shard_size="30kB")
    return [tokens.tolist() for tokens in generate(make(name), prompts(*LENGTHS), max_new_tokens=COUNT, lanes=1)]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mixtral", "t5"])
def test_a_model_on_meta_generates_what_it_generates_in_memory(name, tmp_path):
    tokens = expected(name, tmp_path)
    found = generate(on_meta(name), prompts(*LENGTHS), max_new_tokens=COUNT, lanes=2, weights=tmp_path)
    assert [one.tolist() for one in found] == tokens


def in_process(name, folder):
    model = on_meta(name)
    found = generate(model, prompts(*LENGTHS), max_new_tokens=COUNT, weights=folder)
    again = generate(model, prompts(*LENGTHS), max_new_tokens=COUNT)
    assert [one.tolist() for one in found] == [one.tolist() for one in again]
    layers = [sum(not p.is_meta for p in layer.parameters()) for layer in model.get_decoder().layers]
    return [one.tolist() for one in found], [bool(count) for count in layers]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_process_loads_its_own_layers_only(name, tmp_path):
    tokens = expected(name, tmp_path)
    (first, some), (second, others) = processes.run(in_process, 2, name, tmp_path)
    assert first == second == tokens
    assert [one is not other for one, other in zip(some, others, strict=True)] == [True] * len(some)
    assert any(some)
    assert any(others)


def test_bad_weights_get_one_message(tmp_path):
    with pytest.raises(PenstockError, match="contains no weights"):
        generate(on_meta("llama"), prompts(*LENGTHS), weights=tmp_path)
    make("gpt2").save_pretrained(tmp_path)
    with pytest.raises(PenstockError, match=r"holds a GPT2LMHeadModel .* but the model is a LlamaForCausalLM"):
        generate(on_meta("llama"), prompts(*LENGTHS), weights=tmp_path)
    with pytest.raises(PenstockError, match="the model already has its weights"):
        generate(make("gpt2"), prompts(*LENGTHS), weights=tmp_path)
    with pytest.raises(PenstockError, match="its weights are on meta"):
        generate(on_meta("gpt2"), prompts(*LENGTHS))
