"""Batches whose shapes change from step to step: loss and gradients are the plain model's."""

import copy
import warnings

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import PenstockError, UsageError
from penstock.model.capture import exported
from processes import finish, start

WIDTH, BATCH = 8, 6
LENGTHS = (12, 9, 17, 12, 9)


class Words(nn.Module):
    """Embeddings with positions, causal attention and a head: the length is read off the batch."""

    def __init__(self, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(20, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 20)
        self.double()

    def forward(self, words, mask):
        length = words.shape[1]
        x = self.words(words) + self.places(torch.arange(length, device=words.device))
        hidden = torch.ones(length, length, device=x.device, dtype=torch.bool).tril() & mask[:, None]
        for layer in self.layers:
            scores = (layer(x) @ x.transpose(1, 2)).masked_fill(~hidden, -1e9)
            x = x + scores.softmax(-1) @ x / length
        return self.head(x)


class Windows(Words):
    """Pads the sequence to whole windows, if it must."""

    def forward(self, words, mask):
        missing = -words.shape[1] % 4
        if missing:
            words, mask = (nn.functional.pad(x, (0, missing)) for x in (words, mask))
        out = super().forward(words, mask)
        return out[:, :-missing] if missing else out


class Steps(Words):
    """Goes through the sequence by hand: another length is another trace."""

    def forward(self, words, mask):
        x = self.words(words) * mask[..., None]
        state = x[:, 0]
        for step in range(words.shape[1]):
            state = torch.tanh(self.layers[0](state) + x[:, step])
        return self.head(torch.tanh(self.layers[2](self.layers[1](state))))


def data(length, seed=0):
    generator = torch.Generator().manual_seed(seed + length)
    words = torch.randint(1, 20, (BATCH, length), generator=generator)
    mask = torch.arange(length) < length - torch.arange(BATCH)[:, None] % 3
    return {"words": words, "mask": mask}


def loss(out, target):
    return (out.flatten(1) ** 2).mean(1) @ target / target.shape[0]


TARGET = torch.linspace(0.5, 2, BATCH, dtype=torch.float64)


def pipeline(model, **options):
    return penstock.Pipeline(
        model, example=data(12), loss=loss, **({"lanes": 2, "micro_batches": 3, "timeout": 60} | options)
    )


def check_step(pipe, model, batch):
    plain = copy.deepcopy(model)
    plain.zero_grad()
    model.zero_grad()
    expected = loss(plain(**batch), TARGET)
    expected.backward()
    torch.testing.assert_close(pipe.step(batch, TARGET), expected.detach())
    for (name, own), parameter in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, parameter.grad, msg=name)


@pytest.fixture
def traced(monkeypatch):
    """The lengths that torch.export was asked for."""
    lengths, trace = [], exported.trace

    def counted(model, call, *more):
        lengths.append(call.tensors[0].shape[1])
        return trace(model, call, *more)

    monkeypatch.setattr(exported, "trace", counted)
    return lengths


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "chimera"])
def test_lengths_that_change_are_traced_once_and_left_open(schedule, traced):
    """A batch of another length was refused: "the batch is not like the example that was captured"."""
    model = Words()
    before = list(model.parameters())
    options = {"schedule": schedule, "micro_batches": 4}
    with pipeline(model, capture_path="export", **options) as pipe:
        for length in LENGTHS:
            check_step(pipe, model, data(length))
        plain = copy.deepcopy(model).eval()
        for length in (20, 5, 12):  # longer than in training, and shorter
            torch.testing.assert_close(
                pipe.evaluate(data(length), TARGET), loss(plain(**data(length)), TARGET).detach()
            )
            torch.testing.assert_close(pipe(data(length)), plain(**data(length)))
        check_step(pipe, model, data(11))
    assert traced == [12, 9, 9, 12]  # training of both forms, then evaluation of both
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))


def test_a_length_for_which_forward_does_other_things_is_traced_for_itself(traced):
    """A trace with an open length holds only where the comparisons in forward come out as they did."""
    model = Windows()
    with pipeline(model, capture_path="export") as pipe, warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (12, 9, 8, 16, 10, 13):
            check_step(pipe, model, data(length))
    assert traced == [12, 9, 8]


def test_a_length_that_export_cannot_leave_open_is_replayed_and_said_once():
    model = Steps()
    with pipeline(model, capture_path="export") as pipe:
        check_step(pipe, model, data(12))
        with pytest.warns(UserWarning, match="such batches run by replay"):
            check_step(pipe, model, data(9))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for length in (17, 12, 9):
                check_step(pipe, model, data(length))


