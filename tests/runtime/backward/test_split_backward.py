"""I and W together compute what a plain backward does; after I alone, the weights have no gradient yet."""

import copy
import gc
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from penstock.errors import UsageError
from penstock.runtime.backward.split_backward import DeferredWeightGradients
from penstock.runtime.backward.weight_queue import Pending

TOLERANCE = 1e-12


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def tensors_of(made):
    if isinstance(made, torch.Tensor):
        return [made]
    values = made.values() if isinstance(made, dict) else made
    return [tensor for value in values if value is not None for tensor in tensors_of(value)]


def leaves_of(inputs):
    return [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]


def backward(made):
    outputs = [tensor for tensor in tensors_of(made) if tensor.requires_grad]
    torch.manual_seed(1)
    torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])


def assert_same(found, expected, tolerance=TOLERANCE, what=""):
    assert (found is None) == (expected is None), what
    if expected is not None:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def compare(module, *inputs, tolerance=TOLERANCE, call=None, other=None):
    """Run a module deferred, and a copy plainly; return the names of the parameters without a gradient until W."""
    other = other or copy.deepcopy(module)
    call = call or (lambda module, inputs: module(*inputs))
    plain_inputs, inputs = leaves_of(inputs), leaves_of(inputs)
    torch.manual_seed(2)
    expected = call(other, plain_inputs)
    backward(expected)
    pending = Pending()
    torch.manual_seed(2)
    with DeferredWeightGradients(pending):
        made = call(module, inputs)
    assert len(pending) == 0
    for found, wanted in zip(tensors_of(made), tensors_of(expected), strict=True):
        assert found.requires_grad == wanted.requires_grad
        assert_same(found, wanted, 0)
    backward(made)
    for found, wanted in zip(inputs, plain_inputs, strict=True):
        if isinstance(wanted, torch.Tensor):
            assert_same(found.grad, wanted.grad, tolerance, "input")
    plain_of = dict(other.named_parameters())
    waiting = {n for n, p in module.named_parameters() if p.grad is None and plain_of[n].grad is not None}
    assert bool(waiting) <= bool(len(pending))
    pending.run()
    assert len(pending) == 0
    for name, parameter in module.named_parameters():
        assert_same(parameter.grad, plain_of[name].grad, tolerance, name)
    for (name, buffer), (_, wanted) in zip(module.named_buffers(), other.named_buffers(), strict=True):
        assert_same(buffer, wanted, 0, name)
    return waiting


class Apply(nn.Module):
    """A function of parameters w, v, b of these shapes, and inputs."""

    def __init__(self, function, *shapes, dtype=torch.float64):
        super().__init__()
        for name, shape in zip("wvb", shapes, strict=False):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=dtype)))
        self.function = function

    def forward(self, *inputs):
        return self.function(self, *inputs)


def randn(*shape, dtype=torch.float64, grad=True):
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


class Case(NamedTuple):
    build: object  # returns a module and inputs
    waiting: set  # parameters with no gradient until W


def layer(build, *shape, waiting=("weight",), **options):
    return Case(lambda: (build().double(), [randn(*shape, **options)]), set(waiting))


def function(call, *shapes, inputs, waiting=("w",), dtype=torch.float64):
    made = lambda: (Apply(call, *shapes, dtype=dtype), [randn(*shape, dtype=dtype) for shape in inputs])  # noqa: E731
    return Case(made, set(waiting))


