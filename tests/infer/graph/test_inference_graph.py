"""A model as one graph with branches returns what the model returns: for fresh data, all batch sizes, changed weights.

On a CPU the graphs are those of `cpu_graphs`, which do by hand what a CUDA graph does; on a GPU they are real.
"""

import random
import threading
import warnings
import weakref
from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cpu_graphs import CpuGraphs
from penstock.compile.options import Options
from penstock.errors import UsageError
from penstock.infer import Graph
from penstock.infer.graph import inference_graph as graph_module
from penstock.infer.graph import interpreter as interpreting
from penstock.infer.graph import patch_convolutions as patches
from penstock.infer.graph import program_analysis as reading
from penstock.infer.graph.branches import Branches
from penstock.infer.graph.inference_program import Program
from penstock.infer.graph.interpreter import Interpreter, find_parts
from penstock.infer.graph.program_analysis import compute
from penstock.model.example import read_example

needs_gpu = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
WIDTH = 8


# what the compiler says about itself
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:TensorFloat32", "ignore:\\s*Online softmax")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request, monkeypatch):
    if request.param == "cpu":
        monkeypatch.setattr(graph_module, "has_graphs", lambda device: True)
        monkeypatch.setattr(graph_module, "CudaGraphs", CpuGraphs)
    monkeypatch.setattr(CpuGraphs, "num_replays", 0)
    return request.param


# ---- models


def tower(depth, width=WIDTH):
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())))


class Towers(nn.Module):
    """Two towers, one of them with a dropout, and a join."""

    def __init__(self, first=6, second=7):
        super().__init__()
        self.first, self.second = tower(first), nn.Sequential(tower(second), nn.Dropout(0.5))
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x, y):
        a, b = self.first(x), self.second(y)
        return {"both": a @ b.T * self.scale.exp(), "first": a, "given": y}


class Conv(nn.Module):
    """Blocks of two long branches each, as in Inception, with batch norms."""

    def __init__(self, num_blocks=2):
        super().__init__()

        def branch():
            layers = [
                layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(True))
            ]
            return nn.Sequential(*layers)

        self.blocks = nn.ModuleList(nn.ModuleList(branch() for _ in range(2)) for _ in range(num_blocks))
        self.mix = nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in range(num_blocks))

    def forward(self, x):
        for (left, right), mix in zip(self.blocks, self.mix, strict=True):
            x = mix(torch.cat([left(x), right(x)], 1))
        return x.mean((2, 3))


