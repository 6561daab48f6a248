"""Metrics: means over windows, told in order, without a wait of the host."""

import numpy as np
import pytest
import torch

import penstock


def test_means_of_windows_are_told_in_order():
    told = []
    metrics = penstock.Metrics(every=3, tell=lambda step, means: told.append((step, means)))
    for step in range(7):
        metrics.add(loss=torch.tensor(float(step)), right=step, share=torch.tensor([step]))
    metrics.flush()
    assert told == [
        (3, {"loss": 1.0, "right": 1.0, "share": 1.0}),
        (6, {"loss": 4.0, "right": 4.0, "share": 4.0}),
        (7, {"loss": 6.0, "right": 6.0, "share": 6.0}),
    ]
    assert metrics.latest == told[-1][1]
    metrics.flush()
    assert len(told) == 3


def test_a_metric_that_is_missing_in_some_steps_is_a_mean_of_the_others():
    metrics = penstock.Metrics(every=4)
    for step in range(4):
        metrics.add(loss=1.0, **({"seldom": 10.0 + step} if step % 2 else {}))
    assert metrics.latest == {"loss": 1.0, "seldom": 12.0}


def test_the_caller_s_tensors_stay_as_they_are():
    metrics, loss = penstock.Metrics(every=10), torch.tensor(1.0, requires_grad=True)
    for _ in range(3):
        metrics.add(loss=loss)
    assert float(loss.detach()) == 1.0
    loss.data.fill_(5.0)
    assert metrics.flush() == {"loss": 1.0}


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "3"])
def test_a_window_has_steps(every):
    with pytest.raises(penstock.errors.UsageError, match="every"):
        penstock.Metrics(every=every)


def test_a_metric_is_one_number():
    with pytest.raises(penstock.errors.UsageError, match=r"loss: .*\(2,\)"):
        penstock.Metrics().add(loss=torch.zeros(2))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_does_not_wait():
    told = []
    metrics = penstock.Metrics(every=2, tell=lambda step, means: told.append((step, means)))
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        torch.cuda._sleep(200_000_000)  # what comes behind it is not there for a while
        for step in range(6):
            metrics.add(loss=torch.full((), float(step), device="cuda"))
        assert not told
    finally:
        torch.cuda.set_sync_debug_mode("default")
    metrics.flush()
    assert told == [(2, {"loss": 0.5}), (4, {"loss": 2.5}), (6, {"loss": 4.5})]


def test_whole_numbers_do_not_overflow():
    metrics = penstock.Metrics(every=2)
    for _ in range(2):
        metrics.add(small=torch.tensor(200, dtype=torch.uint8), large=torch.tensor(2**31 - 1, dtype=torch.int32))
    assert metrics.latest == {"small": 200.0, "large": float(2**31 - 1)}


def test_what_is_no_number_is_refused_by_name():
    metrics = penstock.Metrics()
    for wrong in ("a", None, [1.0]):
        with pytest.raises(
            penstock.errors.UsageError, match=f"loss: a metric is one number per step; given: {type(wrong).__name__}"
        ):
            metrics.add(loss=wrong)
    assert metrics.step == 0
    with pytest.raises(penstock.errors.UsageError, match="tell: pass a function"):
        penstock.Metrics(tell=3)


@pytest.mark.parametrize(("number", "mean"), [(np.uint8(200), 200.0), (np.float16(60000), 60000.0), (True, 1.0)])
def test_narrow_numbers_do_not_overflow(number, mean):
    metrics = penstock.Metrics(every=2)
    metrics.add(loss=number)
    metrics.add(loss=number)
    assert metrics.latest["loss"] == pytest.approx(mean, rel=1e-3)


def test_of_a_step_that_is_refused_nothing_counts():
    metrics = penstock.Metrics(every=2)
    with pytest.raises(penstock.errors.UsageError, match="bad: a metric is one number per step"):
        metrics.add(loss=torch.tensor(9.0), bad=[1, 2])
    metrics.add(loss=torch.tensor(1.0))
    metrics.add(loss=torch.tensor(4.0))
    assert metrics.latest == {"loss": 2.5}
