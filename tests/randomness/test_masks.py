"""Random numbers follow from the seed, the micro-batch and what draws: not from the cuts, the schedule or the keep."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock
import processes
from cpu_graphs import CpuGraphs
from penstock.errors import LaneError
from penstock.model.capture.capture import capture
from penstock.pipeline import graph_steps
from penstock.pipeline.planned import planned_model
from pipelines import cuts_of
from runtime_everywhere import everyone, together

WIDTH, LENGTH, SIZE, MICRO_BATCHES = 8, 5, 8, 4
PATHS = ("export", "replay", "direct")


class Block(nn.Module):
    """Draws in modules, between them, and in functions."""

    def __init__(self):
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)  # called twice
        self.leaky = nn.RReLU()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query = self.drop(self.query(x))
        attended = F.scaled_dot_product_attention(query, x, self.value(x), dropout_p=0.2)
        x = x + F.dropout(self.drop(attended), 0.2)
        x = self.leaky(self.last(x) + 0.1 * torch.rand_like(x))
        return x * (1 + torch.bernoulli(torch.full_like(x, 0.5)))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x):
        return x + self.inner(F.dropout(x, 0.1))[0]


class Function(nn.Module):
    """The same in a form that torch.export takes."""

    def __init__(self, kind):
        super().__init__()
        inner = kind(WIDTH, WIDTH, num_layers=2)
        self.function, self.has_cell = (torch.lstm, True) if kind is nn.LSTM else (torch.gru, False)
        self.weights = nn.ParameterList(inner.parameters())

    def forward(self, x):
        start = x.new_zeros(2, x.shape[0], WIDTH)
        state = (start, start) if self.has_cell else start
        return x + self.function(F.dropout(x, 0.1), state, list(self.weights), True, 2, 0.3, True, False, True)[0]


class Model(nn.Module):
    def __init__(self, path):
        super().__init__()
        self.blocks = nn.ModuleList(modules(path))

    def forward(self, x):
        x = x + 0.1 * torch.randn_like(x)
        for block in self.blocks:
            x = F.dropout(block(x), 0.1)
        return x


def modules(path):
    torch.manual_seed(0)
    recurrent = Function if path == "export" else Recurrent
    return [Block(), recurrent(nn.LSTM), Block(), Block(), recurrent(nn.GRU), *(Block() for _ in range(4))]


def seeded(kind, count):
    """Return a function that makes modules with the same weights at every call."""

    def modules(path):
        torch.manual_seed(0)
        return [kind() for _ in range(count)]

    return modules


def made(path, device="cpu"):
    model = nn.Sequential(*modules(path)) if path == "direct" else Model(path)
    return model.double().to(device).train()


def batch(device="cpu"):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(SIZE, LENGTH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.to(device), y.to(device)


def noisy(result, target):
    return F.mse_loss(F.dropout(result, 0.1), target)


def trained(path, *, cuts=None, schedule="1f1b", lanes=2, keep="hold", steps=2, **options):
    """Return the losses of some steps and the gradients after them."""
    device = options.get("devices", ["cpu"])[0]
    model, (x, y) = made(path, device), batch(device)
    schedule = penstock.schedules.build(schedule, lanes=lanes, micro_batches=MICRO_BATCHES)
    if cuts is None:
        captured = capture(model, x, training=True, path="auto" if path == "direct" else path)
        assert captured.path == path
        cuts = cuts_of(captured.graph, schedule.num_stages)
    with penstock.Pipeline(
        model, example=x, loss=noisy, schedule=schedule, cuts=cuts, keep=keep, check=False, timeout=60,
        capture_path="auto" if path == "direct" else path, **options,
    ) as pipe:  # fmt: skip
        torch.manual_seed(7)
        losses = [pipe.step(x, y).item() for _ in range(steps)]
        together()
        gradients = {}
        for found in everyone({name: p.grad.cpu() for name, p in pipe.named_parameters() if p.grad is not None}):
            gradients |= found
    return losses, gradients


def same(found, wanted):
    """Losses are equal to the last bit; gradients but for the order in which micro-batches are added."""
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, wanted[1][name], rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def wanted():
    """What one lane makes of the model, for each path."""
    return {path: trained(path, lanes=1) for path in PATHS}


CASES = {
    "2 lanes": {},
    "elsewhere": {"cuts": [2]},
    "uneven": {"cuts": [1, 3], "lanes": 3},
    "4 lanes": {"lanes": 4},
    "gpipe": {"schedule": "gpipe", "lanes": 3},
    "zb_h1": {"schedule": "zb_h1"},
    "interleaved": {"schedule": "interleaved_1f1b"},
    "dualpipe": {"schedule": "dualpipe"},
    "recompute": {"keep": "recompute", "lanes": 3},
    "offload": {"keep": "offload"},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("path", PATHS)
def test_numbers_do_not_depend_on_the_cuts(path, case, wanted):
    """Masks were seeded by the stage, and cuts followed measured times: the same script gave other losses."""
    same(trained(path, **CASES[case]), wanted[path])


@pytest.mark.parametrize("path", ["export", "direct"])
def test_parts_that_are_run_again_draw_the_same(path, wanted, monkeypatch):
    """Where only such parts drew, nobody noted it: from the second step on, their second run drew other numbers."""
    monkeypatch.setattr(planned_model, "select_recomputed", lambda profile, cuts, *_: ((range(0, cuts[0]),), ()))
    same(trained(path, keep="fit", memory_limit=2**30), wanted[path])


@pytest.mark.sample(2)
@pytest.mark.parametrize("path", PATHS)
def test_processes_draw_the_same(path, wanted):
    for losses, gradients in processes.run(in_process, 2, path):
        same((losses, {name: torch.from_numpy(gradient) for name, gradient in gradients.items()}), wanted[path])


def in_process(path):
    losses, gradients = trained(path, schedule="zb_h1")
    return losses, {name: gradient.numpy() for name, gradient in gradients.items()}


class ByChance(nn.Module):
    """Draws Python's and numpy's random numbers, in front of a layer and behind it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            if random.random() < 0.4:
                continue
            x = F.dropout(torch.tanh(layer(x)), 0.2) * (1 + np.random.rand())
        return x


