"""Slot layers give a model the same keys and values as the layers of transformers."""

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from penstock.infer.generation.slot_layers import PromptWindowLayer, slot_layer


def states(tokens, rows=2):
    return torch.randn(rows, 3, tokens, 4)


@pytest.mark.parametrize("window", [0, 2, 5, 9])
@pytest.mark.parametrize("prompt", [1, 4, 5, 12])
def test_each_token_sees_what_it_sees_in_transformers(window, prompt):
    torch.manual_seed(0)
    plain = DynamicSlidingWindowLayer(window) if window else DynamicLayer()
    ours = PromptWindowLayer(window) if window else DynamicLayer()
    first = states(prompt), states(prompt)
    assert torch.equal(plain.update(*first)[0], ours.update(*first)[0])
    capacity = prompt + 150
    rows = [(ours.keys[row], ours.values[row]) for row in range(2)]
    ours = slot_layer(rows, window, prompt, capacity)
    memory = ours.slots.memory[0].data_ptr()
    for _ in range(150):
        new = states(1), states(1)
        assert plain.get_mask_sizes(1) == ours.get_mask_sizes(1)
        for theirs, found in zip(plain.update(*new), ours.update(*new), strict=True):
            assert torch.equal(theirs, found)
        assert plain.get_seq_length() == ours.get_seq_length()
    assert ours.slots.memory[0].data_ptr() == memory  # nothing was allocated


def test_rows_of_different_lengths_end_at_the_same_column():
    long, short = torch.randn(3, 6, 4), torch.randn(3, 2, 4)
    layer = slot_layer([(long, long), (short, short)], 0, 6, 10)
    assert torch.equal(layer.keys[0], long)
    assert torch.equal(layer.keys[1, :, 4:], short)
    assert not layer.keys[1, :, :4].any()
