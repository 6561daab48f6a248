"""The injector: what it reads, where it strikes, and that a restart goes on."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
import processes
from penstock.errors import HangError, LaneError, LostError, UsageError
from penstock.faults.fault_spec import Chaos, FaultSpec, parse
from penstock.faults.injector import Injector
from pipelines import data, differences, expected, sequence


def make(model=None, **options):
    options = {"lanes": 2, "cuts": [4], "micro_batches": 4, "timeout": 30.0} | options
    return penstock.Pipeline(
        sequence(4) if model is None else model, example=data(8)[0], loss=nn.functional.mse_loss, **options
    )


@pytest.mark.parametrize(
    "text",
    [
        "kill@lane=1,step=3,action=B2",
        "nan@lane=0,step=5,action=F1",
        "stop@rank=1,action=1SEND_F0",
        "delay@action=F,seconds=0.2",
        "exit@step=2,action=save,code=3",
        "raise@step=0,action=optimizer,attempt=1",
        "drop@action=SEND_B1",
        "corrupt@action=0F0",
        "oom",
        "mtti=5s,seed=1,kinds=kill+stop+raise",
    ],
)
def test_the_text_form_is_read_and_written(text):
    (fault,) = parse(text)
    assert str(fault) == text


def test_several_faults():
    faults = parse(" kill@lane=1,step=3,action=B2 ; mtti=200ms;")
    assert [type(fault) for fault in faults] == [FaultSpec, Chaos]
    assert faults[1].mtti == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty; example"),
        ("kil@lane=1", "Did you mean 'kill'"),
        ("kill@lain=1", "Did you mean 'lane'"),
        ("kill@lane", "is not name=value"),
        ("kill@lane=", "is not name=value"),
        ("kill@lane=-1", "whole number"),
        ("kill@lane=1,lane=2", "twice"),
        ("kill@action=optimiser", "Did you mean 'optimizer'"),
        ("kill@action=X2", "is invalid"),
        ("kill@seconds=3", "no other fault takes it"),
        ("delay@lane=1", "a delay needs seconds"),
        ("delay@seconds=0", "above 0"),
        ("delay@seconds=soon", "above 0"),
        ("exit@code=300", "0 to 255"),
        ("nan@lane=1", "a kind that makes values"),
        ("nan@action=SEND_F", "a kind that makes values"),
        ("drop@action=F", "a kind that sends"),
        ("seed=1", "mtti=5s"),
        ("mtti=5s,kinds=kill+rise", "Did you mean 'raise'"),
        ("mtti=5s;mtti=6s", "twice"),
    ],
)
def test_a_text_that_is_none_is_refused(text, words):
    with pytest.raises(UsageError, match=words):
        Injector.parse(text)


def test_the_environment_says_which_process_and_which_attempt():
    text = "raise@rank=1,action=save"
    assert Injector.from_environment({}) is None
    assert Injector.from_environment({"PENSTOCK_FAULTS": " "}) is None
    Injector.from_environment({"PENSTOCK_FAULTS": text}).at("save", lane=0, step=1)  # of rank 0
    with pytest.raises(RuntimeError, match="injected fault"):
        Injector.from_environment({"PENSTOCK_FAULTS": text, "RANK": "1"}).at("save", lane=1, step=1)
    again = {"PENSTOCK_FAULTS": text, "RANK": "1", "TORCHELASTIC_RESTART_COUNT": "1"}
    Injector.from_environment(again).at("save", lane=1, step=1)  # a restart goes on


@pytest.mark.parametrize("point", ["step", "data", "optimizer", "save"])
def test_points_outside_actions(point):
    injector = Injector.parse(f"raise@step=2,lane=1,action={point}")
    for where in ({"lane": 1, "step": 1}, {"lane": 0, "step": 2}):
        injector.at(point, **where)
    injector.at("elsewhere", lane=1, step=2)
    with pytest.raises(RuntimeError, match=f"lane 1, step 2, {point}"):
        injector.at(point, lane=1, step=2)


@pytest.mark.parametrize("action", ["0F1", "1F3", "0B0", "B2", "RECV_F1", "SEND_B0"])
def test_an_exception_at_any_action_and_the_pipeline_goes_on(action):
    x, target = data(8)
    model = sequence(4)
    with make(model) as pipe:
        pipe.watch = Injector.parse(f"raise@step=2,action={action}")
        pipe.step(x, target)
        with pytest.raises(LaneError, match="injected fault"):
            pipe.step(x, target)
        pipe.zero_grad()
        loss = pipe.step(x, target)
        assert not list(differences(pipe, loss, expected(model, x, target)))


def test_steps_are_counted_as_the_caller_does():
    """A process that resumes at step 40 runs its pipeline's first step."""
    x, target = data(8)
    with make() as pipe:
        pipe.watch = injector = Injector.parse("raise@step=41,action=F0")
        injector.at("step", lane=0, step=40)
        pipe.step(x, target)
        injector.at("step", lane=0, step=41)
        with pytest.raises(LaneError, match="lane 0, step 41, 0F0"):
            pipe.step(x, target)


