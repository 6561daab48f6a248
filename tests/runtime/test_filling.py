"""Filling: whatever a tensor is like, its values arrive; those of some megabytes by the hand of one thread."""

import pytest
import torch
from torch import nn

from penstock.runtime import filling
from penstock.runtime.filling import fill

IMAGES = torch.arange(16 * 3 * 32 * 32, dtype=torch.float32).view(16, 3, 32, 32)  # more than torch gives to one thread
MANY = (4 << 20) + 1


@pytest.fixture
def by_hand(monkeypatch):
    """Return the sizes of copies that no thread of torch's had a part in."""
    sizes = []
    move = filling.memmove

    def noted(to, of, size):
        sizes.append(size)
        move(to, of, size)

    monkeypatch.setattr(filling, "memmove", noted)
    return sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64])
def test_dense_tensors_are_copied_by_one_thread(by_hand, dtype):
    for tensor in (IMAGES.to(dtype), IMAGES.to(dtype).to(memory_format=torch.channels_last), IMAGES.to(dtype).mT):
        room = torch.empty_like(tensor)
        assert fill(room, tensor) is room
        assert torch.equal(room, tensor)
    assert by_hand == [IMAGES.numel() * dtype.itemsize] * 3


class Odd(torch.Tensor):
    """A tensor that has its own ways."""


@pytest.mark.parametrize(
    ("tensor", "room"),
    [
        pytest.param(IMAGES, torch.empty_like(IMAGES, memory_format=torch.channels_last), id="another order"),
        pytest.param(IMAGES, torch.empty_like(IMAGES, dtype=torch.float64), id="another type"),
        pytest.param(IMAGES[:, :1].expand(16, 3, 32, 32), torch.empty_like(IMAGES), id="repeated"),
        pytest.param(IMAGES.repeat(2, 1, 1, 1)[::2], torch.empty_like(IMAGES), id="with gaps"),
        pytest.param(IMAGES[:1].expand(16, 3, 32, 32), torch.empty_like(IMAGES), id="one for all"),
        pytest.param(torch.complex(IMAGES, IMAGES).conj(), torch.empty_like(IMAGES, dtype=torch.cfloat), id="conj"),
        pytest.param(torch.complex(IMAGES, IMAGES).conj().imag, torch.empty_like(IMAGES), id="negative"),
        pytest.param(IMAGES[:2], torch.empty_like(IMAGES[:2]), id="few"),
        pytest.param(torch.ones(MANY, dtype=torch.uint8), torch.empty(MANY, dtype=torch.uint8), id="many"),
        pytest.param(torch.ones(()), torch.empty(()), id="one number"),
        pytest.param(torch._efficientzerotensor(IMAGES.shape), torch.empty_like(IMAGES), id="zeros without memory"),
        pytest.param(torch.ones(0, 3), torch.empty(0, 3), id="none"),
        pytest.param(IMAGES.as_subclass(Odd), torch.empty_like(IMAGES), id="a class of its own"),
    ],
)  # fmt: skip
def test_all_others_as_torch_does_it(by_hand, tensor, room):
    assert torch.equal(fill(room, tensor), tensor)
    assert not by_hand


def test_one_that_wants_a_gradient_is_copied_without(by_hand):
    for tensor in (IMAGES.clone().requires_grad_(), nn.Parameter(IMAGES.clone()), IMAGES[:2].clone().requires_grad_()):
        room = fill(torch.empty_like(tensor, requires_grad=False), tensor)
        assert not room.requires_grad
        assert torch.equal(room, tensor)
    assert len(by_hand) == 2


def test_a_part_of_a_tensor_is_copied_from_where_it_begins(by_hand):
    part = IMAGES[3:]
    assert torch.equal(fill(torch.empty_like(part), part), part)
    assert len(by_hand) == 1
