"""States of optimizers, save after save: what is known of them from the last save is only used while it is true."""

import pytest
import torch
from torch import nn

from penstock.checkpoint.optimizer_states import Optimizers
from penstock.errors import UsageError


def collected(optimizers):
    found = optimizers.collect(lambda name: True)
    return found.params["w"], found.tensors["w"]


def test_states_that_change_their_form():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight])
    optimizers = Optimizers([optimizer], lambda: [("w", weight)])
    assert "w" not in optimizers.collect(lambda name: True).params
    first, second = torch.zeros(3), torch.ones(3)
    for state in (
        {"a": first, "b": second},
        {"a": second, "b": first},  # other tensors under the same keys
        {"b": first, "a": second},  # the same keys in another order
        {"a": first, "b": 2},  # a number where a tensor was
        {"a": first, "b": None},
        {"a": first, "b": [first, second]},
        {"a": nn.Parameter(first), "b": second},
        {"a": first, "b": second},
        {"c": first},
    ):
        for _ in range(2):
            optimizer.state[weight] = state
            params, tensors = collected(optimizers)
            assert list(params) == list(state)
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    assert params[key] == {"$stored": f"w/{key}"}
                    assert tensors[f"w/{key}"] is value
                elif isinstance(value, list):
                    assert params[key] == [{"$stored": f"w/{key}[0]"}, {"$stored": f"w/{key}[1]"}]
                else:
                    assert params[key] == value


def test_keys_that_are_written_alike():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight])
    optimizer.state[weight] = {1: torch.zeros(3), "1": torch.ones(3)}
    optimizers = Optimizers([optimizer], lambda: [("w", weight)])
    for _ in range(2):
        with pytest.raises(UsageError, match="w/1: two tensors of the optimizer have this name"):
            collected(optimizers)
