"""Rows: a model that asks for some rows gets what it would get, and less is computed for it."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

from penstock.infer import Graph
from penstock.infer.graph.inference_program import Program
from penstock.model.example import read_example

WIDTH, LENGTH = 8, 5

attend = functional.scaled_dot_product_attention


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, *, is_causal=False):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop, self.is_causal = nn.Dropout(0.5), is_causal

    def forward(self, x):
        parts = self.attend(self.norm1(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self.drop(self.project(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class Of(nn.Module):
    """A function with some weights, as a model."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.block, self.causal = Block(), Block(is_causal=True)
        self.norm, self.place = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.head = nn.Linear(WIDTH, 50)
        self.patches = nn.Conv1d(LENGTH, WIDTH, 4, stride=4)
        self.register_buffer("mask", torch.randn(LENGTH, LENGTH) > 0)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def program_of(model, *example):
    model = model.double().eval()
    return Program(model, read_example(example, model), most=4)


def run(program, *tensors):
    interpreter = program.interpreter(None)
    arguments = [*program.held(), *program.values(tensors), len(tensors[0])]
    with torch.no_grad():
        return program.result(tensors, interpreter.run(arguments, interpreter.make_once(arguments)))


def check(model, *, batch=3, num_fewer=None, batches=(3, 1, 4)):
    """Check that a model's results are the same for several batch sizes; return the program."""
    program = program_of(model, torch.randn(batch, LENGTH, WIDTH, dtype=torch.float64))
    for size in batches:
        x = torch.randn(size, LENGTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(run(program, x), model(x), rtol=1e-12, atol=1e-12)
    if num_fewer is not None:
        assert program.analysis.num_fewer == num_fewer
    return program


def scaled(x):
    """Return what RMSNorm returns, as models write it."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def heads(x):
    return x.unflatten(-1, (2, -1)).transpose(-3, -2)


def attention(m, x):
    scores = m.first(x) @ m.second(x).mT / WIDTH**0.5
    return torch.softmax(scores, dim=-1) @ x


# each with how many operations there are that work on fewer rows
MOVES = {
    "the first token of a block": (lambda m, x: m.block(x)[:, 0], 8),
    "the last of a block that looks back": (lambda m, x: m.causal(x)[:, -1], 8),
    "another of a block that looks back": (lambda m, x: m.causal(x)[:, 2], 7),
    "of two blocks": (lambda m, x: m.block(m.causal(x))[:, 0], 8),
    "by a norm and a head": (lambda m, x: m.head(m.norm(m.block(x)))[:, -1, :], 10),
    "a head for the last word": (lambda m, x: m.head(x)[:, -1], 1),
    "some rows": (lambda m, x: functional.gelu(m.first(x))[:, 1:3], 2),
    "every third row": (lambda m, x: m.first(x).tanh()[:, ::3], 2),
    "the last but one": (lambda m, x: m.first(x).relu()[:, -3:-1], 2),
    "one number": (lambda m, x: (m.first(x) * 2).relu()[:, 0, 3], 2),
    "two readers of the same": (lambda m, x: (y := m.first(x).relu())[:, 0] + y[:, 0].exp(), 2),
    "rows that came first": (lambda m, x: m.first(x.transpose(0, 1)).relu()[-1], 2),
    "by a permutation": (lambda m, x: m.first(x).relu().permute(2, 0, 1)[:, :, 1], 2),
    "by a new dimension": (lambda m, x: m.first(x).unsqueeze(1)[:, :, 0], 1),
    "by what is chosen before": (lambda m, x: m.first(x).relu()[:, :, 2][:, 0], 2),
    "places for each": (lambda m, x: (m.first(x) + m.place)[:, 0], 2),
    "what is broadcast": (lambda m, x: (m.first(x) * x[:, :1] + x.mean(1, keepdim=True))[:, 2], 3),
    "of two kinds": (lambda m, x: (m.first(x).float() * 2).to(x.dtype)[:, 2], 4),
    "a norm by hand": (lambda m, x: scaled(m.first(x))[:, 0], 6),
    "attention by hand": (lambda m, x: attention(m, x)[:, 0], 5),
    "a choice": (lambda m, x: torch.where(x > 0, m.first(x), -x)[:, 3], 4),
    "sums along the row": (lambda m, x: m.first(x).sum(-1, keepdim=True)[:, 0], 2),
    "a softmax": (lambda m, x: torch.softmax(m.first(x), -1)[:, 0], 2),
    "one of two patches": (lambda m, x: m.norm(m.patches(x).transpose(1, 2))[:, 0], 1),
    "queries for all samples": (lambda m, x: attend(m.place, x, x).relu()[:, 0], 2),
    "queries for all samples and heads": (lambda m, x: attend(heads(m.place), heads(x), heads(x))[:, :, 0], 1),
    "no mask, by name": (lambda m, x: attend(x, x, x, attn_mask=None, is_causal=False, scale=0.3)[:, 0], 1),
}


@pytest.mark.parametrize("name", MOVES)
def test_less_is_computed(name):
    function, num_fewer = MOVES[name]
    check(Of(function), num_fewer=num_fewer)


STAYS = {
    "of the batch": lambda m, x: m.first(x)[:2],
    "all samples but one": lambda m, x: m.first(x)[1:],
    "nothing that is computed": lambda m, x: x.transpose(1, 2)[:, 2:4, 1:3].unsqueeze(1)[:, :, :, 0],
    "all but the only one": lambda m, x: (x[:, :1] * 2)[:, 1:],
    "a bias for each row": lambda m, x: functional.linear(x, m.first.weight, m.place)[:, 1],
    "what looks back, by name": lambda m, x: _back(x),
    "what lies in memory so": lambda m, x: _windows(m.first(x).relu()[:, 1:]),
    "samples that look back": lambda m, x: _samples_back(x, m.place[:3].expand(5, 3, 8)),
    "somebody reads all": lambda m, x: (y := m.first(x))[:, 0] + y.sum(1),
    "it is a result too": lambda m, x: ((y := m.first(x)), y[:, 0]),
    "other rows": lambda m, x: (y := m.first(x))[:, 0] + y[:, 1],
    "no row at all": lambda m, x: m.first(x)[:, 2:2],
    "most rows": lambda m, x: m.first(x)[:, 1:],
    "all rows": lambda m, x: m.first(x)[:, 0:LENGTH],
    "sums over rows": lambda m, x: x.cumsum(1)[:, 2],
    "a softmax over rows": lambda m, x: torch.softmax(x, 1)[:, 2],
    "sums that vanish": lambda m, x: x.sum(2)[:, 1],
    "columns of a product": lambda m, x: m.first(x)[:, :, 3],
    "a norm over rows": lambda m, x: functional.layer_norm(x, (LENGTH, WIDTH))[:, 0],
    "samples and rows in one": lambda m, x: x.flatten(0, 1)[3],
    "what is changed later": lambda m, x: _changed(m.first(x)),
    "attention with a mask": lambda m, x: functional.scaled_dot_product_attention(x, x, x, attn_mask=m.mask)[:, 0],
    "what looks back, not from the end": lambda m, x: functional.scaled_dot_product_attention(
        x, x, x, is_causal=True
    )[:, -2],
}  # fmt: skip


def _windows(y):
    """Return windows that overlap."""
    batch, row, column = y.stride()
    return y.as_strided((y.shape[0], 2, 2, WIDTH), (batch, row * 2, row, column))


def _back(x):
    return torch.ops.aten.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 2]


def _samples_back(x, keys):
    return attend(x.transpose(0, 1), keys, keys, is_causal=True)[:, -1]


def _changed(made):
    rows = made[:, 0]
    rows.add_(1.0)
    return rows * 2


@pytest.mark.parametrize("name", STAYS)
def test_all_is_computed_where_it_must_be(name):
    program = check(Of(STAYS[name]))
    assert program.analysis.num_fewer == 0


def test_a_causal_one_with_other_keys_than_queries_stays():
    """Then the last query does not see all keys."""

    def function(m, x):
        return functional.scaled_dot_product_attention(x[:, :3], x, x, is_causal=True)[:, -1]

    assert check(Of(function)).analysis.num_fewer == 0


def test_the_example_may_be_one_sample():
    check(Of(MOVES["the first token of a block"][0]), batch=1, num_fewer=8)
    for name in ("of the batch", "all samples but one"):
        check(Of(STAYS[name]), batch=1, num_fewer=0)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_dimension_that_may_vanish_is_left_alone(batch):
    """With one sample squeeze() takes another dimension away, and the last is another one."""

    class Squeezing(nn.Linear):
        def forward(self, x):
            return super().forward(x).squeeze().relu().select(-1, 0)

    model = Squeezing(WIDTH, WIDTH).double()
    program = program_of(model, torch.randn(batch, 1, WIDTH, dtype=torch.float64))
    for size in (1, 3, 4):
        x = torch.randn(size, 1, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(run(program, x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_matrices_are_left_alone(kind):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("links", getattr(torch.randn(LENGTH, LENGTH, dtype=torch.float64).relu(), kind)())
            self.table = nn.Parameter(torch.randn(LENGTH, WIDTH, dtype=torch.float64))

        def forward(self, x):
            return x[:, 1] * torch.mm(self.links, self.table)[:3].sum(0)

    check(Sparse(), num_fewer=0)


def test_what_is_only_looked_at_stays_as_it_is():
    program = check(Of(STAYS["nothing that is computed"]))
    assert [node.target for node in program.analysis.nodes].count(torch.ops.aten.select.int) == 1
    names = [node.name for node in program.analysis.nodes]
    assert names[0] == "transpose", "the first is still the model's first"


def test_a_weight_that_is_a_part_of_another_is_still_a_product():
    class Parts(nn.Conv2d):
        def forward(self, x):
            return functional.conv2d(x, (self.weight * 2)[:2], None, 16)[:, :, 0]

    model = Parts(3, 8, 16).double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    program = program_of(model, images)
    with torch.no_grad():
        torch.testing.assert_close(run(program, images), model(images), rtol=1e-12, atol=1e-12)
    assert (program.analysis.num_products, program.analysis.num_fewer) == (1, 1)


def test_it_is_told():
    told = Graph(Of(MOVES["the first token of a block"][0]), torch.randn(2, LENGTH, WIDTH)).explain()
    assert "operations that compute only the rows that are used: 8" in told


def flops(call):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return counter.get_total_flops()


def test_the_work_of_a_head_is_for_one_row():
    model = Of(MOVES["a head for the last word"][0])
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    program = program_of(model, x)
    assert flops(lambda: model(x)) == LENGTH * flops(lambda: run(program, x))


class Last(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits[:, -1]


def test_the_last_word_of_a_language_model():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=100, hidden_size=16, intermediate_size=64, num_hidden_layers=2, bos_token_id=1,
                         num_attention_heads=2, max_position_embeddings=16)  # fmt: skip
    model = Last(LlamaForCausalLM(config)).double().eval()
    ids = torch.randint(0, 100, (2, 12))
    program = program_of(model, ids)
    with torch.no_grad():
        torch.testing.assert_close(run(program, ids), model(ids), rtol=1e-7, atol=1e-7)  # its norms are in float32
    assert flops(lambda: run(program, ids)) < 0.6 * flops(lambda: model(ids))


class Pooled(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images).last_hidden_state[:, 0]


def test_the_first_token_of_a_vision_model():
    torch.manual_seed(0)
    config = ViTConfig(image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                       intermediate_size=64)  # fmt: skip
    model = Pooled(ViTModel(config, add_pooling_layer=False)).double().eval()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    program = program_of(model, images)
    with torch.no_grad():
        torch.testing.assert_close(run(program, images), model(images), rtol=1e-11, atol=1e-11)
    assert program.analysis.num_fewer >= 5
    assert flops(lambda: run(program, images)) < 0.8 * flops(lambda: model(images))


# ---- whatever the model


def chance(seed):
    """Return a function made by chance, that reads some rows at its end."""
    draw = random.Random(seed)
    moves = [
        lambda m, x, o: m.first(x),
        lambda m, x, o: m.norm(x),
        lambda m, x, o: x + o,
        lambda m, x, o: x * m.place,
        lambda m, x, o: functional.gelu(x),
        lambda m, x, o: m.block(x),
        lambda m, x, o: m.causal(x),
        lambda m, x, o: torch.softmax(x, -1),
        lambda m, x, o: torch.softmax(x, 1),
        lambda m, x, o: x - x.mean(1, keepdim=True),
        lambda m, x, o: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1.0),
        lambda m, x, o: torch.where(x > o, x, o),
        lambda m, x, o: x.cumsum(1) * 0.1,
        lambda m, x, o: x.transpose(0, 1).tanh().transpose(0, 1),
        lambda m, x, o: x.flip(1),
        lambda m, x, o: attention(m, x),
        lambda m, x, o: x + o[:, draw_row : draw_row + 1],
        lambda m, x, o: x.unsqueeze(1).squeeze(1),
        lambda m, x, o: x.unflatten(2, (2, -1)).transpose(1, 2).sin().transpose(1, 2).flatten(2),
    ]
    draw_row = draw.randrange(LENGTH)
    chosen = [draw.choice(moves) for _ in range(draw.randint(1, 7))]
    olds = [draw.randint(0, 3) for _ in chosen]
    row, other = draw.randrange(-LENGTH, LENGTH), draw.randrange(LENGTH)
    ends = [
        lambda x, o: x[:, row],
        lambda x, o: x[:, min(row % LENGTH, other) : other + 1],
        lambda x, o: x[:, row] + o[:, row],
        lambda x, o: x[:, row] + x[:, other],
        lambda x, o: x.transpose(1, 2)[:, :, row],
        lambda x, o: x[:, ::3].exp()[:, 0],
        lambda x, o: x[:2, row],
        lambda x, o: x[:, -2:, 1:3],
    ]
    end = draw.choice(ends)

    def function(m, x):
        seen = [x]
        for move, old in zip(chosen, olds, strict=True):
            seen.append(move(m, seen[-1], seen[-1 - old % len(seen)]))
        return end(seen[-1], seen[len(seen) // 2])

    return function


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(4))
def test_models_made_by_chance(part):
    moved = 0
    for seed in range(15):
        program = check(Of(chance(100 * part + seed)))
        moved += program.analysis.num_fewer > 0
    assert moved >= 5


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "name", ["the first token of a block", "the last of a block that looks back", "by a norm and a head"]
)
def test_as_a_cuda_graph(name):
    function, num_fewer = MOVES[name]
    model = Of(function).double().eval().cuda()
    graph = Graph(model, torch.randn(3, LENGTH, WIDTH, dtype=torch.float64, device="cuda"))
    assert f"only the rows that are used: {num_fewer}" in graph.explain()
    for size in (3, 1, 4):
        for _ in range(3):
            x = torch.randn(size, LENGTH, WIDTH, dtype=torch.float64, device="cuda")
            with torch.no_grad():
                torch.testing.assert_close(graph(x), model(x), rtol=1e-11, atol=1e-11)
    assert graph.obstacle == ""
