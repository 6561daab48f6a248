"""Memory that runs out: recognised, named on all lanes, with what would fit; and no lane waits for ever."""

import resource
import warnings

import pytest
import torch
from torch import nn

import penstock
import processes
from penstock.errors import LaneError, PenstockError
from penstock.faults.injector import Injector
from penstock.faults.out_of_memory import advice, is_out_of_memory, options
from penstock.pipeline.smaller_micro_batches import split_finer
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


def test_memory_that_runs_out_on_one_lane_is_told_on_all():
    for told, left in processes.run(greedy_process, 2):
        assert told.startswith("True memory ran out on lane 1, stage 1, micro-batch 0, at 1F0")
        assert not left
    assert "Predicted now: lane 0 " in told  # counted without memory, also what the model makes besides


# ---- and goes on, with smaller micro-batches


EXACT = [name for name in penstock.schedules.names() if penstock.schedules.describe(name).trains_exactly]


@pytest.mark.parametrize("schedule", EXACT)
def test_a_pipeline_goes_on_with_twice_the_micro_batches(schedule):
    x, target = data(16)
    model = sequence(8)
    want = expected(model, x, target)
    with penstock.Pipeline(
        model, example=x, loss=nn.functional.mse_loss, lanes=2, micro_batches=4, schedule=schedule, analytic="cpu"
    ) as pipe:
        pipe.step(x, target)
        is_split = split_finer(pipe)
        assert is_split == ("costs" not in penstock.schedules.describe(schedule).options)
        assert pipe.schedule.num_mbs == (8 if is_split else 4)
        pipe.zero_grad()
        with pipe.record() as recording:
            loss = pipe.step(x, target)
        assert not list(differences(pipe, loss, want))
        assert max(recording.timeline.mb) + 1 == pipe.schedule.num_mbs
        assert pipe.explain().schedule.num_mbs == pipe.schedule.num_mbs


def test_it_is_not_split_beyond_a_sample_nor_where_that_is_another_training():
    x, target = data(8)
    made = {"example": x, "loss": nn.functional.mse_loss, "lanes": 2, "analytic": "cpu"}
    with penstock.Pipeline(sequence(8), **made, micro_batches=4) as pipe:
        assert split_finer(pipe)
        assert pipe.step(x, target).isfinite()
        assert not split_finer(pipe)
        assert pipe.schedule.num_mbs == 8
    own = penstock.schedules.build("1f1b", lanes=2, micro_batches=2)
    with penstock.Pipeline(sequence(8), **made, schedule=own) as pipe:
        assert not split_finer(pipe)
    with penstock.Pipeline(
        sequence(8), **made, schedule="pipedream", micro_batches=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    ) as pipe:
        assert not split_finer(pipe)


class Scarce(nn.Module):
    """Has memory for micro-batches of so many samples, once it is scarce."""

    is_scarce = False

    def __init__(self, most):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6).double(), nn.BatchNorm1d(6).double()
        self.most = most

    def forward(self, x):
        out = self.norm(self.linear(nn.functional.dropout(x, 0.5, self.training)))
        if Scarce.is_scarce and len(x) > self.most:  # after the norm has changed its statistics
            torch.empty(1 << 60, dtype=torch.uint8)  # more than can be addressed
        return out


def train_in_scarcity(folder, most, lanes=None, **asked):
    """Train four steps of 16 samples in 4 micro-batches, or 8 from the third on; return how that went."""
    torch.manual_seed(0)
    Scarce.is_scarce = False
    noted = []

    class Switch(penstock.Callback):
        strict = True

        def on_step_begin(self, trainer):
            Scarce.is_scarce = trainer.step >= 2
            if trainer.step == 2:
                assert not asked.get("splits_itself") or split_finer(trainer.pipe)

        def on_step_end(self, trainer, reading):
            noted.append((reading.step, reading.loss, trainer.pipe.schedule.num_mbs))

        def on_fault(self, trainer, fault):
            noted.append((fault["kind"], fault["step"], fault.get("micro_batches")))

    x, target = data(16)
    pipe = penstock.Pipeline(
        [sequence(2), Scarce(most)], example=x, loss=nn.functional.mse_loss, lanes=lanes, micro_batches=4, timeout=30
    )
    trainer = penstock.Trainer(
        pipe, torch.optim.SGD(pipe.parameters(), lr=0.1), [(x, target)], steps=4, folder=folder, view=False,
        callbacks=[Switch()], on_oom=asked.get("on_oom", "split"),
    )  # fmt: skip
    with pipe, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            trainer.fit()
            told = ""
        except LaneError as error:
            told = "\n".join([str(error), *error.__notes__])
    said = [str(one.message) for one in warned if "memory ran out" in str(one.message)]
    state = {name: value.tolist() for name, value in pipe.state_dict().items()}
    return noted, told, said, state


def test_a_training_splits_a_step_for_which_memory_does_not_suffice(tmp_path):
    noted, told, said, state = train_in_scarcity(tmp_path / "split", 2, lanes=2)
    assert not told
    assert len(said) == 1
    assert "with 8 micro-batches" in said[0]
    assert noted[2] == ("out of memory", 3, 8)
    assert [count for *_, count in noted] == [4, 4, 8, 8, 8]
    # the same as where it had been known from the third step on: statistics, dropout and all
    meant, *_, wanted = train_in_scarcity(tmp_path / "meant", 16, lanes=2, splits_itself=True)
    assert [one for one in noted if one[0] != "out of memory"] == meant
    assert state == wanted
    assert '"out of memory"' in (tmp_path / "split" / "faults.jsonl").read_text()


