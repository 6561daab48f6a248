"""Packed images: the patches of all images one behind the other, cut by their grid without an option."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import penstock
from penstock.errors import UsageError
from penstock.pipeline.splitting.batch_splits import found_split
from pipelines import differences
from runtime_everywhere import everywhere

WIDTH, TOKEN = 6, 8


class Config:
    image_token_id = TOKEN


class Reader(nn.Module):
    """Words and images as Qwen2-VL takes them: each image token in the text stands for one patch."""

    config = Config()

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.embed = nn.Embedding(9, WIDTH), nn.Linear(4, WIDTH)
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, input_ids, pixel_values, image_grid_thw):
        assert len(pixel_values) == int(image_grid_thw.prod(-1).sum())
        hidden = self.words(input_ids)
        seen = torch.tanh(self.embed(pixel_values))
        hidden = hidden.masked_scatter((input_ids == TOKEN)[..., None], seen)
        return self.head(torch.tanh(self.inner(hidden)).mean(1))


def batch(grids):
    """Return a batch of texts, each with images of these sizes."""
    torch.manual_seed(1)
    rows = []
    for images in grids:
        count = sum(h * w for h, w in images)
        rows.append(torch.cat([torch.randint(8, (3,)), torch.full((count,), TOKEN), torch.randint(8, (12 - count,))]))
    sizes = torch.tensor([(1, h, w) for images in grids for h, w in images]).reshape(-1, 3)
    return {
        "input_ids": torch.stack(rows),
        "pixel_values": torch.randn(int(sizes.prod(-1).sum()), 4).double(),
        "image_grid_thw": sizes,
    }


ONE_EACH = [[(2, 2)], [(1, 3)], [(2, 3)], [(1, 1)], [(2, 2)], [(1, 2)]]
SOME = [[(2, 2), (1, 3)], [], [(2, 3)], [(1, 1), (1, 1), (2, 2)], [(2, 2)], []]


@everywhere
def test_images_are_cut_with_their_texts():
    """Such a batch was refused: every micro-batch would have got the patches of all images."""
    for grids in (ONE_EACH, SOME):
        model, given, target = Reader(), batch(grids), torch.tensor([0, 1, 2, 0, -100, 1])
        plain = copy.deepcopy(model)
        wanted = F.cross_entropy(plain(**given), target)
        wanted.backward()
        with penstock.Pipeline(
            model, example=given, loss=F.cross_entropy, lanes=2, micro_batches=3, timeout=60
        ) as pipe:
            loss = pipe.step(given, target)
            gradients = {name: p.grad for name, p in plain.named_parameters()}
            assert not list(differences(pipe, loss, (wanted.detach(), gradients)))


def test_how_many_images_a_text_has_follows_from_its_tokens():
    split = found_split(batch(SOME), Reader())
    pieces = [piece for piece, _ in split(batch(SOME), None, 3)]
    assert [len(piece["image_grid_thw"]) for piece in pieces] == [2, 4, 1]
    assert [len(piece["pixel_values"]) for piece in pieces] == [7, 12, 4]


def test_explain_says_how_images_are_cut():
    given = batch(ONE_EACH)
    with penstock.Pipeline(Reader(), example=given, loss=F.cross_entropy, lanes=2, micro_batches=3) as pipe:
        assert "packed images: cut pixel_values by the images in image_grid_thw" in str(pipe.explain())


def test_what_belongs_to_an_image_goes_with_it():
    """Every micro-batch got the numbers of all videos, and took the first of them."""
    given = batch(SOME)
    given["video_grid_thw"] = given.pop("image_grid_thw")
    given["pixel_values_videos"] = given.pop("pixel_values")
    given["second_per_grid_ts"] = [float(number) for number in range(7)]
    given["position_ids"] = torch.arange(3 * 6 * 15).view(3, 6, 15)
    model = Reader()
    model.config = type("Config", (), {"video_token_id": TOKEN})()
    pieces = [piece for piece, _ in found_split(given, model)(given, None, 3)]
    assert [piece["second_per_grid_ts"] for piece in pieces] == [[0.0, 1.0], [2.0, 3.0, 4.0, 5.0], [6.0]]
    assert all(piece["position_ids"].shape == (3, 2, 15) for piece in pieces)


def test_later_batches_that_are_not_like_the_example():
    """A batch of texts alone was a KeyError, and images that nobody can deal out went to all micro-batches whole."""
    split = found_split(batch(SOME), Reader())
    texts = [piece for piece, _ in split({"input_ids": torch.zeros(6, 4).long(), "image_grid_thw": None}, None, 3)]
    assert [tuple(piece["input_ids"].shape) for piece in texts] == [(2, 4)] * 3
    strange = batch(SOME) | {"input_ids": torch.zeros(6, 4).long()}
    with pytest.raises(UsageError, match=r"7 images for 6 samples.*split="):
        split(strange, None, 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda given: given.pop("image_grid_thw"),
        lambda given: given.update(pixel_values=given["pixel_values"][1:]),
        lambda given: given.update(input_ids=given["input_ids"][:, :4]),
        lambda given: given.update({3: 4}),
    ],
    ids=["no grid", "patches that are not those of the grid", "tokens that do not come out even", "no names"],
)
def test_what_is_not_known_is_not_cut(change):
    given = batch(SOME)
    change(given)
    assert found_split(given, Reader()) is None
