"""One batch, from `Pipeline.step` to its gradients: the files that it crosses, as architecture.md lists them."""

import re
import sys
from pathlib import Path

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import penstock

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(penstock.__file__).parent
MOST_FILES = 12


def callers():
    """Return the files of Penstock that called what runs now, in this thread."""
    frame, found = sys._getframe(1), set()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if SOURCE in path.parents:
            found.add(str(path.relative_to(SOURCE)))
        frame = frame.f_back
    return found


class Seen(nn.Linear):
    """A layer that notes who computes it, and who computes its gradient."""

    def __init__(self, files):
        super().__init__(4, 4)
        self.files = files
        self.weight.register_post_accumulate_grad_hook(lambda _: files.update(callers()))

    def forward(self, x):
        self.files.update(callers())
        return super().forward(x)


class Noting(TorchFunctionMode):
    """Notes who calls torch in the user's thread, which cuts the batch and adds up the losses."""

    def __init__(self, files):
        super().__init__()
        self.files = files

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.files.update(callers())
        return function(*args, **kwargs or {})


def noting(owner, name, files):
    """Let a method note who calls it."""
    verb = getattr(owner, name)

    def noted(*args, **kwargs):
        files.update(callers())
        return verb(*args, **kwargs)

    setattr(owner, name, noted)


def files_of_a_step(monkeypatch):
    """Run a step; return the files that its batch goes through: to lanes, forwards, the loss and gradients."""
    files = set()
    model = nn.Sequential(Seen(files), nn.Tanh(), Seen(files))

    mse_loss = nn.functional.mse_loss

    def noted(output, target, **options):
        files.update(callers())
        return mse_loss(output, target, **options)

    monkeypatch.setattr(nn.functional, "mse_loss", noted)
    batch, target = torch.randn(8, 4), torch.randn(8, 4)
    with penstock.Pipeline(model, example=batch, loss=nn.MSELoss(), lanes=2, micro_batches=4, cuts=[2]) as pipe:
        for _ in range(2):  # the first steps of a shape also look whether the loss is exact
            pipe.step(batch, target)
        noting(pipe.internals.group, "run", files)
        for executor in pipe.internals.executors():
            noting(executor.transport, "send", files)
            noting(executor.transport, "receive", files)
        files.clear()
        with Noting(files):
            pipe.step(batch, target)
    return files


def test_a_batch_crosses_at_most_a_dozen_files(monkeypatch):
    found = files_of_a_step(monkeypatch)
    page = (ROOT / "docs" / "design" / "architecture.md").read_text()
    section = re.search(r"^## The path of one batch\n(.*?)(?=^## |\Z)", page, re.M | re.S)[1]
    listed = set(re.findall(r"`([a-z_/]+\.py)`", section))
    assert found <= listed, f"not on the page: {sorted(found - listed)}"
    assert len(listed) <= MOST_FILES
