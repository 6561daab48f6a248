"""Rows of the table of faults with no other test: settings that differ, types, edges, small batches, slow lanes."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock
import processes
from penstock.errors import LaneError, UsageError
from penstock.faults.injector import Injector
from penstock.faults.straggler import slow_lanes
from penstock.pipeline.planned import planned_model as build
from pipelines import data, differences, expected, sequence

# ---- row 12: settings that differ by process


def differing_process(field):
    x, _ = data(8)
    first = {"schedule": "1f1b", "cuts": [4], "keep": "hold", "micro_batches": 4}
    second = {"schedule": "gpipe", "cuts": [2], "keep": "recompute", "micro_batches": 2}
    given = first | ({field: second[field]} if dist.get_rank() and field in second else {})
    model = sequence(5 if dist.get_rank() and field == "model" else 4)
    torch.manual_seed(7 + (dist.get_rank() if field == "seed" else 0))
    if dist.get_rank() and field == "version":
        build.__version__ = "9.9"
    try:
        penstock.Pipeline(model, example=x, loss=nn.functional.mse_loss, **given)
    except UsageError as error:
        return str(error)
    return "no error"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("schedule", "schedule: 1f1b (lane 0), gpipe (lane 1)"),
        ("cuts", "cuts: (4,) (lane 0), (2,) (lane 1)"),
        ("keep", "keep: hold (lane 0), recompute (lane 1)"),
        ("model", "nodes of the model: 8 (lane 0), 10 (lane 1)"),
        ("seed", "random seed (torch.initial_seed): 7 (lane 0), 8 (lane 1)"),
        ("version", f"penstock: {penstock.__version__} (lane 0), 9.9 (lane 1)"),
    ],
)
def test_what_differs_is_listed_on_all(field, words):
    for text in processes.run(differing_process, 2, field):
        assert words in text


# ---- row 13: a wrong dtype in the middle of a run


class Turns(nn.Module):
    """Returns doubles from its third step on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)
        self.calls = [0]

    def forward(self, x):
        made = self.linear(x)
        self.calls[0] += torch.is_grad_enabled() and self.training and x.shape[0] == 2
        return made.double() if self.calls[0] > 8 else made


def turning(**options):
    x = data(8)[0].float()
    stages = [Turns(), nn.Linear(6, 6)]
    pipe = penstock.Pipeline(stages, example=x, loss=nn.functional.mse_loss, micro_batches=4, timeout=20.0, **options)
    stages[0].calls[0] = 0
    told = []
    for _ in range(3):
        try:
            pipe.step(x, x)
            told.append("fine")
        except LaneError as error:
            told.append(str(error))
    pipe.close()
    return told


def check_turning(told):
    assert told[:2] == ["fine", "fine"]
    assert "lane 1, stage 1, micro-batch 0, action 1F0 (forward)" in told[2]
    assert "stage 0 sent torch.float64 (2, 6) to stage 1, whose parameters are torch.float32" in told[2]


def test_a_wrong_type_names_the_edge():
    check_turning(turning(lanes=2))


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_wrong_type_names_the_edge_in_all_processes(transport):
    first, second = processes.run(_turning_over, 2, transport)
    check_turning(first)
    assert first == second


def _turning_over(transport):
    return turning(transport=transport)


# ---- row 14: fewer samples than micro-batches


def small_batches():
    model = sequence(6)
    x, target = data(8)
    lanes = {} if dist.is_initialized() else {"lanes": 2}
    for schedule in ("1f1b", "gpipe", "zb_h1"):
        with penstock.Pipeline(
            model, example=x, loss=nn.functional.mse_loss, micro_batches=8, cuts=[6], schedule=schedule, **lanes
        ) as pipe:
            for size in range(1, 8):
                x, target = data(size, seed=size)
                pipe.zero_grad()
                loss = pipe.step(x, target)
                assert not list(differences(pipe, loss, expected(model, x, target)))
                torch.testing.assert_close(pipe.evaluate(x, target), nn.functional.mse_loss(model(x), target))


def test_fewer_samples_than_micro_batches():
    small_batches()


def test_fewer_samples_than_micro_batches_in_processes():
    processes.run(small_batches, 2)


# ---- row 16: what may cross a cut


