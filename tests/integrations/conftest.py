"""What tests of the integrations share: one thread for torch, as in the lanes."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """On a busy machine, threads that wait for each other make such small models slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
