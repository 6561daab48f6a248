"""Batches that are no plain stacks, split by a function of the user's own; and `pipe.check`."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import penstock
from penstock.errors import UsageError
from pipelines import differences, expected
from runtime_everywhere import everywhere, pipeline

WIDTH = 6


class Patches(nn.Module):
    """Images as patches, one behind the other, and how many each has, as Qwen2-VL takes them; and one label each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.words = nn.Linear(4, WIDTH), nn.Embedding(9, WIDTH)
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, ids, patches, counts):
        image = torch.repeat_interleave(torch.arange(len(ids)), counts)
        seen = torch.zeros(len(ids), WIDTH, dtype=patches.dtype).index_add(0, image, torch.tanh(self.embed(patches)))
        hidden = self.words(ids).mean(1) + seen / counts[:, None]
        return self.head(torch.tanh(self.inner(hidden)))


def images(counts=(3, 1, 4, 2, 5, 1, 2)):
    torch.manual_seed(1)
    counts = torch.tensor(counts)
    return {
        "ids": torch.randint(9, (len(counts), 5)),
        "patches": torch.randn(int(counts.sum()), 4).double(),
        "counts": counts,
    }


def by_images(batch, target, count):
    """Return the images in as many groups, each with its patches."""
    groups = torch.arange(len(batch["ids"])).chunk(count)
    patches = batch["patches"].split(batch["counts"].tolist())
    return [
        (
            {
                "ids": batch["ids"][rows],
                "patches": torch.cat([patches[row] for row in rows]),
                "counts": batch["counts"][rows],
            },
            None if target is None else target[rows],
        )
        for rows in groups
    ]


def test_without_split_such_a_batch_is_refused():
    """Patches have no batch dimension, so that every micro-batch got those of all images."""
    with pytest.raises(UsageError, match="split="):
        penstock.Pipeline(Patches(), example=images(), loss=F.cross_entropy, lanes=2, micro_batches=3)


class Called(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model(**batch)


@everywhere
def test_patches_of_images():
    model, target = Patches(), torch.tensor([0, 1, 2, -100, 1, -100, 0])
    loss, gradients = expected(Called(model), images(), target, F.cross_entropy)
    wanted = loss, {name.removeprefix("model."): gradient for name, gradient in gradients.items()}
    with penstock.Pipeline(
        model, example=images(), loss=F.cross_entropy, micro_batches=3, split=by_images, lanes=2, cuts=["inner"]
    ) as pipe:
        for _ in range(2):
            pipe.zero_grad()
            assert not list(differences(pipe, pipe.step(images(), target), wanted))
        other = images((1, 6, 2, 2))
        torch.testing.assert_close(
            pipe.evaluate(other, target[:4]), F.cross_entropy(model(**other), target[:4]).detach()
        )
        torch.testing.assert_close(pipe.forward(other), model(**other).detach())


class Bags(nn.Module):
    """Packed sequences with offsets."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.inner, self.head = nn.EmbeddingBag(20, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.double()

    def forward(self, offsets, words):
        return self.head(torch.tanh(self.inner(self.bag(words, offsets))))


def test_packed_sequences_with_offsets():
    model = Bags()
    words, offsets = torch.randint(20, (24,)), torch.tensor([0, 3, 4, 9, 15, 20])

    def split(batch, target, count):
        offsets, words = batch
        starts = [*offsets.tolist(), len(words)]
        pieces = []
        for rows in torch.arange(len(offsets)).chunk(count):
            first, last = int(rows[0]), int(rows[-1]) + 1
            piece = (offsets[first:last] - starts[first], words[starts[first] : starts[last]])
            pieces.append((piece, None if target is None else target[first:last]))
        return pieces

    target = torch.randn(6, 2).double()

    def loss(output, target):  # one of the user's own, which is looked at
        return (output - target).square().mean()

    plain = copy.deepcopy(model)
    wanted = loss(plain(offsets, words), target)
    wanted.backward()
    with penstock.Pipeline(model, example=(offsets, words), loss=loss, micro_batches=3, split=split, lanes=2) as pipe:
        torch.testing.assert_close(pipe.step((offsets, words), target), wanted.detach())
        assert pipe.check((offsets, words), target).is_exact
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)


class Packed(nn.Module):
    """Tokens of sequences of several lengths, one behind the other, and where each sequence begins and ends."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.double()

    def forward(self, tokens, ends):
        of = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff())
        hidden = torch.tanh(self.inner(torch.relu(self.embed(tokens))))
        return self.head(hidden.new_zeros(len(ends) - 1, 8).index_add(0, of, hidden))


