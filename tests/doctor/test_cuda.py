"""On a GPU: real synchronisations are found by their line, with what they cost; and what is fine is not."""

import threading
import time
import warnings

import pytest
import torch
from torch import nn

import penstock
from penstock.doctor import Kind, watch
from penstock.doctor.slow_reductions import find_reduction
from sanitizing import SANITIZED

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# what a tiny training shows besides: it is bound by launches, which is no synchronisation
NO_WAITS = {Kind.LAUNCHES, Kind.REDUCTION}


class Training:
    def __init__(self, width=8):
        torch.manual_seed(0)
        self.model = nn.Linear(width, width).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.data = torch.ones(4, width, device="cuda")

    def step(self):
        loss = self.model(self.data).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def report_of(run, steps=6, training=None):
    """Run a training whose loop does something more in each step; with up to 5 steps none is timed."""
    training = training or Training()
    with watch(steps) as watching:
        for _ in range(steps):
            loss = training.step()
            run(loss)
    return watching.report


def waits_of(report):
    return {(finding.kind, finding.code) for finding in report.findings if finding.kind not in NO_WAITS}


def item(loss):
    loss.item()


def branch(loss):
    if loss > 1e9:
        raise AssertionError


def printed(loss):
    str(loss)


def to_list(loss):
    loss.reshape(1).tolist()


def to_cpu(loss):
    loss.cpu()


def nonzero(loss):
    loss.reshape(1).nonzero()


def by_mask(loss):
    loss.reshape(1)[loss.reshape(1) < 9]


def unique(loss):
    loss.reshape(1).unique()


def pageable(loss):
    torch.ones(2**20).to("cuda")


def pageable_not_blocking(loss):
    torch.ones(2**20).to("cuda", non_blocking=True)


def constant(loss):
    torch.tensor([1.0, 2.0], device="cuda")


def blocking(loss):
    torch.ones(2**20).pin_memory().to("cuda")


def whole_device(loss):
    torch.cuda.synchronize()


def stream(loss):
    torch.cuda.current_stream().synchronize()


def event(loss):
    torch.cuda.current_stream().record_event().synchronize()


WAITS = {
    item: Kind.ITEM, branch: Kind.ITEM, printed: Kind.PRINT, to_list: Kind.TO_HOST, to_cpu: Kind.TO_HOST,
    nonzero: Kind.SHAPE, by_mask: Kind.SHAPE, unique: Kind.SHAPE, pageable: Kind.UNPINNED,
    pageable_not_blocking: Kind.UNPINNED, constant: Kind.UNPINNED, blocking: Kind.BLOCKING, whole_device: Kind.WAIT,
    stream: Kind.WAIT, event: Kind.WAIT,
}  # fmt: skip


def first_line(function):
    """Return the text of a function's only line, or of the one that decides."""
    import inspect

    return inspect.getsource(function).splitlines()[1].strip()


@pytest.mark.parametrize("run", WAITS, ids=lambda run: run.__name__)
def test_what_waits_is_found_by_its_line(run):
    report = report_of(run, 5)
    assert waits_of(report) == {(WAITS[run], first_line(run))}
    (finding,) = (finding for finding in report.findings if finding.kind not in NO_WAITS)
    assert (finding.count, finding.per_step) == (3, 1.0)
    assert finding.blocked_ms > 0
    assert report.device == torch.cuda.get_device_name()


def fine(loss):
    host = torch.ones(1024, pin_memory=True)
    there = host.to("cuda", non_blocking=True)
    back = torch.empty(1024, pin_memory=True)
    back.copy_(there, non_blocking=True)
    there[there > 0] = 0.0
    torch.where(there > 0, there, loss)
    float(host[0])


def test_what_is_fine_is_not_found():
    assert waits_of(report_of(fine, 12)) == set()


def test_what_the_host_waits_is_measured():
    def run(loss):
        torch.cuda._sleep(20_000_000)  # some 10 ms
        loss.item()

    report = report_of(run, 5)
    (finding,) = (finding for finding in report.findings if finding.kind is Kind.ITEM)
    assert finding.blocked_ms > 2
    assert report.findings[0] is finding


def test_what_the_gpu_idles_is_estimated():
    def run(loss):
        loss.item()
        time.sleep(0.02)  # the host does something else before it launches again

    report = report_of(run, 5)
    (finding,) = (finding for finding in report.findings if finding.kind is Kind.ITEM)
    assert finding.idle_ms >= 20


def test_a_wait_that_no_table_has_is_found_through_torch():
    def run(loss):
        torch.linalg.inv(torch.eye(4, device="cuda"))

    (found,) = waits_of(report_of(run, 5))
    assert found[1] == 'torch.linalg.inv(torch.eye(4, device="cuda"))'