class InPlace(nn.Module):
    """Changes memory that the other branch has read before, and views of memory that another one changes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = tower(6), tower(7)

    def forward(self, x):
        shared = x * 2
        half = shared[:, : WIDTH // 2]
        a = self.first(shared)
        shared.mul_(0.5)
        b = self.second(shared + 1)
        half.add_(1)
        return a + b + shared


class Counting(nn.Module):
    """Changes buffers in place, in evaluation too: a count, and a sum of what came by."""

    def __init__(self):
        super().__init__()
        self.first, self.second = tower(5), tower(6)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("total", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x):
        self.count.add_(1)
        before = self.first(x + self.total)
        self.total.add_(x.sum(0))
        return before + self.second(x) / self.count


class Making(nn.Module):
    """Makes tensors out of nothing: some stay as they are, one is changed by the data, one comes from the host."""

    def __init__(self):
        super().__init__()
        self.place = nn.Embedding(16, WIDTH)

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)
        mask = torch.ones(x.shape[1], x.shape[1], device=x.device, dtype=torch.bool).tril_()
        room = torch.zeros(x.shape[0], x.shape[1], WIDTH, device=x.device, dtype=x.dtype)
        room[:, 1:] += x[:, :-1]
        weights = torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype).to(x.device)
        seen = torch.softmax((x @ x.mT).masked_fill(~mask, float("-inf")), -1)
        return seen @ (room + self.place(positions)) * weights.sum()


def clip():
    transformers = pytest.importorskip("transformers")
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision = text | {"image_size": 16, "patch_size": 8}
    words = {"vocab_size": 50, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.CLIPConfig(text_config=text | words, vision_config=vision, projection_dim=8)
    return transformers.CLIPModel(config)


def vit():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    return transformers.ViTModel(config)


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50
    )
    return transformers.BertModel(config)


class Patches(nn.Module):
    """Convolutions over patches, of images, films and sounds; what they make is viewed, and changed in place."""

    def __init__(self):
        super().__init__()
        self.images = nn.Conv2d(3, 4, (4, 2), stride=(4, 2))
        self.films = nn.Conv3d(1, 4, 2, stride=2, bias=False)
        self.sounds = nn.Conv1d(2, 4, 3, stride=3)

    def forward(self, image, film, sound):
        flat = self.images(image).view(image.shape[0], 4, -1)
        return flat, self.films(film).relu_().mean((2, 3, 4)), self.sounds(sound * 2).transpose(1, 2)


def floats(*shape):
    return lambda size, generator: torch.randn(size, *shape, generator=generator, dtype=torch.float64)


def ids(length):
    return lambda size, generator: torch.randint(3, 50, (size, length), generator=generator)


@pytest.fixture(autouse=True)
def small_patches(monkeypatch):
    """Small ones become products too, though they would be quicker as they are."""
    monkeypatch.setattr(patches, "_LEAST_NUMBERS", 1)


MODELS = {  # how each is made, its arguments for a batch, how many branches it has
    "towers": (Towers, {"x": floats(WIDTH), "y": floats(WIDTH)}, 2),
    "conv": (Conv, {"x": floats(4, 6, 6)}, 2),
    "in place": (InPlace, {"x": floats(WIDTH)}, 2),
    "counting": (Counting, {"x": floats(WIDTH)}, 2),
    "making": (Making, {"x": floats(6, WIDTH)}, 1),
    "chain": (lambda: tower(12), {"input": floats(WIDTH)}, 1),
    "clip": (clip, {"input_ids": ids(8), "pixel_values": floats(3, 16, 16)}, 2),
    "vit": (vit, {"pixel_values": floats(3, 16, 16)}, 1),
    "bert": (bert, {"input_ids": ids(6)}, 1),
    "patches": (Patches, {"image": floats(3, 8, 6), "film": floats(1, 4, 4, 4), "sound": floats(2, 9)}, 1),
}


def made(name, device="cpu", **options):
    torch.manual_seed(0)
    return MODELS[name][0](**options).double().eval().to(device)


def batch(name, size, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return {key: make(size, generator).to(device) for key, make in MODELS[name][1].items()}


def tensors_of(result):
    if isinstance(result, torch.Tensor):
        return [result]
    values = result.values() if hasattr(result, "values") else result
    return [tensor for value in values if value is not None for tensor in tensors_of(value)]


def assert_same(found, wanted, at_most=1e-11):
    assert type(found) is type(wanted)
    pairs = list(zip(tensors_of(found), tensors_of(wanted), strict=True))
    assert pairs
    for a, b in pairs:
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        assert (a - b).norm() <= at_most * max(1.0, float(b.norm()))


def wanted_of(model, given):
    with torch.no_grad():
        return model(**given)


# ---- the same as the model


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_the_model_s(name, device):
    model, plain = made(name, device), made(name, device)
    graph = Graph(model, batch(name, 2, device=device))
    assert graph.obstacle == ""
    assert graph._program.branches.num_streams == MODELS[name][2]
    for seed in range(3):
        for size in (1, 2, 5):
            given = batch(name, size, seed, device)
            assert_same(graph(**given), wanted_of(plain, given))
    if name == "counting":
        assert model.count == plain.count == 9
    if device == "cpu":
        assert CpuGraphs.num_replays == 9


@pytest.mark.parametrize("name", ["towers", "clip", "conv"])
def test_on_one_stream(name, device):
    model = made(name, device)
    graph = Graph(model, batch(name, 2, device=device), branches=1)
    assert graph._program.branches.num_streams == 1
    given = batch(name, 3, 1, device)
    assert_same(graph(**given), wanted_of(model, given))


def program_of(name, size=3):
    model, example = made(name), batch(name, size)
    program = Program(model, read_example(example, model), most=8)
    call = list(batch(name, size, seed=7).values())
    return model, program, call, lambda: [*program.held(), *program.values(call), size]


def in_any_order(program, branches, arguments, chance):
    """Run a program's nodes in an order that waits and streams allow: what a GPU might do.

    One stream runs as far ahead as it can, then the next; or any of them goes on, at random.
    """
    read = program.analysis
    once = program.interpreter(None).make_once(arguments)
    known = {**dict(zip(read.arguments, arguments, strict=True)), **once}
    left = [deque(i for i, s in enumerate(branches.stream_of) if s == k) for k in range(branches.num_streams)]
    # numbers are known to the host before the GPU does anything
    done = set()
    for index, node in enumerate(read.nodes):
        if not read.graph_nodes[index].after and not read.graph_nodes[index].seconds and not node.all_input_nodes:
            known[node] = compute(node, known, read.root)
            done.add(index)
    is_eager = chance.random() < 0.7
    chance.shuffle(left)
    while any(left):
        able = [own for own in left if own and all(w in done for w in branches.waits[own[0]])]
        at = (able[0] if is_eager else chance.choice(able)).popleft()
        if at not in done:
            known[read.nodes[at]] = compute(read.nodes[at], known, read.root)
            done.add(at)
    return tuple(known[node] for node in read.outputs)


@pytest.mark.parametrize("name", MODELS)
def test_waits_are_enough(name):
    """Found branches, and streams at random, in many orders that the waits allow: always what the model computes."""
    model, program, call, arguments = program_of(name)
    chance = random.Random(0)
    with torch.no_grad():
        state = {key: value.clone() for key, value in model.state_dict().items()}
        wanted = model(**dict(zip(MODELS[name][1], call, strict=True)))
        for trial in range(12):
            found = program.branches
            if trial > 2:
                found = at_random(program, chance)
            model.load_state_dict(state)
            given = arguments()
            assert_same(program.result(call, in_any_order(program, found, given, chance)), wanted)
            model.load_state_dict(state)
            interpreter = Interpreter(program.analysis, found)
            assert_same(program.result(call, interpreter.run(given, interpreter.make_once(given))), wanted)


def test_changes_in_place_come_after_earlier_reads():
    """Without that, the test above would fail: the waits know of memory, not only of values."""
    _, program, _, _ = program_of("in place")
    works = program.analysis.graph_nodes
    [change] = [i for i, work in enumerate(works) if "mul_" in work.name]
    readers = [i for i, work in enumerate(works) if "linear" in work.name and i < change]
    assert set(readers[:1]) <= set(works[change].after)


def test_what_no_input_changes_is_made_once():
    _, program, _, _ = program_of("making")
    once = {str(node.target) for node in program.analysis.once}
    every = {str(node.target) for node in program.analysis.nodes}
    assert {"aten.arange.default", "aten.tril_.default"} <= once | {t.replace(".start", ".default") for t in once}
    assert any("zeros" in target for target in every)  # is filled from the data
    assert any("embedding" in target for target in every)  # reads a weight, which may change
    assert not any("zeros" in target for target in once)


@pytest.mark.parametrize(("name", "count"), [("patches", 3), ("clip", 1), ("vit", 1), ("conv", 0), ("bert", 0)])
def test_convolutions_over_patches_become_products(name, count):
    graph = Graph(made(name), batch(name, 2))
    assert f"computed as matrix products: {count}" in graph.explain() or not count
    assert graph._program.analysis.num_products == count


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 4, 2, stride=1), (3, 4, 4)),  # windows overlap
        (nn.Conv2d(3, 4, 2, stride=3), (3, 4, 4)),
        (nn.Conv2d(3, 4, 2, stride=2, padding=1), (3, 4, 4)),
        (nn.Conv2d(3, 4, 2, stride=2, padding="valid"), (3, 4, 4)),
        (nn.Conv2d(3, 4, 2, stride=2, dilation=2), (3, 4, 4)),
        (nn.Conv2d(4, 4, 2, stride=2, groups=2), (4, 4, 4)),
        (nn.Conv2d(8, 4, 2, stride=2), (8, 4, 4)),  # as cuDNN likes them
        (nn.Conv2d(3, 4, 1), (3, 4, 4)),
        (nn.ConvTranspose2d(3, 4, 2, stride=2), (3, 4, 4)),
    ],
)
def test_other_convolutions_stay(layer, shape, device):
    layer = layer.double().to(device)
    data = torch.randn(2, *shape, dtype=torch.float64, device=device)
    graph = Graph(layer, data)
    assert graph._program.analysis.num_products == 0
    assert_same(graph(data), wanted_of(layer, {"input": data}))


def test_small_patches_are_quicker_as_they_are(monkeypatch):
    monkeypatch.undo()
    images = torch.randn(2, 3, 32, 32)
    for size, count in ((4, 0), (8, 1), (16, 1)):
        layer = nn.Conv2d(3, 8, size, stride=size)
        assert Program(layer, read_example(images, layer), most=1).analysis.num_products == count


class Attribute(nn.Module):
    """Counts in a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.count = torch.zeros((), dtype=torch.float64)

    def forward(self, x):
        self.count.add_(1)
        return x * 0 + self.count


