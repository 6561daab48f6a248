"""Traps: models that were once captured wrong without a word. Each tells its story in a line."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import CaptureError, UsageError
from penstock.model.capture.capture import capture
from transparency import WIDTH, Layers, check, rows


class Reentrant(Layers):
    """A trace goes through the no_grad of the checkpoint, and the gradients were gone."""

    def forward(self, x):
        x = self.layers[0](x)
        for layer in self.layers[1:3]:
            x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=True)
        return self.layers[3](x)


class PrivateCount(Layers):
    """A name with an underscore is state all the same."""

    def __init__(self):
        super().__init__()
        self._calls = 0

    def forward(self, x):
        self._calls += 1
        return self.body(x) * self._calls


class TupleState(Layers):
    """A tuple that forward replaces, as a stateful LSTM does."""

    def __init__(self):
        super().__init__()
        self.state = (0.0, 1.0)

    def forward(self, x):
        self.state = (self.state[0] + 1, self.state[1] * 2)
        return self.body(x) * self.state[1]


class MovingAverage(Layers):
    """Two changes in place of one buffer: a cut between them lost the second one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x):
        y = self.layers[0](x)
        self.mean.mul_(0.9)
        z = torch.tanh(self.layers[1](y))
        self.mean.add_(z.detach().mean(0), alpha=0.1)
        return self.layers[3](self.layers[2](z) - self.mean)


class Queue(Layers):
    """A buffer that is read first and changed through a view later."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.ones(3, WIDTH, dtype=torch.float64))

    def forward(self, x):
        h = self.queue.mean(0)
        y = self.body(x)
        self.queue[0] = y.detach().mean(0)
        return y + h


class OldBuffer(Layers):
    """The backward needs the buffer that was there before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x):
        y = self.body(x) * self.scale
        self.scale = 0.9 * self.scale + 0.1 * y.detach().abs().mean(0)
        return y


class Count(Layers):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.calls.add_(1)
        return self.body(x) * self.calls


class SharedMemory(Layers):
    """einsum may return a view; what is changed in place must not be another stage's."""

    def forward(self, x):
        y = self.layers[1](torch.tanh(self.layers[0](x)))
        z = torch.einsum("ij->ji", y)
        w = self.layers[2](y * 1.0)
        z.mul_(2)
        return self.layers[3](w + z.T)


