"""Memory that runs out: recognised, named on all lanes, with what would fit; and no lane waits for ever."""

import resource

import pytest
import torch
from torch import nn

import penstock
import processes
from penstock.errors import LaneError
from penstock.faults.injector import Injector
from penstock.faults.memory import advice, is_out_of_memory, options
from pipelines import data, differences, expected, sequence

MODEL_WIDTH = 64


def wide():
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(MODEL_WIDTH, MODEL_WIDTH), nn.Tanh())))


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (LaneError("lane 1, stage 1, micro-batch 0, action 1F0 (forward): MemoryError: "), True),
        (LaneError("lane 1, stage 1, micro-batch 0, action 1F0 (forward): ValueError: a mistake"), False),
        (ValueError("out of memory"), False),
        (LaneError("lane 1 waited"), False),
    ],
)
def test_it_is_recognised(error, is_one):
    assert is_out_of_memory(error) == is_one


def test_it_is_recognised_by_its_cause():
    error = LaneError("something else")
    assert not is_out_of_memory(error)
    error.__cause__ = MemoryError()
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("gpipe", ['keep="recompute"', 'keep="offload"', 'keep="fit"', "4 lanes"]),
        ("1f1b", ['keep="recompute"', 'keep="fit"', "micro_batches=16"]),
        ("zb_h1", ['keep="recompute"', "micro_batches=16"]),
    ],
)
def test_advice_names_the_place_and_what_takes_less(schedule, words):
    x = torch.randn(4096, MODEL_WIDTH)
    with penstock.Pipeline(
        wide(), example=x, loss=nn.MSELoss(), lanes=2, micro_batches=8, cuts=[8], schedule=schedule
    ) as pipe:
        pipe.watch = Injector.parse("oom@step=1,action=1F2")
        with pytest.raises(LaneError) as caught:
            pipe.step(x, x)
        text = advice(pipe, caught.value)
    assert "memory ran out on lane 1, stage 1, micro-batch 2, at 1F2" in text
    assert all(word in text for word in words), text
    assert "MiB" in text


def test_the_options_hold_as_much_as_is_measured():
    """What is predicted for a setting is what a pipeline with that setting is measured to save.

    On the lane in the middle: the first holds the batch too, which is the user's, and the last what the loss saves.
    What crosses a cut is predicted where it is made, and measured also where it arrives: one value of five here.
    """
    x = torch.randn(512, MODEL_WIDTH)
    made = {"example": x, "loss": nn.MSELoss(), "lanes": 3, "micro_batches": 4, "cuts": [4, 12], "schedule": "gpipe"}
    saved = {}
    for keep in ("hold", "recompute"):
        with penstock.Pipeline(wide(), **made, keep=keep) as pipe, pipe.record(memory=True) as recording:
            pipe.step(x, x)
            saved[keep] = recording.measured_bytes
    with penstock.Pipeline(wide(), **made) as pipe:
        now, others = options(pipe)
    weights = 4 * 4 * (MODEL_WIDTH * MODEL_WIDTH + MODEL_WIDTH) * 4  # four layers, each number four times
    recomputed = next(option for option in others if option.words == 'keep="recompute"')
    for option, keep in ((now, "hold"), (recomputed, "recompute")):
        assert option.lane_bytes[1] - weights == pytest.approx(saved[keep][1], rel=0.25)


def test_a_fit_that_is_advised_can_be_built():
    x = torch.randn(4096, MODEL_WIDTH)
    made = {"example": x, "loss": nn.MSELoss(), "lanes": 2, "micro_batches": 8, "cuts": [8], "schedule": "gpipe"}
    with penstock.Pipeline(wide(), **made) as pipe:
        now, others = options(pipe)
    fitted = next(option for option in others if option.words.startswith('keep="fit"'))
    limit = float(fitted.words.partition("memory_limit=")[2])
    assert limit < now.peak_bytes
    with penstock.Pipeline(wide(), **made, keep="fit", memory_limit=limit, analytic="cpu") as pipe:
        assert pipe.step(x, x).isfinite()


class Greedy(nn.Module):
    """Wants more memory than there is when its switch is on."""

    is_on = False

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x):
        if Greedy.is_on:
            torch.empty(1 << 36, dtype=torch.uint8)  # 64 GiB
        return self.linear(x)


def greedy_process():
    """Let memory be scarce on lane 1: all see the error, none waits, and with memory they go on."""
    x, target = data(8)
    stages = [sequence(1), Greedy()]
    pipe = penstock.Pipeline(stages, example=x, loss=nn.functional.mse_loss, micro_batches=4, timeout=30.0)
    pipe.step(x, target)
    if torch.distributed.get_rank() == 1:
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 35, limits[1]))
        Greedy.is_on = True
    try:
        pipe.step(x, target)
        told = "no error"
    except LaneError as error:
        told = f"{is_out_of_memory(error)} {advice(pipe, error)}"
    if torch.distributed.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    Greedy.is_on = False
    pipe.zero_grad()
    loss = pipe.step(x, target)
    left = list(differences(pipe, loss, expected(nn.Sequential(*stages), x, target)))
    pipe.close()
    return told, left


@pytest.mark.xdist_group("processes")
def test_memory_that_runs_out_on_one_lane_is_told_on_all():
    for told, left in processes.run(greedy_process, 2):
        assert told.startswith("True memory ran out on lane 1, stage 1, micro-batch 0, at 1F0")
        assert not left
    assert "is not known" in told  # the lane whose model fails where it is counted says so, and nothing worse