def test_what_a_call_leaves_in_an_attribute_is_there_in_the_next(device):
    model = Attribute()
    model.count = model.count.to(device)
    x = torch.ones(2, 1, dtype=torch.float64, device=device)
    graph = Graph(model, x, device=device)
    assert graph.obstacle == ""
    assert [graph(x)[0].item() for _ in range(4)] == [1, 2, 3, 4]
    assert model.count == 4


def assigned(model):
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)


def other_weight(model):
    model[0].weight = nn.Parameter(torch.zeros_like(model[0].weight))


def other_statistics(model):
    model[1].running_mean = torch.ones_like(model[1].running_mean)


def other_layer(model):
    model[0] = nn.Sequential(nn.Tanh(), model[0])


@pytest.mark.parametrize("change", [assigned, other_weight, other_statistics, other_layer])
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_put_in_the_place_of_a_part_is_seen(change, size, device):
    """In a call whose batch size is known, and in one whose is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double().eval().to(device)
    x = torch.randn(size, 4, dtype=torch.float64, device=device)
    graph = Graph(model, x[:2])
    graph(x[:2])
    change(model)
    for _ in range(3):
        assert_same(graph(x), wanted_of(model, {"input": x}))
    assert graph.obstacle == ""


def test_a_call_after_a_weight_was_replaced_leaves_its_mark_once(device):
    model, x = made("counting", device), batch("counting", 2, device=device)
    graph = Graph(model, x)
    for _ in range(3):
        graph(**x)
    name, parameter = next(iter(model.named_parameters()))
    path, _, key = name.rpartition(".")
    setattr(model.get_submodule(path), key, nn.Parameter(parameter.detach() * 2))
    graph(**x)
    assert model.count == 4


class Viewing(nn.Module):
    """Relies on where its convolution puts the channels."""

    def __init__(self, channels=3):
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 2, stride=2)

    def forward(self, x):
        made = self.conv(x)
        is_last = made.stride(1) == 1
        return (made.permute(0, 2, 3, 1) if is_last else made).view(x.shape[0], -1)


LAST = torch.channels_last


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("of_data", "of_weight"), [(None, None), (LAST, None), (None, LAST), (LAST, LAST)])
def test_channels_that_come_last_stay_last(channels, of_data, of_weight, device):
    model = Viewing(channels).double().to(device)
    data = torch.randn(2, channels, 4, 6, dtype=torch.float64, device=device)
    if of_weight is not None:
        model = model.to(memory_format=of_weight)
    if of_data is not None:
        strides = (24 * channels, 1, 6 * channels, channels)
        data = torch.empty_strided(data.shape, strides, dtype=data.dtype, device=device).copy_(data)
    graph = Graph(model.conv, data)
    if (of_data, of_weight) == (None, None):
        assert graph._program.analysis.num_products == 1
    if channels > 1 and (of_data, of_weight) != (None, None) and device == "cpu":  # cuDNN puts no float64 so
        assert graph._program.analysis.num_products == 0
    made = graph(data)
    assert_same(made, wanted_of(model.conv, {"input": data}))
    assert made.stride() == model.conv(data).stride()
    if of_data is None:
        graph = Graph(model, data)
        assert_same(graph(data), wanted_of(model, {"x": data}))
        assert graph.obstacle == ""


class Odd(nn.Module):
    """Patches of what grows with the batch, weights that are patches, and a border that no patch reaches."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 1, 2))
        self.kernel = nn.Parameter(torch.randn(3, 3, 4, 4))
        self.border = nn.Conv2d(3, 2, 3, stride=3)

    def forward(self, x):
        long = nn.functional.conv1d(x[:, 0, 0].reshape(1, 1, -1), self.weight, None, 2)
        made = nn.functional.conv2d(self.kernel, self.kernel[:, :, :2, :2], None, 2)
        return long.sum() * x, nn.functional.conv2d(x, made, None, 2), self.border(x)


