"""Measured profiles: every kind of node once, the model untouched, saved bytes exact."""

import random
from itertools import pairwise

import pytest
import torch
from torch import nn

from penstock.errors import UsageError
from penstock.model.capture.capture import capture
from penstock.model.example import read_example
from penstock.model.graph import Graph, Node, Parameter, Size, Value
from penstock.model.profile import Profile
from penstock.model.profiling import measure as measuring
from penstock.model.profiling.call_timing import Timing, clock_for, engine_overhead, in_queue, median_time
from penstock.model.profiling.measure import measure

FLOAT = 4


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.head(nn.functional.dropout(x, 0.1, self.training))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def mlp(*widths):
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def tiny_gpt2(num_layers=2):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=num_layers, n_embd=32, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    ids = torch.randint(0, 50, (2, 16))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


@pytest.fixture
def no_clock(monkeypatch):
    """Each timing takes one second, at once; returns what was timed."""
    timed = []

    def timing(clock, make, **_):
        make()()
        timed.append(make)
        return Timing(1.0)

    monkeypatch.setattr(measuring, "median_time", timing)
    monkeypatch.setattr(measuring, "engine_overhead", lambda clock, device: Timing(0.0))
    monkeypatch.setattr(measuring, "whole_seconds", lambda captured, **_: None)
    return timed


def saved_by(call, held):
    """Return the distinct memory that autograd keeps for a call, without that of parameters and buffers."""
    held = {tensor.untyped_storage().data_ptr() for tensor in held}
    size_of, alive = {}, []

    def pack(tensor):
        alive.append(tensor.detach())
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            size_of[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    del result
    return sum(size_of.values())


def saved_by_visit(captured, model):
    """Return the same for the captured model, run node by node with its whole history."""

    def visitor(index, run, inputs, parameters):
        return run(inputs, parameters)

    return saved_by(lambda: captured.visit(visitor), [*model.parameters(), *model.buffers()])


def by_op(profile, column):
    return {node.op: getattr(profile, column)[i] for i, node in enumerate(profile.graph.nodes)}


def test_a_profile_has_times_and_bytes_for_every_node():
    profile = measure(capture(Conv(), torch.randn(4, 3, 8, 8)), seconds_budget=0.2)
    assert isinstance(profile, Profile)
    assert (profile.method, profile.batch_size) == ("measured", 4)
    assert profile.device.startswith("cpu")
    forward, input_grad, weight_grad = (by_op(profile, name) for name in ("forward", "input_grad", "weight_grad"))
    assert all(seconds > 0 for seconds in forward.values())
    assert input_grad["conv2d"] == 0  # nothing comes before it that has a gradient
    assert weight_grad["conv2d"] > 0
    assert weight_grad["batch_norm"] > 0
    assert weight_grad["relu_"] == weight_grad["mean"] == input_grad["add_"] == 0


def test_the_model_stays_as_it_was():
    model, example = Conv().train(), torch.randn(4, 3, 8, 8)
    model.head.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept, modes = example.clone(), [module.training for module in model.modules()]
    captured = capture(model, example)
    state, python_state = torch.get_rng_state(), random.getstate()
    measure(captured, seconds_budget=0.05)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state
    assert torch.equal(example, kept)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert [module.training for module in model.modules()] == modes


def test_an_input_that_is_changed_in_place_stays_with_its_owner():
    class Bump(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            x.mul_(3.0)
            return self.layer(x)

    example = torch.ones(2, 4)
    measure(capture(Bump(), example.clone()), seconds_budget=0.05)
    captured = capture(Bump(), example)
    example.fill_(1.0)
    measure(captured, seconds_budget=0.05)
    assert torch.equal(example, torch.ones(2, 4))


@pytest.mark.parametrize(("path", "nodes_of_block"), [("export", 4), ("direct", 1)])
def test_repeated_blocks_are_measured_once(no_clock, path, nodes_of_block):
    def timings(num_blocks):
        no_clock.clear()
        model = nn.Sequential(*(Block(8) for _ in range(num_blocks)))
        profile = measure(capture(model, torch.randn(4, 8), path=path))
        return len(no_clock), profile

    (few, _), (many, profile) = timings(2), timings(9)
    assert many == few
    assert len(profile.graph.nodes) == 9 * nodes_of_block
    assert profile.forward.tolist() == [1.0] * 9 * nodes_of_block


def test_another_shape_or_a_missing_gradient_is_another_kind(no_clock):
    measure(capture(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)))
    assert len(no_clock) == 2 + 4  # forward and weights of the first; forward, inputs, weights and both of the second


class Scaled(nn.Module):
    """The same operation on the same shapes, with a value that was computed, or with a parameter, on either side."""

    def __init__(self):
        super().__init__()
        self.layer, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x, y):
        x = self.layer(x) / self.layer(y).mean(0)
        return self.weight / (x / self.weight).mean(0)