MODULES = {
    "linear": layer(lambda: nn.Linear(3, 5), 4, 3),
    "linear of 3 dimensions": layer(lambda: nn.Linear(3, 5), 4, 2, 3),
    "linear of 1 dimension": layer(lambda: nn.Linear(3, 5), 3),
    "linear without bias": layer(lambda: nn.Linear(3, 5, bias=False), 4, 2, 3),
    "linear of data": layer(lambda: nn.Linear(3, 5), 4, 3, grad=False),
    "linear of data without bias": layer(lambda: nn.Linear(3, 5, bias=False), 4, 3, grad=False),
    "linear of no samples": layer(lambda: nn.Linear(3, 5), 0, 3),
    "linear of no samples, 3 dimensions": layer(lambda: nn.Linear(3, 5), 0, 2, 3),
    "linear of no features": function(lambda m, x: functional.linear(x, m.w), (0, 3), inputs=[(4, 3)]),
    "conv1d": layer(lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), 2, 4, 9),
    "conv2d": layer(lambda: nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), 2, 3, 7, 8),
    "conv2d of data": layer(lambda: nn.Conv2d(3, 4, 3, bias=False), 2, 3, 7, 8, grad=False),
    "conv2d by channel": layer(lambda: nn.Conv2d(4, 8, 3, groups=4), 2, 4, 6, 6),
    "conv2d of no samples": layer(lambda: nn.Conv2d(3, 4, 3), 0, 3, 6, 6),
    "conv2d same": layer(lambda: nn.Conv2d(3, 4, 3, padding="same", dilation=2), 2, 3, 6, 6),
    "conv2d valid": layer(lambda: nn.Conv2d(3, 4, 3, padding="valid"), 2, 3, 6, 6),
    "conv2d same, even kernel": layer(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, (1, 2), padding="same")), 2, 3, 6, 6,
        waiting=["0.weight"],
    ),
    "conv2d reflect": layer(lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), 2, 3, 6, 6),
    "conv2d of one sample without batch": layer(
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Conv2d(3, 4, 3)), 3, 6, 6, waiting=["0.weight"]
    ),
    "conv3d": layer(lambda: nn.Conv3d(2, 3, 2, stride=2), 2, 2, 5, 4, 4),
    "conv_transpose1d": layer(lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1, groups=2), 2, 4, 5),
    "conv_transpose2d": layer(lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, dilation=2), 2, 3, 5, 4),
    "conv_transpose3d": layer(lambda: nn.ConvTranspose3d(2, 3, 2), 2, 2, 3, 3, 3),
    "weight norm": layer(
        lambda: parametrizations.weight_norm(nn.Linear(3, 5)), 4, 3,
        waiting=["parametrizations.weight.original0", "parametrizations.weight.original1"],
    ),
    "weight norm of a conv": layer(
        lambda: parametrizations.weight_norm(nn.Conv1d(3, 5, 3), dim=2), 2, 3, 6,
        waiting=["parametrizations.weight.original0", "parametrizations.weight.original1"],
    ),
    "spectral norm": layer(
        lambda: parametrizations.spectral_norm(nn.Linear(3, 5)), 4, 3, waiting=["parametrizations.weight.original"]
    ),
    "in place after": layer(lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)), 4, 2, 3,
                            waiting=["0.weight", "2.weight"]),
    "conv, norm, in place after": layer(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)), 2, 3, 6, 6,
        waiting=["0.weight"],
    ),
    "lstm": layer(lambda: nn.Sequential(nn.Linear(3, 4), Only(nn.LSTM(4, 4))), 5, 2, 3, waiting=["0.weight"]),
    "attention": layer(
        lambda: SelfAttention(nn.MultiheadAttention(8, 2, dropout=0.1)), 5, 2, 8,
        waiting=["inner.in_proj_weight", "inner.out_proj.weight"],
    ),
    "attention without weights": layer(
        lambda: SelfAttention(nn.MultiheadAttention(8, 2, batch_first=True), need_weights=False), 2, 5, 8,
        waiting=["inner.in_proj_weight", "inner.out_proj.weight"],
    ),
    "encoder layer": layer(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, 5, 8,
        waiting=["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"],
    ),
    "matmul": function(lambda m, x: x @ m.w, (3, 5), inputs=[(4, 3)]),
    "matmul, 4 dimensions": function(lambda m, x: x @ m.w, (3, 5), inputs=[(2, 1, 4, 3)]),
    "matmul from the left": function(lambda m, x: m.w @ x, (5, 3), inputs=[(2, 6, 3, 4)]),
    "matmul by a transposed weight": function(lambda m, x: torch.matmul(x, m.w.t()), (5, 3), inputs=[(2, 4, 3)]),
    "matmul of a vector": function(lambda m, x: x @ m.w, (3, 5), inputs=[(3,)]),
    "matmul on a vector": function(lambda m, x: m.w @ x, (5, 3), inputs=[(3,)]),
    "matmul by a vector": function(lambda m, x: x @ m.w, (3,), inputs=[(2, 4, 3)]),
    "matmul by a vector from the left": function(lambda m, x: m.w @ x, (4,), inputs=[(2, 4, 3)]),
    "matmul of vectors": function(lambda m, x: m.w @ x, (4,), inputs=[(4,)]),
    "matmul, batched": function(lambda m, x: x @ m.w, (2, 3, 5), inputs=[(2, 4, 3)]),
    "matmul, weights spread": function(lambda m, x: x @ m.w, (2, 1, 3, 5), inputs=[(6, 4, 3)]),
    "matmul, input spread": function(lambda m, x: x @ m.w, (6, 2, 3, 5), inputs=[(2, 4, 3)]),
    "matmul, input spread to 2 dimensions": function(lambda m, x: x @ m.w, (2, 3, 5), inputs=[(4, 3)]),
    "matmul from the left, spread": function(lambda m, x: m.w @ x, (2, 5, 3), inputs=[(3, 4)]),
    "matmul from the left, both spread": function(lambda m, x: m.w @ x, (2, 1, 5, 3), inputs=[(1, 6, 3, 4)]),
    "mm": function(lambda m, x: x.mm(m.w), (3, 5), inputs=[(4, 3)]),
    "mm from the left": function(lambda m, x: torch.mm(m.w, x), (5, 3), inputs=[(3, 4)]),
    "bmm": function(lambda m, x: torch.bmm(x, m.w), (2, 3, 5), inputs=[(2, 4, 3)]),
    "bmm from the left": function(lambda m, x: m.w.bmm(x), (2, 5, 3), inputs=[(2, 3, 4)]),
    "addmm": function(lambda m, x: torch.addmm(m.v, x, m.w), (3, 5), (5,), inputs=[(4, 3)]),
    "addmm, scaled": function(
        lambda m, x, y: torch.addmm(y, x, m.w, beta=0.5, alpha=3), (3, 5), inputs=[(4, 3), (4, 1)]
    ),
    "addmm from the left": function(lambda m, x, y: y.addmm(m.w, x, alpha=2), (5, 3), inputs=[(3, 4), (5, 4)]),
    "baddbmm": function(
        lambda m, x: torch.baddbmm(m.v, x, m.w, beta=2, alpha=0.5), (2, 3, 5), (1, 5), inputs=[(2, 4, 3)]
    ),
    "input not contiguous": function(
        lambda m, x: functional.linear(x.transpose(0, 2), m.w) @ m.v, (5, 4), (5, 2), inputs=[(4, 2, 3)],
        waiting=["w", "v"],
    ),
    "gradient not contiguous": function(
        lambda m, x: [functional.linear(x, m.w).transpose(0, 1).exp(), (x @ m.v).transpose(0, 2)], (5, 4), (4, 5),
        inputs=[(2, 3, 4)], waiting=["w", "v"],
    ),
    "einsum": function(lambda m, x: torch.einsum("bsd,dhk->bhsk", x, m.w), (3, 2, 5), inputs=[(4, 6, 3)]),
    "einsum from the left": function(lambda m, x: torch.einsum("kd,bd->bk", m.w, x), (5, 3), inputs=[(4, 3)]),
    "einsum of a list": function(lambda m, x: torch.einsum("bd, dk -> bk", [x, m.w]), (3, 5), inputs=[(4, 3)]),
    "einsum, batched": function(lambda m, x: torch.einsum("ebd,edk->ebk", x, m.w), (2, 3, 5), inputs=[(2, 4, 3)]),
    "einsum with dots": function(lambda m, x: torch.einsum("...d,dk->...k", x, m.w), (3, 5), inputs=[(4, 2, 3)]),
    "einsum by numbers": function(lambda m, x: torch.einsum(x, [0, 1], m.w, [1, 2], [0, 2]), (3, 5), inputs=[(4, 3)]),
    "einsum that spreads": function(
        lambda m, x: torch.einsum("bd,dk->bk", x, m.w), (1, 5), inputs=[(4, 3)], waiting=[]
    ),
    "einsum that sums one alone": function(
        lambda m, x: torch.einsum("bd,dk->b", x, m.w), (3, 5), inputs=[(4, 3)], waiting=[]
    ),
    "einsum without a sum": function(
        lambda m, x: torch.einsum("bd,d->bd", x, m.w), (3,), inputs=[(4, 3)], waiting=[]
    ),
    "einsum of a diagonal": function(
        lambda m, x: torch.einsum("bd,dd->bd", x, m.w), (3, 3), inputs=[(4, 3)], waiting=[]
    ),
    "einsum of three": function(
        lambda m, x: torch.einsum("bd,dk,kl->bl", x, m.w, m.v), (3, 5), (5, 2), inputs=[(4, 3)], waiting=[]
    ),
    "complex": function(
        lambda m, x: functional.linear(x @ m.w, m.v, m.b), (3, 4), (5, 4), (5,), inputs=[(2, 4, 3)],
        waiting=["w", "v"], dtype=torch.complex128,
    ),
    "complex einsum": function(
        lambda m, x: torch.einsum("bd,dk->bk", x, m.w), (3, 4), inputs=[(4, 3)], dtype=torch.complex128
    ),
    "complex from the left": function(lambda m, x: m.w @ x, (4, 3), inputs=[(2, 3, 5)], dtype=torch.complex128),
    "complex conv": function(
        lambda m, x: functional.conv1d(x, m.w), (3, 4, 2), inputs=[(2, 4, 5)], waiting=[], dtype=torch.complex128
    ),
    "one weight twice": function(lambda m, x: (x @ m.w).tanh() @ m.w, (3, 3), inputs=[(4, 3)]),
    "one weight, both ways": function(lambda m, x: functional.linear((x @ m.w).tanh(), m.w), (3, 5), inputs=[(4, 3)]),
    "one weight, put off and not": function(
        lambda m, x: x @ m.w * m.w.sum(), (3, 5), inputs=[(4, 3)], waiting=[]
    ),
    "scaled weight": function(lambda m, x: functional.linear(x, m.w * 0.5), (5, 3), inputs=[(4, 3)]),
    "one scaled weight twice": function(
        lambda m, x: twice(x, m.w * 0.5), (3, 3), inputs=[(4, 3)]
    ),
    "weights with a common part": function(
        lambda m, x: twice(x, (common := m.w.exp()) * m.v, common + 1), (3, 3), (3, 3), inputs=[(4, 3)],
        waiting=["w", "v"],
    ),
    "parts of a weight": function(
        lambda m, x: sum(functional.linear(x, part).exp() for part in m.w.chunk(3)), (6, 3), inputs=[(4, 3)]
    ),
    "experts in a loop": function(lambda m, x: [x @ m.w[i] for i in (0, 2)], (3, 3, 5), inputs=[(4, 3)]),
    "merged adapter": function(
        lambda m, x: functional.linear(x, m.w + m.v @ m.b), (5, 3), (5, 2), (2, 3), inputs=[(4, 3)],
        waiting=["w", "v", "b"],
    ),
    "weight cast": function(lambda m, x: functional.linear(x, m.w.float().double()), (5, 3), inputs=[(4, 3)]),
    "product of activations": function(
        lambda m, x, y: (x @ m.w) @ y.mT, (3, 5), inputs=[(4, 3), (4, 5)],
    ),
    "weight from an activation": function(
        lambda m, x, y: functional.linear(x, functional.linear(y, m.w)), (3, 5), inputs=[(4, 3), (6, 5)]
    ),
    "weight and bias from one embedding": function(
        lambda m, x: functional.linear(functional.linear(x, (h := (m.w * m.v).tanh())[:3]), h[3:6], h[6]),
        (7, 3), (7, 3), inputs=[(4, 3)], waiting=[],
    ),
    "a computed weight that is penalised": function(
        lambda m, x: [functional.linear(x, w := m.w.exp()), (w**2).sum()], (5, 3), inputs=[(4, 3)], waiting=[]
    ),
    "parameter as input": function(lambda m, x: functional.linear(m.v, m.w) + x, (5, 3), (4, 3), inputs=[(4, 5)]),
    "custom function between": function(
        lambda m, x: Double.apply(x @ m.w) @ m.v, (3, 5), (5, 2), inputs=[(4, 3)], waiting=["w", "v"]
    ),
    "linear in a custom function": function(
        lambda m, x: OwnLinear.apply(x @ m.w, m.v), (3, 5), (2, 5), inputs=[(4, 3)]
    ),
    "keyword arguments": function(
        lambda m, x: functional.linear(input=x, weight=m.w, bias=m.v), (5, 3), (5,), inputs=[(4, 3)]
    ),
    "output given": function(lambda m, x: torch.mm(x.detach(), m.w.detach(), out=x.new_empty(4, 5)) + x @ m.w,
                             (3, 5), inputs=[(4, 3)]),
}  # fmt: skip


