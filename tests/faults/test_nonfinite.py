"""Where a value first was not finite: lane, stage, micro-batch, action and operation; nothing is disturbed."""

import pytest
import torch
from torch import nn

import penstock
import processes
from penstock.faults.injector import Injector
from penstock.faults.nonfinite import Place, locate
from pipelines import data, sequence

WIDTH = 6


class Logs(nn.Module):
    """Takes a logarithm between two layers, drops, and counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = self.drop(self.norm(self.first(x)))
        z = torch.log(x) + 0 * y
        return self.last(z)


def make(model, **options):
    options = {"lanes": 2, "micro_batches": 4, "analytic": "cpu", "loss": nn.functional.mse_loss} | options
    return penstock.Pipeline(model, example=torch.rand(8, WIDTH) + 1, **options)


def state_of(pipe):
    held = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    gradients = {f"grad {n}": p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    return held | gradients | {"random": torch.get_rng_state()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n].nan_to_num(), other[n].nan_to_num()) for n in one)


@pytest.mark.parametrize("path", ["export", "replay"])
@pytest.mark.parametrize("keep", ["hold", "recompute"])
def test_an_operation_is_named_and_nothing_is_disturbed(path, keep):
    x, target = torch.rand(8, WIDTH) + 1, torch.zeros(8, WIDTH)
    bad = x.clone()
    bad[5, 2] = -1.0
    with make(Logs(), capture_path=path, keep=keep) as pipe:
        pipe.step(x, target)
        assert locate(pipe, x, target) is None
        assert not pipe.step(bad, target).isfinite()
        before = state_of(pipe)
        place = locate(pipe, bad, target)
        assert same(before, state_of(pipe))
    assert (place.kind, place.mb, place.stage) == ("action", 2, place.lane)
    assert "log" in place.operation
    assert "test_nonfinite.py:" in place.operation
    kind = "RECOMPUTE2 (recompute)" if keep == "recompute" else "F2 (forward)"  # the last stage waits for its recompute
    assert f"lane {place.lane}, stage {place.stage}, micro-batch 2, action {place.stage}{kind}" in str(place)


def test_dropout_drops_the_same():
    """A value that only some of all draws let through is found in every case, and only then."""

    class Fragile(nn.Module):
        def forward(self, x):
            return 1.0 / nn.functional.dropout(x, 0.02)

    layers = [nn.Linear(WIDTH, WIDTH), Fragile(), nn.Linear(WIDTH, WIDTH)]
    x, target = torch.rand(8, WIDTH) + 1, torch.zeros(8, WIDTH)
    seen = set()
    with make(layers, lanes=3) as pipe:
        torch.manual_seed(3)
        for _ in range(20):
            loss = pipe.step(x, target)
            torch.manual_seed(int(torch.randint(1000, ())))  # what was drawn since does not matter
            place = locate(pipe, x, target)
            seen.add(bool(loss.isfinite()))
            assert (place is None) == bool(loss.isfinite())
            if place is not None:
                assert (place.stage, place.operation.split()[0]) in {(1, "reciprocal"), (1, "div")}
    assert seen == {True, False}


class Root(nn.Module):
    def forward(self, x):
        return torch.sqrt(x * 0)  # finite, and its gradient is not


def test_a_gradient_that_is_not_finite_where_the_loss_is():
    x, target = torch.rand(8, WIDTH) + 1, torch.zeros(8, WIDTH)
    with make([nn.Linear(WIDTH, WIDTH), Root(), nn.Linear(WIDTH, WIDTH)], lanes=3) as pipe:
        assert pipe.step(x, target).isfinite()
        place = locate(pipe, x, target)
    assert (place.stage, place.action, place.what) == (1, "1B0", "the gradient of its input")
    assert "full backward" in str(place)
    assert place.operation


@pytest.mark.parametrize("schedule", ["zb_h1", "1f1b"])
def test_a_weight_gradient(schedule):
    x, target = torch.rand(8, WIDTH) + 1, torch.zeros(8, WIDTH)
    with make([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)], schedule=schedule) as pipe:
        pipe.watch = Injector.parse("nan@step=2,action=0W1; nan@step=2,action=0B1")
        pipe.step(x, target)
        pipe.zero_grad()
        pipe.step(x, target)
        place = locate(pipe, x, target)  # what was injected is injected again: the step is the same
    assert place.what in ("the gradient of 0.weight", "the gradient of 0.bias", "the gradient of weight")
    assert place.mb == 1


def test_what_came_in_is_told_from_what_was_made():
    x, target = torch.rand(8, WIDTH) + 1, torch.zeros(8, WIDTH)
    with make(sequence(2).float(), lanes=2, cuts=[2]) as pipe:
        wrong = x.clone()
        wrong[3, 0] = float("nan")
        pipe.step(wrong, target)
        assert "the batch itself is not finite: " in str(locate(pipe, wrong, target))
        assert locate(pipe, wrong, target).mb == 1
        pipe.step(x, wrong)
        assert locate(pipe, x, wrong).what == "target"
        with torch.no_grad():
            dict(pipe.named_parameters())["2.bias"][1] = float("inf")
        pipe.step(x, target)
        place = locate(pipe, x, target)
        assert (place.kind, place.lane, place.what) == ("weight", 1, "2.bias")
        assert "an earlier update caused it" in str(place)


def test_a_mask_of_infinities_is_no_fault():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, *[float("-inf")] * 3]))

        def forward(self, x):
            made = torch.zeros_like(x).masked_fill(x > 1.5, float("-inf"))
            return torch.softmax(self.linear(x) + self.mask, -1), made

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, made):
            return torch.log(self.linear(x) - 100) + made.exp()

    torch.manual_seed(0)
    x, target = torch.rand(8, WIDTH) + 1, torch.zeros(8, WIDTH)
    with make([Masked(), Uses()]) as pipe:
        assert not pipe.step(x, target).isfinite()
        place = locate(pipe, x, target)
    assert (place.stage, place.operation.split()[0]) == (1, "log")


def test_a_schedule_that_updates_within_the_step():
    x, target = torch.rand(8, WIDTH) + 1, torch.zeros(8, WIDTH)
    x[7, 0] = float("inf")
    with make(sequence(2).float(), cuts=[2], schedule="pipedream", optimizer=lambda p: torch.optim.SGD(p, 0.1)) as pipe:
        before = [p.detach().clone() for p in pipe.parameters()]
        good = torch.rand(8, WIDTH) + 1
        pipe.step(good, target)
        after = [p.detach().clone() for p in pipe.parameters()]
        assert locate(pipe, good, target) is None
        assert all(torch.equal(a, p) for a, p in zip(after, pipe.parameters(), strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        pipe.step(x, target)
        assert locate(pipe, x, target).kind in ("input", "weight")


def test_several_batches_of_an_update():
    """The step that was given a batch is the one that is run again, also when others came behind it."""
    target = torch.zeros(8, WIDTH)
    batches = [torch.rand(8, WIDTH) + 1 for _ in range(4)]
    batches[2][6, 1] = -1.0
    with make(Logs(), capture_path="export") as pipe:
        for batch in batches:
            pipe.step(batch, target)
        places = [locate(pipe, batch, target) for batch in batches]
    assert [place is None for place in places] == [True, True, False, True]
    assert places[2].mb == 3


def test_order():
    first = Place("action", 0, 0, 3, "0F3")
    second = Place("action", 1, 1, 0, "1F0")
    back = Place("action", 1, 1, 0, "1B0")
    further = Place("action", 0, 0, 0, "0B0")
    places = [further, back, second, first, Place("weight", 1, 1), Place("input", mb=2)]
    assert sorted(places, key=lambda place: place.order(2)) == places[::-1]


# ---- processes


def locating_process(text):
    x, target = data(8)
    pipe = penstock.Pipeline(
        sequence(4), example=x, loss=nn.functional.mse_loss, cuts=[4], micro_batches=4, timeout=30.0
    )
    pipe.watch = Injector.parse(text, rank=torch.distributed.get_rank(), world_size=2)
    pipe.step(x, target)
    pipe.zero_grad()
    loss = pipe.step(x, target)
    before = state_of(pipe)
    place = locate(pipe, x, target)
    is_same = same(before, state_of(pipe))
    pipe.zero_grad()
    pipe.watch = None
    good = float(pipe.step(x, target))
    pipe.close()
    return bool(loss.isfinite()), str(place), is_same, good


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nan@step=2,action=1F3", "lane 1, stage 1, micro-batch 3, action 1F3 (forward)"),
        ("nan@step=2,action=1B2", "lane 1, stage 1, micro-batch 2, action 1B2 (full backward)"),
    ],
)
def test_all_processes_name_the_same_place(text, words):
    for is_finite, place, is_same, good in processes.run(locating_process, 2, text):
        assert is_finite == ("B" in text)
        assert words in place
        assert is_same
        assert good == good  # finite again