def test_a_parameter_in_the_place_of_a_value_is_another_kind(no_clock):
    model, x, y = Scaled(), torch.randn(8, 4), torch.randn(8, 4)
    profile = measure(capture(model, (x, y), path="export"))
    assert len({node.signature for node in profile.graph.nodes if "div" in node.op}) == 3
    assert profile.saved_bytes.sum() == saved_by(lambda: model(x, y), model.parameters())


def test_both_gradients_together_take_what_a_full_backward_takes(no_clock):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    profile = measure(capture(model, torch.randn(4, 8)))
    assert profile.input_grad.tolist() == [0.0, 0.5]
    assert profile.weight_grad.tolist() == [1.0, 0.5]
    model[1].requires_grad_(False)
    profile = measure(capture(model, torch.randn(4, 8)))
    assert profile.input_grad.tolist() == [0.0, 1.0]
    assert profile.weight_grad.tolist() == [1.0, 0.0]


def saved_of(layer, *shape, column="saved_bytes", path="auto"):
    """Return what a layer keeps after a linear layer, which gives it an input that has a gradient."""
    model = nn.Sequential(nn.Linear(shape[-1], shape[-1]), layer)
    profile = measure(capture(model, torch.randn(*shape), path=path), seconds_budget=0.01)
    return getattr(profile, column)[1:].sum()


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Linear(8, 3), 4 * 8 * FLOAT),  # its input
        (nn.ReLU(), 4 * 8 * FLOAT),  # its output
        (nn.Sigmoid(), 4 * 8 * FLOAT),
        (nn.GELU(), 4 * 8 * FLOAT),  # its input
        (nn.ReLU(inplace=True), 4 * 8 * FLOAT),
        (nn.Dropout(0.5), 4 * 8 * FLOAT),  # a mask of floats on the CPU
        (nn.LayerNorm(8), (4 * 8 + 2 * 4) * FLOAT),  # its input, means and deviations
        (nn.Flatten(), 0),  # a view
        (nn.Identity(), 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize("path", ["export", "direct", "replay"])
def test_saved_bytes_are_exact(layer, expected, path):
    assert saved_of(layer, 4, 8, path=path) == expected


def test_a_tensor_that_two_nodes_keep_counts_once_at_the_first():
    profile = measure(capture(mlp(8, 16, 4), torch.randn(4, 8)), seconds_budget=0.01)
    assert profile.saved_bytes.tolist() == [4 * 8 * FLOAT, 4 * 16 * FLOAT, 0]  # relu keeps what the second linear needs


def test_what_waits_for_the_weights_is_the_input_and_the_gradient_of_the_output():
    assert saved_of(nn.Linear(8, 3), 4, 8, column="pending_bytes") == 4 * (8 + 3) * FLOAT
    assert saved_of(nn.ReLU(), 4, 8, column="pending_bytes") == 0
    frozen = nn.Linear(8, 3).requires_grad_(False)
    assert saved_of(frozen, 4, 8, column="pending_bytes") == 0
    assert saved_of(frozen, 4, 8) == 0


@pytest.mark.parametrize("widths", [(8, 16, 4), (8, 8, 8, 8), (6, 5, 4, 3, 2)])
def test_saved_bytes_of_an_mlp_are_those_of_the_whole_model(widths, no_clock):
    model, x = mlp(*widths), torch.randn(4, widths[0])
    profile = measure(capture(model, x))
    assert profile.saved_bytes.sum() == saved_by(lambda: model(x), model.parameters())


def test_saved_bytes_of_convolutions_are_those_of_the_whole_model(no_clock):
    model, x = Conv(), torch.randn(4, 3, 8, 8)
    profile = measure(capture(model, x))
    assert profile.saved_bytes.sum() == saved_by(lambda: model(x), [*model.parameters(), *model.buffers()])


def test_saved_bytes_of_gpt2(no_clock):
    model, example = tiny_gpt2()
    captured = capture(model, example)
    profile = measure(captured)
    assert profile.saved_bytes.sum() == saved_by_visit(captured, model)
    # the model itself masks attention and lays out keys otherwise when it is not traced: a few percent
    whole = saved_by(lambda: model(**example), [*model.parameters(), *model.buffers()])
    assert profile.saved_bytes.sum() == pytest.approx(whole, rel=0.05)


def test_another_batch_size(no_clock):
    captured = capture(mlp(8, 16, 4), torch.randn(4, 8))
    profile = measure(captured, batch_size=12)
    assert profile.batch_size == 12
    assert profile.saved_bytes.tolist() == [12 * 8 * FLOAT, 12 * 16 * FLOAT, 0]


def test_a_thousand_nodes(no_clock):
    model = nn.Sequential(*(layer for _ in range(500) for layer in (nn.Linear(8, 8), nn.ReLU())))
    seen = []
    profile = measure(capture(model, torch.randn(2, 8)), progress=lambda *told: seen.append(told))
    assert len(profile.forward) == 1000
    assert len(no_clock) < 20
    assert [done for done, _, _ in seen] == list(range(1, 1001))
    assert seen[-1] == (1000, 1000, profile.graph.nodes[-1].name)


class Fake:
    """A captured model of one node, by whatever path; the node can do anything."""

    path = reason = "test"

    def __init__(self, run):
        shape = (Size(0, 1), Size(3))
        values = (
            Value("x", -1, shape, "float32", FLOAT),
            Value("y", 0, shape, "float32", FLOAT, has_grad=True),
            Value("z", 1, shape, "float32", FLOAT, has_grad=True),
        )
        nodes = (Node("first", "mul", "", (0,), (1,), ("w",)), Node("second", "odd", "", (1,), (2,), ("w",)))
        self.graph = Graph(nodes, values, (0,), (2,), {"w": Parameter("w", 3 * FLOAT)}, batch_size=2)
        self.run, self.weight = run, nn.Parameter(torch.ones(3))
        self.model, self.call = nn.Module(), read_example(torch.ones(2, 3), None)

    def split(self, cuts):
        raise RuntimeError("cannot be run in one piece")

    def visit(self, visitor, *, device=None, batch_size=None):
        runs = [lambda inputs, held: [inputs[0] * held[0]], self.run]
        values = [torch.ones(batch_size or 2, 3, device=device)]
        for index, run in enumerate(runs):
            values = visitor(index, run, values, [self.weight])


def test_a_node_that_cannot_be_differentiated_is_guessed_with_a_note():
    def refuse(inputs, held):
        if torch.is_grad_enabled():
            raise RuntimeError("not with gradients")
        return [inputs[0] * held[0]]

    with pytest.warns(UserWarning, match=r"second \(odd\): RuntimeError: not with gradients"):
        profile = measure(Fake(refuse), seconds_budget=0.01)
    assert profile.forward[1] > 0
    assert profile.input_grad[1] == pytest.approx(profile.forward[1])
    assert profile.weight_grad[1] == pytest.approx(profile.forward[1])
    assert profile.saved_bytes[1] == 2 * 3 * FLOAT


def test_a_node_of_several_operations_is_measured_whole():
    captured = Fake(lambda inputs, held: [torch.tanh(torch.sigmoid(inputs[0]) * held[0])])
    profile = measure(captured, seconds_budget=0.01)
    assert profile.saved_bytes[1] == 2 * (2 * 3 * FLOAT)  # what sigmoid and tanh made; multiplying keeps no more
    assert profile.input_grad[1] + profile.weight_grad[1] > 0  # of so small a node, which half is larger is chance
    assert captured.weight.grad is None


@pytest.mark.parametrize(
    "wrong", [{"repeats": 0}, {"seconds_budget": 0}, {"batch_size": 0}, {"device": "meta"}], ids=lambda w: next(iter(w))
)
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        measure(capture(mlp(8, 4), torch.randn(2, 8)), **wrong)


@pytest.mark.parametrize("path", ["direct", "export"])
def test_a_model_on_meta_is_measured_on_a_device_node_by_node(path):
    """With random weights: it has none, and it may be larger than the device."""
    with torch.device("meta"):
        model = mlp(8, 16, 4)
    captured = capture(model, torch.empty(2, 8, device="meta"), path=path)
    found, real = measure(captured), measure(capture(mlp(8, 16, 4), torch.randn(2, 8), path=path))
    assert found.device == real.device
    assert (found.saved_bytes == real.saved_bytes).all()
    assert (found.forward > 0).all()
    assert all(tensor.is_meta for tensor in model.parameters())
    with pytest.raises(UsageError, match="analytic"):
        measure(captured, device="meta")


def test_a_queue_costs_what_the_device_or_the_host_is_late():
    assert in_queue([Timing(2.0), Timing(3.0)]) == [2.0, 3.0]  # host and device are one
    assert in_queue([Timing(5.0, 1.0), Timing(5.0, 1.0), Timing(5.0, 1.0)]) == [6.0, 5.0, 5.0]  # the device decides
    assert in_queue([Timing(1.0, 5.0), Timing(1.0, 5.0), Timing(1.0, 5.0)]) == [6.0, 5.0, 5.0]  # the host does
    assert in_queue([Timing(1.0, 1.0), Timing(0.0, 9.0), Timing(1.0, 1.0)]) == [
        2.0,
        0.0,
        10.0,
    ]  # views wait for nothing


class Script:
    """A clock that reads what it is told to."""

    def __init__(self, seconds):
        self.seconds, self.counts = iter(seconds), []

    def time(self, call, count, *, ahead_seconds=0.0):
        self.counts.append(count)
        call()
        return Timing(next(self.seconds))


def test_a_timing_is_the_median_of_bursts_and_the_quick_get_more_calls():
    quick = Script([1e-4] * 3 + [3e-4, 1e-4, 2e-4, 2e-4, 9e-4])
    timing = median_time(quick, lambda: lambda: None, is_reusable=True, repeats=5, seconds=0.01)
    assert timing == Timing(2e-4)
    assert quick.counts == [1, 1, 1, 20, 20, 20, 20, 20]
    slow = Script([2.0] * 2)
    assert median_time(slow, lambda: lambda: None, is_reusable=True, repeats=5, seconds=0.01) == Timing(2.0)
    assert slow.counts == [1, 1]


def test_what_may_be_called_once_is_made_anew_for_each_call():
    made = []

    def make():
        made.append(0)
        return lambda: made.__setitem__(-1, made[-1] + 1)

    median_time(Script([1e-4] * 8), make, is_reusable=False, repeats=5, seconds=0.01)
    assert made == [1] * 8


def test_the_engine_costs_something_by_itself():
    device = torch.device("cpu")
    assert engine_overhead(clock_for(device), device).device > 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    model, example = Conv().cuda(), torch.randn(4, 3, 8, 8, device="cuda")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    captured = capture(model, example)
    state = torch.cuda.get_rng_state()
    profile = measure(captured, seconds_budget=0.2)
    assert profile.device.startswith("cuda")
    assert profile.forward.sum() > 0
    assert profile.input_grad.sum() > 0
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert profile.saved_bytes.sum() == saved_by(lambda: model(example), [*model.parameters(), *model.buffers()])
    moved = measure(capture(Conv(), torch.randn(4, 3, 8, 8)), device="cuda", seconds_budget=0.2)
    assert moved.device == profile.device
