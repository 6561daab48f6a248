"""Trainings that tests share; also imported by their processes."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock
from pipelines import WIDTH, data, sequence


class Noted(penstock.Callback):
    """Writes down what it is told."""

    strict = True

    def __init__(self):
        self.told = []
        self.losses = {}

    def on_train_begin(self, trainer):
        self.told.append(("begin", trainer.step))

    def on_step_end(self, trainer, reading):
        self.losses[reading.step] = reading.loss

    def on_save(self, trainer, step, folder):
        self.told.append(("save", step))

    def on_fault(self, trainer, fault):
        self.told.append(("fault", fault["kind"]))

    def on_recover(self, trainer, step):
        self.told.append(("recover", step))

    def on_evaluate(self, trainer, figures):
        self.told.append(("evaluate", figures["step"]))

    def on_train_end(self, trainer, summary):
        self.told.append(("end", summary.status))


class StopAt(penstock.Callback):
    strict = True

    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, reading):
        if reading.step == self.step:
            trainer.stop()


def dropping(count=8, rate=0.0):
    """Return a chain of blocks, with dropout where a rate is given."""
    torch.manual_seed(0)
    layers = [m for _ in range(count) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, *([nn.Dropout(rate)] if rate else []), nn.Linear(WIDTH, WIDTH)).double()


def loader(size=24, batch_size=8, *, own=True):
    """Return shuffled batches; a generator of their own keeps their order apart from what steps draw."""
    generator = torch.Generator().manual_seed(3) if own else None
    return DataLoader(TensorDataset(*data(size)), batch_size=batch_size, shuffle=True, generator=generator)


def make(
    folder, *, lanes=2, schedule="1f1b", steps=7, model=None, batches=None, seed=5, momentum=False, callbacks=(),
    micro_batches=4, loss=nn.functional.mse_loss, analytic="h100", example=None, check=True, **asked,
):  # fmt: skip
    """Return a trainer of a small model, its pipeline and what it is told."""
    torch.manual_seed(seed)
    model = sequence(8) if model is None else model
    pipe = penstock.Pipeline(
        model, example=data(8)[0] if example is None else example, loss=loss, lanes=lanes, schedule=schedule,
        micro_batches=micro_batches, timeout=30, analytic=analytic, check=check,
    )  # fmt: skip
    make_optimizer = torch.optim.SGD if momentum else torch.optim.AdamW
    optimizer = make_optimizer(pipe.parameters(), lr=0.05, **({"momentum": 0.9} if momentum else {}))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    noted = Noted()
    torch.manual_seed(seed)
    trainer = penstock.Trainer(
        pipe, optimizer, loader() if batches is None else batches, steps=steps, folder=folder, scheduler=scheduler,
        callbacks=[noted, *callbacks], **asked,
    )  # fmt: skip
    return trainer, pipe, noted


def train(folder, **given):
    """Train; return how it ended, all losses by step, and the weights that are here."""
    trainer, pipe, noted = make(folder, **given)
    with pipe:
        summary = trainer.fit()
        return summary, noted.losses, {name: value.clone() for name, value in pipe.state_dict().items()}


def train_here(folder, given):
    """Train in a process of several; return what can be sent back."""
    summary, losses, weights = train(folder, lanes=None, **given)
    return summary.status, losses, {name: value.tolist() for name, value in weights.items()}


def plain(*, steps=7, model=None, batches=None, seed=5, clip=None, accumulate=1, loss=nn.functional.mse_loss):
    """Train the same without a pipeline; return losses and weights."""
    torch.manual_seed(seed)
    model = sequence(8) if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    batches = loader() if batches is None else batches
    torch.manual_seed(seed)
    losses, given = {}, []
    while len(losses) < steps:
        for batch in batches:
            given.append(batch)
            if len(given) < accumulate:
                continue
            total = sum(loss(model(x), y) for x, y in given) / accumulate
            total.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses[len(losses) + 1] = total.item()
            given = []
            if len(losses) == steps:
                break
    return losses, model.state_dict()