class Makes(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.linear, self.make = nn.Linear(6, 6).double(), make

    def forward(self, x):
        return self.make(self.linear(x))


class Takes(nn.Module):
    def __init__(self, take):
        super().__init__()
        self.linear, self.take = nn.Linear(6, 6).double(), take

    def forward(self, *values):
        return self.linear(self.take(*values))


EDGES = {
    "a number beside": (lambda y: (y, 3), lambda y, n: y * n),
    "a text beside": (lambda y: (y, "tanh"), lambda y, name: getattr(torch, name)(y)),
    "nothing": (lambda y: (y, None), lambda y, nothing: y),
    "whole numbers": (lambda y: (y, (y > 0).long()), lambda y, n: y * n),
    "truths": (lambda y: (y, y > 0), lambda y, mask: y * mask),
    "no dimensions": (lambda y: (y, y.mean()), lambda y, mean: y + 0 * mean),
    "no samples": (lambda y: (y, y[:0]), lambda y, none: y + none.sum()),
    "not contiguous": (lambda y: y.t(), lambda y: y.t()),
    "spread": (lambda y: (y[:, :1].expand(-1, 6), y), lambda a, b: a + b),
    "no gradient": (lambda y: (y, y.detach() * 2), lambda y, free: y * free),
    "complex": (lambda y: torch.complex(y, y * 2), lambda z: z.real * z.imag),
    "half": (lambda y: (y, y.half()), lambda y, half: y + half.double()),
}


def cross():
    x, target = data(8)
    lanes = {} if dist.is_initialized() else {"lanes": 2}
    for name, (make, take) in EDGES.items():
        torch.manual_seed(0)
        stages = [Makes(make), Takes(take)]
        with penstock.Pipeline(
            stages, example=x, loss=nn.functional.mse_loss, micro_batches=4, timeout=20.0, **lanes
        ) as pipe:
            for _ in range(2):
                pipe.zero_grad()
                loss = pipe.step(x, target)
        right = _of_pieces(stages, x, target)
        torch.testing.assert_close(loss, right, msg=lambda text, name=name: f"{name}: {text}")


def test_what_may_cross_a_cut():
    cross()


def test_what_may_cross_a_cut_between_processes():
    processes.run(cross, 2)


def _of_pieces(stages, x, target):
    """Return the loss of the plain stages, a micro-batch at a time: what crosses may depend on how many samples."""
    losses = []
    for piece, aim in zip(x.split(2), target.split(2), strict=True):
        made = stages[0](piece)
        out = stages[1](*made) if isinstance(made, tuple) else stages[1](made)
        losses.append(nn.functional.mse_loss(out, aim))
    return torch.stack(losses).mean().detach()


# ---- row 21: a slow lane is named


def test_a_slow_lane_is_named():
    x, target = data(16)
    with penstock.Pipeline(
        sequence(8), example=x, loss=nn.functional.mse_loss, lanes=4, cuts=[4, 8, 12], micro_batches=8
    ) as pipe:
        pipe.watch = Injector.parse("delay@lane=2,action=F,seconds=20ms; delay@lane=2,action=B,seconds=20ms")
        pipe.step(x, target)
        with pipe.record() as timeline:
            pipe.step(x, target)
    slow = slow_lanes(timeline)[
        0
    ]  # a busy machine may make another slow too; how slow is told of simulated times below
    assert (slow.lane, slow.stages) == (2, (2,))
    assert slow.seconds >= 16 * 0.02
    assert "lane 2 takes" in str(slow)


def test_slow_by_plan_or_by_device():
    build, simulate, costs = penstock.schedules.build, penstock.simulate, penstock.Costs
    schedule = build("1f1b", lanes=4, micro_batches=8)
    even = simulate(schedule, costs(forward=[1.0] * 4, backward=[2.0] * 4))
    uneven = simulate(schedule, costs(forward=[1.0, 1.0, 1.8, 1.0], backward=[2.0, 2.0, 3.6, 2.0]))
    assert slow_lanes(even) == ()
    (slow,) = slow_lanes(uneven)
    assert (slow.lane, slow.is_as_planned) == (2, False)
    assert slow.ratio == pytest.approx(1.8)
    assert "lane 2 takes 1.8 times as long as the others" in str(slow)
    (slow,) = slow_lanes(uneven, expected=even)
    assert not slow.is_as_planned
    (slow,) = slow_lanes(uneven, expected=uneven)
    assert slow.is_as_planned
    assert "planned to take longer" in str(slow)
    assert slow_lanes(uneven, factor=2.0) == ()
    assert slow_lanes(simulate(build("1f1b", lanes=1, micro_batches=2))) == ()
    with pytest.raises(UsageError, match="lanes"):
        slow_lanes(uneven, expected=simulate(build("1f1b", lanes=2, micro_batches=2)))


# ---- row 22: the cause stands in one process only


def raising_process(text):
    x, target = data(8)
    pipe = penstock.Pipeline(
        sequence(6), example=x, loss=nn.functional.mse_loss, cuts=[4, 8], micro_batches=4, timeout=20.0
    )
    pipe.watch = Injector.parse(text, rank=dist.get_rank(), world_size=3)
    begin = time.monotonic()
    try:
        pipe.step(x, target)
        pipe.step(x, target)
        told = "no error", None
    except LaneError as error:
        told = str(error), type(error.__cause__).__name__
    pipe.close()
    return *told, time.monotonic() - begin


@pytest.mark.sample(2)
@pytest.mark.parametrize(("lane", "action"), [(0, "B0"), (1, "F1"), (2, "F1")])
def test_an_exception_has_its_cause_where_it_happened(lane, action):
    results = processes.run(raising_process, 3, f"raise@lane={lane},step=1,action={action}")
    for number, (text, cause, seconds) in enumerate(results):
        assert f"lane {lane}, stage {lane}, micro-batch" in text
        assert "injected fault" in text
        assert cause == ("RuntimeError" if number == lane else "NoneType")
        assert seconds < 10
