"""Warnings name the line of the user's code, however deep in Penstock they come from."""

import warnings

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import warn_user


def test_a_warning_names_the_users_line():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_user("something")
    assert [warning.filename for warning in found] == [__file__]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) - x.mean(0)  # mixes the samples of a batch


def test_a_warning_of_the_constructor_names_the_users_line():
    x = torch.randn(8, 4)
    with pytest.warns(UserWarning, match="only one micro-batch") as found:
        penstock.Pipeline(Counting(), example=x, loss=nn.MSELoss(), lanes=2).close()
    assert {warning.filename for warning in found} == {__file__}