def test_other_threads_are_seen():
    def run(loss):
        worker = threading.Thread(target=item, args=(loss,))
        worker.start()
        worker.join()

    report = report_of(run, 5)
    assert waits_of(report) == {(Kind.OTHER, "loss.item()")}


class Wasteful(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        grad.sum().item()  # in the backward
        return grad


def test_backwards_are_looked_at():
    leaf = torch.ones(4, device="cuda", requires_grad=True)

    def run(loss):
        Wasteful.apply(leaf).sum().backward()

    assert waits_of(report_of(run, 5)) == {(Kind.ITEM, "grad.sum().item()  # in the backward")}


def test_a_backward_of_torch_s_own_is_told_by_the_line_that_called_it():
    leaf = torch.ones(4, device="cuda", requires_grad=True)
    mask = torch.tensor([True, False, True, True], device="cuda")

    def run(loss):
        chosen = leaf[mask].sum()
        chosen.backward()

    assert waits_of(report_of(run, 5)) == {
        (Kind.SHAPE, "chosen = leaf[mask].sum()"),
        (Kind.SHAPE, "chosen.backward()"),
    }


def test_scripts_that_silence_warnings_are_seen_through():
    def run(loss):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss.item()

    assert waits_of(report_of(run, 5)) == {(Kind.ITEM, "loss.item()")}


# ---- how busy the GPU is


@pytest.mark.alone
def test_many_tiny_kernels_are_bound_by_launches():
    def run(loss):
        for _ in range(300):
            loss = loss + 1

    report = report_of(run, 12)
    assert 0.3 < report.idle_share < 1
    found = [finding for finding in report.findings if finding.kind is Kind.LAUNCHES]
    if SANITIZED:  # it takes longer over every operation than a launch could
        assert not found
    else:
        (finding,) = found
        assert "kernels of" in finding.detail
        assert "self.optimizer.step()" in finding.code


def test_large_kernels_are_not():
    wide = torch.randn(4096, 4096, device="cuda")

    def run(loss):
        for _ in range(20):
            wide @ wide

    report = report_of(run, 12)
    assert not [finding for finding in report.findings if finding.kind is Kind.LAUNCHES]
    assert report.idle_share < 0.3
    assert report.step_ms > 1


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_a_profiler_of_the_script_s_own_goes_before():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        report = report_of(item, 12)
    assert report.idle_share is None
    assert any("another profiler is active" in note for note in report.notes)
    assert (Kind.ITEM, "loss.item()") in waits_of(report)


# ---- other advice


def test_a_reduction_is_told_only_where_another_layout_gains():
    wide = torch.zeros(8192, 8192, device="cuda")
    operation = torch.ops.aten._softmax.default
    assert find_reduction(operation, (wide, 1, False), {}) is None
    found = find_reduction(operation, (wide, 0, False), {})
    told = found.try_out()
    assert told is None or told.startswith("takes ")
    report = report_of(lambda loss: torch.softmax(wide, 0), 5)
    assert {finding.kind for finding in report.findings} <= {Kind.REDUCTION}  # measured anew, so it may differ


def test_a_slow_data_loader_leaves_the_gpu_dry():
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            time.sleep(0.01)
            return index

    training = Training()
    with watch(12) as watching:
        for _ in torch.utils.data.DataLoader(Slow(), batch_size=1):
            training.step()
    (finding,) = (finding for finding in watching.report.findings if finding.kind is Kind.STARVED)
    assert finding.code.startswith("for _ in torch.utils.data.DataLoader")
    assert finding.idle_ms >= 9


def test_everything_is_put_back():
    before = (torch.cuda.synchronize, torch.cuda.Event.synchronize, warnings.showwarning, list(warnings.filters))
    report_of(item, 12)
    assert torch.cuda.get_sync_debug_mode() == 0
    after = (torch.cuda.synchronize, torch.cuda.Event.synchronize, warnings.showwarning, list(warnings.filters))
    assert before == after
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_pipeline_on_the_gpu_has_no_waits():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).cuda()
    x, target = torch.randn(8, 16, device="cuda"), torch.randn(8, 16, device="cuda")
    with penstock.Pipeline(
        model, example=x, loss=nn.functional.mse_loss, cuts=[2], micro_batches=4, devices=["cuda:0"] * 2
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
        for _ in range(3):
            pipe.step(x, target)
        with watch(12) as watching:
            for _ in range(12):
                pipe.step(x, target)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    assert waits_of(watching.report) == set()