class HookedOnce(Layers):
    """A hook on a gradient was set on the sender and on the receiver."""

    def forward(self, x):
        y = self.layers[0](x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        return self.layers[3](self.layers[2](torch.tanh(self.layers[1](y))))


class KeptLoss(Layers):
    """A tensor that a module leaves for later in the same call, as layers with losses of their own do."""

    def __init__(self):
        super().__init__()
        self.loss = None

    def forward(self, x):
        y = torch.tanh(self.layers[0](x))
        self.loss = y.square().mean()
        return self.layers[3](torch.tanh(self.layers[2](self.layers[1](y)))) + self.loss


CASES = [KeptLoss, Reentrant, MovingAverage, Queue, OldBuffer, Count, SharedMemory, HookedOnce]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", CASES, ids=lambda k: k.__name__)
def test_every_cut_computes_what_the_model_computes(kind):
    captured = capture(kind(), rows(), training=True)
    cuts = [c for c in range(1, len(captured.graph.nodes)) if c not in captured.graph.uncuttable]
    assert cuts
    for cut in cuts:
        check(kind(), rows(), stages=(2,), cuts=[cut], batch_sizes=(4, 6), modes=(True,))


@pytest.mark.parametrize("kind", [PrivateCount, TupleState, MovingAverage, Queue, OldBuffer, Count])
def test_state_goes_on_from_call_to_call(kind):
    model, plain = kind(), kind()
    captured = capture(model, rows())
    cuts = [c for c in range(1, len(captured.graph.nodes)) if c not in captured.graph.uncuttable]
    chain = captured.split([cuts[len(cuts) // 2]])
    for _ in range(3):
        torch.testing.assert_close(chain(rows()), plain(rows()), rtol=1e-12, atol=1e-12)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(chain.state_dict()[name], buffer)


class KeptState(Layers):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        y = self.body(x if self.last is None else x + self.last)
        self.last = y.detach()
        return y


def test_a_tensor_that_is_kept_for_the_next_call_is_not_traced_away():
    captured = capture(KeptState(), rows())
    assert captured.path == "replay"
    assert "keeps a tensor in last between calls" in captured.reason
    assert capture(KeptLoss(), rows()).path == "export"


@pytest.mark.parametrize("path", ["export", "replay"])
@pytest.mark.parametrize("kind", [Count, MovingAverage])
def test_a_stage_may_be_several_micro_batches_ahead(kind, path):
    model, plain = kind(), kind()
    captured = capture(model, rows(), path=path)
    cuts = [c for c in range(1, len(captured.graph.nodes)) if c not in captured.graph.uncuttable]
    for cut in (cuts[0], cuts[-1]):
        model.load_state_dict(kind().state_dict())
        plain.load_state_dict(kind().state_dict())
        first, second = captured.split([cut]).stages
        batches = [rows() * (k + 1) for k in range(3)]
        values = []
        for batch in batches:
            made = dict(zip(first.outputs, first(*[batch for _ in first.inputs], batch_size=4), strict=True))
            values.append(made | {"input:x": batch})
        for batch, known in zip(batches, values, strict=True):
            (out,) = second(*[known[name] for name in second.inputs], batch_size=4)
            torch.testing.assert_close(out, plain(batch), rtol=1e-12, atol=1e-12)


class ChangedInput(Layers):
    """What follows from the input alone was computed where it is used: after the input was changed."""

    def forward(self, x):
        before = (x * x).sum(1, keepdim=True)
        part = x[:, :2]
        twice = part * 2
        y = torch.tanh(self.layers[0](x.clamp_(-0.5, 0.5)))
        after = x.abs()
        y = self.layers[3](torch.tanh(self.layers[2](torch.tanh(self.layers[1](y)))))
        return y * before + after + twice.sum(1, keepdim=True) + part.sum(1, keepdim=True)


@pytest.mark.parametrize("path", ["export", "replay"])
def test_an_input_that_is_changed_is_read_before_and_after(path):
    model = ChangedInput()
    captured = capture(model, rows(), path=path)
    cuts = [c for c in range(1, len(captured.graph.nodes)) if c not in captured.graph.uncuttable]
    assert cuts
    for chosen in ([], *([cut] for cut in cuts), [cuts[0], cuts[-1]]):
        chain = captured.split(sorted(set(chosen)))
        for size in (4, 3):
            found, wanted = chain(rows(size)), model(rows(size))
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
            gradients = [torch.autograd.grad(made.square().sum(), model.parameters()) for made in (found, wanted)]
            torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


class BatchBranch(Layers):
    def forward(self, x):
        return self.body(x) * (2.0 if x.shape[0] % 2 == 0 else 3.0)


class BatchTensor(Layers):
    def forward(self, x):
        return self.body(x) * torch.tensor(float(x.shape[0]), dtype=x.dtype)


@pytest.mark.parametrize("kind", [BatchBranch, BatchTensor])
def test_what_depends_on_the_batch_size_is_right_for_all(kind):
    model = kind()
    captured = capture(model, rows())
    chain = captured.split([2])
    for size in (2, 3, 4, 5, 6):
        torch.testing.assert_close(chain(rows(size)), model(rows(size)))


class PlainOutputs(Layers):
    def forward(self, x):
        y = self.body(x)
        return {"out": y, "samples": x.shape[0], "sum": y.sum().item(), "sign": "up" if y.sum() > 0 else "down"}


def test_plain_values_that_are_returned_are_those_of_the_batch():
    model = PlainOutputs()
    chain = capture(model, rows()).split([2])
    for batch in (rows(), rows(6) * -3):
        found, expected = chain(batch), model(batch)
        assert found["samples"] == expected["samples"]
        assert found["sum"] == pytest.approx(expected["sum"])
        assert found["sign"] == expected["sign"]


def test_numpys_random_numbers_are_the_same_on_all_stages():
    class Mixed(Layers):
        def forward(self, x):
            share = np.random.beta(1, 1)
            y = self.layers[1](torch.tanh(self.layers[0](x)))
            return self.layers[3](torch.tanh(self.layers[2](y))) * share + x * (1 - share)

    model = Mixed()
    chain = capture(model, rows()).split([2])
    for seed in range(4):
        np.random.seed(seed)
        expected = model(rows())
        np.random.seed(seed)
        torch.testing.assert_close(chain(rows()), expected)


class Twice(nn.Module):
    def forward(self, x):
        return x, x


class Change(nn.Module):
    def forward(self, pair):
        pair[0].mul_(2)
        return pair[0] + pair[1]


@pytest.mark.parametrize(
    "modules",
    [
        [nn.Linear(WIDTH, WIDTH), Twice(), Change(), nn.Linear(WIDTH, WIDTH)],
        [nn.Linear(WIDTH, WIDTH), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)],
    ],
)
def test_sequences_that_change_what_they_get(modules):
    for cut in (1, 2, 3):
        check(nn.Sequential(*modules).double(), rows(), cuts=[cut], stages=(2,))


def test_a_sequence_with_a_forward_of_its_own_is_no_sequence():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    own = model.forward
    model.forward = lambda x: own(x) * 2
    chain = capture(model, rows()).split([1])
    torch.testing.assert_close(chain(rows()), own(rows()) * 2)


def test_hooks_are_not_lost_when_export_is_asked_for():
    model = Layers()
    model.layers[0].register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(CaptureError, match=r"torch\.export drops hooks on layers\.0"):
        capture(model, rows(), path="export")


def test_a_stage_leaves_gradients_switched_on():
    class SwitchedOff(Layers):
        def forward(self, x):
            torch.set_grad_enabled(False)
            y = self.layers[1](self.layers[0](x))
            torch.set_grad_enabled(True)
            return self.layers[3](self.layers[2](y))

    chain = capture(SwitchedOff(), rows(), path="replay").split([1])
    chain(rows())
    assert torch.is_grad_enabled()


def test_state_dicts_have_all_names_and_no_more():
    class Named(Layers):
        def __init__(self):
            super().__init__()
            self.layers[3].weight = self.layers[0].weight
            self.register_buffer("table", torch.ones(WIDTH, dtype=torch.float64), persistent=False)

        def forward(self, x):
            doubled = self.table * 2  # each stage that needs it makes it for itself
            return self.body(x + doubled) * doubled

    for path in ("export", "replay"):
        model = Named()
        chain = capture(model, rows(), path=path).split([2])
        assert set(chain.state_dict()) == set(model.state_dict())
        model.load_state_dict(chain.state_dict())


class TrainerOptions(Layers):
    def forward(self, x, table, scale=1.0, sizes=(1, 2)):
        return self.body(x)[:, : x.shape[1]] * scale + table.sum() * len(sizes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 3.0}, "scale"),
        ({"sizes": (1, 2, 3)}, "sizes"),
        ({"sizes": None}, "sizes"),
        ({"x": rows().float()}, "x: torch.float32"),
        ({"x": torch.zeros(4, 4, dtype=torch.float64)}, r"x: torch.float64 \(4, 4\)"),
        ({"table": torch.zeros(5, dtype=torch.float64)}, "table"),
    ],
)
def test_batches_that_were_not_captured_are_refused(change, message):
    example = {"table": torch.ones(3, dtype=torch.float64), "x": rows(), "scale": 2.0, "sizes": (1, 2)}
    example = {"x": example["x"], "table": example["table"], "scale": 2.0, "sizes": (1, 2)}
    model = TrainerOptions()
    chain = capture(model, example, path="export").split([2])
    torch.testing.assert_close(chain(**dict(reversed(example.items()))), model(**example))
    with pytest.raises(UsageError, match=message):
        chain(**(example | change))
    without = {key: value for key, value in example.items() if key != "scale"}
    with pytest.raises(UsageError, match="scale"):
        chain(**without)