def test_odd_patches(device):
    torch.manual_seed(0)
    model = Odd().double().to(device)
    graph = Graph(model, torch.ones(2, 3, 7, 5, dtype=torch.float64, device=device))
    assert graph._program.analysis.num_products == 4
    for size in (1, 2, 3, 5):
        data = torch.randn(size, 3, 7, 5, dtype=torch.float64, device=device)
        assert_same(graph(data), wanted_of(model, {"x": data}))
    assert graph.obstacle == ""


def test_products_are_not_rounded_more_than_convolutions(monkeypatch):
    layer, data = nn.Conv2d(3, 4, 2, stride=2), torch.ones(2, 3, 4, 4)
    for products, convolutions, count in [
        ("none", "tf32", 1),
        ("tf32", "tf32", 1),
        ("tf32", "ieee", 0),
        ("ieee", "ieee", 1),
    ]:
        monkeypatch.setattr(patches, "torch", SimpleNamespace(**vars(torch) | {"backends": SimpleNamespace(
            cuda=SimpleNamespace(matmul=SimpleNamespace(fp32_precision=products)),
            cudnn=SimpleNamespace(conv=SimpleNamespace(fp32_precision=convolutions)),
        )}))  # fmt: skip
        assert Program(layer, read_example(data, layer), most=1).analysis.num_products == count
        assert Program(layer.double(), read_example(data.double(), layer), most=1).analysis.num_products == 1
        layer.float()


def test_where_nothing_can_be_estimated_all_nodes_count_the_same(monkeypatch):
    def refuse(rates):
        raise NotImplementedError

    monkeypatch.setattr(reading, "Tally", refuse)
    _, program, _, _ = program_of("towers")
    assert len({work.seconds for work in program.analysis.graph_nodes}) == 1
    assert program.branches.num_streams == 2


# ---- compiled


def at_random(program, chance):
    """Return branches with nodes on streams at random."""
    chosen = [chance.randrange(3) for _ in program.analysis.nodes]
    names = {stream: number for number, stream in enumerate(dict.fromkeys(chosen))}
    return Branches(program.analysis.graph_nodes, tuple(names[stream] for stream in chosen))


@pytest.mark.parametrize("name", MODELS)
def test_parts_run_in_one_go(name, monkeypatch):
    """Only the first of a part waits, only its last is waited for; run part by part it is the model, on any streams."""
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    model, program, call, arguments = program_of(name)
    chance, sizes = random.Random(1), []
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        wanted = model(**dict(zip(MODELS[name][1], call, strict=True)))
        for trial in range(8):
            branches = program.branches if trial == 0 else at_random(program, chance)
            parts = find_parts(program.analysis, branches)
            assert sorted(index for part in parts for index in part) == list(range(len(program.analysis.nodes)))
            for part in parts:
                assert len({branches.stream_of[index] for index in part}) == 1
                assert not any(branches.waits[index] for index in part[1:])
                assert not branches.awaited & set(part[:-1])
            sizes.append(max(map(len, parts)))
            model.load_state_dict(state)
            given = arguments()
            interpreter = Interpreter(program.analysis, branches, options=Options())
            assert_same(program.result(call, interpreter.run(given, interpreter.make_once(given))), wanted)
    assert sizes[0] > 1 or name == "making"  # where all is made to be changed


class Dropping(nn.Module):
    """In evaluation a dropout returns what it was given, which then is changed."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.first(x)
        y = torch.relu_(self.drop(h))
        return h + self.last(y)


class Later(nn.Module):
    """Copies that a compiler may leave out, and one of which is changed, perhaps on another stream."""

    def forward(self, x):
        a = torch.tanh(x)
        b = a + torch.zeros_like(a)
        c = a * torch.ones_like(a)
        d = torch.sin(a) + torch.cos(c)
        b.add_(1.0)
        return a + b * c + d


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("model", [Dropping, Later])
def test_memory_that_is_changed_in_place_is_the_model_s(model):
    """Compiled parts themselves, without a graph, on found and on random streams."""
    torch.manual_seed(0)
    model = model().double().eval()
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    program = Program(model, read_example(x, model), most=8)
    chance = random.Random(2)
    with torch.no_grad():
        wanted = model(x)
        for trial in range(4):
            branches = program.branches if trial == 0 else at_random(program, chance)
            interpreter = Interpreter(program.analysis, branches, options=Options())
            given = [*program.held(), *program.values([x]), len(x)]
            made = interpreter.run(given, interpreter.make_once(given))
            assert_same(program.result([x], made), wanted)


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("name", ["towers", "conv", "in place", "clip"])
def test_compiled_parts_are_the_model(name):
    """As above: a capture on a CPU writes down operations, and would see nothing of what is compiled."""
    model, program, call, arguments = program_of(name)
    with torch.no_grad():
        state = {key: value.clone() for key, value in model.state_dict().items()}
        wanted = model(**dict(zip(MODELS[name][1], call, strict=True)))
        model.load_state_dict(state)
        given = arguments()
        interpreter = program.interpreter(Options())
        assert_same(program.result(call, interpreter.run(given, interpreter.make_once(given))), wanted)


@pytest.mark.slow
@quiet
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["towers", "conv", "in place", "clip", "counting"])
def test_compiled_it_is_the_model(name, device):
    model, plain = made(name, device), made(name, device)
    graph = Graph(model, batch(name, 2, device=device), compile=True)
    for seed in range(3):
        for size in (1, 3):
            given = batch(name, size, seed, device)
            assert_same(graph(**given), wanted_of(plain, given))
    assert graph._options is not None
    assert graph.obstacle == ""


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("clone", [True, False])
def test_callers_that_change_their_stream(clone):
    """Each call is behind long work on a stream of its own, and has the graph's memory to itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).double().cuda()
    given = [torch.randn(4, 16, dtype=torch.float64, device="cuda") for _ in range(12)]
    with torch.no_grad():
        wanted = [model(x) for x in given]
    graph = Graph(model, given[0], clone=clone)
    graph(given[0])
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    made = []
    for at, x in enumerate(given):
        with torch.cuda.stream(streams[(0, 1, 2, 2, 1, 0)[at % 6]]):
            torch.cuda._sleep(20_000_000)
            made.append(graph(x))
            if not clone:
                made[-1] = made[-1].clone()
                torch.cuda.current_stream().synchronize()  # what is not copied is there until the next call
    torch.cuda.synchronize()
    for result, right in zip(made, wanted, strict=True):
        torch.testing.assert_close(result, right)


