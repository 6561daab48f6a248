"""Random models: a chain of blocks, each with a habit that is hard to cut, from one seed."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH = 6, 3


class Twice(torch.autograd.Function):
    """A custom function: doubles, and so does its gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * torch.tanh(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * gradient * (1 - torch.tanh(x) ** 2)


class Block(nn.Module):
    """Takes a value of shape (batch, length, width) and returns one; `kept` holds values of earlier blocks."""

    def __init__(self, rng):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, kept):
        return torch.tanh(self.linear(x))


class Skip(Block):
    def forward(self, x, kept):
        return torch.tanh(self.linear(x)) + kept[0]


class ModuleTwice(Block):
    """One activation and one layer, called twice."""

    def __init__(self, rng):
        super().__init__(rng)
        self.act = rng.choice([nn.Tanh(), nn.GELU(), nn.Sigmoid()])

    def forward(self, x, kept):
        return self.act(self.linear(self.act(self.linear(x))))


class Inplace(Block):
    def forward(self, x, kept):
        y = self.linear(x)
        y.add_(x).mul_(0.5)
        return y.tanh_()


class Views(Block):
    """Chunks, transposes and slices that are used further down."""

    def forward(self, x, kept):
        first, second = self.linear(x).chunk(2, dim=-1)
        turned = x.transpose(1, 2)
        return torch.cat([torch.tanh(second), first], -1) + turned.transpose(1, 2)[..., :WIDTH]


class Deposit(Block):
    """Hands a value on in a list that it changes, and does not return."""

    def forward(self, x, kept):
        y = torch.tanh(self.linear(x))
        kept.append(y * 2)
        return y


class Withdraw(Block):
    """Takes the last value that was handed on."""

    def forward(self, x, kept):
        return torch.tanh(self.linear(x)) + kept[-1]


class Counting(Block):
    """A buffer that each call changes, which the result does not depend on."""

    def __init__(self, rng):
        super().__init__(rng)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.rand(WIDTH, dtype=torch.float64) + 0.5, persistent=False)

    def forward(self, x, kept):
        self.count += 1
        return torch.tanh(self.linear(x)) * self.scale


class Branch(Block):
    """Control flow on a number that does not depend on the samples' order or count."""

    def __init__(self, rng):
        super().__init__(rng)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, kept):
        if self.linear.weight.sum() > 0:
            return torch.tanh(self.linear(x))
        return torch.tanh(self.other(x))


class DataBranch(Block):
    """Control flow on the data: whatever the way, the value is the same."""

    def forward(self, x, kept):
        if bool((x > 1e9).any()):
            return x
        return torch.tanh(self.linear(x))


class Recurrent(Block):
    def __init__(self, rng):
        super().__init__(rng)
        self.cell = rng.choice([nn.LSTM, nn.GRU])(WIDTH, WIDTH, batch_first=True)

    def forward(self, x, kept):
        return self.cell(x)[0]


class Attention(Block):
    def __init__(self, rng):
        super().__init__(rng)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x, kept):
        return x + self.attention(x, x, x, need_weights=False)[0]


class Hooked(Block):
    """A hook that changes what a layer returns."""

    def __init__(self, rng):
        super().__init__(rng)
        self.linear.register_forward_hook(_double)


def _double(module, args, output):
    return output * 2


class Parametrized(Block):
    def __init__(self, rng):
        super().__init__(rng)
        parametrizations.weight_norm(self.linear)


class Custom(Block):
    def forward(self, x, kept):
        return Twice.apply(self.linear(x))


class Checkpointed(Block):
    def forward(self, x, kept):
        return checkpoint(lambda y: torch.tanh(self.linear(y)), x, use_reentrant=False)


class Frozen(Block):
    def __init__(self, rng):
        super().__init__(rng)
        for parameter in self.parameters():
            parameter.requires_grad_(False)


class FrozenNorm(Block):
    """Batch norm whose statistics are frozen: in training mode it would couple samples by design."""

    def __init__(self, rng):
        super().__init__(rng)
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=True)
        self.norm.running_mean.uniform_(-1, 1)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x, kept):
        return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)


class Norms(Block):
    def __init__(self, rng):
        super().__init__(rng)
        self.norm = rng.choice([nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)])

    def forward(self, x, kept):
        return self.norm(F.dropout(self.linear(x), 0.0, self.training))


