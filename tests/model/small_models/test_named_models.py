"""Models by name: the user's own code, and small random ones of transformers."""

import re
import sys

import pytest
import torch

from penstock.errors import UsageError
from penstock.model.small_models.named_models import load

FAMILIES = [
    "gpt2",
    "llama",
    "bert",
    "t5",
    "whisper",
    "clip",
    "mixtral",
    "mamba",
    "vit",
    "swin",
    "deepseek_v3",
]


@pytest.mark.filterwarnings("ignore")  # transformers warns about its own past
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_of_transformers_is_built_small_and_runs(name):
    pytest.importorskip("transformers")
    model, example = load(name)
    assert sum(p.numel() for p in model.parameters()) < 2_000_000
    out = model.train()(**example)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert sum(p.grad is not None for p in model.parameters()) > 30


@pytest.mark.filterwarnings("ignore")
def test_the_same_seed_gives_the_same_model_and_leaves_the_random_state_alone():
    pytest.importorskip("transformers")
    before = torch.random.get_rng_state()
    (first, batch), (again, same), (_, other) = load("gpt2"), load("gpt2"), load("gpt2", batch_size=6)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(batch[key], same[key]) for key in batch)
    assert (len(batch["input_ids"]), len(other["input_ids"])) == (4, 6)


@pytest.mark.filterwarnings("ignore")
def test_small_models_keep_what_matters_of_their_family():
    pytest.importorskip("transformers")
    model, example = load("mixtral")
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (4, 4, 2)
    assert config.num_local_experts == 4
    assert not config.use_cache
    assert (example["attention_mask"] == 0).any()
    assert example["input_ids"].max() < config.vocab_size
    gpt2, _ = load("gpt2")
    assert gpt2.lm_head.weight is gpt2.transformer.wte.weight
    assert gpt2.config.resid_pdrop == 0.1


CODE = """
import torch
from dataclasses import dataclass

@dataclass
class Settings:
    width: int = 3

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(Settings().width, 2)

def model():
    return torch.nn.Linear(3, 2)

def both():
    return torch.nn.Linear(3, 2), torch.ones(4, 3)

def nothing():
    return 3

def fails():
    raise RuntimeError("no weights")

number = 3
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "zoo_of_tests.py").write_text(CODE)
    (tmp_path / "broken_zoo.py").write_text("import nowhere_to_be_found")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("zoo_of_tests", "broken_zoo"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("where", ["zoo_of_tests", "zoo_of_tests.py", "./zoo_of_tests.py"])
def test_a_model_of_ones_own(place, where):
    for name in ("Net", "model", "both"):
        model, example = load(f"{where}:{name}")
        assert isinstance(model, torch.nn.Linear)
        assert (example is not None) == (name == "both")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zoo_of_tests:fails", "zoo_of_tests:fails failed: RuntimeError: no weights"),
        ("zoo_of_tests:nothing", "returned an int; it must return a model"),
        ("zoo_of_tests:number", "is an int, not a function or a class"),
        ("zoo_of_tests:modle", "zoo_of_tests has no 'modle'. Did you mean 'model'?"),
        ("zoo_of_rests:model", "no module 'zoo_of_rests'"),
        ("broken_zoo:model", "broken_zoo cannot be imported: no module 'nowhere_to_be_found'"),
        ("broken_zoo.py:model", "broken_zoo.py cannot be imported: ModuleNotFoundError"),
        ("missing.py:model", "no file missing.py"),
    ],
)
def test_what_cannot_be_loaded_says_why(place, name, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        load(name)


@pytest.mark.filterwarnings("ignore")
def test_a_misspelt_family_gets_the_nearest_one():
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match=r"no model 'gptt2'.*Did you mean 'gpt2'\?"):
        load("gptt2")


@pytest.mark.filterwarnings("ignore")
def test_a_family_that_cannot_be_built_says_why():
    pytest.importorskip("transformers")
    for name in ("sam_mask_decoder", "qwen2_vl"):  # the second one is built, but does not run
        with pytest.raises(UsageError, match=f"cannot build a small '{name}'.*module:callable"):
            load(name)


def test_without_transformers_a_family_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'penstock\[hf\]'"):
        load("gpt2")
