"""Copies of tensors in host memory: by several threads, whole, and an error where one cannot be copied."""

import pytest
import torch

from penstock.checkpoint import host_copies as staging_module
from penstock.checkpoint.host_copies import Staging, _split_evenly


@pytest.mark.parametrize("has_threads", [True, False])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [[], [0], [5], [1, 1000, 2, 3, 0, 7], [40000, 1, 1, 1], [40000, 50000, 3, 90000]])
def test_all_are_copied_and_memory_is_used_again(num_threads, sizes, has_threads, monkeypatch):
    monkeypatch.setattr(staging_module, "_has_threads", lambda: has_threads)
    staging = Staging(num_threads)
    places = {}
    rounds = [{str(number): torch.randn(size) for number, size in enumerate(sizes)} for _ in range(2)]
    for round_number, tensors in enumerate([rounds[0], rounds[0], rounds[1]]):
        files, waits = staging.copy({"a": tensors, "b": {"0": torch.full((3,), 1.0 * round_number)}})
        assert not waits
        assert files["b"]["0"].tolist() == [round_number] * 3
        copies = files["a"]
        assert copies.keys() == tensors.keys()
        assert all(torch.equal(copies[name], tensor) for name, tensor in tensors.items())
        assert all(copies[name] is not tensor for name, tensor in tensors.items())
        now = {name: copy.data_ptr() for name, copy in copies.items()}
        assert round_number == 0 or now == places
        places = now


@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_cannot_be_copied_is_an_error(num_threads):
    with pytest.raises(RuntimeError, match="sparse"):
        Staging(num_threads).copy({"a": {"dense": torch.ones(4), "sparse": torch.eye(4).to_sparse()}})


@pytest.mark.parametrize("num_threads", [1, 2])
def test_memory_that_does_not_fit_any_more_is_made_anew(num_threads):
    staging = Staging(num_threads)
    for tensor in (torch.ones(4), torch.ones(4).double(), torch.ones(2, 2).double(), torch.ones(5).double()):
        copies, _ = staging.copy({"a": {"x": tensor, "same": torch.zeros(3)}})
        assert torch.equal(copies["a"]["x"], tensor)
        assert copies["a"]["x"].dtype == tensor.dtype


def test_parts_are_even():
    sizes = [5, 1, 1, 1, 4, 4, 0, 8]
    for count in range(1, 12):
        parts = _split_evenly(sizes, count)
        assert len(parts) == count
        assert [size for part in parts for size in sizes[part]] == sizes
    assert [sum(sizes[part]) for part in _split_evenly(sizes, 2)] == [12, 12]
    assert [[1][part] for part in _split_evenly([], 3)] == [[], [], []]


@pytest.mark.parametrize("change", ["other", "fewer", "more", "order", "size", "type", "file"])
def test_what_changes_from_save_to_save(change):
    staging = Staging()
    files = {"a": {"x": torch.ones(3), "y": torch.ones(4, 5)}, "b": {"x": torch.zeros(3)}}
    staging.copy(files)
    own = files["a"]
    match change:
        case "other":
            own["x"] = torch.full((3,), 2.0)
        case "fewer":
            del own["x"]
        case "more":
            own["w"] = torch.full((3,), 2.0)
        case "order":
            files["a"] = dict(reversed(own.items()))
        case "size":
            own["x"].data = torch.full((5,), 2.0)
        case "type":
            own["x"].data = own["x"].double()
        case "file":
            files = {"b": own, "a": files["b"]}
    for _ in range(2):
        copies, _ = staging.copy(files)
        assert list(copies) == list(files)
        for file, tensors in files.items():
            assert list(copies[file]) == list(tensors)
            assert all(torch.equal(copies[file][name], tensor) for name, tensor in tensors.items())
            assert all(copies[file][name].dtype == tensor.dtype for name, tensor in tensors.items())


class Halved(torch.Tensor):
    """Numbers at half of their size, that know how to be copied one by one."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch._foreach_copy_:
            raise NotImplementedError("no rule")
        if function is torch.Tensor.copy_:
            place, tensor = args
            return place.copy_(tensor.as_subclass(torch.Tensor) * 2)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_tensors_of_other_classes_are_copied_one_by_one():
    given = {
        "x": torch.full((3,), 0.25).as_subclass(Halved),
        "y": torch.ones(2),
        "z": torch.nn.Parameter(torch.ones(1)),
    }
    copies, _ = Staging().copy({"a": given})
    assert copies["a"]["x"].tolist() == [0.5] * 3
    assert copies["a"]["y"].tolist() == [1.0] * 2
    assert copies["a"]["z"].tolist() == [1.0]
