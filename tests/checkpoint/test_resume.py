"""Resuming: what was saved on some lanes goes on, on others, as if nothing had been."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import penstock
from checkpoint_cases import Training, losses_of
from penstock.errors import UsageError
from pipelines import WIDTH, data

HALF, END = 4, 8


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder with a checkpoint of two lanes, and the losses of a run without a stop; once a case."""
    made = {}

    def get(model, optimizer):
        if (model, optimizer) not in made:
            folder = tmp_path_factory.mktemp("saved")
            options = {"model": model, "optimizer": optimizer}
            wanted = losses_of(folder / "unused", 0, END, **options)
            assert losses_of(folder, 0, HALF, save=True, **options) == pytest.approx(wanted[:HALF], rel=1e-10)
            made[model, optimizer] = folder, wanted[HALF:]
        return made[model, optimizer]

    return get


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("model", "optimizer"), [("knotty", "adamw"), ("knotty", "sgd"), ("odd", "adamw"), ("odd", "sgd")]
)
@pytest.mark.parametrize(
    ("lanes", "schedule"), [(1, "1f1b"), (2, "zb_h1"), (2, "interleaved_1f1b"), (3, "gpipe"), (4, "1f1b")]
)
def test_other_lanes_and_schedules_go_on_with_the_same_losses(saved, model, optimizer, lanes, schedule):
    folder, wanted = saved(model, optimizer)
    found = losses_of(folder, HALF, END, restore=True, model=model, optimizer=optimizer, lanes=lanes, schedule=schedule)
    assert found == pytest.approx(wanted, rel=1e-10, abs=1e-10)


def test_dropout_goes_on_with_the_same_masks_on_the_same_cuts(saved):
    folder, wanted = saved("dropping", "sgd")
    found = losses_of(folder, HALF, END, restore=True, model="dropping", optimizer="sgd", schedule="zb_h1")
    assert found == pytest.approx(wanted, rel=1e-10, abs=1e-10)


def test_the_state_is_that_of_the_model(saved):
    """A tensor with two names is stored once, and the file is one that safetensors reads."""
    folder, _ = saved("odd", "adamw")
    files = sorted((folder / "checkpoint-000004").glob("model-*.safetensors"))
    stored = {}
    for file in files:
        assert not stored.keys() & load_file(file).keys()
        stored |= load_file(file)
    with Training(folder, model="odd") as training:
        training.checkpoints.restore()
        state = training.pipe.state_dict()
        assert state.keys() == training.model.state_dict().keys() == stored.keys() | {"last.weight"}
        assert state["last.weight"] is not None
        assert all(torch.equal(state[name], stored[name]) for name in stored)
        assert stored["none"].shape == (0, 3)
        assert stored["gain"].shape == ()


def test_weights_of_sixteen_bits(tmp_path):
    options = {"dtype": torch.bfloat16}
    wanted = losses_of(tmp_path / "unused", 0, END, **options)
    losses_of(tmp_path, 0, HALF, save=True, **options)
    assert losses_of(tmp_path, HALF, END, restore=True, lanes=3, **options) == wanted[HALF:]


def test_a_state_wider_than_its_parameter_stays_so(tmp_path):
    with Training(tmp_path, dtype=torch.bfloat16) as training:
        training.run(0, 1)
        first = next(iter(training.pipe.parameters()))
        wide = training.optimizers[0].state[first]["exp_avg"].double() + 1e-9
        training.optimizers[0].state[first]["exp_avg"] = wide
        training.checkpoints.save(1, wait=True)
        training.optimizers[0].state[first]["exp_avg"] = wide * 0
        training.checkpoints.restore()
        assert torch.equal(training.optimizers[0].state[first]["exp_avg"], wide)


def test_saving_does_not_change_what_is_saved_when_the_training_goes_on(tmp_path):
    """The copy is taken at once: steps made while it is written do not show in it."""
    with Training(tmp_path) as training:
        training.run(0, HALF)
        wanted = {name: tensor.clone() for name, tensor in training.pipe.state_dict().items()}
        training.checkpoints.save(HALF)
        training.run(HALF, END)
        training.checkpoints.wait()
        training.checkpoints.restore()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in training.pipe.state_dict().items())


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_schedules_that_update_within_the_step(tmp_path, lanes):
    def make(count):
        torch.manual_seed(0)
        model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).double()
        return penstock.Pipeline(
            model, example=data(8)[0], loss=nn.functional.mse_loss, lanes=count, micro_batches=4,
            schedule="pipedream_2bw", optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        )  # fmt: skip

    with make(2) as pipe, penstock.Checkpoints(tmp_path, pipe, optimizer=pipe.optimizers.values()) as checkpoints:
        for seed in range(3):
            pipe.step(*data(8, seed=seed))
        checkpoints.save(3, wait=True)
        wanted = [optimizer.state_dict() for optimizer in pipe.optimizers.values()]
        assert any(state["state"] for state in wanted)
        momenta = {n: s for o in pipe.optimizers.values() for n, s in _momenta(pipe, o)}
    with make(lanes) as pipe, penstock.Checkpoints(tmp_path, pipe, optimizer=pipe.optimizers.values()) as checkpoints:
        assert checkpoints.restore().step == 3
        found = {n: s for o in pipe.optimizers.values() for n, s in _momenta(pipe, o)}
        assert found.keys() == momenta.keys()
        assert all(torch.equal(found[name], momenta[name]) for name in momenta)


