"""Copies of tensors in host memory: by several threads, whole, and an error where one cannot be copied."""

import pytest
import torch

from penstock.checkpoint.staging import Staging


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [[], [0], [5], [1, 1000, 2, 3, 0, 7], [1000, 1, 1, 1]])
def test_all_are_copied_and_memory_is_used_again(num_threads, sizes):
    staging = Staging(num_threads)
    places = {}
    for round_number in range(3):
        tensors = {str(number): torch.randn(size) for number, size in enumerate(sizes)}
        copies, waits = staging.copy(tensors)
        assert not waits
        assert copies.keys() == tensors.keys()
        assert all(torch.equal(copies[name], tensor) for name, tensor in tensors.items())
        assert all(copies[name] is not tensor for name, tensor in tensors.items())
        now = {name: copy.data_ptr() for name, copy in copies.items()}
        assert round_number == 0 or now == places
        places = now


@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_cannot_be_copied_is_an_error(num_threads):
    with pytest.raises(RuntimeError, match="sparse"):
        Staging(num_threads).copy({"dense": torch.ones(4), "sparse": torch.eye(4).to_sparse()})
