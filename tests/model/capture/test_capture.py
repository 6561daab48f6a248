"""The first test of capture: whatever the model does, its stages compute exactly what it computes."""

import gc
import random
import weakref
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from penstock.errors import CaptureError, GraphError, UsageError
from penstock.model.capture.capture import capture
from transparency import WIDTH, Layers, check, rows


class Skips(Layers):
    def forward(self, x):
        first = self.layers[0](x)
        y = self.layers[2](torch.relu(self.layers[1](first)))
        return self.layers[3](y + first) + x


class BatchNorm(Layers):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).double()

    def forward(self, x):
        return self.body(self.norm(x))


class CounterInPlace(Layers):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.steps += 1
        return self.body(x) * self.steps


class CounterReassigned(CounterInPlace):
    def forward(self, x):
        self.steps = self.steps + 1
        return self.body(x) * self.steps


class Tied(Layers):
    def __init__(self):
        super().__init__()
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x):
        return F.linear(self.body(x), self.layers[1].weight.T)


class InPlace(Layers):
    def forward(self, x):
        y = self.layers[0](x)
        z = self.layers[1](y)
        z.relu_()
        y = y + z
        y[:, 0] = self.layers[2](y * 2)[:, 1]
        return self.layers[3](y)


class FilledSlices(Layers):
    def forward(self, x):
        out = torch.zeros(x.shape[0], len(self.layers), WIDTH, dtype=x.dtype)
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            out[:, i] = x
        return out.sum(1)