def test_a_call_that_is_wrong_is_not_the_compiler_s_fault(device, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)).to(device)
    graph = Graph(model, torch.zeros(2, 3, dtype=torch.long, device=device), compile=True)
    graph(torch.zeros(2, 3, dtype=torch.long, device=device))
    if device == "cpu":  # on a GPU it would end the process's work there
        with pytest.raises(IndexError):
            graph(torch.full((3, 3), 99, device=device))
    graph(torch.zeros(4, 3, dtype=torch.long, device=device))
    assert graph._options is not None
    assert graph.obstacle == ""


def test_what_cannot_be_compiled_is_a_graph_as_it_is(device, monkeypatch):
    def fails(module, **options):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fails)
    model = made("towers", device)
    graph = Graph(model, batch("towers", 2, device=device), compile=True)
    given = batch("towers", 2, 1, device)
    with pytest.warns(UserWarning, match="not compiled: RuntimeError: no compiler"):
        assert_same(graph(**given), wanted_of(model, given))
    assert_same(graph(**given), wanted_of(model, given))
    assert graph.obstacle == ""


class Pretended:
    """A stream that only notes how far it is behind each of the others."""

    current = None

    def __init__(self):
        self.done = {}  # how many operations of each stream come before what is given to this one now

    def record_event(self):
        return dict(self.done)

    def wait_event(self, event):
        for stream, count in event.items():
            self.done[stream] = max(count, self.done.get(stream, 0))

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    @contextmanager
    def now(self):
        before, Pretended.current = Pretended.current, self
        yield
        Pretended.current = before

    def add(self):
        self.done[self] = self.done.get(self, 0) + 1
        return self.record_event()


@pytest.fixture
def noted(monkeypatch):
    """What the interpreter computed, in order: the node, what that comes behind, and whether its tensor still lives."""
    found = []

    def computed(node, known, root):
        result = compute(node, known, root)
        tensor = result if isinstance(result, torch.Tensor) else None
        found.append((node, Pretended.current.add(), None if tensor is None else weakref.ref(tensor)))
        return result

    monkeypatch.setattr(interpreting, "compute", computed)
    monkeypatch.setattr(interpreting, "OnStream", Pretended.now)
    return found


def run_pretended(name, noted, at_the_end=lambda: None):
    """Run a program on streams that only take notes; tell when all is computed, and nothing let go."""
    _, program, _, arguments = program_of(name)
    streams = [Pretended() for _ in range(program.branches.num_streams)]
    joins = streams[0].wait_stream
    streams[0].wait_stream = lambda other: (at_the_end(), joins(other))
    with streams[0].now(), torch.no_grad():
        given = arguments()
        once = program.interpreter(None).make_once(given)
        noted.clear()
        return program, streams, given, program.interpreter(None).run(given, once, streams)


@pytest.mark.parametrize("name", ["towers", "conv", "in place", "clip"])
def test_what_streams_are_told_keeps_the_order(name, noted):
    """What the interpreter says to its streams is what the branches say, and all of it lies between fork and join."""
    program, streams, *_ = run_pretended(name, noted)
    at = {}
    for index, (node, behind, _) in enumerate(noted):
        assert node is program.analysis.nodes[index]
        own = streams[program.branches.stream_of[index]]
        at[index] = (own, behind[own])
        for before in program.analysis.graph_nodes[index].after:
            stream, count = at[before]
            assert behind[stream] >= count
    assert all(streams[0].done[stream] == stream.done[stream] for stream in streams)


@pytest.mark.parametrize("name", ["towers", "conv", "clip"])
def test_what_crosses_is_kept_and_the_rest_let_go(name, noted):
    """Memory of a value that another stream may still read is not given again before the end; all other is."""
    alive = []

    def look():
        alive[:] = [index for index, (_, _, ref) in enumerate(noted) if ref is not None and ref() is not None]
        same.update({index: id(noted[index][2]()) for index in alive})  # what changes in place returns the same tensor

    same = {}
    program, _, given, made = run_pretended(name, noted, look)
    outputs = {program.analysis.nodes.index(node) for node in program.analysis.outputs}
    kept = program.branches.crossing | outputs
    assert program.branches.crossing
    assert program.branches.crossing <= set(alive)
    assert {same[index] for index in alive} - set(map(id, given)) == {same[index] for index in kept}
    left = {id(ref()) for _, _, ref in noted if ref is not None and ref() is not None}
    assert left - set(map(id, given)) == set(map(id, made))


