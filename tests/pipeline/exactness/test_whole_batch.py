"""The loss of micro-batches is the loss of the whole batch, with no option set, or the pipeline is refused.

Each case was once silently wrong, by the share of the gradient that its comment says.
"""

import copy
import functools

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import UsageError


def mlp(outputs=5):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.0), nn.Tanh(), nn.Linear(8, outputs)
    ).double()


def called(model, batch):
    return model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch)


def compare(model, batch, target, loss, **options):
    """Run a step, and compare loss and gradients with the plain model's."""
    plain = copy.deepcopy(model)
    output = called(plain, batch)
    expected = output.loss if loss is None else loss(output, *target)
    expected.backward()
    with penstock.Pipeline(model, example=batch, loss=loss, micro_batches=4, lanes=2, **options) as pipe:
        assert pipe.step(batch, *target).item() == pytest.approx(expected.item(), rel=1e-6)
        assert pipe.evaluate(batch, *target).isfinite()
    largest = max(p.grad.abs().max() for p in plain.parameters() if p.grad is not None)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        if one.grad is not None:
            assert (one.grad - other.grad).abs().max() <= 1e-9 * largest


def features(rows=9):
    torch.manual_seed(1)
    return torch.randn(rows, 6).double()


def classes(*, ignored=()):
    torch.manual_seed(2)
    target = torch.randint(5, (9,))
    target[list(ignored)] = -100
    return target


RARE = torch.tensor([0.2, 0.03, 0.9, 0.9, 0.01]).double()


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=RARE),  # 30 %
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=RARE, label_smoothing=0.1),
        nn.CrossEntropyLoss(reduction="sum"),  # 75 %
        nn.functional.cross_entropy,
        functools.partial(nn.functional.cross_entropy, weight=RARE),
        lambda output, target: nn.functional.nll_loss(output.log_softmax(1), target),
        lambda output, target: nn.functional.cross_entropy(output, target, reduction="sum"),
    ],
)
def test_classes_of_which_some_are_ignored(loss):
    compare(mlp(), features(), (classes(ignored=[0, 1, 2, 5]),), loss)


@pytest.mark.parametrize(
    "name", ["MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCEWithLogitsLoss", "SoftMarginLoss"]
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_of_torch_with_their_reductions(name, reduction):
    compare(mlp(), features(), (torch.rand(9, 5).double(),), getattr(nn, name)(reduction=reduction))


def test_probabilities_as_targets_count_by_samples():
    compare(mlp(), features(), (torch.rand(9, 5).double().softmax(1),), nn.CrossEntropyLoss(weight=RARE))


def contrast(output, target):
    output = nn.functional.normalize(output, dim=1)
    return nn.functional.cross_entropy(output @ output.T * 3, torch.arange(len(output)))


@pytest.mark.parametrize(
    "loss",
    [
        contrast,  # 100 %
        lambda output, target: (output - target).square().mean().sqrt(),  # 16 %
        lambda output, target: ((output - target).square() * (target > 0)).sum() / (target > 0).sum(),  # 25 %
        lambda output, target: (output - target).std(),  # 9 %
    ],
)
def test_losses_that_couple_samples_are_refused(loss):
    with (
        penstock.Pipeline(mlp(), example=features(), loss=loss, micro_batches=4, lanes=2) as pipe,
        pytest.raises(UsageError, match="couples samples"),
    ):
        pipe.step(features(), torch.randn(9, 5).double())


def test_a_check_that_is_off_refuses_nothing():
    with penstock.Pipeline(mlp(), example=features(), loss=contrast, micro_batches=4, lanes=2, check=False) as pipe:
        assert pipe.step(features(), torch.randn(9, 5).double()).isfinite()


def test_one_micro_batch_takes_every_loss():
    with penstock.Pipeline(mlp(), example=features(), loss=contrast, micro_batches=1, lanes=2) as pipe:
        expected = contrast(mlp()(features()), None)
        assert pipe.step(features(), torch.randn(9, 5).double()).item() == pytest.approx(expected.item(), rel=1e-12)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.LSTM(6, 8), nn.LSTM(8, 8), nn.Linear(8, 3)

    def forward(self, values):
        return self.head(self.second(self.first(values)[0])[0])


def test_a_batch_on_dimension_1_was_cut_along_time():
    """The default of nn.LSTM and nn.TransformerEncoder: 10 % and 25 % off without a word."""
    torch.manual_seed(0)
    values = torch.randn(7, 8, 6).double()
    with pytest.raises(UsageError, match="batch_dim="):
        penstock.Pipeline(Recurrent().double(), example=values, loss=nn.MSELoss(), micro_batches=4, lanes=2)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(6, 3)

    def forward(self, values):
        return self.head(self.encoder(values))


@pytest.mark.parametrize(("make", "path"), [(Recurrent, "replay"), (Encoder, "export"), (Encoder, "replay")])
def test_a_batch_on_dimension_1(make, path):
    torch.manual_seed(0)
    values, target = torch.randn(7, 8, 6).double(), torch.randn(7, 8, 3).double()
    model = make().double()
    compare(model, values, (target,), nn.MSELoss(), batch_dim=1, capture_path=path)
    options = {"micro_batches": 4, "lanes": 2, "capture_path": path, "batch_dim": {"values": 1}}
    with penstock.Pipeline(model, example={"values": values}, **options) as pipe:
        torch.testing.assert_close(pipe.forward({"values": values}), model(values).detach())


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(20, 8), nn.Embedding(8, 8)
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, ids, position_ids):
        hidden = self.tokens(ids) + self.positions(position_ids)
        return self.head(torch.tanh(self.inner(hidden))).transpose(1, 2)