def twice(x, weight, other=None):
    return functional.linear(functional.linear(x, weight).tanh(), weight if other is None else other)


class Only(nn.Module):
    """The first output of a module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class SelfAttention(nn.Module):
    def __init__(self, inner, **options):
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x):
        return self.inner(x, x, x, **self.options)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class OwnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", MODULES)
def test_i_and_w_are_the_plain_backward(name):
    module, inputs = MODULES[name].build()
    assert compare(module, *inputs) == MODULES[name].waiting


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": True}], ids=str
)
def test_embedding(options):
    indices = torch.tensor([[0, 2, 2], [6, 5, 2]])
    assert compare(nn.Embedding(7, 3, **options).double(), indices) == {"weight"}


def test_embedding_whose_padding_is_counted_from_the_end():
    indices = torch.tensor([0, 5, 6])
    assert compare(Apply(lambda m: functional.embedding(indices, m.w, padding_idx=-2), (7, 3))) == {"w"}


@pytest.mark.parametrize("options", [{"sparse": True}, {"max_norm": 0.5}], ids=str)
def test_embedding_that_is_left_plain(options):
    module = nn.Embedding(7, 3, **options).double()
    pending = Pending()
    with DeferredWeightGradients(pending):
        module(torch.tensor([0, 2])).sum().backward()
    assert len(pending) == 0
    assert module.weight.grad is not None


@pytest.mark.parametrize("is_column_major", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_grouped_products(is_column_major):
    def run(module, inputs):
        weight = module.w.transpose(-2, -1) if is_column_major else module.w
        return functional.grouped_mm(inputs[0], weight, offs=torch.tensor([2, 2, 6], dtype=torch.int32))

    module = Apply(None, (3, 16, 8) if is_column_major else (3, 8, 16), dtype=torch.float32)
    assert compare(module, randn(6, 8, dtype=torch.float32), call=run, tolerance=1e-5) == {"w"}


def test_cross_attention_with_its_own_projections():
    module = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True).double()
    waiting = compare(module, randn(2, 3, 8), randn(2, 5, 6), randn(2, 5, 4))
    assert waiting == {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"}
    decoder = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True).double()
    waiting = compare(decoder, randn(2, 3, 8), randn(2, 5, 8))
    matrices = {name for name, parameter in decoder.named_parameters() if parameter.ndim == 2}
    assert waiting == matrices


@pytest.mark.skipif(not hasattr(functional, "linear_cross_entropy"), reason="newer than this torch")
def test_linear_cross_entropy():
    target = torch.tensor([1, 0, 4, 2])
    module = Apply(lambda m, x: functional.linear_cross_entropy(x, m.w, target), (5, 3))
    assert compare(module, randn(4, 3)) == {"w"}


def test_frozen_weights_are_left_plain():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    module[0].weight.requires_grad_(False)
    assert compare(module, randn(5, 3)) == {"1.weight"}
    assert module[0].weight.grad is None
    module.requires_grad_(False)
    pending = Pending()
    with DeferredWeightGradients(pending):
        assert not module(randn(5, 3, grad=False)).requires_grad


def test_inputs_that_want_gradients_are_no_weights():
    x, y = randn(4, 3), randn(3, 5)
    pending = Pending()
    with DeferredWeightGradients(pending):
        made = functional.linear(x @ y, y)
    made.sum().backward()
    assert len(pending) == 0
    assert x.grad is not None
    assert y.grad is not None


def test_nothing_is_put_off_where_no_graph_is_recorded():
    module, pending = nn.Linear(3, 4), Pending()
    with DeferredWeightGradients(pending), torch.no_grad():
        assert module(torch.ones(2, 3)).grad_fn is None


def test_tied_weights_and_a_block_used_twice():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(7, 4)
            self.block = nn.Linear(4, 4)

        def forward(self, indices):
            hidden = self.words(indices)
            for _ in range(2):
                hidden = self.block(hidden).tanh()
            return hidden @ self.words.weight.t()

    calls = []
    module = Tied().double()
    module.words.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.clone()))
    other = copy.deepcopy(module)
    calls.clear()
    assert compare(module, torch.tensor([[1, 2], [2, 0]])) == {"words.weight", "block.weight"}
    assert len(calls) == 1  # the copy has no hooks
    assert other.words.weight.grad is None


def test_hooks_see_the_whole_gradient_once():
    expected, seen, after = nn.Linear(3, 3).double(), [], []
    module = copy.deepcopy(expected)
    run = lambda layer, x: layer(layer(x)) + x @ layer.weight.t()  # noqa: E731
    x = randn(4, 3, grad=False)
    expected.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))  # not linear: whole or wrong
    run(expected, x).sum().backward()
    module.weight.register_hook(lambda gradient: seen.append(gradient) or gradient.clamp(-1, 1))
    module.weight.register_post_accumulate_grad_hook(after.append)
    pending = Pending()
    with DeferredWeightGradients(pending):
        made = run(module, x)
    made.sum().backward()
    assert (len(pending), seen) == (3, [])
    pending.run()
    assert (len(seen), len(after)) == (1, 1)
    assert_same(module.weight.grad, expected.weight.grad)


def test_parameters_that_one_weight_joins_get_their_gradients_at_once():
    calls = []
    module = Apply(lambda m, x: twice(functional.linear(x, m.w + m.v), m.w, m.v), (3, 3), (3, 3))
    module.w.register_hook(calls.append)
    module.v.register_hook(calls.append)
    assert compare(module, randn(4, 3)) == {"w", "v"}
    assert len(calls) == 2


def test_micro_batches_interleave():
    expected = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    module = copy.deepcopy(expected)
    batches = [randn(5, 3, grad=False) for _ in range(3)]
    for batch in batches:
        expected(batch).sum().backward()
    queues, made = [Pending() for _ in batches], []
    for batch, pending in zip(batches, queues, strict=True):
        with DeferredWeightGradients(pending):
            made.append(module(batch))
    for at in (1, 0):
        made[at].sum().backward()
    queues[0].run()
    made[2].sum().backward()
    assert [len(pending) for pending in queues] == [0, 2, 2]
    queues[2].run()
    queues[1].run()
    for found, wanted in zip(module.parameters(), expected.parameters(), strict=True):
        assert_same(found.grad, wanted.grad)


def test_a_gradient_that_a_parameter_keeps_is_not_changed_under_the_queue():
    """Autograd gives a parameter that is added through a view the very memory of the gradient that the queue holds."""

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.shift = nn.Linear(3, 3, bias=False), nn.Parameter(torch.zeros(6))

        def forward(self, x):
            return self.layer(x) + self.shift.view(2, 3)

    expected = Shifted().double()
    module = copy.deepcopy(expected)
    queues, batches = [Pending(), Pending()], [randn(2, 3, grad=False) for _ in range(2)]
    for pending, batch in zip(queues, batches, strict=True):
        gradient = torch.randn(2, 3, dtype=torch.float64)
        expected(batch).backward(gradient.clone())
        with DeferredWeightGradients(pending):
            made = module(batch)
        made.backward(gradient.clone())
    for pending in queues:
        pending.run()
    for found, wanted in zip(module.parameters(), expected.parameters(), strict=True):
        assert_same(found.grad, wanted.grad)


def test_gradients_that_nobody_else_holds_are_not_copied():
    module, pending, seed = nn.Linear(3, 4), Pending(), torch.ones(8)
    with DeferredWeightGradients(pending):
        made = module(torch.ones(2, 3)).view(8)
    made.backward(seed)
    assert pending._entries[0].gradient.data_ptr() == seed.data_ptr()


def test_weights_too_big_to_wait_for_one_another(monkeypatch):
    monkeypatch.setattr("penstock.runtime.backward.weight_queue._MANY_BYTES", 0)
    module = wordy().double()
    assert compare(module, torch.randint(9, (3, 5))) == matrices_of(module)


def test_an_input_changed_between_i_and_w_is_an_error():
    module, pending, x = nn.Linear(3, 4), Pending(), torch.ones(2, 3)
    with DeferredWeightGradients(pending):
        made = module(x)
    made.sum().backward()
    x.zero_()
    with pytest.raises(RuntimeError, match=r"changed in place between I and W"):
        pending.run()


def test_bytes_of_the_queue():
    module, pending = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5, bias=False)), Pending()
    x = torch.ones(2, 3, requires_grad=True)
    assert pending.num_bytes() == 0
    with DeferredWeightGradients(pending):
        made = [module(x), functional.linear(x, module[0].weight)]
    assert pending.num_bytes() == 0
    torch.autograd.backward(made, [torch.ones(2, 5), torch.ones(2, 4)])
    # inputs: x once, the hidden layer; gradients: of three outputs
    assert pending.num_bytes() == 4 * (2 * 3 + 2 * 4 + 2 * 5 + 2 * 4 + 2 * 4)
    pending.run()
    assert pending.num_bytes() == 0


def test_an_empty_queue_does_nothing():
    pending = Pending()
    pending.run()
    assert len(pending) == 0


def test_what_w_is_done_with_is_let_go():
    module, pending, x = nn.Linear(3, 4), Pending(), torch.ones(2, 3)
    with DeferredWeightGradients(pending):
        made = module(x).tanh()
    alive = weakref.ref(x)
    made.sum().backward()
    del x, made
    gc.disable()
    try:
        assert alive() is not None
        pending.run()
        assert alive() is None
    finally:
        gc.enable()


def test_a_queue_that_is_dropped_lets_go_of_all():
    module, hidden = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), []
    module[1].register_forward_hook(lambda module, inputs, output: hidden.append(weakref.ref(output.untyped_storage())))
    gc.disable()
    try:
        pending = Pending()
        with DeferredWeightGradients(pending):
            made = module(torch.ones(2, 3))
        made.sum().backward()
        del made
        assert hidden[0]() is not None
        del pending
        assert hidden[0]() is None
    finally:
        gc.enable()


class Nested(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(3, 3) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = checkpoint(lambda x: self.inner(x).tanh(), self.first(x), use_reentrant=self.use_reentrant)
        return self.last(x)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_in_the_model_is_left_plain(use_reentrant):
    assert compare(Nested(use_reentrant).double(), randn(4, 3)) == {"first.weight", "last.weight"}


def test_hooks_of_the_runtime_see_what_is_saved():
    module, x = Nested(use_reentrant=False).double(), randn(4, 3)
    expected = copy.deepcopy(module)
    expected(x).sum().backward()
    packed, pending = [], Pending()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t)
    with hooks, DeferredWeightGradients(pending, own_hooks=1):
        made = module(x)
    assert any(tensor is x for tensor in packed)
    made.sum().backward()
    assert len(pending) == 2  # not the one that is checkpointed
    pending.run()
    for found, wanted in zip(module.parameters(), expected.parameters(), strict=True):
        assert_same(found.grad, wanted.grad)
    with hooks, DeferredWeightGradients(pending):
        made = module(x)
    made.sum().backward()
    assert len(pending) == 0


def autocast_case(name):
    if name == "conv":
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3)), torch.randn(2, 3, 6, 6)
    if name == "attention":
        return nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True), torch.randn(2, 5, 8)
    if name == "products":
        call = lambda m, x: torch.einsum("bsd,dk->bsk", torch.addmm(m.v, x.flatten(0, 1), m.w).view(2, 5, 8), m.b)  # noqa: E731
        return Apply(call, (8, 8), (8,), (8, 4), dtype=torch.float32), torch.randn(2, 5, 8)
    if name == "no product":
        return Apply(lambda m, x: torch.einsum("bsd,d->bsd", x, m.w), (8,), dtype=torch.float32), torch.randn(2, 5, 8)
    if name == "not contiguous":
        return Apply(lambda m, x: x.transpose(0, 1) @ m.w, (64, 64), dtype=torch.float32), torch.randn(7, 5, 64)
    module = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4, bias=False))
    return module, torch.randint(9, (2, 5))


@pytest.mark.parametrize("name", ["conv", "attention", "products", "no product", "not contiguous", "words"])
def test_autocast(name):
    module, x = autocast_case(name)
    expected = copy.deepcopy(module)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = expected(x)
    wanted.float().pow(2).sum().backward()
    pending = Pending()
    with DeferredWeightGradients(pending), torch.autocast("cpu", torch.bfloat16):
        made = module(x)
    assert made.dtype == wanted.dtype
    assert_same(made, wanted, 0)
    made.float().pow(2).sum().backward()
    pending.run()
    for found, parameter in zip(module.parameters(), expected.parameters(), strict=True):
        assert found.grad.dtype is torch.float32
        assert_same(found.grad, parameter.grad, 2e-2 * float(parameter.grad.abs().max()) + 1e-6)


def test_autocast_leaves_double_precision():
    def run(module, inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return module(*inputs)

    assert compare(nn.Linear(3, 4).double(), randn(5, 3), call=run) == {"weight"}


def test_autocast_keeps_no_lowered_weight():
    module, pending, packed = nn.Linear(64, 64, bias=False), Pending(), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    with hooks, DeferredWeightGradients(pending, own_hooks=1), torch.autocast("cpu", torch.bfloat16):
        module(torch.ones(2, 64))
    address = module.weight.data_ptr()
    assert all(tensor.data_ptr() == address for tensor in packed if tensor.numel() == 64 * 64)


class Force(nn.Module):
    """An energy, and its derivative by the positions, as models of molecules have it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1, bias=False)

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.last(torch.tanh(self.first(x)))
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, force