@pytest.mark.parametrize("options", [{"keep": "recompute"}, {"lanes": 4}, {"schedule": "dualpipe"}], ids=str)
def test_pythons_random_numbers_follow_from_the_seed_too(options, monkeypatch):
    """Lanes drew from one generator in turn, and a forward that was run again drew other numbers than before."""
    monkeypatch.setattr(__name__ + ".made", lambda path, device: ByChance().double().train())
    random.seed(1)
    np.random.seed(1)
    before = random.getstate()
    wanted = trained("replay", lanes=1)
    random.seed(2)
    np.random.seed(2)
    same(trained("replay", **options), wanted)
    random.seed(1)
    assert random.getstate() == before


def on_graphs(monkeypatch, path, **options):
    """Return the same of steps that run as graphs, on a CPU as those that the tests have for it."""
    monkeypatch.setattr(CpuGraphs, "num_replays", 0)
    monkeypatch.setattr(graph_steps, "has_graphs", lambda device: True)
    monkeypatch.setattr(graph_steps, "CudaGraphs", CpuGraphs)
    found = trained(path, graphs=True, steps=4, **options)
    assert CpuGraphs.num_replays
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"lanes": 4}, {"keep": "recompute"}], ids=str)
@pytest.mark.parametrize("path", ["export", "direct"])
def test_replays_of_graphs_draw_the_same(path, options, monkeypatch):
    """A replay seeds the generators of all places at once, before any of them draws."""
    monkeypatch.setattr(__name__ + ".modules", seeded(Block, 8))
    wanted = trained(path, lanes=1, steps=4, graphs=False)
    same(on_graphs(monkeypatch, path, **options), wanted)


@pytest.mark.parametrize("path", ["export", "direct"])
def test_replays_of_parts_that_are_run_again(path, monkeypatch):
    """A backward runs them: the graph of it has to know their generators, and its replay to seed them."""
    monkeypatch.setattr(planned_model, "select_recomputed", lambda profile, cuts, *_: ((range(0, cuts[0]),), ()))
    monkeypatch.setattr(__name__ + ".modules", seeded(Block, 8))
    wanted = trained(path, lanes=1, steps=4, graphs=False)
    same(on_graphs(monkeypatch, path, keep="fit", memory_limit=2**30), wanted)


COMPILED = {"elsewhere": {"cuts": [2]}, "3 lanes": {"lanes": 3, "keep": "recompute"}}


def nearly_same(found, wanted):
    """What is compiled rounds in other places."""
    for ours, loss in zip(found[0], wanted[0], strict=True):
        assert ours == pytest.approx(loss, rel=1e-9)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, wanted[1][name], rtol=1e-7, atol=1e-10)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("path", "case"),
    [
        ("export", "3 lanes"), ("direct", "elsewhere"),
        pytest.param("export", "elsewhere", marks=pytest.mark.full),
        pytest.param("direct", "3 lanes", marks=pytest.mark.full),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_stages_draw_the_same_wherever_they_are_cut(path, case, monkeypatch):
    """Inductor drew the seeds of a whole stage at once, so the masks depended on the cuts."""
    monkeypatch.setattr(__name__ + ".modules", few_modules)
    wanted = trained(path, lanes=1, compile=True)
    nearly_same(trained(path, compile=True, **COMPILED[case]), wanted)


def few_modules(path):
    torch.manual_seed(0)
    recurrent = [] if path == "export" else [Recurrent(nn.GRU)]  # which torch.compile leaves as it is
    return [Block(), Block(), *recurrent, Block(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))]


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    @torch.compiler.disable
    def drop(self, x):
        return F.dropout(x, 0.2)

    def forward(self, x):
        return self.drop(self.linear(x))


