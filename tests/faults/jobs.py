"""Jobs: models, batches, losses and callbacks that trainings of these tests name; some of them make trouble."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import penstock

WIDTH, SAMPLES, BATCH = 8, 24, 8
SEEN = []  # the samples that the loss was given in this step
CALLS = {"model": 0, "loss": 0}


def lane():
    return int(os.environ.get("RANK", "0"))


def chain():
    """Return blocks with dropout: random numbers must come back too."""
    blocks = [m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH))


def model():
    """Return the chain as two stages: nothing is to be captured or measured, so that a start is quick."""
    made = chain()
    return [made[:6], made[6:]]


def half_frozen():
    """Return two stages, the first of which has no parameters."""
    return [nn.Sequential(nn.Tanh(), nn.Dropout(0.1)), nn.Linear(WIDTH, WIDTH)]


def late_chain():
    """Return the chain; on lane 1 a while after the others are there."""
    time.sleep(2.0 * (lane() == 1))
    return chain()


class Stops(nn.Module):
    """Stops its process when it is called for the first time, on lane 0 of the first attempt: that measures."""

    def forward(self, x):
        CALLS["model"] += 1
        if CALLS["model"] == 1 and lane() == 0 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGSTOP)
        return x * 1.0


def stopping_chain(where):
    """Return the chain; stop the process of a lane while it is made, or while it is measured."""
    made = chain()
    if where == "measure":
        return nn.Sequential(Stops(), *made)
    if lane() == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        os.kill(os.getpid(), signal.SIGSTOP)
    return made


class Samples(Dataset):
    """Pairs that follow from their number, which is the first value of the target."""

    def __init__(self, wrong=None):
        self.x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
        self.y = torch.tanh(self.x.roll(1, dims=1))
        self.y[:, 0] = torch.arange(SAMPLES)
        self.wrong = wrong

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if index == self.wrong:
            raise ValueError("a mistake in the data")
        return self.x[index], self.y[index]


class Slow:
    """Batches, each after a pause, so that there is time to do something to a training."""

    def __init__(self, seconds):
        self.loader, self.seconds = DataLoader(Samples(), batch_size=BATCH, shuffle=True), seconds
        self.sampler, self.batch_sampler = self.loader.sampler, self.loader.batch_sampler

    def __iter__(self):
        for item in self.loader:
            time.sleep(self.seconds)
            yield tuple(item)


def data(pause=0.0):
    return Slow(pause)


class Once:
    """Batches that come only once: the second time there are none."""

    def __init__(self):
        self.batches = list(Slow(0.0))

    def __iter__(self):
        while self.batches:
            yield self.batches.pop()


def ending_data():
    return Once()


class Hanging(Slow):
    """Batches, the fourth of which never comes; on one lane only, or on all."""

    def __init__(self, how, on):
        super().__init__(0.0)
        self.how, self.on = how, on

    def __iter__(self):
        for number, item in enumerate(super().__iter__()):
            if number == 2 and self.on in (lane(), "all"):
                self.never_returns()
            yield item

    def never_returns(self):
        if self.how == "in Python":
            while True:
                time.sleep(0.1)
        mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)  # no signal gets it out of this


def hanging_data(how="in Python", on=1):
    return Hanging(how, on)


def hanging_workers():
    """Return batches of another process, which never gives the last of them."""
    return DataLoader(Stuck(), batch_size=BATCH, num_workers=1)


class Stuck(Samples):
    """Samples, the last of which never comes."""

    def __getitem__(self, index):
        if index == SAMPLES - 1:
            time.sleep(1e6)
        return super().__getitem__(index)


# ---- what is seen


def noting_loss(output, target):
    """Return the loss; note whose it is."""
    SEEN.extend(target[:, 0].detach().long().tolist())
    return nn.functional.mse_loss(output[:, 1:], target[:, 1:])


class Ids(penstock.Callback):
    """Writes down the samples of each step whose update was made, on the lane that has the loss."""

    strict = True

    def on_step_begin(self, trainer):
        SEEN.clear()

    def on_step_end(self, trainer, reading):
        if SEEN:
            with Path(os.environ["SAMPLES_SEEN"]).open("a") as file:
                file.write(f"{reading.step} {' '.join(map(str, SEEN))}\n")


# ---- what makes trouble


class Wrong(nn.Module):
    """Raises in the second step, with four micro-batches a step."""

    def forward(self, x):
        CALLS["model"] += 1
        if CALLS["model"] > 6:
            raise ValueError("a mistake in the model")
        return x * 1.0


def wrong_model():
    return [nn.Linear(WIDTH, WIDTH), nn.Sequential(Wrong(), nn.Linear(WIDTH, WIDTH))]


def wrong_loss(output, target):
    CALLS["loss"] += 1
    if CALLS["loss"] > 6:
        raise ValueError("a mistake in the loss")
    return nn.functional.mse_loss(output, target)


def wrong_data():
    """Return batches of another process, one of which raises there."""
    return DataLoader(Samples(wrong=20), batch_size=BATCH, num_workers=1)


class Annoying(penstock.Callback):
    def on_step_end(self, trainer, reading):
        raise ValueError("a mistake in the callback")


class Strict(Annoying):
    strict = True
