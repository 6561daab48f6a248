"""What `compile=` may be, and that options of Inductor get there."""

import copy
import gc
import weakref
from itertools import pairwise

import pytest
import torch
from torch import fx, nn
from torch._dynamo.utils import counters

import penstock
from penstock.compile.options import Options, compiled, options_of
from penstock.compile.passes import OwnPass
from penstock.errors import UsageError
from penstock.infer import Graph


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (True, {}),
        (False, None),
        ({}, {}),
        ({"max_autotune": True}, {"max_autotune": True}),
        ({"triton.cudagraphs": False}, {"triton.cudagraphs": False}),
        ({"epilogue-fusion": True}, {"epilogue-fusion": True}),
        ({"triton": {"max_tiles": 2}, "shape_padding": False}, {"triton.max_tiles": 2, "shape_padding": False}),
        ({"post_grad_fusion_options": {"batch_linear": {}}}, {"post_grad_fusion_options": {"batch_linear": {}}}),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own
def test_options(given, wanted):
    assert options_of(given) == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (1, "compile: 1 is neither True nor False nor a dict of options"),
        (None, "compile: None is neither"),
        ("max-autotune", "compile: 'max-autotune' is neither"),
        ({"max_autotun": True}, "Inductor has no option 'max_autotun'. Did you mean 'max_autotune'?"),
        ({3: True}, "Inductor has no option 3"),
        ({"max_autotune": "yes"}, "compile: max_autotune must be True or False; given: 'yes'"),
        ({"max_autotune": 1}, "compile: max_autotune must be True or False; given: 1"),
        (
            {"triton": {"persistent_reductions": 2}},
            "compile: triton.persistent_reductions must be True or False; given: 2",
        ),
        ({"triton": {"max_tile": 2}}, "Inductor has no option 'triton.max_tile'. Did you mean 'triton.max_tiles'?"),
        ({"triton": {"cudagraphs": True}}, "conflicts with the CUDA graphs of Penstock"),
        ({"triton.cudagraphs": True}, "conflicts with the CUDA graphs of Penstock"),
        ({"fallback_random": False}, "fallback_random must stay True"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_cannot_be_right(given, message):
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(UsageError, match=message.replace("?", "[?]").replace("'.", "'[.]")):
        penstock.Pipeline(layers, example=torch.ones(4, 4), lanes=2, compile=given)
    with pytest.raises(UsageError, match=message.replace("?", "[?]").replace("'.", "'[.]")):
        Graph(layers, torch.ones(4, 4), compile=given)


@pytest.mark.parametrize("path", ["direct", "export"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_options_get_to_stages_and_loss(path, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "compile", lambda run, **options: (seen.append(options), run)[1])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    given = {"max_autotune": True}
    with penstock.Pipeline(
        model, example=torch.ones(4, 4), loss=nn.functional.mse_loss, lanes=2, micro_batches=2, compile=given,
        capture_path=path,
    ) as pipe:  # fmt: skip
        pipe.step(torch.ones(4, 4), torch.ones(4, 4))
    assert [options["dynamic"] for options in seen] == [False] * 3
    assert all(given.items() <= options["options"].items() for options in seen)


@pytest.fixture
def made(monkeypatch):
    """Let graphs be compiled to what they are; return them."""
    found, real = [], torch.compile

    def kept(graph, example):
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda run, **_: real(run, dynamic=False, backend=kept))
    return found


def test_a_pass_of_the_users_own_is_run_too(monkeypatch):
    seen, graphs = [], []
    monkeypatch.setattr(torch, "compile", lambda run, **options: (seen.append(options["options"]), run)[1])
    compiled(nn.Linear(2, 2), Options({"post_grad_custom_pre_pass": graphs.append}))
    compiled(nn.Linear(2, 2), Options())
    theirs, ours = (options["post_grad_custom_pre_pass"] for options in seen)
    assert isinstance(theirs, OwnPass)
    assert isinstance(ours, OwnPass)
    graph = fx.symbolic_trace(nn.Linear(2, 2)).graph
    theirs(graph)
    assert graphs == [graph]
    assert theirs.uuid() is None  # torch's cache cannot know what a function of the user's does
    assert ours.uuid() is not None


@pytest.mark.parametrize("path", ["direct", "export"])
@pytest.mark.filterwarnings("ignore")
def test_all_of_many_stages_are_compiled(path, made):
    """Torch compiles no more than eight variants of one function, and for it all stages would be variants of one."""
    widths = [*range(4, 16), 4, 4, 4]
    model = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths))).double()
    reference = copy.deepcopy(model)
    x, y = torch.randn(4, 4).double(), torch.randn(4, 4).double()
    with penstock.Pipeline(
        model, example=x, loss=nn.functional.mse_loss, lanes=2, schedule="looped_bfs", stages_per_lane=7,
        cuts=list(range(1, 14)), micro_batches=2, compile=True, capture_path=path,
    ) as pipe:  # fmt: skip
        pipe.step(x, y)
    nn.functional.mse_loss(reference(x), y).backward()
    for parameter, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad)
    num_stages = 14 if path == "export" else 13  # two are the same module twice; in a graph their names differ
    assert len(made) >= num_stages + 1  # and the loss; in a process where torch's settings change, some twice


@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_is_compiled_however_many_there_were(made):
    """Torch would count all that have the same loss together."""
    kept = [compiled(nn.functional.mse_loss, options) for options in (Options() for _ in range(12))]
    for run in kept:
        run(torch.ones(2), torch.zeros(2))
    assert len(made) >= 12


@pytest.mark.filterwarnings("ignore")
def test_what_looks_alike_is_compiled_once():
    options = Options()
    layers = [nn.Linear(3, 3) for _ in range(3)]
    runs = [compiled(layer, options) for layer in layers]
    assert all(isinstance(run._orig_mod, nn.Linear) for run in runs)
    before = counters["stats"]["unique_graphs"]
    for run, layer in zip(runs, layers, strict=True):
        torch.testing.assert_close(run(torch.ones(2, 3)), layer(torch.ones(2, 3)))
    assert before < counters["stats"]["unique_graphs"] < before + 3


class Numbered(nn.Module):
    """A layer that knows its number, as many do; torch compiles anew for each."""

    def __init__(self, number):
        super().__init__()
        self.number, self.layer = number, nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x) * self.number


@pytest.mark.filterwarnings("ignore")
def test_layers_with_numbers_are_all_compiled(made):
    options = Options()
    layers = [Numbered(number) for number in range(2, 14)]
    kept = [compiled(layer, options) for layer in layers]
    for run, layer in zip(kept, layers, strict=True):
        torch.testing.assert_close(run(torch.ones(2, 3)), layer(torch.ones(2, 3)))
    assert len(made) >= 12


@pytest.mark.filterwarnings("ignore")
def test_what_was_compiled_goes_with_its_pipeline(made):
    for _ in range(3):
        run = compiled(nn.Linear(3, 3), Options())
        run(torch.ones(2, 3))
        graphs = weakref.WeakSet(made)
        assert graphs
        made.clear()
        del run
        gc.collect()
        assert not graphs
