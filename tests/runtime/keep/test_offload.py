"""What autograd saves, in host memory for a while: the same gradients, the same errors, and nothing left behind."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from penstock.model.capture.capture import capture
from penstock.model.profiling.analytic import analytic
from penstock.model.small_models.named_models import load
from penstock.randomness.draws import SeededMode
from penstock.runtime.batch_norm import DeferredStatistics
from penstock.runtime.keep import offload
from penstock.runtime.keep.offload import HostPool, Saved, StorageSet
from sanitizing import SANITIZED
from transparency import WIDTH, Layers, rows

CPU = torch.device("cpu")


def images():
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Views(Layers):
    """Saves views, slices, transposed and expanded tensors, one tensor twice, and its own outputs."""

    def forward(self, x):
        q, k, v = self.layers[0](x).repeat(1, 3).chunk(3, dim=1)
        scores = (q[:, ::2] @ k[:, 1::2].T).exp()
        mixed = scores @ v * v[:1].expand(len(x), -1)
        y = torch.tanh(self.layers[1](mixed.T.contiguous().T))
        return y[:, 1:].sigmoid() * y[:, :-1], y, (y * y).sum() * torch.complex(y, y).conj().abs()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        y = x**3
        ctx.save_for_backward(x, weight, y, x.new_tensor([2.0]))
        return y * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, y, _ = ctx.saved_tensors
        return 3 * x**2 * weight * grad, (y * grad).sum(0)


class Custom(Layers):
    def forward(self, x):
        return Cube.apply(torch.relu(self.layers[0](x)), self.layers[1].bias)


class InPlace(Layers):
    def forward(self, x):
        y = torch.sigmoid(self.layers[0](x)).mul(2)
        y.relu_()
        y = y * 1
        y[:, 0] = 1.0
        return torch.tanh_(self.layers[1](y))


class Checkpointed(Layers):
    def forward(self, x):
        x = checkpoint(lambda x: torch.tanh(self.layers[0](x)), x, use_reentrant=False)
        return checkpoint(lambda x: torch.tanh(self.layers[1](x)), x * 2, use_reentrant=False)


def convs():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)
    ).double()


def gpt2():
    model, example = load("gpt2", batch_size=2)
    return model.double(), example


MODELS = {
    "layers": lambda: (Layers(), rows()),
    "views": lambda: (Views(), rows()),
    "convolutions": lambda: (convs(), images()),
    "custom": lambda: (Custom(), rows()),
    "in place": lambda: (InPlace(), rows()),
    "checkpoint": lambda: (Checkpointed(), rows()),
    "lstm": lambda: (nn.LSTM(WIDTH, WIDTH, num_layers=2).double(), rows(6).view(3, 2, WIDTH)),
    "encoder": lambda: (nn.TransformerEncoderLayer(WIDTH, 2, 16).double(), rows(6).view(3, 2, WIDTH)),
    "gpt2": gpt2,
}


def called(model, example):
    torch.manual_seed(3)
    result = model(**example) if isinstance(example, dict) else model(example)
    if hasattr(result, "logits"):
        return [result.logits]
    return [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, torch.Tensor)]


def total(outputs):
    return sum((output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum() for output in outputs)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def made(name):
    torch.manual_seed(0)
    return MODELS[name]()


def with_gradient(example):
    return example if isinstance(example, dict) else example.clone().requires_grad_()


HOW = {
    "held": lambda saved: None,
    "offloaded": lambda saved: saved.offload(),
    "fetched": lambda saved: (saved.offload(), saved.fetch()),
    "twice": lambda saved: (saved.offload(), saved.fetch(), saved.offload(), saved.fetch()),
    "cleared": lambda saved: (saved.offload(), saved.clear()),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_plain_ones(name, how):
    model, example = made(name)
    plain_input = with_gradient(example)
    total(called(model, plain_input)).backward()
    expected = gradients(model)
    assert expected
    model.zero_grad(set_to_none=True)
    own_input, pool = with_gradient(example), HostPool()
    saved = Saved(pool, keep_storages=StorageSet([*model.parameters(), *model.buffers()]))
    with saved.collecting():
        outputs = called(model, own_input)
    before = saved.num_bytes(on="device")
    assert before > 0
    HOW[how](saved)
    if how == "offloaded":
        assert saved.num_bytes(on="device") <= (before // 4 if name == "views" else 0)  # conjugates stay
        assert 0 < saved.num_bytes(on="host") <= before
    total(outputs).backward()
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in expected)
    if isinstance(own_input, torch.Tensor):
        assert torch.equal(own_input.grad, plain_input.grad)
    assert saved.num_bytes(on="device") == saved.num_bytes(on="host") == 0


def layout(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.T,
        lambda x: x[1:, ::2],
        lambda x: x[2:3].expand(4, -1),
        lambda x: x.unfold(1, 3, 2),
        lambda x: x.flatten()[3],
        lambda x: x.half()[1:],
        lambda x: x.bool(),
        lambda x: x.view(torch.int32)[:, 3:],
    ],
)
def test_views_come_back_as_they_were(view):
    x = torch.randn(6, 8)
    kept = view(x)
    seen = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            ctx.save_for_backward(kept, x)
            return y * 2

        @staticmethod
        def backward(ctx, grad):
            seen.extend(ctx.saved_tensors)
            return grad

    expected, saved = kept.clone(), Saved()
    with saved.collecting():
        y = Keep.apply(torch.ones((), requires_grad=True))
    saved.offload()
    saved.fetch()
    y.backward()
    assert layout(seen[0]) == layout(kept)
    assert torch.equal(seen[0], expected)
    assert torch.equal(seen[1], x)
    if kept.untyped_storage()._cdata == x.untyped_storage()._cdata:  # as they shared it before
        assert seen[0].untyped_storage()._cdata == seen[1].untyped_storage()._cdata


def test_only_what_is_needed_of_a_large_piece_of_memory_moves():
    """A micro-batch is a slice of the batch: its part goes to the host, not the whole."""
    batch, weight, saved = torch.randn(100, 8), torch.randn(8, requires_grad=True), Saved()
    with saved.collecting():
        y = batch[50:52] * weight
    saved.offload()
    assert saved.num_bytes(on="host") == 2 * 8 * 4
    y.sum().backward()
    torch.testing.assert_close(weight.grad, batch[50:52].sum(0))


def test_a_tensor_that_is_saved_twice_has_one_box():
    x, saved = torch.randn(10, requires_grad=True), Saved()
    with saved.collecting():
        y = x.exp()
        z = (y * y).sum() + (y * y.detach()).sum() + y.sin().sum()
    assert len(list(saved._live_boxes())) == 1 + 0 * z.numel()
    assert saved.num_bytes(on="device") == 40


def test_what_is_to_be_kept_stays():
    model, x = Layers().float(), rows().float().requires_grad_()
    saved = Saved(keep_storages=StorageSet([*model.parameters(), x]))
    with saved.collecting():
        y = model.layers[0](x[1:])
    assert saved.num_bytes(on="device") == 0
    saved.offload()
    assert saved.num_bytes(on="host") == 0
    y.sum().backward()
    assert x.grad is not None


@contextlib.contextmanager
def no_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.sample(4)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("is_backward", [True, False])
def test_nothing_is_left_behind(how, is_backward):
    model, x, pool = Views(), rows(), HostPool()
    keep = StorageSet([*model.parameters(), x])
    with no_collection():
        saved, boxes, storages = Saved(pool, keep_storages=keep), [], []
        pack = saved._pack

        def noting(tensor):
            box = pack(tensor)
            boxes.append(weakref.ref(box))
            if tensor not in keep:
                storages.append(StorageWeakRef(tensor.untyped_storage()))
            return box

        saved._pack = noting
        with saved.collecting():
            outputs = called(model, x)
        HOW[how](saved)
        loss = total(outputs)
        del outputs
        if is_backward:
            loss.backward()
        del loss
        assert len(boxes) > len(storages) > 5
        assert not [box() for box in boxes if box() is not None]
        assert all(storage.expired() for storage in storages)
        assert saved.num_bytes(on="device") == saved.num_bytes(on="host") == 0
        size = pool.num_bytes
        pool.clear()
        assert pool.num_bytes == 0
        assert (size > 0) == (how != "held")


def test_memory_is_freed_as_the_backward_goes():
    """As in a plain backward: not at its end."""
    x, saved, sizes = torch.randn(10, requires_grad=True), Saved(), []
    with saved.collecting():
        y = x.exp()
        z = y.exp()
    y.register_hook(lambda grad: sizes.append((saved.num_bytes(on="device"), saved.num_bytes(on="host"))))
    saved.offload()
    del y
    z.sum().backward()
    assert sizes == [(0, 40)]


@pytest.mark.parametrize("how", ["held", "offloaded", "fetched", "twice"])
def test_changes_in_place_are_noticed(how):
    def run(saved, *, late):
        x = torch.randn(5, requires_grad=True)
        with saved.collecting() if saved else contextlib.nullcontext():
            y = x.exp()
            z = y.sin()
        if saved and late:
            HOW[how](saved)
        y.add_(1)
        if saved and not late:
            HOW[how](saved)
        z.sum().backward()

    for late in (True, False):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(None, late=late)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*shape \[5\].*expected version 0"):
            run(Saved(), late=late)


def test_changes_of_what_is_kept_are_noticed():
    weight, x = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    saved = Saved(keep_storages=StorageSet([weight]))
    with saved.collecting():
        y = (x * weight).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_backward_may_run_twice():
    x, saved = torch.randn(5, requires_grad=True), Saved()
    with saved.collecting():
        y = x.exp().sum()
    saved.offload()
    y.backward(retain_graph=True)
    y.backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().exp())


def test_gradients_of_gradients():
    x, saved = torch.randn(5, requires_grad=True, dtype=torch.float64), Saved()
    with saved.collecting():
        y = (x.exp() * x).sum()
    saved.offload()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, (x.exp() * (x + 2)).detach())


def test_host_memory_is_used_again():
    model, pool = Views(), HostPool()
    keep = StorageSet(model.parameters())
    sizes = []
    for _ in range(4):
        saved = Saved(pool, keep_storages=keep)
        with saved.collecting():
            outputs = called(model, rows())
        saved.offload()
        saved.fetch()
        total(outputs).backward()
        sizes.append(pool.num_bytes)
    assert sizes[0] > 0
    assert sizes == sizes[:1] * 4


def test_the_pool_gives_what_fits_best():
    pool = HostPool()
    buffers = {size: pool.take(size, CPU) for size in (100, 1000, 10000)}
    for buffer in buffers.values():
        pool.give(buffer)
    assert pool.take(900, CPU) is buffers[1000]
    assert pool.take(800, CPU).numel() == 800  # not ten times as much
    assert pool.take(100, CPU) is buffers[100]
    assert pool.num_bytes == 11900


def test_tensors_that_are_no_plain_memory_stay():
    x, saved = torch.randn(4, 4, requires_grad=True), Saved()
    sparse = torch.eye(4).to_sparse()
    with saved.collecting():
        y = torch.sparse.mm(sparse, x).sum() + (x[:0] * 2 * x[:0]).sum()
    saved.offload()
    saved.fetch()
    y.backward()
    torch.testing.assert_close(x.grad, torch.ones(4, 4))


def test_boxes_are_told_apart_where_memory_has_been_used_again(monkeypatch):
    """What was offloaded left its address to others: these are not the same tensor."""
    x, saved, outputs = torch.randn(10, requires_grad=True, dtype=torch.float64), Saved(), []
    for step in range(3):
        with monkeypatch.context() as patch, saved.collecting():
            patch.setattr(offload, "storage_of", lambda tensor: 7)  # an allocator does so now and then
            outputs.append((x * (step + 1)).sin().sum())
        saved.offload()
        saved.fetch()
    for step, output in enumerate(outputs):
        (found,) = torch.autograd.grad(output, x)
        torch.testing.assert_close(found, ((x * (step + 1)).cos() * (step + 1)).detach())


def test_under_the_modes_of_a_forward():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Tanh()).double()
    results = []
    for saved in (None, Saved()):
        model.zero_grad(set_to_none=True)
        statistics = DeferredStatistics(model)
        with saved.collecting() if saved else contextlib.nullcontext(), statistics, SeededMode(3, "cpu"):
            y = model(rows())
        if saved:
            saved.offload()
        y.square().sum().backward()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def saved_bytes(model, example, keep):
    """Return the bytes that autograd saves in a forward; each piece of memory counts once."""
    saved = Saved(keep_storages=keep)
    with saved.collecting():
        result = called(model, example)
    found = saved.num_bytes(on="device")
    del result
    return found


def test_bytes_of_a_linear_layer():
    model = nn.Linear(4, 2)
    assert saved_bytes(model, torch.zeros(3, 4), StorageSet(model.parameters())) == 48


@pytest.mark.parametrize("name", ["layers", "convolutions"])
def test_bytes_are_those_of_the_profile(name):
    model, example = made(name)
    profile = analytic(capture(model, example))
    keep = StorageSet([*model.parameters(), *model.buffers()])
    found = saved_bytes(model, example, keep)
    assert found == profile.saved_bytes.sum()
    keep = StorageSet([*model.parameters(), *model.buffers(), example])
    assert saved_bytes(model, example, keep) == found - example.nbytes


@pytest.fixture
def whole_checkpoints():
    """Torch's sanitizer breaks off where a checkpoint leaves its forward early, which it does by an exception."""
    with set_checkpoint_early_stop(not SANITIZED):
        yield


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("whole_checkpoints")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MODELS)
def test_on_cuda(name, how):
    model, example = made(name)
    model = model.cuda()
    example = {k: v.cuda() for k, v in example.items()} if isinstance(example, dict) else example.cuda()
    total_of = lambda outputs: sum((o * o).sum().real for o in outputs)  # noqa: E731
    total_of(called(model, example)).backward()
    expected = gradients(model)
    pool, copying = HostPool(), torch.cuda.Stream()
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        saved = Saved(pool, keep_storages=StorageSet([*model.parameters(), *model.buffers()]))
        with saved.collecting():
            outputs = called(model, example)
        with torch.cuda.stream(copying):
            HOW[how](saved)
        total_of(outputs).backward()
        del outputs
        found = gradients(model)
        for n in expected:
            torch.testing.assert_close(found[n], expected[n], rtol=1e-9, atol=1e-9)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_leaves_the_gpu_and_streams_wait_for_each_other():
    """Copies on a stream of their own, while the memory that they read and write is given to others."""
    x = torch.randn(64, 1024, 1024, device="cuda", requires_grad=True)
    size, pool, copying = x.nbytes, HostPool(), torch.cuda.Stream()
    for step in range(5):
        saved = Saved(pool, keep_storages=StorageSet([x]))
        before = torch.cuda.memory_allocated()
        with saved.collecting():
            y = ((x * (step + 1)).sin().exp() * 2).sum()
        with torch.cuda.stream(copying):
            saved.offload()
        assert torch.cuda.memory_allocated() - before < size
        noise = [torch.full_like(x, torch.nan) for _ in range(3)]
        del noise
        with torch.cuda.stream(copying):
            saved.fetch()
        (found,) = torch.autograd.grad(y, x)
        del y
        z = x.detach() * (step + 1)
        torch.testing.assert_close(found, 2 * z.sin().exp() * z.cos() * (step + 1))
        del found, z
    assert pool.num_bytes <= 3 * size
