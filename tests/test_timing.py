"""measure: how often it runs what it times, what it returns, and what it refuses."""

import subprocess
import sys
import time

import pytest
import torch

import penstock
from penstock.errors import UsageError
from penstock.model.profiling.call_timing import Timing
from penstock.timing import Measurement, _burst, measure


def counted():
    calls = []

    def run(*args, **kwargs):
        calls.append((args, kwargs))

    return run, calls


class Told:
    """A clock that tells what it was told: seconds of the device and of the host, for one call after the other."""

    def __init__(self, *timings):
        self.timings, self.asked = list(timings), []

    def time(self, call, count, *, ahead_seconds=0.0):
        self.asked.append((count, ahead_seconds))
        return Timing(*self.timings.pop(0))


@pytest.mark.parametrize(
    ("timings", "wanted"),
    [
        ([(2e-6, 1e-5)], 64),
        ([(70e-6, 1e-5), (2e-6, 1e-5)], 64),  # the device waited for the host
        ([(70e-6, 9e-4), (2e-6, 1e-5)], 64),
        ([(70e-6, 1e-5), (69e-6, 1e-5)], 1),
        ([(2e-3, 1e-5)], 1),  # not asked for again
        ([(2e-6, 5e-3)], 1),  # it would take the host too long
    ],
)
def test_how_many_calls_are_timed_at_once(timings, wanted):
    clock = Told(*timings)
    count, ahead = _burst(clock, lambda: None, torch.device("cuda"), one_at_a_time=False)
    assert count == wanted
    assert 0 < ahead <= 0.02
    assert not clock.timings
    assert _burst(Told(*timings), lambda: None, torch.device("cuda"), one_at_a_time=True)[0] == 1


def test_a_measurement_has_each_run():
    found = Measurement((0.003, 0.001, 0.002))
    assert (found.median, found.low, found.high) == (0.002, 0.001, 0.003)


@pytest.mark.parametrize(
    ("times", "text"),
    [
        ((0.0012, 0.00123, 0.00131), "1.23 ms (1.20-1.31), 3 runs"),
        ((2.0,), "2.00 s (2.00-2.00), 1 run"),
        ((0.123, 0.1234), "123 ms (123-123), 2 runs"),
        ((12.34e-6, 9.5e-6, 20e-6), "12.3 µs (9.5-20.0), 3 runs"),
        ((4.2e-9,), "4.20 ns (4.20-4.20), 1 run"),
        ((0.0,), "0.00 ns (0.00-0.00), 1 run"),
    ],
)
def test_a_measurement_is_told_in_three_digits(times, text):
    assert str(Measurement(times)) == text


def test_runs_to_warm_up_come_before_those_that_are_timed():
    run, calls = counted()
    found = measure(run, 1, repeats=4, warm=2, device="cpu", other=2)
    assert len(found.times) == 4
    assert calls == [((1,), {"other": 2})] * 6


def test_the_slow_one_takes_longer():
    assert measure(time.sleep, 0.01, repeats=2, warm=0, device="cpu").low >= 0.01


@pytest.mark.parametrize("options", [{"flush_cache": True}, {"host": True}])
def test_options_run_on_a_cpu_too(options):
    assert len(measure(torch.add, torch.ones(8), 1.0, repeats=2, warm=0, **options).times) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"repeats": 0}, "repeats: 0 must be a whole number, 1 or more"),
        ({"repeats": 2.5}, "repeats: 2.5 must be"),
        ({"repeats": True}, "repeats: True must be"),
        ({"warm": -1}, "warm: -1 must be a whole number, 0 or more"),
        ({"repeats": 0, "warm": -1}, "repeats: 0 .*; warm: -1"),
        ({"device": "gpu"}, "nothing can be timed on 'gpu'"),
        ({"device": "meta"}, "nothing runs on meta"),
        ({"device": 2.5}, "nothing can be timed on 2.5"),
    ],
)
def test_wrong_arguments_are_told(given, message):
    run, calls = counted()
    with pytest.raises(UsageError, match=message):
        measure(run, **given)
    assert not calls


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told():
    with pytest.raises(UsageError, match="nothing can be timed on 'cuda'"):
        measure(torch.ones, 3, device="cuda")


def test_what_cannot_be_called_is_told():
    with pytest.raises(UsageError, match="cannot be called; to time an expression, write lambda"):
        measure(torch.ones(3))


def test_errors_of_the_function_are_its_own():
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 / 0, device="cpu")


def test_it_is_public_and_torch_comes_when_something_is_timed():
    assert penstock.timing.measure is measure
    code = "import sys, penstock; penstock.timing.measure; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False"]


# ---- on a GPU


def sleep(milliseconds):
    """Keep the GPU busy for about so long, or up to twice as long where its clock is slow, and the host not at all."""
    torch.cuda._sleep(int(milliseconds * 2e6))


@pytest.mark.alone
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu:
    def test_the_gpu_s_own_time_is_measured(self):
        found = measure(sleep, 5, repeats=3)
        assert found.low > 2e-3

    def test_the_host_s_work_is_in_the_figure_only_when_it_is_asked_for(self):
        x = torch.ones(1024, device="cuda")

        def slow_to_ask():
            time.sleep(0.01)
            return x + 1

        assert measure(slow_to_ask, repeats=3, host=True).low >= 0.01
        assert measure(slow_to_ask, repeats=3).high < 0.01

    def test_what_waits_for_the_gpu_is_timed_as_it_is(self):
        """The GPU is kept busy so that the host runs ahead; what waits for it would time that too."""
        x = torch.ones(1024, device="cuda")
        assert 0 < measure(lambda: x.sum().item(), repeats=3).median < 5e-3

    def test_tiny_kernels_are_timed_in_bursts(self):
        x = torch.ones(16, device="cuda")
        calls = []

        def tiny():
            calls.append(1)
            return x + 1

        found = measure(tiny, repeats=4)
        assert 0 < found.low < 50e-6
        assert len(calls) > 4 * 10

    @pytest.mark.parametrize("options", [{"flush_cache": True}, {"host": True}, {"flush_cache": True, "host": True}])
    def test_options(self, options):
        x = torch.ones(2**20, device="cuda")
        found = measure(torch.add, x, 1.0, repeats=3, **options)
        assert len(found.times) == 3
        assert found.low > 0

    def test_the_device_is_that_of_the_arguments(self):
        assert measure(torch.add, torch.ones(8), 1.0, repeats=2).low > 0  # on the CPU, though there is a GPU

    def test_a_function_that_gives_the_gpu_nothing_is_refused(self):
        with pytest.raises(UsageError, match="gave it no work"):
            measure(lambda: sum(range(1000)), repeats=2)
        assert measure(lambda: sum(range(1000)), repeats=2, device="cpu").low > 0