def test_an_argument_that_happens_to_have_as_many_rows_as_the_batch():
    torch.manual_seed(0)
    ids = torch.randint(20, (8, 8))
    batch = {"ids": ids, "position_ids": torch.arange(8)}
    with pytest.raises(UsageError, match=r"whole=\['position_ids'\] makes it exact"):
        penstock.Pipeline(Positions().double(), example=batch, loss=nn.CrossEntropyLoss(), micro_batches=4, lanes=2)
    compare(Positions().double(), batch, (ids,), nn.CrossEntropyLoss(), whole=["position_ids"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_dim": -1}, "batch_dim"),
        ({"batch_dim": {"nothing": 1}}, "'nothing' is not an argument"),
        ({"whole": "input"}, "whole: pass a list"),
        ({"whole": ["nothing"]}, "'nothing' is not an argument"),
        ({"whole": ["input"]}, "no tensor with a batch dimension"),
    ],
)
def test_layouts_that_cannot_be(options, message):
    with pytest.raises(UsageError, match=message):
        penstock.Pipeline(mlp(), example=features(), loss=nn.MSELoss(), lanes=2, **options)


def padded_labels(ids):
    labels = ids.clone()
    labels[0, 3:], labels[1, :9], labels[5, 1:] = -100, -100, -100
    return labels


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration"])
def test_padded_labels_of_transformers_models(name):
    """Every fine-tuning: 10 % off; causal models leave out the first label of each row too."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = {
        "LlamaForCausalLM": transformers.LlamaConfig(
            vocab_size=99, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
        ),
        "BertForMaskedLM": transformers.BertConfig(
            vocab_size=99, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
            hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        ),
        "T5ForConditionalGeneration": transformers.T5Config(
            vocab_size=99, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0,
            decoder_start_token_id=0,
        ),
    }[name]  # fmt: skip
    ids = torch.randint(90, (8, 12))
    compare(
        getattr(transformers, name)(config).double().train(), {"input_ids": ids, "labels": padded_labels(ids)}, (), None
    )


def test_the_check_leaves_no_trace():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 5))
    batch, before = torch.randn(9, 6), copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    with penstock.Pipeline(model, example=batch, loss=nn.MSELoss(), lanes=2, cuts=[2], micro_batches=3):
        assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


class Patches(nn.Module):
    """Words with pictures whose patches stand in one long list, as in Qwen2-VL; returns its own loss."""

    def __init__(self):
        super().__init__()
        self.words, self.patches = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, words, patches):
        seen = self.patches(patches).view(words.shape[0], -1, 4).mean(1)
        return ((self.words(words) + seen * torch.arange(words.shape[0])[:, None]) ** 2).mean()


def test_a_batch_that_is_no_plain_stack_is_refused_when_the_pipeline_is_made():
    """Every micro-batch got the patches of all samples, and the first step failed in a lane with torch's own error."""
    words, patches = torch.randn(7, 4), torch.randn(7 * 3, 4)
    with pytest.raises(UsageError, match="would not compute the same result as the whole batch: the example cut to 5"):
        penstock.Pipeline(Patches(), example={"words": words, "patches": patches}, lanes=2, micro_batches=3)


@pytest.mark.parametrize("ignored", [-1, 5, 255])
def test_a_label_of_no_class_that_a_function_of_ones_own_leaves_out(ignored):
    """The weights of the classes were asked for the weight of label 255: a raw IndexError."""
    target = classes().where(torch.arange(9) % 3 != 0, ignored)

    def loss(output, target):
        return nn.functional.cross_entropy(output, target, weight=RARE, ignore_index=ignored)

    compare(mlp(), features(), (target,), loss)


class SmallTerm(nn.Module):
    """A model that adds a term to its loss which couples samples, and is lost in the rounding of the loss."""

    def __init__(self, share):
        super().__init__()
        self.body, self.share = mlp(1), share
        self.gate = nn.Linear(6, 4).double()

    def forward(self, x, labels):
        balance = self.gate(x).softmax(-1).mean(0).square().sum()
        return {"loss": (self.body(x).squeeze(1) - labels).square().mean() + self.share * balance}


@pytest.mark.parametrize("share", [1e-2, 1e-6])
def test_a_small_term_that_couples_samples_is_refused(share):
    """Its gradients were wrong, and the loss was the same but for rounding."""
    batch = {"x": features(), "labels": torch.randn(9).double()}
    with pytest.raises(UsageError, match="couples samples"):
        penstock.Pipeline(SmallTerm(share), example=batch, micro_batches=4, lanes=2)
    with penstock.Pipeline(SmallTerm(0.0), example=batch, micro_batches=4, lanes=2) as pipe:
        torch.testing.assert_close(pipe.step(batch), SmallTerm(0.0)(**batch)["loss"].detach())


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:some nodes cannot be measured alone")  # the router's
@pytest.mark.parametrize("coefficient", [0.001, 0.02, 0.0])
def test_the_load_balancing_loss_of_experts(coefficient):
    """Mixtral's own coefficient is 0.001: 1e-6 of the loss, and 12 % of the router's gradient."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=coefficient,
        )
    )  # fmt: skip
    ids = torch.randint(1, 50, (8, 9))
    batch = {"input_ids": ids, "labels": ids}
    if coefficient:
        with pytest.raises(UsageError, match="router's auxiliary loss"):
            penstock.Pipeline(model, example=batch, micro_batches=4, lanes=2)
        with pytest.warns(UserWarning, match="only one micro-batch"):
            penstock.Pipeline(model, example=batch, lanes=2, cuts=["model.layers.1"]).close()
    else:
        penstock.Pipeline(model, example=batch, micro_batches=4, lanes=2, cuts=["model.layers.1"]).close()