# ---- calls


def has_graph(graph, given):
    form, _ = graph._program.read((), given)
    return graph._replays.get((form.shape, *graph._autocast())) is not None


def test_calls_may_be_written_in_any_way(device):
    model, given = made("towers", device), batch("towers", 3, 1, device)
    graph = Graph(model, batch("towers", 2, device=device))
    wanted = wanted_of(model, given)
    assert_same(graph(given["x"], given["y"]), wanted)
    assert_same(graph(given["x"], y=given["y"]), wanted)
    assert_same(graph(y=given["y"], x=given["x"]), wanted)
    assert graph(y=given["y"], x=given["x"])["given"] is given["y"]  # what the model hands on as it got it


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = tower(6), tower(6)

    def forward(self, pair, power=1):
        return self.first(pair[0]) + self.second(pair["b"] if isinstance(pair, dict) else pair[1]) ** power


def test_arguments_may_be_nested(device):
    model = Nested().double().to(device).eval()
    x, y = batch("towers", 3, device=device).values()
    graph = Graph(model, ([x, y],))
    for seed in range(3):
        x, y = batch("towers", 3, seed, device).values()
        assert_same(graph([x, y]), model([x, y]).detach())
    assert has_graph(graph, {"pair": [x, y]})


def test_a_call_unlike_the_example_runs_as_it_is(device):
    model = made("making", device)
    graph = Graph(model, batch("making", 2, device=device))
    longer = torch.randn(2, 9, WIDTH, dtype=torch.float64, device=device)
    with pytest.warns(UserWarning, match="no CUDA graph for a call: the batch is not like the example"):
        assert_same(graph(longer), model(longer).detach())
    assert_same(graph(longer), model(longer).detach())  # said once
    given = batch("making", 3, 1, device)
    assert_same(graph(**given), wanted_of(model, given))
    assert graph.obstacle == ""


@pytest.mark.slow
def test_more_batch_sizes_than_there_is_room_for(device):
    model = made("towers", device)
    graph = Graph(model, batch("towers", 2, device=device))
    for size in range(1, 12):
        given = batch("towers", size, size, device)
        assert_same(graph(**given), wanted_of(model, given))
    assert [has_graph(graph, batch("towers", size)) for size in range(1, 12)] == [True] * 8 + [False] * 3
    given = batch("towers", 12, 3, device)
    for _ in range(70):
        result = graph(**given)
    assert_same(result, wanted_of(model, given))
    assert has_graph(graph, given)  # another one had rested long enough


def test_a_model_in_training_is_evaluated_and_stays_in_training(device):
    model = made("towers", device).train()
    graph, given = Graph(model, batch("towers", 2, device=device)), batch("towers", 3, 1, device)
    result = graph(**given)
    assert all(module.training for module in model.modules())
    assert_same(result, wanted_of(model.eval(), given))
    assert not any(tensor.requires_grad for tensor in tensors_of(result))


def test_weights_may_change(device):
    model, given = made("towers", device), batch("towers", 3, 1, device)
    graph = Graph(model, batch("towers", 2, device=device))
    before = graph(**given)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert_same(graph(**given), wanted_of(model, given))  # in place: the same graph
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() * 1.1
    after = graph(**given)
    assert_same(after, wanted_of(model, given))  # elsewhere: captured anew
    assert not torch.equal(before["both"], after["both"])


def test_outputs_are_the_caller_s_or_the_graph_s_own(device):
    model, example = made("towers", device), batch("towers", 2, device=device)
    given = [batch("towers", 2, seed, device) for seed in range(2)]
    wanted = [wanted_of(model, one) for one in given]
    graph = Graph(model, example)
    kept = [graph(**one) for one in given]
    for a, b in zip(kept, wanted, strict=True):
        assert_same(a, b)
    graph = Graph(model, example, clone=False)
    first = graph(**given[0])["both"].data_ptr()
    second = graph(**given[1])
    assert second["both"].data_ptr() == first
    assert_same(second, wanted[1])


def test_under_autocast_and_in_inference_mode(device):
    torch.manual_seed(0)
    model = Towers().eval().to(device)
    given = {key: value.float() for key, value in batch("towers", 3, 1, device).items()}
    graph = Graph(model, given)
    with torch.inference_mode():
        graph(**given)
    assert_same(graph(**given), wanted_of(model, given), at_most=1e-5)
    with torch.autocast(device, dtype=torch.bfloat16):
        cast = graph(**given)
        assert_same(cast, wanted_of(model, given), at_most=2e-2)
    assert cast["both"].dtype == torch.bfloat16
    assert_same(graph(**given), wanted_of(model, given), at_most=1e-5)


def test_threads_take_turns(device):
    model = made("towers", device)
    graph = Graph(model, batch("towers", 2, device=device))
    faults = []

    def work(seed):
        try:
            for step in range(5):
                given = batch("towers", 1 + step % 2, seed * 10 + step, device)
                assert_same(graph(**given), wanted_of(model, given))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


# ---- where there is no graph


def test_on_a_cpu_the_model_runs_as_it_is():
    model, given = made("towers"), batch("towers", 3)
    graph = Graph(model, given)
    assert_same(graph(**given), wanted_of(model, given))
    assert "CUDA graphs need a GPU" in graph.obstacle
    assert graph._program is None  # nothing was captured for that


