"""A training on a GPU: the plain loop's losses, resumed in the middle, and split when its memory runs out."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock
from pipelines import data, sequence

CUDA = pytest.param(
    "cuda:0", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)


def batches():
    return DataLoader(TensorDataset(*data(24)), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))


def make(folder, device, *, model=None, callbacks=(), graphs="auto", micro_batches=4, **asked):
    torch.manual_seed(5)
    model = sequence(8) if model is None else model
    pipe = penstock.Pipeline(
        model, example=data(8)[0], loss=nn.functional.mse_loss, devices=[device] * 2, micro_batches=micro_batches,
        cuts=[] if isinstance(model, list) else [8], graphs=graphs,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    losses = {}

    class Noted(penstock.Callback):
        strict = True

        def on_step_end(self, trainer, reading):
            losses[reading.step] = reading.loss

    trainer = penstock.Trainer(
        pipe, optimizer, batches(), folder=folder, callbacks=[Noted(), *callbacks], view=False, log_every=1,
        checkpoint_every=2, **asked,
    )  # fmt: skip
    return pipe, trainer, losses


def plain(steps):
    torch.manual_seed(5)
    model = sequence(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses, loader = {}, batches()
    while len(losses) < steps:
        for batch, target in loader:
            if len(losses) == steps:
                break
            loss = nn.functional.mse_loss(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[len(losses) + 1] = float(loss.detach())
    return losses


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_training_of_a_device_has_the_losses_of_the_plain_loop(tmp_path, device):
    """Steps run as CUDA graphs from the third on; a resume goes on in the middle of an epoch."""
    pipe, trainer, losses = make(tmp_path / "run", device, steps=5, record_every=2, validation=batches())
    with pipe:
        assert trainer.fit().is_done
        assert len(trainer.reading.lane_bytes) == 2
        assert all(size > 0 for size in trainer.reading.lane_bytes)
    pipe, trainer, more = make(tmp_path / "run", device, steps=9)
    with pipe:
        assert trainer.fit().resumed_from == 5
    assert losses | more == pytest.approx(plain(9), rel=1e-9)


class Hungry(nn.Module):
    """Takes, for a moment, memory for each sample that it is given, once it is told how much."""

    bytes_per_sample = 0

    def forward(self, x):
        torch.empty(len(x) * Hungry.bytes_per_sample, dtype=torch.uint8, device=x.device)
        return x * 1.0


SHARE = 0.05  # of the GPU's memory that the test may have: there may be others beside it


class Switch(penstock.Callback):
    """From a step on four samples at once want more memory than there is, and two do not, or one."""

    strict = True

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, trainer):
        if trainer.step == self.step:
            Hungry.bytes_per_sample = int(torch.cuda.get_device_properties(0).total_memory * SHARE * 0.3)


@pytest.fixture
def little_memory():
    gc.collect()  # what earlier tests left in this process counts, too: cuBLAS has a workspace for each stream
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(SHARE)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    Hungry.bytes_per_sample = 0
    torch.cuda.empty_cache()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("step", "graphs"), [(0, "auto"), (1, "auto"), (2, False)])
@pytest.mark.filterwarnings("ignore:no CUDA graphs")  # where not even one sample fits beside what is kept
def test_memory_that_runs_out_splits_the_step(tmp_path, little_memory, step, graphs):
    """In a step that runs eagerly, or in the second, which is captured as graphs."""
    torch.manual_seed(5)
    layers = sequence(8)
    pipe, trainer, losses = make(
        tmp_path / "run", "cuda:0", steps=4, model=[layers[:8], nn.Sequential(Hungry(), *layers[8:])],
        callbacks=[Switch(step)], graphs=graphs, micro_batches=2,
    )  # fmt: skip
    with pipe, pytest.warns(UserWarning, match="memory ran out"):
        assert trainer.fit().is_done
    assert pipe.schedule.num_mbs in (4, 8)  # twice where torch's allocator has no piece that is large enough
    assert losses == pytest.approx(plain(4), rel=1e-9)
