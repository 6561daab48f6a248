"""What beginners get wrong: one clear error each, before anything runs, and no hang."""

import copy
import pickle

import pytest
import torch
from torch import nn

import penstock
import processes
from penstock.errors import LaneError, UsageError

BATCH = torch.randn(8, 6)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


def make(model=None, **options):
    options = {"example": BATCH, "loss": nn.MSELoss(), "micro_batches": 4, "lanes": 2, "cuts": [2]} | options
    return penstock.Pipeline(layers() if model is None else model, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": lambda x: x}, "pass an nn.Module"),
        ({"schedule": 3}, "schedule: pass a name"),
        ({"schedule": "1f2b"}, "Did you mean"),
        ({"loss": nn.MSELoss}, "is a class"),
        ({"loss": 3}, "loss: pass a function"),
        ({"weight": "mean"}, "weight: pass a function"),
        ({"keep": "nothing"}, "hold, recompute, except_last, offload, fit"),
        ({"keep": "fit"}, "memory_limit"),
        ({"graphs": "on"}, "graphs: 'on' is neither True nor False nor 'auto'"),
        ({"autocast": "bf16"}, "autocast: pass a dtype, such as torch.bfloat16; given: 'bf16'"),
        ({"autocast": True}, "autocast: pass a dtype"),
        ({"autocast": torch.int32}, "autocast: pass a dtype"),
        ({"scaler": 5, "deferred_batch_norm": "x"}, "scaler: pass a torch.amp.GradScaler; given: int; deferred_batch"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)}, "not an optimizer"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}, "does not update weights within the step"),
        ({"schedule": "pipedream"}, "pass optimizer="),
        ({"lanes": 0}, "lanes"),
        ({"micro_batches": 0}, "micro_batches"),
        ({"micro_batches": "8"}, "micro_batches"),
        ({"timeout": 0}, "timeout"),
        ({"transport": "gloo"}, "these are threads"),
        ({"transport": "shred"}, "Did you mean 'shared'"),
        ({"devices": ["cpu"]}, "one for each lane"),
        ({"cuts": ["c"], "capture_path": "direct"}, "cuts: there is no node or module 'c'"),
        ({"cuts": ["c"], "capture_path": "export"}, "cuts: there is no node or module 'c'"),
        ({"cuts": ["c"], "model": [nn.Linear(6, 6), nn.Linear(6, 6)]}, "cuts: there is no node or module 'c'"),
        ({"cuts": ["c"], "lanes": 1}, "cuts: there is no node or module 'c'"),
        ({"devices": ["cpu", "nowhere"]}, "cannot be used"),
    ],
)
def test_arguments(options, words):
    """Among them cuts that the model does not have: they were ignored where the model has only one way to be cut."""
    with pytest.raises((UsageError, penstock.errors.ScheduleError), match=words):
        make(**options)


def test_a_step_without_its_target_is_refused():
    with make() as pipe, pytest.raises(UsageError, match=r"step\(batch, target\)"):
        pipe.step(BATCH)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output, target: output - target, "reduce it"),
        (lambda output, target: (output - target).sum().item(), "reduce it"),
        (lambda output, target: (output - target).detach().mean(), "does not depend on any parameter"),
    ],
)
def test_losses_that_are_none(loss, words):
    with make(loss=loss) as pipe, pytest.raises(LaneError, match=words):
        pipe.step(BATCH, BATCH)


ARRAY = BATCH.numpy()
CONVERT = r"a numpy array \(float32, shape \(8, 6\)\) is not a tensor: convert it with torch.as_tensor"


@pytest.mark.parametrize(
    "call",
    [
        lambda pipe: pipe.step(ARRAY, BATCH),
        lambda pipe: pipe.step((ARRAY,), BATCH),
        lambda pipe: pipe.step({"input": ARRAY}, BATCH),
        lambda pipe: pipe.step({"input": BATCH, "more": ARRAY}, BATCH),
        lambda pipe: pipe.step(BATCH, ARRAY),
        lambda pipe: pipe.step(BATCH, {"labels": [ARRAY]}),
        lambda pipe: pipe.evaluate(BATCH, ARRAY),
        lambda pipe: pipe.forward(ARRAY),
        lambda pipe: make(example=ARRAY),
    ],
)
def test_a_numpy_array_is_refused_with_what_to_do(call):
    """A batch was printed; of a target the error was that 'int' is not callable, in a lane."""
    with make() as pipe, pytest.raises(UsageError, match=CONVERT) as caught:
        call(pipe)
    assert len(str(caught.value)) < 250


def test_weights_of_nothing_are_refused():
    with make(weight=lambda batch, target: 0) as pipe, pytest.raises(UsageError, match="mean over nothing"):
        pipe.step(BATCH, BATCH)


def test_outputs_need_neither_target_nor_weight():
    with make(weight=lambda batch, target: (target == target).sum()) as pipe:
        assert pipe.forward(BATCH).shape == BATCH.shape


def test_a_closed_pipeline_says_so():
    pipe = make()
    pipe.step(BATCH, BATCH)
    pipe.close()
    for call in (lambda: pipe.step(BATCH, BATCH), lambda: pipe.evaluate(BATCH, BATCH), lambda: pipe.forward(BATCH)):
        with pytest.raises(UsageError, match="is closed"):
            call()
    assert pipe.state_dict().keys() == layers().state_dict().keys()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_pipeline_is_not_copied(copied):
    with make() as pipe, pytest.raises(UsageError, match="state_dict"):
        copied(pipe)


def test_an_empty_batch_is_called_a_batch():
    with make() as pipe, pytest.raises(UsageError, match="the batch holds no samples"):
        pipe.step(BATCH[:0], BATCH[:0])


def one_after_the_other():
    losses = []
    for schedule in ("1f1b", "gpipe", "zb_h1"):
        with make(schedule=schedule, lanes=None) as pipe:
            losses.append(round(float(pipe.step(BATCH * 0 + 1, BATCH * 0)), 6))
    return losses


def test_pipelines_one_after_the_other_in_processes():
    first, second = processes.run(one_after_the_other, 2)
    assert first == second
    assert len(set(first)) == 1


def test_a_backward_left_in_the_loop_is_told_to_go(tmp_path):
    """torch said 'element 0 of tensors does not require grad and does not have a grad_fn'."""
    with make() as pipe:
        loss = pipe.step(BATCH, BATCH)
        gradients = [p.grad.clone() for p in pipe.parameters()]
        for call in (loss.backward, lambda: loss.backward(retain_graph=True)):
            with pytest.raises(UsageError, match=r"pipe\.step has run the backward already.*remove this line"):
                call()
        assert all(torch.equal(p.grad, g) for p, g in zip(pipe.parameters(), gradients, strict=True))
        value = loss.item()
        torch.save({"loss": loss}, tmp_path / "loss.pt")
        # it is a plain tensor in all else, whatever is done with it
        copies = [
            copy.copy(loss), copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), loss.detach(), loss.clone(),
            torch.load(tmp_path / "loss.pt", weights_only=True)["loss"], loss + 0, torch.stack([loss])[0],
            torch.compile(lambda x: x * 1.0, backend="eager")(loss),
        ]  # fmt: skip
        assert all(type(one) is torch.Tensor and float(one) == value for one in (loss, *copies))
        assert (f"{loss:.3f}", loss.requires_grad, float(loss.numpy())) == (f"{value:.3f}", False, value)
        weight = nn.Parameter(torch.ones(()))
        (loss * weight).backward()  # what has a graph of its own goes its own way
        assert float(weight.grad) == value
        assert "backward" not in vars(pipe.evaluate(BATCH, BATCH))