COMPILES = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.mark.full
@COMPILES
def test_modules_with_graph_breaks_draw_the_same_wherever_they_are_cut(monkeypatch):
    """Modules compiled as one were compiled piece by piece there, and the pieces drew for the first of them."""
    monkeypatch.setattr(__name__ + ".modules", seeded(Breaks, 4))
    nearly_same(trained("direct", compile=True, cuts=[2]), trained("direct", compile=True, lanes=1))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return checkpoint(lambda x: F.dropout(self.linear(x), 0.3), x, use_reentrant=False)


@COMPILES
def test_compiled_checkpoints_that_draw_are_refused(monkeypatch):
    """The backward drew other masks than the forward: gradients were wrong."""
    monkeypatch.setattr(__name__ + ".modules", lambda path: [Checkpointed(), Checkpointed()])
    with pytest.raises(LaneError, match="the backward would draw random numbers again"):
        trained("direct", compile=True, cuts=[1])


@pytest.mark.full
@COMPILES
def test_batches_of_many_lengths_stay_compiled():
    """Torch gives up after eight shapes; uncompiled code then drew random numbers under unknown names."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(2))).double()
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    with penstock.Pipeline(
        model, example=x, loss=nn.MSELoss(), lanes=1, micro_batches=2, compile=True, capture_path="export"
    ) as pipe:
        for size in range(2, 20, 2):
            x = torch.randn(size, WIDTH, dtype=torch.float64)
            assert pipe.step(x, x).isfinite()


needs_gpu = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ON_GPU = {
    "graphs": {"graphs": True},
    "eager": {"graphs": False},
    "elsewhere": {"graphs": True, "cuts": [2]},
    "4 lanes": {"graphs": True, "lanes": 4},
    "recompute": {"graphs": True, "keep": "recompute"},
    "interleaved": {"graphs": True, "schedule": "interleaved_1f1b"},
    "dualpipe": {"graphs": False, "schedule": "dualpipe"},
    "compiled": {"graphs": True, "compile": True},
    "compiled elsewhere": {"graphs": True, "compile": True, "cuts": [2]},
}


def on_gpu(path, *, lanes=2, **options):
    return trained(path, lanes=lanes, steps=4, devices=["cuda:0"] * lanes, **options)


@COMPILES
@pytest.mark.parametrize("case", [pytest.param(case, marks=needs_gpu) for case in ON_GPU])
@pytest.mark.parametrize("path", ["export", "direct"])
def test_on_a_gpu_with_graphs_and_without(path, case, monkeypatch):
    """Each place has a generator that the graphs know, for one cannot be seeded anew within a capture."""
    monkeypatch.setattr(__name__ + ".modules", seeded(Block, 8))
    compiled = {"compile": True} if "compile" in ON_GPU[case] else {}
    wanted = on_gpu(path, lanes=1, graphs=False, **compiled)
    (nearly_same if compiled else same)(on_gpu(path, **ON_GPU[case]), wanted)


@pytest.mark.parametrize("graphs", [pytest.param(graphs, marks=needs_gpu) for graphs in (False, True)])
@pytest.mark.parametrize("path", ["export", "direct"])
def test_parts_that_are_run_again_on_a_gpu(path, graphs, monkeypatch):
    """Their second run is in a thread of autograd's, which has to know what draws."""
    monkeypatch.setattr(planned_model, "select_recomputed", lambda profile, cuts, *_: ((range(0, cuts[0]),), ()))
    monkeypatch.setattr(__name__ + ".modules", seeded(Block, 8))
    wanted = on_gpu(path, lanes=1, graphs=False)
    same(on_gpu(path, keep="fit", memory_limit=2**33, graphs=graphs), wanted)


@pytest.mark.parametrize("lanes", [pytest.param(lanes, marks=needs_gpu) for lanes in (2, 4)])
def test_recurrent_networks_on_a_gpu(lanes):
    """Those of cuDNN take a seed from the host, so that there are no graphs."""
    same(on_gpu("replay", lanes=lanes, graphs=False), on_gpu("replay", lanes=1, graphs=False))
