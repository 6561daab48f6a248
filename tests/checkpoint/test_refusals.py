"""Refusals: what does not fit is said by name before anything has changed, what cannot be saved before a training."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock
from checkpoint_cases import Training
from penstock.errors import CheckpointError, UsageError
from penstock.tensor_files.manifest import checksum, to_bytes
from pipelines import WIDTH, data

ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD


def everything(training, *others):
    """Return all that a restore could change."""
    found = [training.pipe.state_dict(), *(o.state_dict() for o in (*training.optimizers, *training.schedulers))]
    found += [thing.state_dict() for thing in others]
    return copy.deepcopy(found), torch.get_rng_state()


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


class Place:
    """Data whose state may be refused."""

    def __init__(self):
        self.at, self.is_refusing = 0, False

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        if self.is_refusing:
            raise ValueError("another data set")
        self.at = state["at"]


def shuffled(generator):
    return DataLoader(TensorDataset(*data(40)), batch_size=8, shuffle=True, generator=generator)


def test_a_loader_without_the_generator_that_was_saved(tmp_path):
    """It was refused, but the weights had changed."""
    with Training(tmp_path) as training:
        feed = penstock.feed(shuffled(torch.Generator()), training.pipe)
        own = penstock.Checkpoints(tmp_path, training.pipe, optimizer=training.optimizers, data=feed)
        next(batches := iter(feed))
        training.run(0, 1)
        own.save(1, wait=True)
        batches.close()
        training.run(1, 2)
        feed = penstock.feed(shuffled(None), training.pipe)
        own = penstock.Checkpoints(tmp_path, training.pipe, optimizer=training.optimizers, data=feed)
        before = everything(training, feed)
        with pytest.raises(CheckpointError, match=r"checkpoint-000001: data: .* had 1 own generators and now has 0"):
            own.restore()
        assert same(everything(training, feed), before)


@pytest.mark.parametrize("who", ["data", "scheduler", "scaler", "random"])
def test_whoever_refuses_nothing_has_changed(tmp_path, who, monkeypatch):
    with Training(tmp_path) as training:
        place, scaler = Place(), torch.amp.GradScaler("cpu", init_scale=64.0)
        own = penstock.Checkpoints(
            tmp_path, training.pipe, optimizer=training.optimizers, scheduler=training.schedulers, scaler=scaler,
            data=place,
        )  # fmt: skip
        training.run(0, 1)
        place.at = 3
        own.save(1, wait=True)
        training.run(1, 4)
        torch.rand(3)
        place.at = 8
        scaler.load_state_dict({**scaler.state_dict(), "scale": 32.0})

        def refuse(*_):
            raise RuntimeError("refused here")

        with monkeypatch.context() as patch:
            if who == "data":
                place.is_refusing = True
            elif who == "random":
                patch.setattr(torch, "set_rng_state", refuse)
            else:
                patch.setattr(scaler if who == "scaler" else training.schedulers[0], "load_state_dict", refuse)
            before = everything(training, place, scaler)
            with pytest.raises(CheckpointError, match=f"{who}.*refuse"):
                own.restore()
        after = everything(training, place, scaler)
        if who == "scheduler":  # where the test has put something
            before[0][2].pop("load_state_dict", None), after[0][2].pop("load_state_dict", None)
        assert same(after, before)
        place.is_refusing = False
        assert own.restore().step == 1
        assert place.at == 3
        assert scaler.get_scale() == 64.0


# ---- optimizers


def named(pipe, *beginnings):
    return [p for name, p in pipe.named_parameters() if name.startswith(beginnings)]


def saved_with(folder, training, make):
    optimizer = make(training.pipe)
    with penstock.Checkpoints(folder, training.pipe, optimizer=optimizer) as checkpoints:
        training.pipe.step(*training.batch(0))
        for one in optimizer if isinstance(optimizer, list) else [optimizer]:
            one.step()
            one.zero_grad()
        checkpoints.save(1, wait=True)


def whole(kind, **options):
    return lambda pipe: kind(pipe.parameters(), lr=0.1, **options)


def two_groups(second):
    return lambda pipe: ADAMW(
        [{"params": named(pipe, "0", "2")}, {"params": named(pipe, *second), "weight_decay": 0.0}], lr=0.1
    )


def part(pipe):
    return ADAMW(named(pipe, "0", "2"), lr=0.1)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (whole(SGD, momentum=0.9), whole(ADAMW), "optimizer 0 is AdamW, but SGD was saved"),
        (whole(ADAMW), whole(SGD, momentum=0.9), "optimizer 0 is SGD, but AdamW was saved"),
        (whole(SGD), whole(torch.optim.Adagrad), "optimizer 0 is Adagrad, but SGD was saved"),
        (
            two_groups(("4", "6")), part,
            "saved with an optimizer and have none now: optimizer 0, group 1: 4.weight, 4.bias, 6.weight, 6.bias",
        ),
        (part, two_groups(("4", "6")), "group 1: the checkpoint lacks 4.bias, 4.weight"),
        (
            lambda pipe: ADAMW(named(pipe, "0", "2", "4"), lr=0.1), two_groups(("4",)),
            "groups 0 and 1 were saved as one group",
        ),
        (
            lambda pipe: torch.optim.LBFGS(pipe.parameters()),
            lambda pipe: torch.optim.LBFGS(list(pipe.parameters())[::-1]),
            "LBFGS was saved with other parameters or another order",
        ),
    ],
)  # fmt: skip
def test_another_optimizer_is_refused_by_name(tmp_path, before, now, message):
    """AdamW took up what SGD had saved, without a word, and without its own numbers."""
    with Training(tmp_path) as training:
        if message.startswith("LBFGS"):
            optimizer = before(training.pipe)
            optimizer.step(lambda: training.pipe.step(*training.batch(0)))
            penstock.Checkpoints(tmp_path, training.pipe, optimizer=optimizer).save(1, wait=True)
        else:
            saved_with(tmp_path, training, before)
    with Training(tmp_path) as training:
        own = penstock.Checkpoints(tmp_path, training.pipe, optimizer=now(training.pipe))
        state = everything(training)
        with pytest.raises(CheckpointError) as caught:
            own.restore()
        assert message in str(caught.value)
        assert "checkpoint-000001" in str(caught.value)
        assert same(everything(training), state)


def test_the_weights_alone_go_on_with_another_optimizer(tmp_path):
    with Training(tmp_path) as training:
        saved_with(tmp_path, training, whole(SGD, momentum=0.9))
        wanted = {name: t.clone() for name, t in training.pipe.state_dict().items()}
    with Training(tmp_path) as training:
        optimizer = ADAMW(training.pipe.parameters(), lr=0.3)
        own = penstock.Checkpoints(tmp_path, training.pipe, optimizer=optimizer)
        drawn = torch.get_rng_state()
        assert own.restore(parts=["model"]).step == 1
        assert same(training.pipe.state_dict(), wanted)
        assert optimizer.param_groups[0]["lr"] == 0.3
        assert not optimizer.state
        assert torch.equal(torch.get_rng_state(), drawn)


def test_every_part_but_the_model(tmp_path):
    with Training(tmp_path) as training:
        training.run(0, 1)
        training.checkpoints.save(1, wait=True)
        training.run(1, 3)
        weights = copy.deepcopy(training.pipe.state_dict())
        training.checkpoints.restore(parts=["optimizer", "scheduler"])
        assert same(training.pipe.state_dict(), weights)
        assert training.schedulers[0].last_epoch == 1
        assert {float(state["step"]) for state in training.optimizers[0].state.values()} == {1.0}


@pytest.mark.parametrize("parts", [[], ["weights"], "modle"])
def test_parts_that_there_are_not(tmp_path, parts):
    with Training(tmp_path) as training, pytest.raises(UsageError, match="parts: choose from model, optimizer"):
        training.checkpoints.restore(parts=parts)


def test_without_an_optimizer_the_rest_is_taken_up(tmp_path):
    """An evaluation needs none."""
    with Training(tmp_path) as training:
        training.run(0, 1)
        training.checkpoints.save(1, wait=True)
        assert penstock.Checkpoints(tmp_path, training.pipe).restore().step == 1


def test_a_checkpoint_that_does_not_tell_the_class_still_loads(tmp_path):
    with Training(tmp_path) as training:
        training.run(0, 1)
        training.checkpoints.save(1, wait=True)
        folder = tmp_path / "checkpoint-000001"
        state, manifest = (json.loads((folder / name).read_bytes()) for name in ("state.json", "MANIFEST.json"))
        assert [group.pop("class") for group in state["optimizer"]["groups"]] == ["AdamW"]
        content = to_bytes(state)
        (folder / "state.json").write_bytes(content)
        manifest["files"]["state.json"] = {"bytes": len(content), "xxh3": checksum(content)}
        del manifest["xxh3"]
        (folder / "MANIFEST.json").write_bytes(to_bytes({**manifest, "xxh3": checksum(to_bytes(manifest))}))
        assert training.checkpoints.restore().step == 1


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_an_optimizer_with_one_state_for_all_goes_on(tmp_path, lanes):
    def begin(count):
        training = Training(tmp_path, lanes=count)
        optimizer = torch.optim.LBFGS(training.pipe.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")
        return training, optimizer, penstock.Checkpoints(tmp_path, training.pipe, optimizer=optimizer)

    def steps(training, optimizer):
        def closure():
            optimizer.zero_grad()
            return training.pipe.step(*training.batch(0))

        return [float(optimizer.step(closure)) for _ in range(3)]

    training, optimizer, checkpoints = begin(2)
    with training:
        steps(training, optimizer)
        checkpoints.save(3, wait=True)
        wanted = steps(training, optimizer)
    training, optimizer, checkpoints = begin(lanes)
    with training:
        checkpoints.restore()
        assert steps(training, optimizer) == pytest.approx(wanted, rel=1e-10)


def test_a_parameter_of_two_optimizers_is_refused_at_once(tmp_path):
    """It was noticed only when such a checkpoint was to be taken up."""
    with Training(tmp_path) as training:
        both = [ADAMW(training.pipe.parameters()), SGD(named(training.pipe, "2", "4"), lr=0.1)]
        with pytest.raises(UsageError, match=r"2.weight, 2.bias, 4.weight, 4.bias: in optimizer 0 and in 1"):
            penstock.Checkpoints(tmp_path, training.pipe, optimizer=both)
        both[1] = SGD(named(training.pipe, "2"), lr=0.1)
        both[0] = ADAMW(named(training.pipe, "0", "4"))
        own = penstock.Checkpoints(tmp_path, training.pipe, optimizer=both)
        own.check()
        both[0].add_param_group({"params": named(training.pipe, "2.weight")})
        with pytest.raises(UsageError, match=r"2.weight: in optimizer 0 and in 1"):
            own.check()


# ---- what cannot be saved


class Warm:
    def __init__(self):
        self.kinds = {"a", "b"}

    def __call__(self, epoch):
        return 0.9**epoch


class Odd:
    def state_dict(self):
        return {"seen": {1, 2}}

    def load_state_dict(self, state):
        pass


def test_what_could_not_be_saved_is_said_before_a_training(tmp_path):
    with Training(tmp_path / "x") as training:
        warm = torch.optim.lr_scheduler.LambdaLR(training.optimizers[0], Warm())
        for options, message in (
            ({"scheduler": warm}, r"scheduler 0.lr_lambdas\[0\].kinds: a checkpoint holds"),
            ({"data": Odd()}, "data.seen: a checkpoint holds"),
        ):
            own = penstock.Checkpoints(tmp_path, training.pipe, **options)
            with pytest.raises(UsageError, match=message):
                own.check()
        training.checkpoints.check()
    assert list(tmp_path.iterdir()) == []


def test_parameters_that_no_file_can_hold_are_said_before_a_training(tmp_path):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
            self.turn = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex128))

        def forward(self, x):
            return self.last((self.first(x) * self.turn).real)

    told = r"turn: a checkpoint cannot hold a tensor of torch.complex128"
    with Training(tmp_path, model=Complex()) as training, pytest.raises(UsageError, match=told):
        training.checkpoints.check()