def test_a_derivative_inside_the_forward_is_differentiated_again():
    compare(Force().double(), randn(4, 3, grad=False))


def test_a_derivative_inside_the_forward_leaves_nothing_in_the_queue():
    module, pending = nn.Linear(3, 4), Pending()
    with DeferredWeightGradients(pending):
        x = torch.ones(2, 3, requires_grad=True)
        torch.autograd.grad(module(x).sum(), x)
    assert len(pending) == 0


def test_a_derivative_by_a_weight_inside_the_forward_is_refused():
    module = nn.Linear(3, 4)
    with DeferredWeightGradients(Pending()):
        made = module(torch.ones(2, 3)).sum()
        torch.autograd.grad(made, module.bias, retain_graph=True)
        with pytest.raises(UsageError, match="does not split the backward"):
            torch.autograd.grad(made, [module.weight])


def test_transforms_of_functions_are_left_plain():
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x):
            slope = torch.func.vmap(torch.func.grad(lambda row: self.layer(row).tanh().sum()))(x)
            return torch.func.vmap(self.layer)(x), slope

    assert compare(Mapped().double(), randn(5, 3)) == set()


def test_compiled_parts_are_left_plain():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(torch.compile(lambda x: self.first(x).tanh(), backend="aot_eager")(x))

    assert compare(Partly().double(), randn(5, 3)) == {"last.weight"}


