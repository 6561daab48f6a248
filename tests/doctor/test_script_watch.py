"""Watching a training: which steps are looked at, what is put back afterwards, and other threads."""

import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.data import DataLoader, Dataset

import penstock
from penstock.doctor import Kind, Watch, watch
from penstock.doctor.gpu_busy import Busy
from penstock.doctor.gpu_tensors import AssumedGpuTensors
from penstock.doctor.sightings import Phase
from penstock.errors import UsageError
from penstock.feeding.item_source import Channel, InlineSource
from pretended import Pretended


class Training:
    """A model in double precision, which the pretended GPU holds."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def forward(self):
        return self.model(torch.ones(2, 4, dtype=torch.float64)).sum()

    def step(self):
        loss = self.forward()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


@pytest.fixture
def pretended(monkeypatch):
    """A watch that takes the GPU to be there: torch's switch is a list, and its profiler tells one story."""
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def make(steps=None, **more):
        made = Watch(steps, where=Pretended(), **more)
        made._profiling = FakeProfiling()
        made.modes = modes
        return made

    return make


class FakeProfiling:
    reason = ""
    is_running = False
    times = 0

    def start(self):
        assert _get_current_dispatch_mode() is None, "what is timed must not be looked at"
        self.is_running = True
        self.times += 1

    def stop(self):
        was_running, self.is_running = self.is_running, False
        return Busy(0.3, 0.1, 300, 0.2) if was_running else None


def without_gpu(steps=None, **more):
    """Return a watch as on a machine without a GPU, also on one that has one."""
    return Watch(steps, where=AssumedGpuTensors(), **more)


def told(report):
    return [(finding.kind, finding.code, finding.count) for finding in report.findings]


def test_the_steps_to_warm_up_and_those_to_time_are_left_out():
    training = Training()
    with without_gpu() as watching:
        for number in range(12):
            training.step().item()  # each
            if number in (0, 6):
                training.forward().item()  # in the second step, and in the second that is timed
    assert told(watching.report) == [(Kind.ITEM, "training.step().item()  # each", 7)]
    (finding,) = watching.report.findings
    assert finding.per_step == 1
    lines = Path(__file__).read_text().splitlines()
    assert finding.place == f"tests/doctor/test_script_watch.py:{1 + lines.index(' ' * 12 + finding.code)}"
    assert watching.report.num_steps == 7  # of 12: 2 to warm up, 3 looked at, 3 timed, 4 looked at
    assert watching.report.device == ""


def test_the_watch_ends_after_so_many_steps():
    training, ended = Training(), []
    with without_gpu(4, at_end=lambda: ended.append(1)) as watching:
        for _ in range(10):
            training.step().item()
    assert watching.report.num_steps == 2
    assert [finding.count for finding in watching.report.findings] == [2]
    assert ended == [1]


def test_what_comes_after_the_last_step_does_not_count():
    training = Training()
    with without_gpu(warm=1) as watching:
        for _ in range(3):
            training.step()
        training.forward().item()
    assert watching.report.findings == ()
    assert watching.report.num_steps == 2


def test_without_steps_everything_counts():
    training = Training()
    with without_gpu() as watching:
        training.forward().item()
    assert [(f.kind, f.count) for f in watching.report.findings] == [(Kind.ITEM, 1)]
    assert watching.report.num_steps == 0
    assert "No step ended" in str(watching.report)


def test_steps_by_hand():
    """Inference, or two optimizers a step: what the loop calls a step is one."""
    training = Training()
    with without_gpu(warm=1) as watching:
        for _ in range(4):
            training.step()
            training.step()
            training.forward().item()
            watching.step()
    assert watching.report.num_steps == 3
    assert [(f.count, f.per_step) for f in watching.report.findings] == [(3, 1.0)]


