"""Weights from files: every process reads its own tensors, and the pipeline equals the model of `from_pretrained`."""

import copy
import json
import os
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import penstock
import processes
from penstock.errors import CaptureError, CheckpointError, OutputError, PenstockError, UsageError
from penstock.loading.weight_files import open_weights
from penstock.tensor_files.safetensors_reader import SafetensorsReader

torch.manual_seed(0)
TOKENS = torch.randint(3, 90, (4, 6))
LABELS = TOKENS.clone()
LABELS[:2, 3:] = -100  # padded, so that micro-batches have different numbers of labels
TEXT = {"input_ids": TOKENS, "labels": LABELS}
IMAGES = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 1, 0])}
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
WORDS = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES = {
    "llama": ("LlamaForCausalLM", {**SIZES, **WORDS, "num_key_value_heads": 2}),
    "llama with tied words": ("LlamaForCausalLM", {**SIZES, **WORDS, "tie_word_embeddings": True}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, **WORDS, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    ),
    "qwen2": ("Qwen2ForCausalLM", {**SIZES, **WORDS, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", {**SIZES, **WORDS, "num_key_value_heads": 2, "num_local_experts": 4}),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100, "pad_token_id": 0,
         "dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
    "bert": ("BertForMaskedLM", {**SIZES, **WORDS, **NO_DROPOUT}),
    "vit": ("ViTForImageClassification", {**SIZES, **NO_DROPOUT, "image_size": 16, "patch_size": 4}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of torch only slow down such small models."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def class_and_config(family):
    name, settings = FAMILIES[family]
    kind = getattr(transformers, name)
    return kind, kind.config_class(**settings)


def saved(family, folder, *, seed=1, shard="40KB"):
    """Write a model as its author would; return its class and config."""
    kind, config = class_and_config(family)
    torch.manual_seed(seed)
    kind(config).save_pretrained(folder, max_shard_size=shard)
    return kind, config


def on_meta(kind, config):
    with torch.device("meta"):
        return kind(config)


def example_of(family):
    return IMAGES if family == "vit" else TEXT


def plain_step(model, example):
    """Return the loss and the gradients of a plain model."""
    loss = model(**example).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same_step(pipe, model, example):
    loss, gradients = plain_step(model, example)
    assert torch.isclose(pipe.step(example), loss, rtol=1e-5)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_save_pretrained_gives_what_from_pretrained_gives(family, tmp_path):
    kind, config = saved(family, tmp_path)
    plain = kind.from_pretrained(tmp_path).train()
    example = example_of(family)
    model = on_meta(kind, config)
    with penstock.Pipeline(model, example=example, lanes=2, micro_batches=2, weights=tmp_path) as pipe:
        state = pipe.state_dict()
        for name, tensor in plain.state_dict().items():
            assert torch.equal(state[name], tensor), name
        assert_same_step(pipe, plain, example)
        with torch.no_grad():
            expected = plain.eval()(**example).loss
        assert torch.isclose(pipe.evaluate(example), expected, rtol=1e-5)


def names_read(tmp_path, family, dtype):
    """Run in each process; return the keys that it read, and its loss and gradients."""
    kind, config = class_and_config(family)
    config.dtype = dtype
    read = []
    plain_read = SafetensorsReader.read_into

    def note(reader, name, target):
        read.append(name)
        plain_read(reader, name, target)

    SafetensorsReader.read_into = note
    model = on_meta(kind, config).to(dtype)
    with penstock.Pipeline(model, example=example_of(family), micro_batches=2, weights=tmp_path) as pipe:
        loss = pipe.step(example_of(family))
        gradients = {name: p.grad.float().numpy() for name, p in pipe.named_parameters()}
        return read, loss.float().item(), gradients, str(next(pipe.parameters()).dtype)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "t5"])
def test_a_process_reads_only_its_own_tensors_and_once(family, tmp_path):
    kind, _ = saved(family, tmp_path)
    plain = kind.from_pretrained(tmp_path).train()
    loss, gradients = plain_step(plain, example_of(family))
    (first, one, own, _), (second, other, others, _) = processes.run(names_read, 2, tmp_path, family, torch.float32)
    stored = set(open_weights(tmp_path).shapes)
    for names in (first, second):
        assert len(names) == len(set(names)) < len(stored)
    tied = {"llama": set(), "mixtral": set(), "gpt2": {"transformer.wte.weight"}, "t5": {"shared.weight"}}[family]
    assert set(first) & set(second) <= tied
    assert set(first) | set(second) == stored
    assert one == pytest.approx(float(loss), rel=1e-5)
    assert other == pytest.approx(float(loss), rel=1e-5)
    for name, gradient in {**own, **others}.items():
        torch.testing.assert_close(torch.from_numpy(gradient), gradients[name], rtol=1e-4, atol=1e-6)


def test_values_are_converted_on_the_way_in(tmp_path):
    kind, config = saved("llama", tmp_path)
    plain = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = on_meta(kind, config).to(torch.bfloat16)
    with penstock.Pipeline(model, example=TEXT, lanes=2, micro_batches=2, weights=tmp_path) as pipe:
        state = pipe.state_dict()
    for name, tensor in plain.state_dict().items():
        assert state[name].dtype == torch.bfloat16
        assert torch.equal(state[name], tensor), name


# ---- tensors that are in no file


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
def test_a_new_head_has_the_values_that_from_pretrained_draws(family, lanes, tmp_path):
    saved(family, tmp_path)
    warnings.filterwarnings("ignore", message=r".*the model does not have .*(lm_head|cls)")
    name = {"llama": "LlamaFor", "bert": "BertFor", "gpt2": "GPT2For"}[family] + "SequenceClassification"
    kind = getattr(transformers, name)
    config = kind.config_class.from_pretrained(tmp_path)
    example = {"input_ids": TOKENS, "labels": torch.tensor([0, 1, 1, 0])}
    torch.manual_seed(5)
    plain = kind.from_pretrained(tmp_path).train()
    torch.manual_seed(5)
    with pytest.warns(UserWarning, match="holds no values for .*(score|classifier)"):
        pipe = penstock.Pipeline(
            on_meta(kind, config), example=example, lanes=lanes, micro_batches=2, weights=tmp_path, check=False
        )
    with pipe:
        state = pipe.state_dict()
    for key, tensor in plain.state_dict().items():
        assert torch.equal(state[key], tensor), key


@pytest.mark.parametrize("lacking", ["model.layers.1.self_attn.o_proj.weight", "model.embed_tokens.weight"])
def test_a_layer_that_is_in_no_file_is_initialised_alike_for_every_number_of_lanes(lacking, tmp_path):
    kind, config = saved("llama", tmp_path, shard="1GB")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[lacking], tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.manual_seed(7)
    plain = kind.from_pretrained(tmp_path)
    states = []
    for lanes in (1, 2):
        torch.manual_seed(7)
        with pytest.warns(UserWarning, match="the model initialises them"):
            pipe = penstock.Pipeline(
                on_meta(kind, config), example=TEXT, lanes=lanes, micro_batches=2, weights=tmp_path
            )
        states.append(pipe.state_dict())
        pipe.close()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(states[0][name], tensor), name
        assert torch.equal(states[1][name], tensor), name


class Scaled(nn.Module):
    """Has buffers that no state dict holds, and that only its constructor computes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.arange(8) / 8 + 1, persistent=False)

    def forward(self, x):
        return self.last(self.norm(self.first(x)) * self.scale)


INPUT, TARGET = torch.randn(8, 8), torch.randn(8, 8)


def scaled_step(model, folder, **options):
    with penstock.Pipeline(
        model, example=INPUT, loss=nn.MSELoss(), lanes=2, micro_batches=2, weights=folder, **options
    ) as pipe:
        return pipe.evaluate(INPUT, TARGET), pipe.step(INPUT, TARGET), pipe.state_dict()


def test_buffers_that_were_kept_keep_their_values(tmp_path):
    torch.manual_seed(3)
    plain = Scaled()
    save_file(plain.state_dict(), tmp_path / "own.safetensors")
    with penstock.empty_weights():
        model = Scaled()
    assert model.first.weight.is_meta
    assert not model.scale.is_meta
    evaluated, _, _ = scaled_step(model, tmp_path)
    with torch.no_grad():
        assert torch.allclose(evaluated, nn.functional.mse_loss(plain.eval()(INPUT), TARGET))
    assert torch.equal(model.scale, plain.scale)  # the user's model is as it was
    again, _, _ = scaled_step(model, tmp_path / "own.safetensors")
    assert torch.equal(again, evaluated)


def test_a_buffer_without_values_is_refused_with_the_remedy(tmp_path):
    save_file(Scaled().state_dict(), tmp_path / "own.safetensors")
    with torch.device("meta"):
        model = Scaled()
    with pytest.raises(UsageError, match=r"no file holds scale, .* penstock\.empty_weights\(\)"):
        scaled_step(model, tmp_path)


def test_parameters_and_statistics_of_plain_modules_are_initialised_by_their_modules(tmp_path):
    plain = Scaled()
    state = {name: t for name, t in plain.state_dict().items() if not name.startswith(("norm", "last.bias"))}
    save_file(state, tmp_path / "own.safetensors")
    with penstock.empty_weights():
        model = Scaled()
    states = []
    warnings.filterwarnings("ignore", message=".*they keep the values that they have")  # running averages
    for lanes in (1, 2):
        torch.manual_seed(9)
        with pytest.warns(UserWarning, match="holds no values for norm.weight, norm.bias, last.bias"):
            pipe = penstock.Pipeline(
                model, example=INPUT, loss=nn.MSELoss(), lanes=lanes, micro_batches=2, weights=tmp_path
            )
        states.append({name: tensor.clone() for name, tensor in pipe.state_dict().items()})
        pipe.close()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    assert torch.equal(states[0]["norm.weight"], torch.ones(8))
    assert torch.equal(states[0]["norm.running_var"], torch.ones(8))
    assert states[0]["last.bias"].abs().max() > 0
    assert torch.equal(states[0]["last.weight"], plain.last.weight)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.gain = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.inner(x) * self.gain


def test_a_parameter_that_nothing_initialises_is_refused(tmp_path):
    save_file(Bare().inner.state_dict(prefix="inner."), tmp_path / "own.safetensors")
    with torch.device("meta"):
        model = Bare()
    warnings.simplefilter("ignore")  # pytest restores the filters
    with pytest.raises(UsageError, match=r"no file holds gain, .* reset_parameters\(\)"):
        scaled_step(model, tmp_path)


def test_a_model_with_values_keeps_those_that_are_in_no_file(tmp_path):
    torch.manual_seed(4)
    model, other = Scaled(), Scaled()
    save_file(other.first.state_dict(prefix="first."), tmp_path / "own.safetensors")
    kept = model.last.weight.detach().clone()
    with pytest.warns(UserWarning, match=r"holds no values for .* and 2 more; they keep the values that they have"):
        _, _, state = scaled_step(model, tmp_path)
    assert torch.equal(state["first.weight"], other.first.weight)
    assert torch.equal(state["last.weight"], kept)


def test_a_state_dict_needs_no_buffers_that_the_model_can_compute(tmp_path):
    kind, config = saved("llama", tmp_path)
    plain = kind.from_pretrained(tmp_path).train()
    with penstock.Pipeline(on_meta(kind, config), example=TEXT, lanes=2, micro_batches=2) as pipe:
        with pytest.raises(UsageError, match="have no values yet"):
            pipe.step(TEXT)
        pipe.load_state_dict(plain.state_dict())
        assert_same_step(pipe, plain, TEXT)


# ---- and back


@pytest.mark.parametrize(
    ("family", "lanes"), [*((family, 2) for family in FAMILIES), ("mixtral", 1), ("llama with tied words", 3)]
)
def test_plain_from_pretrained_loads_what_a_pipeline_saves(family, lanes, tmp_path):
    kind, config = saved(family, tmp_path / "base")
    model = on_meta(kind, config)
    with penstock.Pipeline(
        model, example=example_of(family), lanes=lanes, micro_batches=2, weights=tmp_path / "base"
    ) as pipe:
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.add_(0.01)
        pipe.save_pretrained(tmp_path / "tuned", max_shard_size="30kB")
        state = pipe.state_dict()
    plain = kind.from_pretrained(tmp_path / "tuned")
    for name, tensor in plain.state_dict().items():
        assert torch.equal(state[name], tensor), name
    base, tuned = open_weights(tmp_path / "base"), open_weights(tmp_path / "tuned")
    assert set(tuned.shapes) == set(base.shapes)  # the names of the author's files
    assert all(file.stat().st_size < 200_000 for file in (tmp_path / "tuned").glob("*.safetensors"))


def tuned_and_saved(folder, family):
    """Run in each process: load, change, save."""
    kind, config = class_and_config(family)
    model = on_meta(kind, config)
    with penstock.Pipeline(
        model, example=example_of(family), micro_batches=2, weights=folder / "base", check=False
    ) as pipe:
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.mul_(1.5)
        pipe.save_pretrained(folder / "tuned")
        try:
            pipe.save_pretrained(folder / "tuned")
        except OutputError as error:
            return str(error)


@pytest.mark.parametrize("family", ["llama with tied words", "mixtral", "t5"])
def test_processes_write_their_parts(family, tmp_path):
    kind, _ = saved(family, tmp_path / "base")
    messages = processes.run(tuned_and_saved, 2, tmp_path, family)
    assert all("already contains a model" in message for message in messages)
    base, plain = kind.from_pretrained(tmp_path / "base"), kind.from_pretrained(tmp_path / "tuned")
    for (name, tensor), other in zip(plain.named_parameters(), base.parameters(), strict=True):
        assert torch.equal(tensor, other * 1.5), name
    assert len(list((tmp_path / "tuned").glob("*.safetensors"))) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "tuned"]


def test_saving_never_replaces_anything_else(tmp_path):
    with penstock.Pipeline(Scaled(), example=INPUT, loss=nn.MSELoss(), lanes=2, micro_batches=2) as pipe:
        for size in (0, "many", -3):
            with pytest.raises(UsageError, match="max_shard_size"):
                pipe.save_pretrained(tmp_path / "new", max_shard_size=size)
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(OutputError, match=r"contains other files \(notes\.txt\)"):
            pipe.save_pretrained(tmp_path, overwrite=True)
        with pytest.raises(OutputError, match="is a file"):
            pipe.save_pretrained(tmp_path / "notes.txt")
        folder = pipe.save_pretrained(tmp_path / "new")
        with pytest.raises(OutputError, match="already contains a model"):
            pipe.save_pretrained(folder)
        pipe.save_pretrained(folder, overwrite=True)
        assert load_file(folder / "model.safetensors").keys() == pipe.state_dict().keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "notes.txt"]


# ---- a checkpoint of Penstock


def test_a_checkpoint_and_its_folder(tmp_path):
    torch.manual_seed(6)
    plain = Scaled()
    with penstock.Pipeline(plain, example=INPUT, loss=nn.MSELoss(), lanes=2, micro_batches=2) as pipe:
        checkpoints = penstock.Checkpoints(tmp_path, pipe)
        checkpoints.save(step=1)
        checkpoints.wait()
        state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    for folder in (tmp_path, next(tmp_path.glob("checkpoint-*"))):
        with penstock.empty_weights():
            model = Scaled()
        with penstock.Pipeline(
            model, example=INPUT, loss=nn.MSELoss(), lanes=3, micro_batches=2, weights=folder
        ) as pipe:
            for name, tensor in pipe.state_dict().items():
                assert torch.equal(tensor, state[name]), name


def test_a_flipped_bit_in_a_checkpoint_is_found(tmp_path):
    with penstock.Pipeline(Scaled(), example=INPUT, loss=nn.MSELoss(), lanes=1, micro_batches=1) as pipe:
        checkpoints = penstock.Checkpoints(tmp_path, pipe)
        checkpoints.save(step=1)
        checkpoints.wait()
    (file,) = tmp_path.glob("checkpoint-*/model-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with penstock.empty_weights():
        model = Scaled()
    with pytest.raises(CheckpointError, match="checksum"):
        scaled_step(model, tmp_path)


# ---- bad input: one message, before memory is filled


def lacks_index(folder):
    (folder / "model.safetensors.index.json").unlink()


def lacks_shard(folder):
    sorted(folder.glob("*.safetensors"))[1].unlink()


def is_cut_short(folder):
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-10])


def has_cut_header(folder):
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:30])


def is_empty(folder):
    sorted(folder.glob("*.safetensors"))[0].write_bytes(b"")


def lacks_listed_tensor(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.9.weight"] = next(iter(index["weight_map"].values()))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def leaves_the_folder(folder):
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def has_broken_index(folder):
    (folder / "model.safetensors.index.json").write_text("{")


def has_only_pickles(folder):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


def has_other_shapes(folder):
    for file in folder.glob("model*"):
        file.unlink()
    kind, config = class_and_config("llama")
    config.intermediate_size = 48
    kind(config).save_pretrained(folder)


def is_of_another_model(folder):
    shutil.rmtree(folder)
    saved("bert", folder)


def has_no_tensor_of_the_model(folder):
    for file in folder.glob("*.json"):
        file.unlink()
    for file in folder.glob("model*"):
        file.unlink()
    save_file({"x": torch.zeros(2)}, folder / "model.safetensors")


DAMAGE = {
    lacks_index: r"contains \d+ safetensors files \(.*\), but no index",
    lacks_shard: r"lacks 1 of \d+ files: model-00002",
    is_cut_short: r"model-00002.*is cut short",
    has_cut_header: r"model-00002.*is cut short",
    is_empty: "is not a safetensors file",
    lacks_listed_tensor: r"lack tensors that the index lists: model\.layers\.9\.weight",
    leaves_the_folder: "is not a valid file name",
    has_broken_index: "is not JSON",
    has_only_pickles: r"pytorch_model\.bin is not a safetensors file; .*save_pretrained",
    has_other_shapes: r"of another shape than in the model: .*mlp\.\w+_proj\.weight: \(.*48.*\) instead of \(.*64",
    is_of_another_model: r"holds a BertForMaskedLM \(model_type bert\), but the model is a LlamaForCausalLM",
    has_no_tensor_of_the_model: "holds no tensor of the model",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_bad_weights_get_one_message_before_anything_is_made(damage, tmp_path, monkeypatch):
    kind, config = saved("llama", tmp_path)
    damage(tmp_path)
    monkeypatch.setattr("penstock.pipeline.pipeline.plan_model", lambda *_, **__: pytest.fail("went on"))
    with pytest.raises(PenstockError, match=DAMAGE[damage]):
        penstock.Pipeline(on_meta(kind, config), example=TEXT, lanes=2, weights=tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [("nowhere", "no such file or folder"), (7, "give a file or a folder"), ("model.pt", "only safetensors files")],
)
def test_bad_paths(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pt").write_bytes(b"x")
    with torch.device("meta"):
        model = Bare()
    with pytest.raises(PenstockError, match=message):
        scaled_step(model, given)


def open_files(folder):
    """Return the open files of this process in a folder."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return [target for link in links if link.is_symlink() and (target := str(link.readlink())).startswith(str(folder))]


def test_a_second_attempt_is_refused_like_the_first(tmp_path):
    """A pipeline left its empty buffers in the model, and the next one took their memory for the model's values."""
    save_file(Scaled().state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Scaled()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"no file holds scale.*empty_weights"):
            scaled_step(model, tmp_path)
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_a_model_on_meta_serves_several_pipelines(tmp_path):
    """Each pipeline has its own statistics, although the model is the same."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    batch = torch.randn(8, 8)
    for path in ("direct", "export", "replay"):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        options = {"example": batch, "loss": nn.MSELoss(), "lanes": 2, "cuts": [1], "micro_batches": 2}
        with (
            penstock.Pipeline(model, weights=tmp_path, capture_path=path, **options) as first,
            penstock.Pipeline(model, weights=tmp_path, capture_path=path, **options) as second,
        ):
            first.step(batch, batch)
            assert first.state_dict()["1.num_batches_tracked"] == 2
            assert second.state_dict()["1.num_batches_tracked"] == 0
            assert torch.equal(second.state_dict()["1.running_mean"], torch.zeros(8))
            expected = nn.functional.mse_loss(copy.deepcopy(plain).eval()(batch), batch)
            assert torch.isclose(second.evaluate(batch, batch), expected)


def test_no_file_stays_open_after_a_failure(tmp_path):
    save_file(nn.Linear(8, 8).state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    with pytest.raises(PenstockError):
        penstock.Pipeline(model, example=torch.randn(8, 8), loss=nn.MSELoss(), lanes=2, cuts=[7], weights=tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        open_weights(tmp_path)
    assert open_files(tmp_path) == []


class Normalised(nn.Module):
    """In evaluation, export cuts the normalised weight elsewhere than in training."""

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.first(x))


@pytest.mark.filterwarnings("ignore:some nodes cannot be measured")
def test_evaluation_may_use_tensors_in_another_stage(tmp_path):
    """A stage took them from the model, where they stay on meta."""
    plain = Normalised()
    save_file({name: tensor.clone() for name, tensor in plain.state_dict().items()}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Normalised()
    evaluated, stepped, _ = scaled_step(model, tmp_path)
    assert torch.isclose(evaluated, nn.functional.mse_loss(plain.eval()(INPUT), TARGET))
    assert torch.isclose(stepped, nn.functional.mse_loss(plain.train()(INPUT), TARGET), rtol=1e-2)


@pytest.mark.filterwarnings("ignore:the model cannot be profiled")
def test_a_model_with_layer_drop_is_captured_on_meta(tmp_path):
    """It compares a random number to choose its layers, and on meta the number had no value."""
    small = {"hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.OPTConfig(**small, ffn_dim=64, dropout=0.0, max_position_embeddings=32, **WORDS)
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path)
    plain = transformers.OPTForCausalLM.from_pretrained(tmp_path).train()
    model = on_meta(transformers.OPTForCausalLM, config)
    with penstock.Pipeline(model, example=TEXT, lanes=2, micro_batches=2, weights=tmp_path) as pipe:
        assert_same_step(pipe, plain, TEXT)


class Attribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), torch.arange(8.0)

    def forward(self, x):
        return self.linear(x) * self.scale


@pytest.mark.parametrize("path", ["auto", "replay"])
def test_a_plain_tensor_on_meta_is_refused_with_the_remedy(path, tmp_path):
    """The message was about a value that did not reach a stage."""
    with torch.device("meta"):
        model = nn.Sequential(Attribute(), Attribute())
    options = {"example": torch.randn(8, 8), "loss": nn.MSELoss(), "lanes": 2}
    with pytest.raises(CaptureError, match=r"0\.scale, 1\.scale: .*neither a parameter nor a buffer.*empty_weights"):
        penstock.Pipeline(model, capture_path=path, **options)


class Unlucky(nn.Linear):
    def reset_parameters(self):
        if dist.is_initialized() and dist.get_rank() == 1 and not self.weight.is_meta:
            raise RuntimeError("no luck")
        super().reset_parameters()


def fails_in_one(tmp_path, fault):
    """Run in each process; the processes stay alive until both have raised."""
    path = tmp_path / {"initialisation": "half.safetensors"}.get(fault, "all.safetensors")
    if dist.get_rank() == 1 and fault != "initialisation":
        path = None if fault == "argument" else tmp_path / "nowhere"
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), Unlucky(8, 8))
    batch = torch.randn(8, 8)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            penstock.Pipeline(model, example=batch, loss=nn.MSELoss(), micro_batches=2, cuts=[1], weights=path)
    except Exception as error:
        dist.barrier()
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("fault", "messages"),
    [
        ("file", ("CheckpointError: another process .*no such file", "CheckpointError: .*no such file")),
        ("argument", ("UsageError: weights: given in some .* lane 1",) * 2),
        ("initialisation", ("CheckpointError: another process .*no luck", "RuntimeError: no luck")),
    ],
)
def test_what_fails_in_one_process_is_raised_in_all(fault, messages, tmp_path):
    """The other process waited until the first one had ended."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    save_file(layers.state_dict(), tmp_path / "all.safetensors")
    save_file(layers[:1].state_dict(), tmp_path / "half.safetensors")
    for told, expected in zip(processes.run(fails_in_one, 2, tmp_path, fault), messages, strict=True):
        assert re.match(expected, told), told


def test_stage_modules_take_no_weights(tmp_path):
    with pytest.raises(UsageError, match="needs a single model"):
        scaled_step([nn.Linear(8, 8), nn.Linear(8, 8)], tmp_path)


def test_tied_tensors_with_two_values_are_refused(tmp_path):
    kind, config = saved("llama", tmp_path, shard="1GB")
    config.tie_word_embeddings = True
    with pytest.raises(CheckpointError, match=r"ties .*embed_tokens.*different values.*tie_word_embeddings=False"):
        penstock.Pipeline(on_meta(kind, config), example=TEXT, lanes=2, micro_batches=2, weights=tmp_path)


def test_what_the_model_does_not_have_is_named(tmp_path):
    kind, config = saved("llama", tmp_path, shard="1GB")
    config.num_hidden_layers = 2
    with pytest.warns(
        UserWarning, match=r"the model does not have model\.layers\.2\..* and 4 more; they are not loaded"
    ):
        pipe = penstock.Pipeline(on_meta(kind, config), example=TEXT, lanes=2, micro_batches=2, weights=tmp_path)
    pipe.close()


# ---- a model that is larger than the limit of a process

ROOM = 450 << 20  # bytes that a process may take beside what its imports took


def big_config():
    return transformers.LlamaConfig(
        hidden_size=1024, num_hidden_layers=12, num_attention_heads=8, intermediate_size=2816, vocab_size=1000
    )


def limited(folder, is_plain):
    """Run in each process: load and train with little memory; return the loss, or the name of the error."""
    import resource

    torch.manual_seed(0)
    torch.set_num_threads(1)
    batch = {"input_ids": TOKENS, "labels": TOKENS}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(big_config())
    kilobytes = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    resource.setrlimit(resource.RLIMIT_AS, (kilobytes * 1024 + ROOM,) * 2)
    try:
        if is_plain:
            return float(transformers.LlamaForCausalLM.from_pretrained(folder)(**batch).loss)
        options = {"micro_batches": 2, "weights": folder, "keep": "recompute", "analytic": "cpu"}
        with penstock.Pipeline(model, example=batch, **options) as pipe:
            return float(pipe.evaluate(batch))
    except (MemoryError, RuntimeError, OSError) as error:
        return type(error).__name__


@pytest.mark.slow
def test_two_processes_hold_what_one_cannot(tmp_path):
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(big_config())
    plain.save_pretrained(tmp_path, max_shard_size="100MB")
    with torch.no_grad():
        loss = float(plain.eval()(input_ids=TOKENS, labels=TOKENS).loss)
    assert sum(p.nbytes for p in plain.parameters()) > ROOM
    del plain
    (alone,) = processes.run(limited, 1, tmp_path, True)
    assert isinstance(alone, str)
    assert processes.run(limited, 2, tmp_path, False) == pytest.approx([loss, loss], rel=1e-4)
