"""Checkpoint cases: the models and the loop that tests of checkpoints share; also imported by their processes."""

from __future__ import annotations

import torch
from torch import nn

import penstock
from pipelines import WIDTH, Knotty, data

SCALE = torch.tensor(0.9, dtype=torch.float64)


class Odd(nn.Module):
    """Tied modules, statistics, dropout, a scalar, an empty tensor, buffers of several kinds."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH))
        self.gain = nn.Parameter(torch.ones(()))
        self.none = nn.Parameter(torch.ones(0, 3))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.double()

    def forward(self, x):
        h = self.norm(torch.tanh(self.first(x)))
        return self.last(self.middle(h)) * self.gain + self.none.sum() + self.flags.sum() * 0 + self.hidden.sum() * 0


def plain(width=WIDTH, count=6):
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(count) for m in (nn.Linear(width, width), nn.Tanh()))).double()


def adamw(pipe):
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.3)]


def grouped_sgd(pipe):
    named = list(pipe.named_parameters())
    biases, others = ([p for n, p in named if n.endswith("bias") is wanted] for wanted in (True, False))
    groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "lr": 0.02, "nesterov": True}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return [optimizer], [torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [3])]


MODELS = {"knotty": Knotty, "odd": Odd, "dropping": lambda: Odd(0.2), "plain": plain, "small": lambda: plain(count=2)}
OPTIMIZERS = {"adamw": adamw, "sgd": grouped_sgd}


class Training:
    """A pipeline that is trained on batches that depend on the step only; `penstock.Checkpoints` around it."""

    def __init__(self, folder, *, model="plain", optimizer="adamw", lanes=2, schedule="1f1b", dtype=None, **options):
        made = MODELS[model]() if isinstance(model, str) else model
        if dtype is not None:
            made.to(dtype)
        self.is_knotty, self.dtype = isinstance(made, Knotty), dtype or torch.float64
        self.model = made
        batch = self.batch(0)[0]
        keep = options.pop("keep_checkpoints", 3)
        self.pipe = penstock.Pipeline(
            made, example=batch, loss=nn.functional.mse_loss, lanes=lanes, micro_batches=4, schedule=schedule,
            timeout=60, analytic="cpu", **options,
        )  # fmt: skip
        torch.manual_seed(1)
        self.optimizers, self.schedulers = OPTIMIZERS[optimizer](self.pipe)
        self.checkpoints = penstock.Checkpoints(
            folder, self.pipe, optimizer=self.optimizers, scheduler=self.schedulers, keep=keep
        )

    def batch(self, step):
        x, target = (t.to(self.dtype) for t in data(8, seed=100 + step))
        return ((x, SCALE) if self.is_knotty else x), target

    def run(self, begin, end):
        """Return the losses of some steps."""
        losses = []
        for step in range(begin, end):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            losses.append(float(self.pipe.step(*self.batch(step))))
            self.pipe.clip_grad_norm_(0.5)
            for thing in [*self.optimizers, *self.schedulers]:
                thing.step()
        return losses

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            self.checkpoints.close()
        finally:
            self.pipe.close()


def losses_of(folder, begin, end, *, save=None, restore=False, **options):
    """Train some steps, after a restore or before a save, if wanted; return the losses."""
    with Training(folder, **options) as training:
        if restore:
            restored = training.checkpoints.restore()
            assert restored.step == begin
        losses = training.run(begin, end)
        if save:
            training.checkpoints.save(end, wait=True)
            assert not training.checkpoints.failures
        return losses