class Expert(Block):
    """Rows go to one of two experts, by their own values."""

    def __init__(self, rng):
        super().__init__(rng)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, kept):
        flat = x.reshape(-1, WIDTH)
        goes = flat[:, 0] > 0
        made = torch.zeros_like(flat)
        made[goes] = self.linear(flat[goes])
        made[~goes] = self.other(flat[~goes])
        return torch.tanh(made).view_as(x)


class Mean(Block):
    """A mean over the length, spread again."""

    def forward(self, x, kept):
        return torch.tanh(self.linear(x)) + x.mean(1, keepdim=True).expand_as(x)


class Conv(Block):
    def __init__(self, rng):
        super().__init__(rng)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x, kept):
        return torch.tanh(self.conv(x.transpose(1, 2)).transpose(1, 2))


class WritesIntoParts(Block):
    """Writes into a part of a value, by slices and by a mask."""

    def forward(self, x, kept):
        y = self.linear(x).clone()
        y[:, 0] += x[:, -1]
        y[..., 1].mul_(0.5)
        y.masked_fill_(y.abs() > 3, 0.1)
        return torch.tanh(y)


class AsksForSizes(Block):
    """Asks for the number of samples and makes tensors of that size."""

    def forward(self, x, kept):
        rows = torch.arange(x.shape[0])
        zeros = x.new_zeros(len(x), 1, WIDTH)
        picked = self.linear(x)[rows, torch.zeros_like(rows)]
        return torch.cat([zeros, torch.tanh(self.linear(x))], 1)[:, 1:] + picked.unsqueeze(1).tanh()


class StopsGradients(Block):
    """Stops a gradient, and computes a part without one."""

    def forward(self, x, kept):
        with torch.no_grad():
            weight = x.softmax(-1)
        return torch.tanh(self.linear(x)) * weight + x.detach().mean(-1, keepdim=True)


class Sorted(Block):
    """Orders within each sample: topk, gather, cumsum."""

    def forward(self, x, kept):
        values, where = self.linear(x).topk(2, dim=-1)
        return torch.tanh(x + values.sum(-1, keepdim=True) + x.gather(-1, where).cumsum(-1)[..., -1:])


class Number(Block):
    """Reads a number back that does not depend on the samples."""

    def forward(self, x, kept):
        return torch.tanh(self.linear(x)) * (1 + float(self.linear.bias.detach().abs().max()))


class Spectrum(Block):
    """Complex numbers between."""

    def forward(self, x, kept):
        return torch.tanh(torch.fft.ifft(torch.fft.fft(self.linear(x), dim=-1) * 0.5, dim=-1).real)


class GradientHook(Block):
    """A hook on a value's gradient."""

    def forward(self, x, kept):
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(_half)
        return torch.tanh(y)


def _half(gradient):
    return gradient * 0.5


class Remembered(Block):
    """Leaves a value in an attribute; the next call within the forward reads it."""

    def forward(self, x, kept):
        self.last = torch.tanh(self.linear(x))
        return self._read(x)

    def _read(self, x):
        return self.last + x


class Unbound(Block):
    """Takes a value apart and puts it together again, in reverse."""

    def forward(self, x, kept):
        parts = [torch.tanh(self.linear(part)) for part in x.unbind(1)]
        return torch.stack(parts[::-1], 1)


class OwnWeight(Block):
    """A weight of its own that is no layer's."""

    def __init__(self, rng):
        super().__init__(rng)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x, kept):
        return torch.tanh(torch.einsum("blw,wv->blv", self.linear(x), self.weight))


class Unused(Block):
    """A layer that nothing calls: its gradient stays None."""

    def __init__(self, rng):
        super().__init__(rng)
        self.spare = nn.Linear(WIDTH, WIDTH)


class Reentrant(Block):
    """The older kind of checkpointing."""

    def forward(self, x, kept):
        return checkpoint(lambda y: torch.tanh(self.linear(y)), x, use_reentrant=True)


class Normed(Block):
    """Batch norm in training: each micro-batch has its own statistics, as `MicroNorm` of the plain model."""

    def __init__(self, rng):
        super().__init__(rng)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x, kept):
        return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)


