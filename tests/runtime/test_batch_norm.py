"""Running statistics of batch norm: after a step of micro-batches as after one whole batch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import penstock
from penstock.model.capture.capture import capture
from penstock.runtime.batch_norm import DeferredStatistics

WIDTH = 3
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def data(size=9, dims=1, dtype=torch.float64, seed=1):
    """Return samples whose means and variances drift, so that those of micro-batches differ."""
    shape = (size, WIDTH, 4, 3, 2)[: 1 + max(1, dims + (dims > 1))]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    drift = torch.arange(1.0, size + 1).view(-1, *[1] * (len(shape) - 1))
    return (values * drift + 3 * drift).to(dtype)


class Net(nn.Module):
    """The norm comes first, so that its input is the same whole or in pieces; another comes later."""

    def __init__(self, dims=1, dtype=torch.float64, **kwargs):
        super().__init__()
        torch.manual_seed(0)
        self.first = NORMS[dims](WIDTH, **kwargs)
        self.mixing = nn.Linear(WIDTH, WIDTH)
        self.second = nn.BatchNorm1d(WIDTH, **kwargs)
        self.to(dtype)

    def forward(self, x):
        x = self.first(x)
        return self.second(torch.tanh(self.mixing(x.flatten(2).mean(2) if x.dim() > 2 else x)))


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def stages_of(model, x, path):
    captured = capture(model, x, path=path, training=True)
    return captured.split([c for c in range(1, len(captured.graph.nodes)) if c not in captured.graph.uncuttable])


def run_step(chain, statistics, pieces, *, recomputed=()):
    """Run all micro-batches, some of them twice, and commit."""
    for mb, piece in enumerate(pieces):
        for again in range(1 + (mb in recomputed)):
            call = chain.read(piece)

            def run(stage, values, again=again, call=call):
                own = statistics[stage.index]
                own.collecting = not again
                before = {name: b.clone() for name, b in stage.named_buffers() if "running" in name}
                with own:
                    made = stage(*values, batch_size=call.batch_size)
                assert all(torch.equal(b, before[n]) for n, b in stage.named_buffers() if "running" in n)
                return made

            chain.run(call, run)
    for own in statistics:
        own.collecting = True
        own.commit()


PATHS = ["direct", "export", "replay"]


def made(path, **kwargs):
    """Return a model that a path can take."""
    net = Net(**kwargs)
    if path == "direct":
        return nn.Sequential(net.first, nn.Flatten(), nn.LazyLinear(WIDTH, dtype=torch.float64), net.second)
    return net


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(3, 3, 3), (2, 5, 2), (9,)])
def test_running_statistics_are_those_of_the_whole_batch(path, dims, sizes):
    model = made(path, dims=dims)
    model(data(dims=dims))  # lazy modules, and statistics that are not the first
    plain = copy.deepcopy(model)
    chain = stages_of(model, data(dims=dims), path)
    statistics = [DeferredStatistics(stage) for stage in chain.stages]
    for step in range(3):
        x = data(dims=dims, seed=step)
        plain(x)
        run_step(chain, statistics, x.split(sizes), recomputed=(0,))
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    found, expected = buffers(model), buffers(plain)
    for name in found:
        if name.startswith(norms[0]) or len(sizes) == 1:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-10)
    assert found[f"{norms[1]}.num_batches_tracked"] == 4


@pytest.mark.parametrize("path", ["direct", "replay"])
@pytest.mark.parametrize("kwargs", [{"momentum": None}, {"momentum": 1.0}, {"momentum": 0.3, "affine": False}])
def test_momentum(path, kwargs):
    model = made(path, **kwargs)
    model(data())
    plain = copy.deepcopy(model)
    chain = stages_of(model, data(), path)
    statistics = [DeferredStatistics(stage) for stage in chain.stages]
    for step in range(4):
        x = data(seed=step)
        plain(x)
        run_step(chain, statistics, x.split((2, 5, 2)), recomputed=(0, 1))
    found, expected = buffers(model), buffers(plain)
    for name in found:
        if name.startswith(("first", "0.")):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-10)
    assert all(count == 5 for name, count in found.items() if "tracked" in name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_and_gradients_are_those_of_plain_micro_batches(dtype):
    model, plain = Net(dims=2, dtype=dtype), Net(dims=2, dtype=dtype)
    statistics = DeferredStatistics(model)
    for piece in data(dims=2, dtype=dtype).split((2, 5, 2)):
        with statistics:
            y = model(piece)
        y.square().sum().backward()
        expected = plain(piece)
        expected.square().sum().backward()
        assert torch.equal(y, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_float32_is_near_the_whole_batch():
    norm, plain = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH)
    statistics, x = DeferredStatistics(norm), data(dims=2, dtype=torch.float32) + 100
    for piece in x.split(2):
        with statistics:
            norm(piece)
    statistics.commit()
    plain(x)
    torch.testing.assert_close(norm.running_mean, plain.running_mean)
    torch.testing.assert_close(norm.running_var, plain.running_var)


class Twice(nn.Module):
    """One norm, called twice in a forward."""

    def __init__(self, **kwargs):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64, **kwargs)

    def forward(self, x):
        return self.norm(x) + self.norm(2 * x - 1)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_norm_that_is_called_twice_is_updated_twice(momentum):
    model, plain = Twice(momentum=momentum), Twice(momentum=momentum)
    statistics = DeferredStatistics(model)
    for step in range(2):
        for piece in data(seed=step).split((4, 5)):
            with statistics:
                model(piece)
        statistics.commit()
        plain(data(seed=step))
    for name, found in buffers(model).items():
        torch.testing.assert_close(found, plain.get_buffer(name), rtol=1e-10, atol=1e-10)


def test_norms_in_evaluation_and_instance_norm_stay_plain():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.BatchNorm1d(WIDTH)
            self.untracked = nn.BatchNorm1d(WIDTH, track_running_stats=False)
            self.instance = nn.InstanceNorm1d(WIDTH, track_running_stats=True)

        def forward(self, x):
            return self.instance(self.untracked(self.frozen(x)))

    model, plain = Mixed(), Mixed()
    x = data(dims=1, dtype=torch.float32)[:, :, None] * torch.linspace(0, 1, 4)
    for m in (model, plain):
        m.frozen.eval()
        m.frozen.running_mean += 1
    statistics = DeferredStatistics(model)
    for piece in x.split((4, 5)):
        with statistics:
            y = model(piece)
        assert torch.equal(y, plain(piece))
    statistics.commit()
    assert all(torch.equal(b, plain.get_buffer(n)) for n, b in model.named_buffers())
    model.eval()
    plain.eval()
    with statistics:
        assert torch.equal(model(x), plain(x))
    statistics.commit()
    assert all(torch.equal(b, plain.get_buffer(n)) for n, b in model.named_buffers())


def by_aten(x, mean, variance):
    return torch.ops.aten.batch_norm.default(x, None, None, mean, variance, True, 0.1, 1e-5, True)


def by_legit(x, mean, variance):
    return torch.ops.aten._native_batch_norm_legit.default(x, None, None, mean, variance, True, 0.1, 1e-5)[0]


def by_native(x, mean, variance):
    return torch.native_batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5)[0]


def by_update(x, mean, variance):
    return torch.ops.aten._batch_norm_with_update.default(x, None, None, mean, variance, 0.1, 1e-5)[0]


def by_functional(x, mean, variance):
    op = torch.ops.aten._native_batch_norm_legit_functional.default
    y, _, _, new_mean, new_variance = op(x, None, None, mean, variance, True, 0.1, 1e-5)
    mean.copy_(new_mean)
    variance.copy_(new_variance)
    return y


def by_torch(x, mean, variance):
    return torch.batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5, False)


def by_name(x, mean, variance):
    return F.batch_norm(running_var=variance, input=x, running_mean=mean, training=True)


@pytest.mark.parametrize("norm", [by_aten, by_legit, by_native, by_update, by_functional, by_torch, by_name])
def test_every_way_to_call_it(norm):
    def fresh():
        return torch.zeros(WIDTH, dtype=torch.float64), torch.ones(WIDTH, dtype=torch.float64)

    x, found, expected = data(), fresh(), fresh()
    plain = norm(x, *expected)
    assert expected[0].abs().max() > 0
    statistics = DeferredStatistics(nn.Module())
    assert not statistics.has_any
    for piece in x.split((4, 5)):
        untouched = fresh()
        with statistics:
            y = norm(piece, *found)
        assert torch.equal(y, norm(piece, *untouched))
        assert torch.equal(found[1], fresh()[1])
    statistics.commit()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert plain.shape == x.shape


def test_a_value_alone_has_a_mean_and_no_variance_of_its_own():
    x, mean, variance = data(), torch.zeros(WIDTH).double(), torch.ones(WIDTH).double()
    expected = mean.clone(), variance.clone()
    by_aten(x, *expected)
    statistics = DeferredStatistics(nn.Module())
    for piece in x.split(1):
        with statistics:
            by_aten(piece, mean, variance)
    statistics.commit()
    torch.testing.assert_close((mean, variance), expected, rtol=1e-10, atol=1e-10)


def test_buffers_that_are_given_other_tensors_within_a_step():
    """A recompute puts the buffers of its forward back, and after it copies of those that were there."""
    model, plain = nn.BatchNorm1d(WIDTH).double(), nn.BatchNorm1d(WIDTH).double()
    statistics = DeferredStatistics(model)
    for piece in data().split(3):
        with statistics:
            model(piece)
        for name, buffer in list(model.named_buffers()):
            setattr(model, name, buffer.clone())
    statistics.commit()
    plain(data())
    for name, found in buffers(model).items():
        torch.testing.assert_close(found, plain.get_buffer(name), rtol=1e-10, atol=1e-10)


class Replacing(nn.BatchNorm1d):
    """Counts by giving its counter another tensor, as older norms do."""

    def forward(self, x):
        self.num_batches_tracked = self.num_batches_tracked + 1
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1)


@pytest.mark.parametrize("path", PATHS)
def test_counters_that_are_replaced(path):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Replacing(WIDTH), nn.Tanh()).double()
    chain = stages_of(model, data(), path)
    statistics = [DeferredStatistics(stage) for stage in chain.stages]
    for step in range(2):
        run_step(chain, statistics, data().split(3), recomputed=(1,))
        assert model[1].num_batches_tracked == step + 1


def test_lanes_that_share_a_stage_commit_together():
    model, plain = Twice(), Twice()
    one, other = DeferredStatistics(model), DeferredStatistics(model)
    for lane, piece in zip((one, other, one), data().split((2, 5, 2)), strict=True):
        with lane:
            model(piece)
    one.commit(other)
    plain(data())
    for name, found in buffers(model).items():
        torch.testing.assert_close(found, plain.get_buffer(name), rtol=1e-10, atol=1e-10)


def test_a_norm_that_not_every_micro_batch_uses_counts_once():
    model = nn.ModuleList([nn.BatchNorm1d(WIDTH).double(), nn.BatchNorm1d(WIDTH).double()])
    plain = copy.deepcopy(model)
    statistics, pieces = DeferredStatistics(model), data().split(3)
    for mb, piece in enumerate(pieces):
        with statistics:
            model[mb % 2](piece)
    statistics.commit()
    plain[0](torch.cat([pieces[0], pieces[2]]))
    plain[1](pieces[1])
    for name, found in buffers(model).items():
        torch.testing.assert_close(found, plain.get_buffer(name), rtol=1e-10, atol=1e-10)


def test_a_step_that_is_given_up_leaves_no_trace():
    model = Twice()
    before, statistics = buffers(model), DeferredStatistics(model)
    with statistics:
        model(data())
    with pytest.raises(ValueError, match="more than 1 value"), statistics:
        model(data(1))
    statistics.reset()
    statistics.commit()
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    with statistics:
        model(data())
    statistics.commit()
    assert model.norm.num_batches_tracked == 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_cuda(dims, dtype):
    norm, x = NORMS[dims](WIDTH, dtype=dtype, device="cuda"), data(dims=dims, dtype=dtype).cuda()
    plain, statistics = copy.deepcopy(norm), DeferredStatistics(norm)
    for piece in x.split((2, 5, 2)):
        with statistics:
            y = norm(piece)
        assert torch.equal(y, copy.deepcopy(norm)(piece))
    statistics.commit()
    plain(x)
    for name, found in buffers(norm).items():
        torch.testing.assert_close(found, plain.get_buffer(name))


class Replaced(nn.Module):
    """Counts its calls in a buffer that it replaces, and in one that it changes in place."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls = self.calls + 1
        return torch.tanh(self.norm(self.linear(x)))


@pytest.mark.sample(3)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("schedule", ["dualpipe", "chimera", "1f1b"])
def test_every_micro_batch_counts_once_where_two_lanes_share_a_stage(path, schedule):
    """A recompute put copies of the buffers back, and what the other lane had counted meanwhile was lost."""
    x = data(24)
    for keep in ("hold", "recompute", "except_last", "offload"):
        torch.manual_seed(0)
        model = nn.Sequential(*(Replaced() for _ in range(4))).double()
        with penstock.Pipeline(
            model, example=x, loss=F.mse_loss, lanes=4, micro_batches=12, schedule=schedule, keep=keep,
            capture_path=path, cuts=["1", "2", "3"],
        ) as pipe:  # fmt: skip
            before = [int(layer.calls) for layer in model]
            for _ in range(2):
                pipe.step(x, x)
            counts = {n: int(v) for n, v in pipe.state_dict().items() if n.endswith("num_batches_tracked")}
            assert set(counts.values()) == {24}, (keep, counts)
            assert [int(layer.calls) - b for layer, b in zip(model, before, strict=True)] == [24] * 4, keep
            assert all(int(layer.norm.num_batches_tracked) == 24 for layer in model), keep