class ViewChanged(Layers):
    def forward(self, x):
        base = self.layers[0](x)
        left = base[:, : WIDTH // 2]
        y = self.layers[1](base.clone())
        left.mul_(2)
        return self.layers[3](torch.tanh(self.layers[2](base)) + base + y)


class Dropout(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.3, self.training)
        return x


class Autocast(Layers):
    def __init__(self):
        super().__init__()
        self.float()

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.body(x.float()).float()


class NoGrad(Layers):
    def forward(self, x):
        with torch.no_grad():
            frozen = self.layers[1](torch.tanh(self.layers[0](x)))
        return self.layers[3](self.layers[2](x) + frozen)


class Frozen(Layers):
    def __init__(self):
        super().__init__()
        self.layers[1].requires_grad_(False)
        self.layers[0].bias.requires_grad_(False)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class OwnBackward(Layers):
    def forward(self, x):
        return self.layers[3](StraightThrough.apply(self.layers[1](StraightThrough.apply(self.layers[0](x) * 5))))


class OwnParameters(nn.Module):
    """No submodule at all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))

    def forward(self, x):
        return torch.tanh(x @ self.a) @ self.b


class LengthUsed(Layers):
    def forward(self, x):
        return self.body(x) * len(x) + torch.arange(len(x), dtype=x.dtype)[:, None]


Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    loss: torch.Tensor
    extra: dict
    nothing: None = None


class Structured(Layers):
    def forward(self, x, *, mask, index, scale=2.0, unused=None):
        y = self.body(x.masked_fill(mask, 0.0) * scale)[index]
        return Output(y.sum(), {"pair": Pair(y, None), "list": [y * 2, 3], "flag": mask.any()})


class Cache:
    def __init__(self):
        self.kept = []

    def get_seq_length(self):
        return len(self.kept)


class WithCache(Layers):
    def forward(self, x):
        cache = Cache()
        for layer in self.layers:
            x = torch.tanh(layer(x))
            cache.kept.append(x)
        return {"out": x, "cache": cache}


class IfOnTensor(Layers):
    def forward(self, x):
        y = self.layers[1](torch.tanh(self.layers[0](x)))
        if y.sum() > 0:
            y = self.layers[2](y)
        return self.layers[3](y)


class ItemLater(Layers):
    def forward(self, x):
        y = self.layers[0](x)
        scale = y.abs().max().item()
        for layer in self.layers[1:]:
            y = layer(y)
        return y * scale


class WhileLoop(Layers):
    def forward(self, x):
        y = torch.tanh(self.layers[0](x))
        count = 0
        while y.norm() > 0.3 * x.norm() and count < 5:
            y = torch.tanh(self.layers[1](y)) * 0.7
            count += 1
        return self.layers[3](self.layers[2](y))


class CalledOften(Layers):
    def forward(self, x):
        for _ in range(3):
            for layer in self.layers[:2]:
                x = torch.tanh(layer(x))
        return x


class LayerDrop(Layers):
    def __init__(self):
        super().__init__(6)

    def forward(self, x):
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.5:
                continue
            x = torch.tanh(layer(x))
        return x * 2


class DataShaped(Layers):
    def forward(self, x):
        y = self.layers[0](x)
        chosen = y[y[:, 0] > 0]
        z = self.layers[2](torch.tanh(self.layers[1](chosen)))
        return self.layers[3](y + z.sum(0))


class EarlyReturn(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if x.norm() < 1.2:
                return x
        return x


class Recomputes(Layers):
    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=False)
        return x


EXPORTED = [
    Layers, Skips, BatchNorm, CounterInPlace, CounterReassigned, Tied, InPlace, FilledSlices, ViewChanged, Dropout,
    NoGrad, Frozen, OwnParameters, LengthUsed, Recomputes,
]  # fmt: skip
REPLAYED = [
    OwnBackward, IfOnTensor, ItemLater, WhileLoop, CalledOften, LayerDrop, DataShaped, EarlyReturn, Recomputes, Skips,
    BatchNorm, CounterInPlace, CounterReassigned, Tied, Dropout, NoGrad, Frozen, LengthUsed,
]  # fmt: skip


@pytest.mark.parametrize("kind", EXPORTED, ids=lambda k: k.__name__)
def test_stages_by_export_compute_what_the_model_computes(kind):
    captured = check(kind(), rows(), stages=(2,) if kind is OwnParameters else (2, 3))
    assert captured.path == "export"


@pytest.mark.parametrize("kind", REPLAYED, ids=lambda k: k.__name__)
def test_stages_by_replay_compute_what_the_model_computes(kind):
    captured = check(kind(), rows(), path="replay")
    assert captured.path == "replay"


@pytest.mark.parametrize("kind", [IfOnTensor, ItemLater, WhileLoop, LayerDrop, DataShaped, OwnBackward, EarlyReturn])
def test_what_a_trace_would_get_wrong_goes_to_replay_and_says_where(kind):
    captured = capture(kind(), rows(), training=True)
    assert captured.path == "replay"
    assert "test_capture.py:" in captured.reason or "StraightThrough" in captured.reason


def test_replay_takes_the_way_of_each_batch():
    model = EarlyReturn()
    captured = capture(model, rows(), path="replay")
    chain = captured.split([1, 2, 3])
    for scale in (1e-3, 0.3, 1.0, 10.0):  # returns after one layer, or after all of them
        x = rows() * scale
        torch.testing.assert_close(chain(x), model(x), rtol=1e-12, atol=1e-12)


def test_layer_drop_with_pythons_own_random_numbers():
    class Dropped(LayerDrop):
        def forward(self, x):
            for layer in self.layers:
                if self.training and random.random() < 0.5:
                    continue
                x = torch.tanh(layer(x))
            return x

    model = Dropped()
    captured = capture(model, rows(), training=True)
    assert "random numbers" in captured.reason
    chain = captured.split([2, 4])
    for seed in range(8):
        random.seed(seed)
        expected = model(rows())
        random.seed(seed)
        torch.testing.assert_close(chain(rows()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("path", ["export", "replay"])
def test_structures_in_and_out(path):
    example = {"x": rows(), "mask": rows() > 1, "index": torch.tensor([0, 2, 1, 0]), "scale": 3.0, "unused": None}
    model = Structured()
    check(model, example, path=path, batch_sizes=(4, 6))
    out = capture(model, example, path=path).split([1])(**example)
    assert isinstance(out, Output)
    assert isinstance(out.extra["pair"], Pair)
    assert out.nothing is None
    assert out.extra["list"][1] == 3
    assert out.extra["pair"].second is None


@pytest.mark.parametrize("path", ["export", "replay"])
def test_caches_are_left_out_of_what_is_returned(path):
    model = WithCache()
    check(model, rows(), path=path)
    assert capture(model, rows(), path=path).split([2])(rows())["cache"] is None


def test_autocast_regions_can_be_cut():
    captured = check(Autocast(), rows(), tolerance=1e-6)
    assert captured.path == "export"
    assert len(captured.graph.nodes) >= 8


def test_hooks_are_called_once_a_run_where_their_module_is():
    model, seen = Layers(), []
    model.layers[1].register_forward_hook(lambda module, args, output: seen.append(1))
    model.layers[2].register_forward_hook(lambda module, args, output: output * 2)
    captured = check(model, rows(), stages=(3,))
    assert captured.path == "replay"
    assert "layers.1" in captured.reason
    chain = captured.split([1, 2, 3])
    seen.clear()
    chain(rows())
    assert seen == [1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models_are_cut_under_the_compiler():
    model = Layers()
    captured = capture(torch.compile(model), rows())
    assert captured.path == "export"
    assert set(captured.graph.parameters) == {name for name, _ in model.named_parameters()}
    torch.testing.assert_close(captured.split([2])(rows()), model(rows()))


def test_a_model_on_meta_is_captured_and_only_a_stage_is_materialised():
    with torch.device("meta"):
        model = Layers()
    captured = capture(model, torch.empty(4, WIDTH, dtype=torch.float64, device="meta"))
    chain = captured.split([4])
    stage = chain.stages[0].to_empty(device="cpu")
    real = Layers()
    stage.load_state_dict({name: real.state_dict()[name] for name in stage.state_dict()})
    (made,) = stage(rows(), batch_size=4)
    torch.testing.assert_close(made, torch.tanh(real.layers[1](torch.tanh(real.layers[0](rows())))))
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("path", ["export", "replay"])
def test_a_meta_model_with_positions_runs_on_the_device_of_its_stage(path):
    class Positions(Layers):
        def forward(self, x):
            return self.body(x + torch.arange(WIDTH, device=x.device, dtype=x.dtype))

    with torch.device("meta"):
        model = Positions()
    captured = capture(model, torch.empty(4, WIDTH, dtype=torch.float64, device="meta"), path=path)
    chain = captured.split([len(captured.graph.nodes) // 2])
    real = Positions()
    for stage in chain.stages:
        stage.to_empty(device="cpu")
        stage.load_state_dict({name: real.state_dict()[name] for name in stage.state_dict()})
    torch.testing.assert_close(chain(rows()), real(rows()))


@pytest.mark.parametrize("path", ["direct", "export", "replay"])
def test_stages_have_the_models_own_names(path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)
    ).double()
    captured = check(model, rows(), path=path)
    chain = captured.split([2])
    assert set(chain.state_dict()) == set(model.state_dict())
    assert set(chain.stages[0].state_dict()) == {"0.weight", "0.bias"}
    parameters = dict(model.named_parameters())
    for stage in chain.stages:
        assert all(parameters[name] is p for name, p in stage.named_parameters())


def test_sequences_in_sequences_are_taken_apart():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Sequential(nn.Linear(WIDTH, 4))
    ).double()
    captured = check(model, rows(), stages=(2, 3))
    assert captured.path == "direct"
    assert [node.name for node in captured.graph.nodes] == ["0.0", "0.1", "1.0"]


def test_a_module_that_stands_twice_in_a_sequence_is_called_twice():
    relu = nn.ReLU()
    shared = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), relu, shared, relu, shared, nn.Tanh()).double()
    captured = check(model, rows(), stages=(2, 3, 6))
    assert [node.name for node in captured.graph.nodes] == ["0", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(8, 4)), torch.zeros(2, 4)),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(4)),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(2, 4, dtype=torch.int64)),
    ],
)
def test_a_sequence_that_cannot_run_gets_one_message(model, example):
    with pytest.raises(CaptureError, match="direct: RuntimeError"):
        capture(model, example)


def test_a_class_is_no_model():
    with pytest.raises(UsageError, match=r"Linear is a class; pass a module: Linear\(\.\.\.\)"):
        capture(nn.Linear, rows())
    with pytest.raises(UsageError, match="not 3"):
        capture(3, rows())


def test_a_sequence_of_too_few_modules_is_not_taken_directly():
    model = nn.Sequential(Layers(), nn.Linear(WIDTH, 2).double())
    assert capture(model, rows()).path == "direct"
    assert capture(model, rows(), num_stages=4).path == "export"


def test_a_list_of_stage_modules_hands_on_tuples_as_arguments():
    class First(nn.Module):
        def forward(self, x, y):
            return x + y, x * 2

    class Second(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH).double()

        def forward(self, a, b):
            return self.layer(a) + b

    modules = [First(), Second(), nn.Tanh()]
    captured = capture(modules, (rows(), rows()))
    assert captured.path == "direct"
    x = rows()
    torch.testing.assert_close(captured.split([1, 2])(x, x), torch.tanh(modules[1](x + x, x * 2)))
    assert "1.layer.weight" in captured.graph.parameters


def test_tuples_and_dicts_flow_through_a_sequence():
    class Split(nn.Module):
        def forward(self, x):
            return {"a": x, "b": (x + 1, None)}

    class Join(nn.Module):
        def forward(self, d):
            return d["a"] * d["b"][0]

    check(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), Split(), Join(), nn.Linear(WIDTH, 1)).double(), rows(), stages=(2, 3, 4)
    )


def test_the_graph_knows_shapes_as_functions_of_the_batch():
    class Folded(Layers):
        def forward(self, x):
            y = self.layers[0](x).reshape(-1, 4)
            return self.layers[1](torch.cat([y.reshape(-1, WIDTH), x[:1]]))

    graph = capture(Folded(), rows()).graph
    shapes = {str(value) for value in graph.values}
    assert {"float64[2·batch, 4]", "float64[batch+1, 8]", "float64[batch, 8]"} <= shapes
    assert graph.nodes[0].module == "layers.0"
    assert set(graph.nodes[0].parameters) == {"layers.0.weight", "layers.0.bias"}
    assert "test_capture.py:" in next(node for node in graph.nodes if node.op == "cat").source


@pytest.mark.parametrize("path", ["export", "replay"])
def test_the_graph_knows_what_crosses_and_what_skips(path):
    captured = capture(Skips(), rows(), path=path)
    graph = captured.graph
    crossings = [len(graph.crossing(cut)) for cut in range(1, len(graph.nodes))]
    assert max(crossings) == 2
    chain = captured.split([1, 2, 4] if path == "export" else [1, 2])
    skip = set(chain.stages[0].outputs) & set(chain.stages[-1].inputs)
    assert skip, "the skip goes straight to the stage that uses it"
    assert not skip & set(chain.stages[-2].outputs)


def test_masks_and_positions_never_cross():
    class Masked(Layers):
        def forward(self, x):
            mask = torch.arange(WIDTH, device=x.device) < 5
            for layer in self.layers:
                x = torch.where(mask, torch.tanh(layer(x)), x)
            return x

    graph = capture(Masked(), rows()).graph
    assert all(graph.values[v].dtype == "float64" for cut in range(1, len(graph.nodes)) for v in graph.crossing(cut))
    check(Masked(), rows())


def test_parameters_that_nobody_uses_are_held_once():
    class Spare(Layers):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(2, 2)

    for path in ("export", "replay"):
        chain = capture(Spare(), rows(), path=path).split([2])
        assert set(chain.state_dict()) == set(Spare().state_dict())


def test_capture_leaves_the_model_and_random_numbers_alone():
    for path in ("export", "replay"):
        model = BatchNorm().train()
        model.layers[1].eval()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        torch.manual_seed(5)
        state = torch.get_rng_state()
        capture(model, rows(), path=path).split([2])
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert model.training
        assert not model.layers[1].training
        assert all(p.grad is None for p in model.parameters())


def test_capture_leaves_tensors_that_are_no_buffers_alone():
    """A trace of torch's changes them for real."""

    class Counting(Layers):
        def __init__(self):
            super().__init__()
            self.count, self.table = torch.zeros((), dtype=torch.float64), torch.arange(3.0)

        def forward(self, x):
            self.count.add_(1)
            return super().forward(x) * self.count

    model = Counting()
    table = model.table
    capture(model, rows(), path="export")
    assert model.count == 0
    assert model.table is table


def test_dropout_is_fresh_in_every_run():
    for path in ("export", "replay"):
        chain = capture(Dropout(), rows(), training=True, path=path).split([3])
        assert not torch.equal(chain(rows()), chain(rows()))


def test_the_order_and_style_of_arguments_do_not_matter():
    example = {"x": rows(), "mask": rows() > 1, "index": torch.tensor([0, 2, 1, 0])}
    model = Structured()
    chain = capture(model, example).split([3])
    turned = dict(reversed(example.items()))
    torch.testing.assert_close(chain(**turned).loss, model(**turned).loss)
    chain = capture(Skips(), rows()).split([2])
    torch.testing.assert_close(chain(x=rows()), Skips()(rows()))


def test_the_same_tensor_twice_in_an_example_is_two_inputs():
    class Two(Layers):
        def forward(self, x, target):
            return (self.body(x) - target).square().mean()

    x = rows()
    chain = capture(Two(), {"x": x, "target": x}).split([3])
    torch.testing.assert_close(chain(x=x, target=x + 1), Two()(x, x + 1))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": rows(), "mask": rows() > 1}, "it lacks index"),
        (
            {"x": rows(), "mask": rows() > 1, "index": torch.zeros(1, dtype=torch.int64), "y": rows()},
            "it has y, which was not a tensor in the example",
        ),
        (
            {"x": rows(), "mask": rows() > 1, "index": torch.tensor([0]), "scale": 4.0},
            "another plain value of scale",
        ),
    ],
)
def test_wrong_batches_are_refused(batch, message):
    example = {"x": rows(), "mask": rows() > 1, "index": torch.tensor([0, 2, 1, 0]), "scale": 3.0}
    chain = capture(Structured(), example).split([3])
    with pytest.raises(UsageError, match=message):
        chain(**batch)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (3, "pass a tensor, a tuple of arguments or a dict"),
        ((), "no tensor"),
        ({"x": 3}, "no tensor"),
        (torch.tensor(1.0), "no tensor with a batch dimension"),
        (torch.empty(0, WIDTH), "no samples"),
    ],
)
def test_wrong_examples_are_refused(example, message):
    with pytest.raises(UsageError, match=message):
        capture(Layers(), example)