class Dropped(Block):
    """Dropout, as a module and as a function."""

    def __init__(self, rng):
        super().__init__(rng)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, kept):
        return F.dropout(torch.tanh(self.linear(self.drop(x))), 0.2, self.training)


class DropPath(Block):
    """Stochastic depth: whole samples skip the block."""

    def forward(self, x, kept):
        stays = (torch.rand(x.shape[0], 1, 1, dtype=x.dtype) > 0.4).to(x.dtype)
        return x + torch.tanh(self.linear(x)) * stays / 0.6


class MicroNorm(nn.Module):
    """A batch norm of the plain model that sees one micro-batch after the other, as in a pipeline."""

    def __init__(self, norm, sizes):
        super().__init__()
        self.norm, self.sizes = norm, sizes

    def forward(self, x):
        return torch.cat([self.norm(part) for part in x.split(self.sizes(len(x)))])


BLOCKS = (
    Block, Skip, ModuleTwice, Inplace, Views, Deposit, Withdraw, Counting, Branch, DataBranch, Recurrent, Attention,
    Hooked, Parametrized, Custom, Checkpointed, Frozen, FrozenNorm, Norms, Expert, Mean, Conv,
)  # fmt: skip

# put into some chains behind all that the older seeds mean, so that those stay as they are
MORE = (
    WritesIntoParts, AsksForSizes, StopsGradients, Sorted, Number, Spectrum, GradientHook, Remembered, Unbound,
    OwnWeight, Unused, Reentrant, Normed, Normed, Dropped, Dropped, DropPath,
)  # fmt: skip


class Model(nn.Module):
    """A chain of random blocks between an embedding and a head; returns what `form` says."""

    def __init__(self, seed, *, outputs):
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.is_embedded = rng.random() < 0.3
        self.form = rng.choice(["tensor", "tensor", "tuple", "dict", "nested"])
        self.pools = rng.random() < 0.7
        if self.is_embedded:
            self.embed = nn.Embedding(11, WIDTH, sparse=rng.random() < 0.3)
        count = rng.randint(3, 6)
        self.blocks = nn.ModuleList(rng.choice(BLOCKS)(rng) for _ in range(count))
        if rng.random() < 0.25:  # one block twice in the chain
            self.blocks.append(self.blocks[rng.randrange(count)])
        self.head = nn.Linear(WIDTH, outputs)
        if rng.random() < 0.2 and len(self.blocks) > 1:  # a parameter that two layers share
            self.blocks[-1].linear = self.blocks[0].linear
        more = random.Random(f"more {seed}")
        for _ in range(more.choice([0, 0, 1, 2])):
            self.blocks.insert(more.randint(0, len(self.blocks)), more.choice(MORE)(more))
        self.is_random = any(isinstance(block, Dropped | DropPath) for block in self.blocks)
        self.double()
        self.train()  # which leaves frozen norms in evaluation

    def forward(self, x, scale=None):
        x = self.embed(x) if self.is_embedded else x
        kept = [x]
        for block in self.blocks:
            x = block(x, kept)
        if scale is not None:
            x = x * scale[:, None, None]
        made = self.head(x.mean(1) if self.pools else x)
        if self.form == "tuple":
            return made, None
        if self.form == "dict":
            return {"out": made, "nothing": None}
        return {"deep": [(made, 3)]} if self.form == "nested" else made

    def in_micro_batches(self, sizes):
        """Let batch norm see micro-batches; `sizes` gives those of a batch."""
        for block in self.blocks:
            if isinstance(block, Normed) and not isinstance(block.norm, MicroNorm):
                block.norm = MicroNorm(block.norm, sizes)
        return self

    def output_of(self, made):
        """Return the tensor in what forward returned."""
        forms = {"tuple": lambda: made[0], "dict": lambda: made["out"], "nested": lambda: made["deep"][0][0]}
        return forms.get(self.form, lambda: made)()


def batch_for(model, size, rng):
    """Return a batch: a tensor, a tuple or a dict."""
    x = torch.randint(11, (size, LENGTH)) if model.is_embedded else torch.randn(size, LENGTH, WIDTH).double()
    form = rng.choice(["tensor", "tuple", "dict"])
    if form == "tensor":
        return x
    scale = torch.rand(size).double() + 0.5
    return (x, scale) if form == "tuple" else {"x": x, "scale": scale}
