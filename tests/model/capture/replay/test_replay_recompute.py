"""Recompute by replay, where control flow depends on data."""

import copy

import pytest
import torch

from penstock import Pipeline
from transparency import Layers, rows


class Branches(Layers):
    """The second forward has gradients on, so more tensors live at the cut, and it sent more than the first."""

    def forward(self, x):
        y = torch.tanh(self.layers[0](x))
        kept = y * 2
        if y.sum().item() > 0:
            y = y * 2
        y = torch.tanh(self.layers[1](y)) + kept
        if y.sum().item() > 0:
            y = y + 1
        return self.layers[3](torch.tanh(self.layers[2](y))) + kept


@pytest.mark.parametrize("cuts", [("layers.2",), ("layers.1", "layers.2", "layers.3")], ids=["2 stages", "4 stages"])
@pytest.mark.parametrize("keep", ["recompute", "except_last"])
def test_branches_on_data_are_recomputed(keep, cuts):
    model, batch, loss = Branches(), rows(8), torch.nn.functional.mse_loss
    plain = copy.deepcopy(model)
    with Pipeline(
        model, example=batch, loss=loss, lanes=len(cuts) + 1, micro_batches=4, cuts=cuts, keep=keep,
        capture_path="replay",
    ) as pipe:  # fmt: skip
        pipe.step(batch, batch)
        pipe.step(batch, batch)
    for part in 2 * batch.chunk(4):
        (loss(plain(part), part) / 4).backward()
    gradients = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-12, atol=1e-14)