def test_a_sequence_of_one_is_not_run_by_a_trace_of_many():
    """torch takes an open dimension to be larger than one: there it would broadcast."""
    model = Words()
    with pipeline(model, capture_path="export") as pipe:
        check_step(pipe, model, data(9))
        with pytest.warns(UserWarning, match="by replay"):
            check_step(pipe, model, data(1))
        check_step(pipe, model, data(9))


def test_what_the_plain_model_does_not_take_fails_as_it_does():
    """More words than there are places: the model's own error, and the pipeline goes on."""
    model = Words()
    with pipeline(model, capture_path="export") as pipe:
        with pytest.raises(PenstockError, match="index out of range"):
            pipe.step(data(70), TARGET)
        check_step(pipe, model, data(12))
        with pytest.raises(UsageError, match="it lacks mask"):
            pipe.step({"words": data(12)["words"]}, TARGET)


@pytest.mark.full
@pytest.mark.parametrize("options", [{"keep": "recompute"}, {"keep": "offload"}])
def test_lengths_change_with_other_options(options):
    model = Words()
    with pipeline(model, capture_path="export", **options) as pipe:
        for length in (12, 9, 17):
            check_step(pipe, model, data(length))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.filterwarnings("ignore:.*loss_type")
def test_lengths_of_models_of_transformers_change(name):
    """Every collator of transformers pads to the longest sequence of the batch."""
    pytest.importorskip("transformers")
    from penstock.model.small_models.named_models import load

    model = load(name)[0].double()
    for module in (*model.modules(), model.config):
        for key, value in vars(module).items():
            if isinstance(value, float) and ("drop" in key or isinstance(module, nn.Dropout)):
                setattr(module, key, 0.0)
    model.train()

    def batch(length):
        words = torch.randint(5, 90, (BATCH, length), generator=torch.Generator().manual_seed(length))
        mask = (torch.arange(length) < length - torch.arange(BATCH)[:, None] % 3).long()
        return {"input_ids": words, "attention_mask": mask, "labels": words.where(mask > 0, -100)}

    with penstock.Pipeline(model, example=batch(12), lanes=2, timeout=60) as pipe:
        assert pipe.internals.captured.path == "export"
        for length in (12, 9, 17):
            model.zero_grad()
            expected = model(**batch(length)).loss
            expected.backward()
            gradients = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            torch.testing.assert_close(pipe.step(batch(length)).double(), expected.detach().double(), rtol=1e-6, atol=0)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)
        with torch.no_grad():
            expected = model.eval()(**batch(21)).loss
        torch.testing.assert_close(pipe.evaluate(batch(21)).double(), expected.double(), rtol=1e-6, atol=0)


def test_lengths_change_in_processes():
    results = finish(start(in_process, 2))
    assert results[0] == results[1]


def in_process():
    model = Words()
    losses, gradients = [], {}
    with pipeline(model, capture_path="export") as pipe:
        for length in (12, 9, 17):
            model.zero_grad()
            losses.append(float(pipe.step(data(length), TARGET)))
            gradients = {name: p.grad.clone() for name, p in pipe.named_parameters()}
        losses.append(float(pipe.evaluate(data(21), TARGET)))
    plain = Words()
    for length, own in zip((12, 9, 17), losses, strict=False):
        plain.zero_grad()
        expected = loss(plain(**data(length)), TARGET)
        expected.backward()
        assert abs(own - float(expected)) < 1e-12
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, dict(plain.named_parameters())[name].grad, msg=name)
    assert abs(losses[-1] - float(loss(plain(**data(21)), TARGET))) < 1e-12
    return losses


@pytest.mark.filterwarnings("ignore:.*loss_type")
def test_a_cache_that_is_left_out_is_told_once():
    """`use_cache=True`, the default of every decoder of transformers, returned no cache without a word."""
    pytest.importorskip("transformers")
    from penstock.model.small_models.named_models import load

    model, example = load("gpt2", batch_size=4)
    model.config.use_cache = True
    assert model(**example).past_key_values is not None
    with penstock.Pipeline(model, example=example, lanes=2, timeout=60) as pipe:
        with pytest.warns(UserWarning, match="a pipeline returns none: past_key_values is None"):
            assert pipe(example).past_key_values is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe(example)
    model.config.use_cache = False
    with penstock.Pipeline(model, example=example, lanes=2, timeout=60) as pipe, warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(example)