@pytest.mark.parametrize("action", ["0F1", "1F2", "1B0", "0B3", "RECV_F"])
def test_nan_reaches_the_loss_or_the_gradients_and_not_the_batch(action):
    x, target = data(8)
    with make() as pipe:
        before = x.clone(), [p.detach().clone() for p in pipe.parameters()]
        pipe.watch = Injector.parse(f"nan@step=1,action={action}")
        loss = pipe.step(x, target)
        gradients = [p.grad for p in pipe.parameters()]
        assert loss.isfinite() == ("B" in action)
        assert not all(g.isfinite().all() for g in gradients)
        assert torch.equal(x, before[0])
        assert all(torch.equal(p, old) for p, old in zip(pipe.parameters(), before[1], strict=True))
        pipe.zero_grad()
        assert pipe.step(x, target).isfinite()


def test_a_flipped_bit_changes_the_loss():
    x, target = data(8)
    with make() as pipe:
        right = pipe.step(x, target)
        pipe.watch = Injector.parse("corrupt@action=0F1")
        assert not torch.equal(pipe.step(x, target), right)
        pipe.watch = None
        assert torch.equal(pipe.step(x, target), right)


def test_a_message_that_is_not_sent_is_missed():
    x, target = data(8)
    with make() as pipe:
        pipe.step(x, target)
        pipe.timeout = 1.0
        pipe.watch = Injector.parse("drop@action=SEND_F2")
        with pytest.raises(HangError, match=r"has waited 1 s for .* for micro-batch 2"):
            pipe.step(x, target)


def test_a_delay_is_seen_in_the_timeline():
    x, target = data(8)
    with make() as pipe:
        pipe.watch = Injector.parse("delay@action=1F1,seconds=80ms")
        with pipe.record() as timeline:
            pipe.step(x, target)
    seconds = {str(span.action): span.end - span.start for span in timeline}
    assert seconds["1F1"] >= 0.08


def test_chaos_is_the_same_for_all_and_strikes_one():
    """All processes draw the same faults, so that exactly one of them has each."""
    injectors = [Injector.parse("mtti=10ms,seed=3,kinds=raise", rank=rank, world_size=3) for rank in range(3)]
    struck = [0, 0, 0]
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        for rank, injector in enumerate(injectors):
            try:
                injector.at("step", lane=rank, step=1)
            except RuntimeError:
                struck[rank] += 1
        time.sleep(0.001)
    assert all(struck)
    assert 15 < sum(struck) < 150  # 50 are to be expected


# ---- processes


def struck_process(text):
    """Train with faults; return the error, or the losses."""
    x, target = data(8)
    pipe = make(lanes=None)
    pipe.watch = Injector.parse(text, rank=torch.distributed.get_rank(), world_size=2)
    losses = []
    begin = time.monotonic()
    try:
        for _ in range(3):
            pipe.zero_grad()
            losses.append(float(pipe.step(x, target)))
    except LostError as error:
        return str(error), time.monotonic() - begin
    finally:
        pipe.close()
    return losses


@pytest.mark.parametrize(("kind", "code"), [("kill", -signal.SIGKILL), ("exit", 7)])
def test_a_process_that_dies_at_an_action_is_named(kind, code):
    more = ",code=7" if kind == "exit" else ""
    left, gone = processes.run(struck_process, 2, f"{kind}@lane=1,step=2,action=B1{more}", may_fail=True)
    assert gone == f"ended with {code}"
    text, seconds = left
    assert "lane 1 is gone" in text
    assert seconds < 10


def test_a_process_that_is_stopped_goes_on_when_it_is_let():
    started = processes.start(struck_process, 2, "stop@lane=1,step=2,action=F1")
    pid = started[1][0].pid
    end = time.monotonic() + 60
    while _is_running(pid) and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(pid, signal.SIGCONT)
    first, second = processes.finish(started)
    assert first == second
    assert len(first) == 3


def _is_running(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"