def test_wrong_cuts_are_refused():
    captured = capture(Layers(), rows())
    for cuts, message in [
        ([0], "outside"),
        ([3, 3], "does not come after"),
        ([99], "outside"),
        ([5, 2], "does not come after"),
    ]:
        with pytest.raises(GraphError, match=message):
            captured.split(cuts)


def test_wrong_paths_are_refused():
    with pytest.raises(UsageError, match="Did you mean 'export'"):
        capture(Layers(), rows(), path="exprot")
    with pytest.raises(CaptureError, match="not a sequence of modules"):
        capture(Layers(), rows(), path="direct")
    with pytest.raises(UsageError, match="a list of stage modules"):
        capture([nn.Linear(2, 2), 3], rows())


def test_a_model_that_no_path_can_take_names_its_line_and_says_what_to_do():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x):
            return self.layer(x).no_such_method()

    with pytest.raises(CaptureError, match=r"(?s)test_capture\.py:\d+.*pass a list of stage modules"):
        capture(Broken(), rows())


def test_a_recording_keeps_no_values():
    """What replay saw of a run was kept for as long as the pipeline: pegasus_x took 24 GiB where it needs 2."""
    made = []

    class Model(Layers):
        def forward(self, x):
            x = super().forward(x)
            made.append(weakref.ref(x.untyped_storage()))
            return x * 2

    captured = capture(Model(), rows(), path="replay")
    gc.collect()
    assert captured.path == "replay"
    assert made
    assert not [ref for ref in made if ref() is not None]