def by_sequences(batch, target, count):
    ends, pieces = batch["ends"], []
    for rows in torch.arange(len(ends) - 1).chunk(count):
        first, last = int(rows[0]), int(rows[-1]) + 1
        own = {"tokens": batch["tokens"][ends[first] : ends[last]], "ends": ends[first : last + 1] - ends[first]}
        pieces.append(({name: own[name] for name in batch}, None if target is None else target[first:last]))
    return pieces


def own_loss(output, target):
    return (output - target).square().mean()


@pytest.mark.parametrize("names", [("tokens", "ends"), ("ends", "tokens")], ids=" first, then ".join)
@pytest.mark.parametrize("lengths", [(3, 1, 4, 2, 5, 2, 2), (3, 1, 4, 2, 5, 2, 2, 6)], ids=len)
@pytest.mark.parametrize(
    ("loss", "options"), [(nn.MSELoss(), {}), (own_loss, {}), (nn.MSELoss(), {"loss_over": "batch"})]
)
def test_a_mean_over_sequences_of_packed_tokens(loss, lengths, names, options):
    """Micro-batches were weighed by the rows of the first argument: tokens, or ends of which there is one more."""
    model = Packed()
    ends = torch.tensor([0, *lengths]).cumsum(0)
    whole = {"tokens": torch.randn(int(ends[-1]), 4).double(), "ends": ends}
    batch, target = {name: whole[name] for name in names}, torch.randn(len(lengths), 2).double()
    plain = copy.deepcopy(model)
    wanted = loss(plain(**batch), target)
    wanted.backward()
    with penstock.Pipeline(
        model, example=batch, loss=loss, micro_batches=4, split=by_sequences, lanes=2, **options
    ) as pipe:
        torch.testing.assert_close(pipe.step(batch, target), wanted.detach())
        torch.testing.assert_close(pipe.forward(batch), plain(**batch).detach())  # those of the first alone, once
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)


def test_a_loss_that_couples_packed_sequences_is_refused():
    batch = {"tokens": torch.randn(19, 4).double(), "ends": torch.tensor([0, 3, 4, 8, 10, 15, 17, 19])}

    def loss(output, target):
        return (output - target).square().mean().sqrt()

    with (
        penstock.Pipeline(Packed(), example=batch, loss=loss, micro_batches=4, split=by_sequences, lanes=2) as pipe,
        pytest.raises(UsageError, match="couples samples"),
    ):
        pipe.step(batch, torch.randn(7, 2).double())


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (lambda batch, target, count: batch, "split: must return a list of"),
        (lambda batch, target, count: [batch], "split: must return \\(batch, target\\) pairs"),
        (lambda batch, target, count: [], "split: must return a list"),
        (lambda batch, target, count: [(batch, target)] * (count + 1), "but at most 3 are allowed"),
        (lambda batch, target, count: [(batch, target)] * 2, "returns 14 rows for its micro-batches together, but 7"),
        (
            lambda batch, target, count: by_images(batch, target, count)[::-1],
            "do not compute the same result as the whole batch",
        ),
    ],
)
def test_splits_that_cannot_be(split, message):
    with pytest.raises(UsageError, match=message):
        penstock.Pipeline(Patches(), example=images(), loss=F.cross_entropy, lanes=2, micro_batches=3, split=split)


# ---- pipe.check


@everywhere
def test_a_check_on_demand():
    """It compares every gradient, prints what differs most, and leaves everything as it was."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5)
    ).double()
    torch.manual_seed(1)
    batch, target = torch.randn(10, WIDTH).double(), torch.randint(5, (10,))
    target[:5] = -100
    for loss, exact in ((F.cross_entropy, True), (lambda o, t: F.cross_entropy(o, t).sqrt(), False)):
        with pipeline(model, batch, loss=loss, check=False, weight=lambda b, t: (t != -100).sum()) as pipe:
            pipe.step(batch, target)
            before = {name: p.grad.clone() for name, p in pipe.named_parameters()}
            buffers = {name: value.clone() for name, value in pipe.state_dict().items()}
            state = torch.get_rng_state()
            found = pipe.check(batch, target)
            assert found.is_exact is exact, str(found)
            assert len(found.differences) == 8
            assert ("NOT EXACT" in str(found)) is not exact
            assert torch.equal(torch.get_rng_state(), state)
            assert all(torch.equal(p.grad, before[name]) for name, p in pipe.named_parameters())
            assert all(torch.equal(value, buffers[name]) for name, value in pipe.state_dict().items())
            pipe.zero_grad()