def test_a_training_ends_where_splitting_is_no_help_or_is_not_wanted(tmp_path):
    noted, told, said, _ = train_in_scarcity(tmp_path / "small", 0, lanes=2)
    assert len(said) == 2  # 8 and 16
    assert "Expected more than 1 value per channel" in told  # what a batch norm says of one sample alone
    assert "memory ran out with 8 micro-batches" in told
    assert [one[0] for one in noted] == [1, 2, "out of memory", "out of memory", "error"]
    noted, told, said, _ = train_in_scarcity(tmp_path / "stop", 2, lanes=2, on_oom="stop")
    assert not said
    assert "allocate" in told
    assert "memory ran out on lane 1" in told


def test_all_processes_split_together(tmp_path):
    first, second = processes.run(train_in_scarcity, 2, tmp_path / "run", 2)
    want, *_, wanted = train_in_scarcity(tmp_path / "meant", 16, lanes=2, splits_itself=True)
    for noted, told, said, _ in (first, second):
        assert not told
        assert len(said) == 1
        assert [one for one in noted if one[0] != "out of memory"] == want
    assert first[3] | second[3] == wanted


def test_a_split_with_a_scaler_and_a_loss_of_its_own_parameters(tmp_path):
    """Nothing was unscaled when memory ran out, and what the loss has learns as ever."""
    torch.manual_seed(0)
    Scarce.is_scarce = False
    x, target = data(16)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    class Weighed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, output, target):
            return nn.functional.mse_loss(output * self.weight, target)

    class Switch(penstock.Callback):
        strict = True

        def on_step_begin(self, trainer):
            Scarce.is_scarce = trainer.step >= 2

        def on_pre_optimizer_step(self, trainer):
            seen.append(float(loss.weight.grad))

    seen, loss = [], Weighed()
    pipe = penstock.Pipeline(
        [sequence(2), Scarce(2)], example=x, loss=loss, lanes=2, micro_batches=4, scaler=scaler, timeout=30
    )
    pipe.internals.chains[0].stages[1].eval()
    trainer = penstock.Trainer(
        pipe, torch.optim.SGD([*pipe.parameters(), *loss.parameters()], lr=0.0), [(x, target)], steps=4,
        folder=tmp_path, view=False, callbacks=[Switch()],
    )  # fmt: skip
    with pipe, pytest.warns(UserWarning, match="with 8 micro-batches"):
        assert trainer.fit().is_done
    assert seen[0] == pytest.approx(seen[1])  # the same batch and the same weights: nothing is left from before


def test_what_is_split_is_the_batch_not_the_example():
    x, target = data(16)
    made = {"loss": nn.functional.mse_loss, "lanes": 2, "analytic": "cpu"}
    with penstock.Pipeline(sequence(8), example=x[:2], micro_batches=2, **made) as pipe:
        pipe.step(x, target)
        assert split_finer(pipe)
        assert pipe.schedule.num_mbs == 4
    with penstock.Pipeline(sequence(8), example=x, micro_batches=4, **made) as pipe:
        pipe.step(x[:4], target[:4])
        assert not split_finer(pipe)


def test_a_profile_that_was_given_is_of_larger_micro_batches():
    x, _ = data(16)
    made = {"example": x, "loss": nn.functional.mse_loss, "lanes": 2, "micro_batches": 4}
    with penstock.Pipeline(sequence(8), **made, analytic="cpu") as pipe:
        profile = pipe.explain().profile
    with penstock.Pipeline(sequence(8), **made, profile=profile) as pipe:
        held = pipe._planned.held_bytes()
        assert split_finer(pipe)
        assert pipe.internals.predicted() is None
        assert (pipe._planned.held_bytes()["saved_bytes"] * 2 == held["saved_bytes"]).all()
        assert pipe.explain().schedule.num_mbs == 8


def test_a_rehearsal_runs_out_once_a_step(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_FAULTS", "oom@step=2,action=1F1; oom@step=3,lane=0,action=B0")
    x, target = data(32)
    pipe = penstock.Pipeline(sequence(8), example=x, loss=nn.functional.mse_loss, lanes=2, micro_batches=4, cuts=[8])
    trainer = penstock.Trainer(
        pipe, torch.optim.SGD(pipe.parameters(), lr=0.1), [(x, target)], steps=4, folder=tmp_path, view=False
    )
    with pipe, pytest.warns(UserWarning, match="memory ran out"):
        assert trainer.fit().is_done
    assert pipe.schedule.num_mbs == 16


def refusing_process(folder):
    """Give lane 1 a batch of another type; return what is said, and how long that took."""
    x, target = data(8)
    pipe = penstock.Pipeline([sequence(1), sequence(1)], example=x, loss=nn.functional.mse_loss, timeout=60.0)
    given = (x.float(), target) if torch.distributed.get_rank() else (x, target)
    trainer = penstock.Trainer(
        pipe, torch.optim.SGD(pipe.parameters(), lr=0.1), [given], steps=1, folder=folder, view=False
    )
    with pipe:
        try:
            trainer.fit()
        except PenstockError as error:
            return str(error)
    return "no error"


def test_a_batch_that_one_process_refuses_is_told_in_all(tmp_path):
    for told in processes.run(refusing_process, 2, tmp_path / "run"):
        assert "the batch is not like the example" in told