class Marked(torch.Tensor):
    """A class of tensors with rules of its own."""

    seen = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_classes_of_tensors_with_their_own_rules_are_left_plain():
    module, pending = nn.Sequential(nn.Linear(3, 4), SelfAttention(nn.MultiheadAttention(4, 2))), Pending()
    with DeferredWeightGradients(pending):
        made = module(torch.ones(2, 3).as_subclass(Marked))[0]
    assert type(made) is Marked
    assert functional.multi_head_attention_forward in Marked.seen
    made.sum().backward()
    assert len(pending) == 0
    assert module[0].weight.grad is not None


ATEN = {
    "linear": lambda m, x: torch.ops.aten.linear.default(x, m.w, m.v),
    "linear, by name": lambda m, x: torch.ops.aten.linear(x, m.w, m.v),
    "matmul": lambda m, x: torch.ops.aten.matmul.default(x, torch.ops.aten.t.default(m.w)),
    "mm": lambda m, x: torch.ops.aten.mm.default(x, torch.ops.aten.t.default(m.w)),
    "addmm": lambda m, x: torch.ops.aten.addmm.default(m.v, x, torch.ops.aten.permute.default(m.w, [1, 0]), alpha=2),
    "einsum": lambda m, x: torch.ops.aten.einsum.default("bd,kd->bk", [x, m.w]),
    "embedding": lambda m, x: torch.ops.aten.embedding.default(m.w, torch.tensor([1, 2]), 1) @ x.t(),
    "conv": lambda m, x: torch.ops.aten.conv1d.default(x[None].mT, m.w[:, :, None], m.v, [2]),
    "conv, padded": lambda m, x: torch.ops.aten.conv1d.padding(x[None].mT, m.w[:, :, None], m.v, [1], "same"),
    "convolution": lambda m, x: torch.ops.aten.convolution.default(
        x[None].mT, m.w[:, :, None], m.v, [2], [0], [1], False, [0], 1
    ),
    "conv_transpose": lambda m, x: torch.ops.aten.conv_transpose2d.input(
        x[None].mT[..., None], m.w.t()[:, :, None, None], m.v, [2]
    ),
}


