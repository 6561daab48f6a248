"""Sums over rows that a product reads too become products, and nothing else does."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from penstock.compile.passes import OwnPass

aten = torch.ops.aten


def backward_of_linear(x, weight, given):
    """What AOTAutograd makes of the backward of a linear layer with a bias."""
    rows = given.reshape(-1, given.shape[-1])
    return aten.mm(rows.t(), x), aten.mm(rows, weight), aten.sum.dim_IntList(rows, [0], True).reshape(-1)


def sum_alone(x, weight, given):
    return (aten.sum.dim_IntList(given.exp().reshape(-1, given.shape[-1]), [0]),)


def flat_sum(x, weight, given):
    rows = given.reshape(-1, given.shape[-1])
    return aten.mm(rows.t(), x), aten.sum.dim_IntList(rows, [0]), aten.sum.dim_IntList(rows, [-2], True)


def other_sums(x, weight, given):
    rows = given.reshape(-1, given.shape[-1])
    product = aten.mm(rows.t(), x)
    wide = aten.sum.dim_IntList(rows, [0], dtype=torch.float64)
    every = aten.sum.dim_IntList(rows, None)
    return product, aten.sum.dim_IntList(rows, [1]), wide, aten.sum.dim_IntList(rows, [0, 1]), every


def turned(x, weight, given):
    columns = given.reshape(-1, given.shape[-1]).t()
    return aten.mm(columns, x), aten.sum.dim_IntList(columns, [0])


def values(dtype):
    torch.manual_seed(0)
    return [torch.randn(*shape).to(dtype) for shape in ((12, 5), (7, 5), (3, 4, 7))]


@pytest.mark.parametrize(("program", "num_changed"), [(backward_of_linear, 1), (flat_sum, 2)])
def test_becomes_a_product(program, num_changed):
    given = values(torch.bfloat16)
    traced = make_fx(program, tracing_mode="fake")(*given)
    OwnPass(devices=("cpu",))(traced.graph)
    traced.graph.lint()
    traced.recompile()
    assert not traced.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert len(traced.graph.find_nodes(op="call_function", target=aten.full.default)) == 1
    products = [
        n
        for n in traced.graph.find_nodes(op="call_function", target=aten.mm.default)
        if n.args[0].target is aten.full.default
    ]
    assert len(products) == num_changed
    for made, wanted, exact in zip(traced(*given), program(*given), program(*(v.double() for v in given)), strict=True):
        assert (made.shape, made.dtype) == (wanted.shape, wanted.dtype)
        torch.testing.assert_close(made.double(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("program", "dtype", "devices"),
    [
        (sum_alone, torch.bfloat16, ("cpu",)),  # it would have to be written to memory first
        (other_sums, torch.bfloat16, ("cpu",)),
        (turned, torch.bfloat16, ("cpu",)),
        (backward_of_linear, torch.float16, ("cpu",)),  # a part of it might overflow
        (backward_of_linear, torch.float32, ("cpu",)),  # a product may round what it is given
        (backward_of_linear, torch.float64, ("cpu",)),
        (backward_of_linear, torch.bfloat16, ("cuda",)),
    ],
)
def test_stays_a_sum(program, dtype, devices):
    traced = make_fx(program, tracing_mode="fake")(*values(dtype))
    before = traced.graph.python_code("self").src
    OwnPass(devices=devices)(traced.graph)
    assert traced.graph.python_code("self").src == before


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_with_inductor():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 5)).bfloat16()
    seen = []

    class Watched(OwnPass):
        def __call__(self, graph):
            count = len(graph.find_nodes(op="call_function", target=aten.sum.dim_IntList))
            super().__call__(graph)
            seen.append(count - len(graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)))

    options = {"post_grad_custom_pre_pass": Watched(devices=("cpu",)), "fx_graph_cache": False}
    run = torch.compile(layer, dynamic=False, options=options)  # whatever shapes came before
    x = torch.randn(9, 6).bfloat16()
    run(x).float().pow(2).sum().backward()
    made = [p.grad.double() for p in layer.parameters()]
    exact = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 5)).double()
    exact.load_state_dict(layer.state_dict())
    exact(x.double()).pow(2).sum().backward()
    for gradient, parameter in zip(made, exact.parameters(), strict=True):
        assert (gradient - parameter.grad).norm() / parameter.grad.norm() < 0.02
    assert sum(seen) == 2  # both biases


def test_what_was_compiled_with_it_is_known_by_it():
    assert OwnPass().uuid() == OwnPass().uuid() != OwnPass(devices=("cpu",)).uuid()
