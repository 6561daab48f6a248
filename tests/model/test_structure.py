"""What is taken apart is put together again, with other tensors."""

import dataclasses

import pytest
import torch

from penstock.model.structure import flatten, rebuild


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    name: str = "a"


@dataclasses.dataclass(slots=True, frozen=True)
class Frozen:
    x: torch.Tensor
    parts: list = dataclasses.field(default_factory=list)


@pytest.mark.parametrize("make", [Slotted, Frozen])
def test_dataclasses_with_slots(make):
    given = {"batch": make(torch.ones(1))}
    tensors, template = flatten(given)
    assert len(tensors) == 1
    other = rebuild(template, [torch.zeros(1)])["batch"]
    assert type(other) is make
    assert other.x == 0
    assert given["batch"].x == 1


def test_slots_that_hold_more():
    tensors, template = flatten(Frozen(torch.ones(1), [torch.ones(2), 3]))
    made = rebuild(template, [tensor + 1 for tensor in tensors])
    assert made.x == 2
    assert made.parts[0].tolist() == [2, 2]
    assert made.parts[1] == 3
