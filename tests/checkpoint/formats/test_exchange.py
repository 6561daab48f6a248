"""Foreign forms: weights go to and come from what others read, and nothing that they hold is run."""

import ast
import io
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import penstock
from checkpoint_cases import Odd, Training
from penstock.checkpoint.formats.dcp import read_dcp
from penstock.checkpoint.formats.exchange import FORMS, export_checkpoint, import_weights
from penstock.errors import CheckpointError, OutputError, UsageError
from penstock.tensor_files.manifest import read_manifest
from test_architecture import FILES


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a checkpoint of a model with tied modules, and its state."""
    folder = tmp_path_factory.mktemp("saved")
    with Training(folder, model="odd") as training:
        training.run(0, 2)
        training.checkpoints.save(2, wait=True)
        state = {name: tensor.clone() for name, tensor in training.pipe.state_dict().items()}
    return read_manifest(folder / "checkpoint-000002"), state


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_a_safetensors_file_holds_the_whole_state_dict(saved, tmp_path):
    manifest, state = saved
    moved = export_checkpoint(manifest, tmp_path / "model.safetensors", form="safetensors")
    same(load_file(moved.path), state)
    model = Odd()
    model.load_state_dict(load_file(moved.path))
    assert moved.num_tensors == len(state)


def test_a_checkpoint_is_a_hugging_face_folder_and_so_is_its_export(saved, tmp_path):
    """The folder itself has the layout; the export has only what from_pretrained looks for."""
    manifest, state = saved
    (tmp_path / "config.json").write_text('{"model_type": "odd"}')
    export_checkpoint(manifest, tmp_path / "out", form="huggingface", config=tmp_path / "config.json")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]  # fmt: skip
    for folder in (tmp_path / "out", manifest.folder):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        read = {name: load_file(folder / file)[name] for name, file in index["weight_map"].items()}
        same(read | {"last.weight": read["first.weight"]}, state)
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in read.values())


def test_transformers_opens_a_checkpoint_directly(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(50, (4, 8))
    example = {"input_ids": tokens, "labels": tokens}
    with penstock.Pipeline(model, example=example, lanes=2, micro_batches=2, analytic="cpu") as pipe:
        pipe.step(example)
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.add_(0.01)
        with penstock.Checkpoints(tmp_path, pipe) as checkpoints:
            checkpoints.save(1, wait=True)
        wanted = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    config.save_pretrained(tmp_path / "checkpoint-000001")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-000001")
    same({name: t for name, t in loaded.state_dict().items() if name in wanted}, wanted)
    assert "lm_head.weight" in wanted


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_what_is_exported_as_dcp(saved, tmp_path):
    manifest, state = saved
    export_checkpoint(manifest, tmp_path / "out", form="dcp")
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(target, checkpoint_id=tmp_path / "out", no_dist=True)
    same(target, state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_of_others_is_read(tmp_path):
    """Several files and kinds; what is no tensor is left out, and pickles within are not opened."""
    state = {
        "model": {"w": torch.randn(5, 3), "half": torch.randn(4).bfloat16(), "none": torch.ones(0, 2)},
        "scalar": torch.tensor(3, dtype=torch.int64),
        "step": 5,
        "words": {"a": [1, "x"]},
    }
    writer = dcp.FileSystemWriter(tmp_path, single_file_per_rank=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    wanted = {f"model.{name}": t for name, t in state["model"].items()} | {"scalar": state["scalar"]}
    same(read_dcp(tmp_path), wanted)
    moved = import_weights(tmp_path, tmp_path / "run", prefix="model.")
    same(load_file(moved.path / "model-00001-of-00001.safetensors"), state["model"])


@pytest.mark.parametrize("form", [*FORMS, "pt", "nested pt"])
def test_what_is_imported_is_taken_up(saved, tmp_path, form):
    manifest, state = saved
    key = None
    if form in FORMS:
        source = export_checkpoint(manifest, tmp_path / f"weights.{form}", form=form).path
    else:
        key = "state.model" if form == "nested pt" else None
        source = tmp_path / "weights.pt"
        torch.save(state if key is None else {"state": {"model": state}, "epoch": 3}, source)
    moved = import_weights(source, tmp_path / "run", step=7, key=key)
    assert moved.path == tmp_path / "run" / "checkpoint-000007"
    with Training(tmp_path / "run", model="odd", lanes=3) as training:
        restored = training.checkpoints.restore()
        assert restored.step == 7
        same(training.pipe.state_dict(), state)
        training.run(7, 8)
        training.checkpoints.save(8, wait=True)
        assert training.checkpoints.steps() == [7, 8]


def test_nothing_is_written_over(saved, tmp_path):
    manifest, _ = saved
    for form in FORMS:
        target = tmp_path / form
        target.write_text("mine")
        with pytest.raises(OutputError, match="already exists"):
            export_checkpoint(manifest, target, form=form)
        assert target.read_text() == "mine"
        export_checkpoint(manifest, target, form=form, force=True)
        export_checkpoint(manifest, target, form=form, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(FORMS), "nothing is left beside"
    import_weights(tmp_path / "huggingface", tmp_path / "run")
    with pytest.raises(OutputError, match="already exists"):
        import_weights(tmp_path / "huggingface", tmp_path / "run")


def test_a_damaged_checkpoint_is_not_exported(saved, tmp_path):
    manifest, _ = saved
    folder = shutil.copytree(manifest.folder, tmp_path / manifest.folder.name)
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    for form in FORMS:
        with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: tensor"):
            export_checkpoint(read_manifest(folder), tmp_path / "out", form=form)
        assert sorted(p.name for p in tmp_path.iterdir()) == [folder.name]


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return open, (str(self.canary), "w")


def _pt(folder, payload):
    torch.save({"w": torch.ones(2), "x": payload}, folder / "evil.pt")
    return folder / "evil.pt"


def _old_pt(folder, payload):
    torch.save({"w": payload}, folder / "old.pt", _use_new_zipfile_serialization=False)
    return folder / "old.pt"


def _bare_pickle(folder, payload):
    (folder / "bare.bin").write_bytes(pickle.dumps(payload))
    return folder / "bare.bin"


def _safetensors(folder, payload):
    (folder / "model.safetensors").write_bytes(pickle.dumps(payload))
    return folder / "model.safetensors"


def _huggingface(folder, payload):
    _safetensors(folder, payload)
    return folder


def _dcp(folder, payload):
    (folder / ".metadata").write_bytes(pickle.dumps(payload))
    return folder


def _dcp_within(folder, payload):
    """Hide it in a good description."""
    _save_dcp(folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = {"x": payload}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def _dcp_tensor(folder, payload):
    """Hide it where a tensor should be."""
    _save_dcp(folder)
    content = io.BytesIO()
    torch.save(payload, content)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        (folder / info.relative_path).write_bytes(content.getvalue())
        info.offset, info.length = 0, len(content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def _save_dcp(folder):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(2)}, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize(
    "make", [_pt, _old_pt, _bare_pickle, _safetensors, _huggingface, _dcp, _dcp_within, _dcp_tensor]
)
def test_canaries_stay_alive(tmp_path, make):
    canary, folder = tmp_path / "canary", tmp_path / "evil"
    folder.mkdir()
    source = make(folder, Payload(canary))
    with pytest.raises(CheckpointError) as caught:
        import_weights(source, tmp_path / "run")
    assert not canary.exists()
    assert str(source) in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_canary_would_sing(tmp_path):
    """The payload does run where it is unpickled: the tests above can fail."""
    pickle.loads(pickle.dumps(Payload(tmp_path / "canary"))).close()
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_names_beyond_the_description_are_refused_in_every_protocol(tmp_path, protocol):
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"x": os.system}, protocol=protocol))
    with pytest.raises(CheckpointError, match=r"refused without running it: (posix|nt)\.system is not allowed"):
        read_dcp(tmp_path)


def test_descriptions_that_lie(tmp_path):
    """Names that lead out, sizes that would fill the memory, and files that end too soon."""
    _save_dcp(tmp_path)
    good = (tmp_path / ".metadata").read_bytes()

    def lie(change, message):
        metadata = pickle.loads(good)
        change(metadata)
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=message):
            read_dcp(tmp_path)

    def info(metadata):
        return next(iter(metadata.storage_data.values()))

    def huge(metadata):
        told = metadata.state_dict_metadata["w"]
        told.size = told.chunks[0].sizes = torch.Size([1 << 50])

    lie(lambda m: setattr(info(m), "relative_path", "../x"), "is not a valid file name")
    lie(lambda m: setattr(info(m), "length", 1 << 50), "bytes, and")
    lie(lambda m: setattr(info(m), "offset", -5), "bytes, and")
    lie(huge, "more than are stored")
    lie(lambda m: setattr(m, "storage_data", {}), "do not cover it")
    lie(lambda m: setattr(m, "state_dict_metadata", 3), "is not a valid description")
    for cut in (0, 10, len(good) // 2):
        (tmp_path / ".metadata").write_bytes(good[:cut])
        with pytest.raises(CheckpointError):
            read_dcp(tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: f / "nothing", "no such file"),
        (lambda f: f, "contains neither"),
        (lambda f: (f / "x.safetensors").write_bytes(b"\xff" * 20) and f / "x.safetensors", "not a valid safetensors"),
        (lambda f: torch.save([1, 2], f / "x.pt") or f / "x.pt", "is not a state dict; it contains: list"),
        (lambda f: torch.save({"m": {}, "epoch": 1}, f / "x.pt") or f / "x.pt", "it contains: m, epoch.*--key"),
        (lambda f: zipfile.ZipFile(f / "x.pt", "w").close() or f / "x.pt", "refused"),
    ],
)
def test_sources_that_cannot_be_read(tmp_path, make, message):
    with pytest.raises(CheckpointError, match=message):
        import_weights(make(tmp_path), tmp_path / "run")


def test_an_index_that_leads_out_is_refused(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    (tmp_path / "hf").mkdir()
    for name in ("../w.safetensors", str(tmp_path / "w.safetensors")):
        (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(CheckpointError, match="is not a valid file name"):
            import_weights(tmp_path / "hf", tmp_path / "run")


def test_words_that_cannot_be(saved, tmp_path):
    manifest, _ = saved
    with pytest.raises(UsageError, match="is not one of"):
        export_checkpoint(manifest, tmp_path / "x", form="onnx")
    with pytest.raises(UsageError, match="config"):
        export_checkpoint(manifest, tmp_path / "x", form="dcp", config=tmp_path)
    with pytest.raises(UsageError, match="is already a Penstock checkpoint"):
        import_weights(manifest.folder, tmp_path / "run")


# ---- nothing in the package can run what it reads


def unsafe_calls(tree):
    """Yield the calls in a source file that could run what they read."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        text = ast.unparse(node.func)
        words = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        last = text.rsplit(".", 1)[-1]
        if text in ("eval", "exec", "__import__") or text.startswith(("pickle.", "cPickle.", "dill.", "joblib.")):
            yield text
        if last in ("Unpickler", "unsafe_load") or text in ("yaml.load", "marshal.loads", "shelve.open"):
            yield text
        if text == "torch.load" and words.get("weights_only") != "True":
            yield text
        if words.get("weights_only") == "False" or words.get("allow_pickle") == "True":
            yield text
        if last in ("all_gather_object", "broadcast_object_list", "send_object_list", "scatter_object_list"):
            yield text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_source_file_can_run_what_it_reads(path):
    assert list(unsafe_calls(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "line",
    [
        "eval(x)", "pickle.load(f)", "torch.load(f)", "torch.load(f, weights_only=False)", "yaml.load(f)", "exec(x)",
        "np.load(f, allow_pickle=True)", "dist.all_gather_object(a, b)", "pickle.Unpickler(f)",
    ],
)  # fmt: skip
def test_the_ban_finds_what_it_bans(line):
    assert list(unsafe_calls(ast.parse(line)))


def test_torch_load_is_in_one_place():
    users = [path for path in FILES if "torch.load(" in path.read_text()]
    assert [Path(path).name for path in users] == ["dcp.py"]