def test_hooks_are_not_forgotten(device):
    model, given = made("towers", device), batch("towers", 2, device=device)
    calls = []
    model.first.register_forward_hook(lambda *_: calls.append(1))
    with pytest.warns(UserWarning, match="no CUDA graph: .*hook"):
        graph = Graph(model, given)
    assert_same(graph(**given), wanted_of(model, given))
    assert len(calls) == 2


class Reads(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


def test_a_model_that_reads_its_data_runs_as_it_is(device):
    with pytest.warns(UserWarning, match="no CUDA graph: torch.export cannot capture it"):
        graph = Graph(Reads().to(device), torch.ones(2, 2, device=device))
    assert graph(torch.ones(2, 2, device=device)).sum() == 8
    assert graph(-torch.ones(2, 2, device=device)).sum() == -4
    assert "runs without a graph: torch.export cannot capture it" in graph.explain()


class Fails(CpuGraphs):
    def capturing(self, generators):
        raise RuntimeError("not while a stream is capturing\nand more")


def test_a_capture_that_fails_is_said_once(monkeypatch):
    monkeypatch.setattr(graph_module, "has_graphs", lambda device: True)
    monkeypatch.setattr(graph_module, "CudaGraphs", Fails)
    model, given = made("counting"), batch("counting", 2)
    graph = Graph(model, given)
    with pytest.warns(UserWarning, match="no CUDA graph: RuntimeError: not while a stream is capturing. The model"):
        graph(**given)
    graph(**given)
    assert model.count == 2
    assert graph.obstacle == "RuntimeError: not while a stream is capturing"
    assert " runs without a graph: RuntimeError" in graph.explain()


def test_a_call_that_is_wrong_is_no_reason_to_give_up(device):
    model = bert().double().eval().to(device)
    graph, given = Graph(model, batch("bert", 2, device=device)), batch("bert", 2, 1, device)
    if device == "cpu":  # on a GPU it would end the process's work there
        with pytest.raises(IndexError):
            graph(torch.full((2, 6), 99))
    with pytest.warns(UserWarning, match="not like the example"), pytest.raises(RuntimeError):
        graph(torch.ones(2, 6, device=device))  # words must be whole numbers
    assert_same(graph(**given), wanted_of(model, given))
    assert graph.obstacle == ""


def test_what_it_is_called(device):
    graph = Graph(made("towers", device), batch("towers", 2, device=device))
    assert repr(graph) == f"Graph of Towers on {graph.device}"
    assert graph.explain().startswith(f"Towers on {graph.device}: 2 branches\n")
    compiled = Graph(made("towers", device), batch("towers", 2, device=device), compile=True)
    assert compiled.explain().startswith(f"Towers on {graph.device}, compiled: 2 branches\n")


def test_explain():
    text = Graph(made("clip"), batch("clip", 2)).explain()
    first, second, *rows = text.splitlines()
    assert first == "CLIPModel on cpu runs without a graph: CUDA graphs need a GPU, and the model is on cpu"
    assert second == "as a graph: 2 branches"
    shares = [int(line.split()[-1].removesuffix("%")) for line in rows[1:3]]
    assert sum(shares) == pytest.approx(100, abs=1)
    assert "waits between them: 1" in text
    assert "computed once" in text
    assert "1 branch\n" in Graph(made("chain"), batch("chain", 2)["input"]).explain()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branches": 0}, "branches: 0 is neither 'auto' nor a number from 1 to 8"),
        ({"branches": True}, "branches: True"),
        ({"branches": "two"}, "branches: 'two'"),
        ({"device": "meta"}, "the meta device cannot run anything"),
        ({"device": "cuda:99"}, "cannot be used"),
        ({"model": len}, "model: expected an nn.Module"),
        ({"example": 3}, "example: pass a tensor"),
        (
            {"example": (torch.ones(2), torch.ones(2), torch.ones(2))},
            "example: Towers cannot be called with it: too many",
        ),
        ({"example": torch.ones(2)}, "example: Towers cannot be called with it: missing a required argument: 'y'"),
    ],
)
def test_wrong_arguments(options, message):
    arguments = {"model": made("towers"), "example": batch("towers", 2)} | options
    with pytest.raises(UsageError, match=message):
        Graph(arguments.pop("model"), arguments.pop("example"), **arguments)


# ---- on a GPU alone


@torch.library.custom_op("penstock_tests::slow", mutates_args=())
def slow(x: torch.Tensor, cycles: int) -> torch.Tensor:
    """Keep the stream busy, and the host not at all."""
    if x.is_cuda:
        torch.cuda._sleep(cycles)
    return x.clone()


@slow.register_fake
def _(x, cycles):
    return torch.empty_like(x)


class Late(nn.Module):
    """One branch sleeps before it reads what the other made, which goes on meanwhile and would take its memory."""

    def __init__(self, width, sleeps):
        super().__init__()
        self.first, self.beside, self.on = tower(6, width), tower(6, width), tower(9, width)
        self.sleeps = sleeps

    def forward(self, x, y):
        shared = self.first(y)
        if "beside" in self.sleeps:
            x = torch.ops.penstock_tests.slow(x, 3_000_000)
        beside = self.beside(x + shared)
        if "first" in self.sleeps:
            shared = torch.ops.penstock_tests.slow(shared, 3_000_000)
        on = self.on(shared)
        if "end" in self.sleeps:
            beside = torch.ops.penstock_tests.slow(beside, 3_000_000)
        return on * 2 + beside, on, beside


