"""Transparency: run a model whole and as stages whose gradients are handed over by hand, and compare everything."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from penstock.model.capture.capture import capture
from penstock.model.example import read_example
from penstock.model.structure import flatten

WIDTH = 8


def rows(size=4):
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Layers(nn.Module):
    def __init__(self, count=4):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.double()

    def body(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x):
        return self.body(x)


@dataclass
class Outcome:
    outputs: list
    gradients: dict
    buffers: dict


def differentiable(tensors):
    return [t for t in tensors if t.is_floating_point() and t.requires_grad]


def weights_for(tensors):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in tensors]


def run_plain(model, call):
    args, kwargs = call.arguments()
    outputs, _ = flatten(model(*args, **kwargs), drop=lambda o: hasattr(o, "get_seq_length"))
    ends = differentiable(outputs)
    if ends:
        sum((o * w).sum() for o, w in zip(ends, weights_for(ends), strict=True)).backward()
    return outcome(outputs, model)


def outcome(outputs, model):
    return Outcome(
        [o.detach().clone() for o in outputs],
        {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        {n: b.clone() for n, b in model.named_buffers()},
    )


def run_stages(chain, call, model):
    """Run each stage on leaves of its own, then its backward with the gradients that later stages left."""
    ran = []
    gradient_of = {}

    def run_stage(stage, values):
        leaves = [cut_off(v) for v in values]
        made = stage(*leaves, batch_size=call.batch_size)
        sent = [m.detach() if isinstance(m, torch.Tensor) else m for m in made]
        for tensor, original in zip(sent, made, strict=True):
            tensor.requires_grad_(original.requires_grad)
        ran.append((values, leaves, made, sent))
        return sent

    outputs, _ = flatten(chain.run(call, run_stage))
    ends = differentiable(outputs)
    if ends:
        loss = sum((o * w).sum() for o, w in zip(ends, weights_for(ends), strict=True))
        gradients = torch.autograd.grad(loss, ends)
        for end, gradient in zip(ends, gradients, strict=True):
            gradient_of[id(end)] = gradient
    for values, leaves, made, sent in reversed(ran):
        pairs = [
            (m, gradient_of[id(s)]) for m, s in zip(made, sent, strict=True) if m.requires_grad and id(s) in gradient_of
        ]
        if pairs:
            torch.autograd.backward([m for m, _ in pairs], [g for _, g in pairs])
        for value, leaf in zip(values, leaves, strict=True):
            if isinstance(leaf, torch.Tensor) and leaf.grad is not None:
                before = gradient_of.get(id(value))
                gradient_of[id(value)] = leaf.grad if before is None else before + leaf.grad
    return outcome(outputs, model)


def cut_off(value):
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def even_cuts(graph, stages):
    allowed = [c for c in range(1, len(graph.nodes)) if c not in graph.uncuttable]
    assert len(allowed) >= stages - 1, f"{len(allowed)} places for cuts in {len(graph.nodes)} nodes"
    return sorted({allowed[len(allowed) * k // stages] for k in range(1, stages)})


def assert_same(a: Outcome, b: Outcome, tolerance=1e-10):
    assert len(a.outputs) == len(b.outputs)
    for x, y in zip(a.outputs, b.outputs, strict=True):
        torch.testing.assert_close(y, x, rtol=tolerance, atol=tolerance)
    assert a.gradients.keys() == b.gradients.keys()
    for name, x in a.gradients.items():
        y = b.gradients[name]
        zero = torch.zeros(())
        assert (x is None) == (y is None) or (zero if x is None else x).abs().max() == (
            zero if y is None else y
        ).abs().max(), name
        if x is not None and y is not None:
            torch.testing.assert_close(y, x, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")
    for name, x in a.buffers.items():
        torch.testing.assert_close(
            b.buffers[name], x, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def check(
    model, example, *, path="auto", stages=(2, 3), batch_sizes=None, modes=(True, False), tolerance=1e-10, cuts=None
):
    """Compare a model with its stages; return what was captured."""
    call = read_example(example, model)
    captured = capture(model, call, training=True, path=path)
    start = copy.deepcopy(model.state_dict())
    for count in stages:
        chain = captured.split(cuts or even_cuts(captured.graph, count))
        for training in modes:
            for size in batch_sizes or (call.batch_size, call.batch_size + 2, 1):
                if (
                    size == 1
                    and training
                    and any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in model.modules())
                ):
                    continue  # batch norm has no statistics of one sample
                sized = call.resized(size)
                model.load_state_dict(start)
                plain = copy.deepcopy(model).train(training)
                plain.zero_grad(set_to_none=True)
                torch.manual_seed(3)
                expected = run_plain(plain, sized)
                model.zero_grad(set_to_none=True)
                chain.train(training)
                torch.manual_seed(3)
                assert_same(expected, run_stages(chain, sized, model), tolerance)
    model.load_state_dict(start)
    return captured