def test_printing_and_fetching_are_seen_without_a_gpu(capsys):
    training = Training()
    with without_gpu(warm=0) as watching:
        loss = training.step()
        print(loss)  # noqa: T201
        str(torch.ones(2))  # data: nobody knows where it would be
        loss.detach().tolist()
        on_host = loss.detach().cpu()
        on_host.numpy(), on_host.item()  # it has been fetched
        training.step()
    assert {(kind, code) for kind, code, _ in told(watching.report)} == {
        (Kind.PRINT, "print(loss)  # noqa: T201"),
        (Kind.TO_HOST, "loss.detach().tolist()"),
        (Kind.TO_HOST, "on_host = loss.detach().cpu()"),
    }
    assert "grad_fn" in capsys.readouterr().out


class Slow(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.ones(4, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of newer Pythons
@pytest.mark.parametrize("workers", [0, 1])
def test_a_slow_data_loader_is_told(workers):
    training = Training()
    with without_gpu(9) as watching:
        for _ in DataLoader(Slow(), batch_size=2, num_workers=workers):
            training.step()
    assert [kind for kind, *_ in told(watching.report)] == [Kind.STARVED]
    (finding,) = watching.report.findings
    assert finding.code.startswith("for _ in DataLoader(Slow()")
    assert finding.per_step == 1
    assert finding.detail.endswith("% of a step")


@pytest.mark.parametrize("thread", ["auto", True, False])
@pytest.mark.parametrize("is_torch_s", [True, False])
def test_a_feed_that_has_nothing_yet_is_told(thread, is_torch_s):
    """Whoever pulls, and whatever the loader is, the loop waits; and once is enough to say so."""
    loader = DataLoader(Slow()) if is_torch_s else (Slow()[k] for k in range(64))
    training = Training()
    with without_gpu(9) as watching:
        for _ in penstock.feed(loader, device="cpu", thread=thread):
            training.step()
    assert [kind for kind, *_ in told(watching.report)] == [Kind.STARVED]
    (finding,) = watching.report.findings
    assert finding.code.startswith("for _ in penstock.feed(loader")
    assert finding.per_step == 1


def test_steps_of_several_optimizers_are_said_to_be_counted():
    one, other = Training(), Training()
    with without_gpu(12) as watching:
        for _ in range(6):
            one.step()
            other.step()
    assert any(note.startswith("2 optimizers take steps") for note in watching.report.notes)
    with without_gpu() as watching:
        for _ in range(6):
            one.step()
            other.step()
            watching.step()
    assert not any("optimizers" in note for note in watching.report.notes)


class Looks(Dataset):
    """Tells what mode a worker of a data loader is in."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return 0 if _get_current_dispatch_mode() is None else 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of newer Pythons
def test_workers_of_data_loaders_are_not_looked_at():
    with without_gpu():
        assert torch.cat(list(DataLoader(Looks(), num_workers=1))).tolist() == [0, 0]
        assert _get_current_dispatch_mode() is not None


# ---- as if there were a GPU


def test_steps_are_timed_without_looking(pretended):
    training = Training()
    with pretended(12) as watching:
        for _ in range(12):
            training.step().item()
    assert watching._profiling.times == 1
    assert watching.modes == ["warn", 0, "warn", 0]
    report = watching.report
    assert report.device == "a pretended GPU"
    assert report.idle_share == pytest.approx(2 / 3)
    launches, item = sorted(report.findings, key=lambda finding: finding.kind.value, reverse=True)
    assert launches.kind is Kind.LAUNCHES
    assert launches.code == "self.optimizer.step()"
    assert (item.kind, item.count) == (Kind.ITEM, 7)
    assert item.blocked_ms > 0
    assert item.idle_ms > 0  # the next forward came after


def sync_warning():
    warnings.warn("called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:1.)", stacklevel=1)


def test_what_torch_warns_of_is_told_by_its_line(pretended):
    training = Training()
    with pretended(warm=0) as watching:
        for _ in range(2):
            sync_warning()
            warnings.simplefilter("ignore")  # as scripts do
            training.step()
    ((kind, code, count),) = told(watching.report)
    assert (kind, count) == (Kind.OTHER, 2)
    assert code.startswith("warnings.warn(")


def test_other_threads_are_seen_through_torch_s_warnings(pretended):
    training = Training()
    with pretended(warm=0) as watching:
        worker = threading.Thread(target=sync_warning)
        worker.start()
        worker.join()
        training.step()
    assert [(f.kind, f.count) for f in watching.report.findings] == [(Kind.OTHER, 1)]


def test_a_line_that_is_known_is_not_told_again(pretended):
    training = Training()
    with pretended(warm=0) as watching:
        training.forward().item(), warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        training.step()
    assert [(f.kind, f.count) for f in watching.report.findings] == [(Kind.ITEM, 1)]


def test_other_warnings_go_their_way(pretended):
    with pretended(), pytest.warns(UserWarning, match="mine"):
        warnings.warn("mine", stacklevel=1)


def test_explicit_waits_are_told(pretended, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    training = Training()
    with pretended(warm=0) as watching:
        torch.cuda.synchronize()
        training.step()
    ((kind, code, count),) = told(watching.report)
    assert (kind, code, count) == (Kind.WAIT, "torch.cuda.synchronize()", 1)


# ---- what is left behind


def state():
    return (
        torch.Tensor.__repr__,
        "cpu" in vars(torch.Tensor),
        torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
        Channel.take,
        InlineSource.take,
        torch.cuda.synchronize,
        torch.cuda.Event.synchronize,
        warnings.showwarning,
        list(warnings.filters),
        _get_current_dispatch_mode(),
        len(_global_optimizer_post_hooks),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(pretended, fails):
    for make in (without_gpu, pretended):
        before = state()
        with pytest.raises(ZeroDivisionError) if fails else warnings.catch_warnings(), make() as watching:
            Training().step().item()
            assert state() != before
            if fails:
                raise ZeroDivisionError
        assert state() == before
        assert watching.report.num_steps == 1


class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_user_s_own_is_left_alone():
    """The watch cannot time steps, nor leave its own mode, while another stands above it."""
    training = Training()
    with without_gpu(7) as watching:
        training.step()
        with Plain() as mine:
            for _ in range(6):
                training.step().item()
                assert _get_current_dispatch_mode() is mine
        assert not watching._is_open
        assert not watching._step_seconds[Phase.TIMED]
    assert [(f.kind, f.count) for f in watching.report.findings] == [(Kind.ITEM, 5)]
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 2}, "steps: 2 must be a whole number above 2"),
        ({"steps": 2.5}, "steps: 2.5 must be"),
        ({"steps": True, "warm": 0}, "steps: True must be"),
        ({"warm": -1}, "warm: -1 must be a whole number of at least 0"),
    ],
)
def test_wrong_arguments_are_told(given, message):
    with pytest.raises(UsageError, match=message):
        watch(**given)


def test_a_watch_is_used_once():
    watching = without_gpu()
    with pytest.raises(UsageError, match="has not started"):
        watching.report  # noqa: B018
    with watching:
        pass
    with pytest.raises(UsageError, match="used only once"), watching:
        pass


def test_it_is_public():
    assert penstock.doctor.watch is watch
    assert set(penstock.doctor.__all__) == {"Finding", "Kind", "Report", "Watch", "watch"}


def test_a_compiled_model_stays_compiled():
    torch.compiler.reset()  # torch compiles the same code a few times only, and other tests may have had it compiled
    training = Training()
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    training.model = torch.compile(training.model, backend=backend)
    with without_gpu() as watching:
        for _ in range(3):
            training.step()
    assert len(calls) == 1
    assert watching.report.findings == ()


def test_a_pipeline_is_watched():
    training = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x, target = torch.ones(4, 4), torch.ones(4, 4)
    with (
        without_gpu(warm=1) as watching,
        penstock.Pipeline(training, example=x, loss=nn.MSELoss(), micro_batches=2, lanes=2, cuts=[1]) as pipe,
    ):
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in range(3):
            pipe.step(x, target)
            optimizer.step()
    assert watching.report.num_steps == 2
    assert watching.report.findings == ()