def stepped(model, example, **options):
    """Return the largest difference between gradients of a step and those of the plain model."""
    plain = copy.deepcopy(model)
    loss = lambda out, target: ((out - target) ** 2).mean()  # noqa: E731
    target = torch.ones_like(plain(example).detach())
    loss(plain(example), target).backward()
    with penstock.Pipeline(model, example=example, loss=loss, lanes=2, timeout=60, **options) as pipe:
        pipe.step(example, target)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((own.grad - other.grad).abs().max()) for own, other in pairs)


class OwnRows(nn.Module):
    """Its code goes through the samples one by one, so that another batch size is another way through it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.double()

    def forward(self, rows):
        padded = torch.stack([torch.cat([row.new_zeros(2), row[:2]]) for row in rows])
        scale = padded.detach().pow(2).mean(1, keepdim=True)
        x = self.first(padded).tanh()
        return self.third(self.second(x + scale).tanh() * scale)


def test_replay_of_code_that_loops_over_the_samples():
    """Stages took values by their turn in the code, which follows the batch size: KeyError 'value_133' in timesfm."""
    assert stepped(OwnRows(), torch.randn(8, 4, dtype=torch.float64), capture_path="replay") < 1e-12


class Mapped(OwnRows):
    """A mask that torch.vmap makes between layers, from an input, as transformers' masks of images."""

    def forward(self, rows):
        x = self.first(rows).tanh()
        signs = rows > 0

        def is_seen(row, place):
            return row.new_ones((), dtype=torch.bool) & signs[row, place]

        places = torch.vmap(is_seen, in_dims=(None, 0))
        mask = torch.vmap(places, in_dims=(0, None))(torch.arange(rows.shape[0]), torch.arange(4))
        return self.third(self.second(x).tanh().where(mask, 0.5))