@pytest.mark.parametrize("name", ATEN)
def test_operators_of_exported_graphs(name):
    module = Apply(ATEN[name], (5, 3), (5,))
    assert compare(module, randn(4, 3)) == {"w"}


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.ConvTranspose2d(4, 3, 2, stride=2),
        nn.Flatten(), nn.Linear(192, 5),
    )  # fmt: skip


def wordy():
    return nn.Sequential(nn.Embedding(9, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 9))


NETWORKS = {
    "convolutional": (convolutional, lambda: torch.randn(3, 3, 4, 4, dtype=torch.float64)),
    "wordy": (wordy, lambda: torch.randint(9, (3, 5))),
}


def matrices_of(module):
    return {name for name, parameter in module.named_parameters() if parameter.ndim > 1}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NETWORKS)
def test_exported_modules(name):
    build, example = NETWORKS[name]
    x = example()
    module = torch.export.export(build().double(), (x,), strict=False).module()
    assert compare(module, x) == matrices_of(module)


@pytest.mark.parametrize("path", ["export", "replay", "direct"])
@pytest.mark.parametrize("name", NETWORKS)
def test_captured_stages(name, path):
    from penstock.model.capture.capture import capture

    build, example = NETWORKS[name]
    module, x = build().double(), example()
    other = copy.deepcopy(module)
    captured = capture(module, x, path=path)
    allowed = [cut for cut in range(1, len(captured.graph.nodes)) if cut not in captured.graph.uncuttable]
    chain = captured.split([allowed[len(allowed) // 2]])
    assert len(chain.stages) == 2
    call = lambda which, inputs: (chain if which is module else which)(*inputs)  # noqa: E731
    assert compare(module, x, call=call, other=other) == matrices_of(module)


def share_that_waits(name):
    """Return the share of a small model's elements, among those that want gradients, that wait for W."""
    from penstock.model.small_models.named_models import load

    model, example = load(name, batch_size=2) if name != "resnet" else (ResNet(), {"x": torch.randn(2, 3, 32, 32)})
    dtype = torch.float32 if name == "mixtral" else torch.float64  # groups of rows come in no other
    model.train(name != "wav2vec2").to(dtype)  # which masks at random, by numpy
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in example.items()}
    call = lambda module, given: module(**dict(zip(inputs, given, strict=True)))  # noqa: E731
    tolerance = 1e-4 if dtype is torch.float32 else TOLERANCE
    waiting = compare(model, *inputs.values(), call=call, tolerance=tolerance)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return sum(sizes[name] for name in waiting) / sum(sizes.values())


class Residual(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip
        self.way = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x):
        return functional.relu(self.body(x) + self.way(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
            Residual(8, 8, 1), Residual(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "bert", "vit", "resnet", "t5", "mixtral", "whisper", "wav2vec2", "convnext"]
)
def test_most_weight_gradients_of_public_architectures_wait(name):
    pytest.importorskip("transformers")
    assert share_that_waits(name) > 0.9
