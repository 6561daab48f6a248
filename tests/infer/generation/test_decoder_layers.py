"""The layers of a model are found, and divided between lanes."""

import itertools

import pytest
import torch

from infer.generation import language_models as models
from penstock.errors import UsageError
from penstock.infer.generation.decoder_layers import choose_ranges, find_layers, split_evenly

NAMES = {
    "llama": "model.layers", "gpt2": "transformer.h", "bloom": "transformer.h", "opt": "model.decoder.layers",
    "t5": "decoder.block", "bart": "model.decoder.layers",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_list_of_decoder_layers_is_found(name):
    model = models.make(name)
    found, layers = find_layers(model)
    assert found == NAMES[name]
    assert model.get_submodule(found) is layers
    assert len(layers) == 4


def test_a_model_with_two_lists_is_refused():
    model = models.make("llama")
    model.model.more = torch.nn.ModuleList(model.model.layers)
    with pytest.raises(UsageError, match="lengths of its lists: 4, 4"):
        find_layers(model)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_largest_lane_is_as_small_as_possible(count):
    for sizes in itertools.product([1, 2, 5], repeat=5):
        ranges = split_evenly(sizes, count)
        assert [at for part in ranges for at in part] == list(range(5))
        assert all(ranges)
        cuts = itertools.combinations(range(1, 5), count - 1)
        best = min(max(sum(sizes[a:b]) for a, b in itertools.pairwise((0, *cut, 5))) for cut in cuts)
        assert max(sum(sizes[at] for at in part) for part in ranges) == best


def test_the_head_counts_for_the_last_lane():
    model = models.make("gpt2")
    model.resize_token_embeddings(4000)
    _, layers = find_layers(model)
    assert choose_ranges(model, layers, 2) == [range(3), range(3, 4)]