def _momenta(pipe, optimizer):
    names = {id(p): n for n, p in pipe.named_parameters()}
    for parameter, state in optimizer.state.items():
        yield names[id(parameter)], state["momentum_buffer"]


def test_everything_around_the_pipeline_comes_back(tmp_path):
    """Several schedulers, the scaler, random states, notes, and the place in the data."""
    import random

    import numpy as np

    data_source = [data(8, seed=seed) for seed in range(5)]
    with Training(tmp_path) as training:
        optimizer = training.optimizers[0]
        schedulers = [
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        ]
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(torch.ones(()))
        feed = penstock.feed(data_source, training.pipe)
        own = penstock.Checkpoints(
            tmp_path, training.pipe, optimizer=optimizer, scheduler=schedulers, scaler=scaler, data=feed
        )
        batches = iter(feed)
        next(batches), next(batches)
        optimizer.step()
        for scheduler in schedulers[1:]:
            scheduler.step()
        schedulers[0].step(0.5)
        wanted = [s.state_dict() for s in (*schedulers, scaler, feed)]
        notes = {"names": ["a", "ü"], "best": float("inf"), "nested": {"1": None, "2": [True, 0.1]}}
        own.save(2, notes=notes, wait=True)
        drawn = random.random(), np.random.rand(), torch.rand(1)
        for scheduler in schedulers[1:]:
            scheduler.step()
        scaler.update(128.0)
        restored = own.restore()
        assert [s.state_dict() for s in (*schedulers, scaler)] == wanted[:-1]
        assert feed.state_dict() == wanted[-1]
        assert restored.notes == notes
        assert (random.random(), np.random.rand(), torch.rand(1)) == drawn
        rest = [batch for batch, _ in feed]
        assert len(rest) == 3
        assert torch.equal(rest[0], data_source[2][0])


def test_a_loss_with_parameters(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, output, target):
            return nn.functional.mse_loss(output * self.scale, target)

    loss = Scaled()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
    with penstock.Pipeline(model, example=data(8)[0], loss=loss, lanes=2, micro_batches=4, cuts=[1]) as pipe:
        optimizer = torch.optim.Adam([*pipe.parameters(), *loss.parameters()], lr=0.1)
        with penstock.Checkpoints(tmp_path, pipe, optimizer=optimizer) as checkpoints:
            pipe.step(*data(8))
            optimizer.step()
            value, moment = loss.scale.item(), optimizer.state[loss.scale]["exp_avg"].item()
            checkpoints.save(1, wait=True)
            pipe.step(*data(8))
            optimizer.step()
            assert loss.scale.item() != value
            checkpoints.restore()
            assert (loss.scale.item(), optimizer.state[loss.scale]["exp_avg"].item()) == (value, moment)


def test_an_optimizer_of_other_parameters_is_refused(tmp_path):
    with Training(tmp_path) as training:
        stranger = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
        with pytest.raises(UsageError, match=r"not the pipeline's.*\(3,\)"):
            penstock.Checkpoints(tmp_path, training.pipe, optimizer=stranger)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "keep: must be a whole number of at least 1"),
        ({"optimizer": 3}, "optimizer: expected a torch optimizer"),
        ({"scheduler": object()}, "scheduler: object has no state_dict"),
        ({"data": [1]}, "data: list has no state_dict"),
    ],
)
def test_arguments_that_cannot_be_right(tmp_path, options, message):
    with Training(tmp_path) as training, pytest.raises(UsageError, match=message):
        penstock.Checkpoints(tmp_path, training.pipe, **options)


@pytest.mark.parametrize(
    ("step", "notes", "message"),
    [
        (-1, {}, "step: must be"),
        (1.5, {}, "step: must be"),
        (1, {"x": object()}, "notes.x: a checkpoint holds numbers"),
    ],
)
def test_what_cannot_be_saved_is_said_at_once(tmp_path, step, notes, message):
    with Training(tmp_path) as training:
        with pytest.raises(UsageError, match=message):
            training.checkpoints.save(step, notes=notes)
        assert training.checkpoints.steps() == []
        assert list(tmp_path.iterdir()) == []