def test_replay_fills_no_hole_while_vmap_holds_it():
    """gemma3: "not possible to get the gradient edge for a Tensor that does not require gradients"."""
    example = torch.randn(8, 4, dtype=torch.float64)
    for cut in ("second", "third"):
        assert stepped(Mapped(), example, capture_path="replay", cuts=[cut]) < 1e-12


class Wary(nn.Linear):
    """A layer that wants to be trained, as code that hooks the gradient of its result."""

    def forward(self, x):
        out = super().forward(x)
        if not out.requires_grad:
            raise RuntimeError("nothing here is trained")
        return out


class Guarded(OwnRows):
    """Layers that do not run without gradients, as a profile runs them."""

    def __init__(self):
        super().__init__()
        self.second = Wary(4, 4).double()

    def forward(self, rows):
        return self.third(self.second(self.first(rows).tanh()).tanh())


def test_a_model_that_cannot_run_node_by_node_is_cut_by_its_parameters():
    """The profile failed with the model's own RuntimeError, though the model can be trained."""
    example = torch.randn(8, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="cannot be profiled.*nothing here is trained"):
        assert stepped(Guarded(), example, capture_path="replay") < 1e-12


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:.*loss_type")
@pytest.mark.parametrize("name", ["clip", "albert"])
def test_export_takes_models_in_which_something_is_as_long_as_the_batch(name):
    """position_ids of (1, 77) at batch 1: "the batch size is written into a tensor of the trace"."""
    pytest.importorskip("transformers")
    from penstock.model.small_models.named_models import load

    for batch_size in (1, 3):
        model, example = load(name, batch_size=batch_size)
        model.eval()
        example.pop("labels", None)
        example.pop("return_loss", None)
        with penstock.Pipeline(model, example=example, lanes=2, micro_batches=1, timeout=60) as pipe:
            assert pipe.internals.captured.path == "export"
            made, wanted = pipe(example), model(**example)
        for key, value in wanted.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(made[key], value.detach(), rtol=1e-4, atol=1e-5)