@pytest.mark.sample(2)
@pytest.mark.parametrize("sleeps", [(), ("beside",), ("first",), ("end",), ("beside", "end")])
def test_branches_that_are_late(sleeps, device):
    """A missing wait, or memory that is used again too early, shows as a wrong number: data is fresh in every call."""
    torch.manual_seed(0)
    model = Late(64, sleeps).double().eval().to(device)
    given = [torch.randn(16, 64, dtype=torch.float64, device=device) for _ in range(2)]
    graph = Graph(model, tuple(given))
    assert graph._program.branches.num_streams == 2
    for _ in range(6):
        for size in (16, 3):
            given = [torch.randn(size, 64, dtype=torch.float64, device=device) for _ in range(2)]
            with torch.no_grad():
                wanted = model(*given)
            assert_same(graph(*given), wanted)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu:
    @pytest.mark.parametrize("name", ["towers", "clip", "conv", "vit", "bert"])
    def test_in_bfloat16(self, name):
        torch.manual_seed(0)
        model = MODELS[name][0]().bfloat16().eval().cuda()

        def of(size, seed):
            given = batch(name, size, seed, "cuda")
            return {k: v.bfloat16() if v.is_floating_point() else v for k, v in given.items()}

        graph = Graph(model, of(2, 0))
        for seed in range(3):
            for size in (1, 8, 32):
                given = of(size, seed)
                assert_same(graph(**given), wanted_of(model, given), at_most=2e-2)
        assert graph.obstacle == ""

    def test_the_host_waits_for_nothing(self):
        model = made("clip", "cuda")
        graph = Graph(model, batch("clip", 2, device="cuda"))
        given = [batch("clip", 2, seed, "cuda") for seed in range(4)]
        host = {key: value.pin_memory() for key, value in batch("clip", 2, 9).items()}
        wanted = [wanted_of(model, one) for one in given]
        graph(**given[0])
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it does not see everything
            torch.cuda.set_sync_debug_mode("error")
            try:
                found = [graph(**one) for one in given]
                graph(**host)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for a, b in zip(found, wanted, strict=True):
            assert_same(a, b)

    def test_on_streams_of_the_caller_s(self):
        """Calls on several streams come one after the other, and each behind what made its data."""
        model = made("towers", "cuda")
        graph = Graph(model, batch("towers", 4, device="cuda"))
        streams = [torch.cuda.Stream() for _ in range(3)]
        host = [batch("towers", 4, seed) for seed in range(9)]
        found = []
        for seed, given in enumerate(host):
            with torch.cuda.stream(streams[seed % 3]):
                moved = {key: value.cuda() for key, value in given.items()}
                torch.cuda._sleep(500_000)
                late = {key: value * 1 for key, value in moved.items()}
                found.append((moved, graph(**late)))
        torch.cuda.synchronize()
        for given, result in found:
            wanted = wanted_of(model, given)
            assert_same({"both": result["both"]}, {"both": wanted["both"]})

    def test_data_from_the_host_goes_to_the_model(self):
        model, given = made("clip", "cuda"), batch("clip", 3, 1)
        graph = Graph(model, batch("clip", 2))
        wanted = wanted_of(model, {key: value.cuda() for key, value in given.items()})
        assert_same(graph(**given), wanted)

    def test_graphs_of_several_batch_sizes_share_their_memory(self):
        torch.manual_seed(0)
        model = Late(1024, ()).eval().cuda()
        graph = Graph(model, (torch.randn(64, 1024, device="cuda"),) * 2)
        used = []
        for size in (2048, 1024, 512, 256):
            graph(*(torch.randn(size, 1024, device="cuda") for _ in range(2)))
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_reserved())
        assert used[-1] < 1.5 * used[0]

    def test_random_numbers_go_on(self):
        """A model that draws in evaluation too draws anew in each call."""

        class Draws(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = tower(4)

            def forward(self, x):
                return self.layers(x) + torch.rand_like(x)

        graph = Graph(Draws().cuda(), torch.zeros(2, WIDTH, device="cuda"))
        x = torch.zeros(2, WIDTH, device="cuda")
        drawn = [graph(x) for _ in range(3)]
        assert graph.obstacle == ""
        assert not torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[1], drawn[2])


@pytest.mark.filterwarnings("ignore:.*loss_type")
@pytest.mark.parametrize("name", ["clip", "albert"])
def test_models_of_transformers_are_captured_at_batch_1(name, device):
    """A tensor with a dimension of 1 was taken for one that the batch size is written into, and no graph was made."""
    pytest.importorskip("transformers")
    from penstock.model.small_models.named_models import load

    model, example = load(name, batch_size=1)
    example.pop("labels", None)
    example.pop("return_loss", None)
    model, example = model.to(device).eval(), {key: value.to(device) for key, value in example.items()}
    graph = Graph(model, example)
    assert not graph.obstacle
    for size in (1, 1, 3):
        batch = {key: value.repeat(size, *[1] * (value.dim() - 1)) for key, value in example.items()}
        with torch.no_grad():
            wanted = model(**batch)
        made = graph(**batch)
        for key, value in wanted.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(made[key], value, rtol=1e-4, atol=1e-5)
    assert CpuGraphs.num_replays or device == "cuda"


def test_a_model_that_runs_as_it_is_is_called_and_nothing_more(monkeypatch):
    """Its modules were gone through at every call, which took longer than a small model does."""
    model = Towers().eval()
    given = (torch.randn(2, WIDTH), torch.randn(2, WIDTH))
    graph = Graph(model, given)  # on a CPU
    monkeypatch.setattr(nn.Module, "modules", lambda self: pytest.fail("went through the modules"))
    monkeypatch.setattr(graph_module, "flatten", lambda *_: pytest.fail("took the arguments apart"))
    made = graph(*given)
    torch.testing.assert_close(made["both"], model(*given)["both"].detach())
    assert not made["both"].requires_grad
