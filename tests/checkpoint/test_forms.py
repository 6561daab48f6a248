"""Forms: tensors of every dtype as safetensors, and states of every kind as JSON, come back as they were."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from penstock.checkpoint.state_as_json import from_plain, to_plain
from penstock.errors import CheckpointError, UsageError
from penstock.tensor_files.disk import Disk
from penstock.tensor_files.tensor_shards import SAFE_NAMES, Shard, write_shard


def tensors():
    """Yield a tensor of every dtype and of odd shapes."""
    for number, dtype in enumerate(SAFE_NAMES):
        for shape in ((), (0, 3), (1,), (3, 2, 5)):
            yield f"{number} {shape}", torch.arange(math.prod(shape)).reshape(shape).to(dtype)


def test_every_dtype_and_shape_is_stored_as_safetensors_reads_it(tmp_path):
    path, wanted = tmp_path / "x.safetensors", dict(tensors())
    entry = write_shard(Disk(), path, wanted)
    assert entry["bytes"] == path.stat().st_size
    with Shard(path, json.loads(json.dumps(entry))) as shard, safe_open(path, framework="pt") as other:
        assert set(other.keys()) == wanted.keys()
        for name, tensor in wanted.items():
            for found in (shard.read(name), other.get_tensor(name)):
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
                assert bytes(found.reshape(-1).view(torch.uint8).numpy()) == bytes(
                    tensor.reshape(-1).view(torch.uint8).numpy()
                )


def test_no_tensors_at_all(tmp_path):
    entry = write_shard(Disk(), tmp_path / "x.safetensors", {})
    with Shard(tmp_path / "x.safetensors", entry) as shard:
        assert shard.tensors == {}


def test_tensors_larger_than_what_is_written_at_once(tmp_path):
    wanted = torch.randn(3 << 20)  # 12 MiB
    entry = write_shard(Disk(), tmp_path / "x.safetensors", {"w": wanted})
    with Shard(tmp_path / "x.safetensors", entry) as shard:
        assert torch.equal(shard.read("w"), wanted)


SIMPLE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
STATES = st.recursive(
    SIMPLE,
    lambda inner: (
        st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner, inner) | st.just(Counter({3: 1, 5: 2}))
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(STATES)
def test_states_come_back_as_they_were(state):
    text = json.dumps(to_plain(state, "state"), allow_nan=False)
    found = from_plain(json.loads(text))
    assert found == state
    assert type(found) is type(state)


def test_numbers_that_json_lacks_and_tensors():
    state = {"nan": float("nan"), "inf": -math.inf, "x": torch.ones(2, 0), "y": torch.tensor(3.5, dtype=torch.bfloat16)}
    state["array"] = np.arange(6, dtype=np.uint32).reshape(2, 3)
    state["number"] = np.float64(0.1)
    found = from_plain(json.loads(json.dumps(to_plain(state, "state"), allow_nan=False)))
    assert math.isnan(found["nan"])
    assert found["inf"] == -math.inf
    assert found["number"] == 0.1
    assert found["array"].dtype == np.uint32
    assert (found["array"] == state["array"]).all()
    for name in ("x", "y"):
        assert found[name].dtype == state[name].dtype
        assert torch.equal(found[name], state[name])


@pytest.mark.parametrize("thing", [object(), {1, 2}, lambda: 0, torch.float32, {"a": [print]}])
def test_what_is_neither_number_nor_text_is_named(thing):
    with pytest.raises(UsageError, match="here"):
        to_plain(thing, "here")


@pytest.mark.parametrize(
    "plain",
    [
        {"$tensor": ["F64", [2], "AAAA"]}, {"$tensor": ["PICKLE", [], ""]}, {"$tensor": 3}, {"$what": 1},
        {"$bytes": "!"}, {"$stored": "x"}, {"$map": [[[], 1]]}, {"$float": "x"},
    ],
)  # fmt: skip
def test_what_was_not_written_so_is_refused(plain):
    with pytest.raises(CheckpointError, match="cannot be read"):
        from_plain(plain)
