"""A loop with an Accelerator around a pipeline: the same losses and weights as with the plain model."""

import copy

import pytest
import torch
from accelerate import Accelerator
from torch.nn import functional as F  # noqa: N812

from huggingface_cases import as_under_torchrun
from penstock.errors import UsageError
from penstock.integrations.accelerate import make_accelerator
from penstock.integrations.late_gradients import step_before_backward
from penstock.integrations.one_process import without_torchrun
from pipelines import data, sequence
from runtime_everywhere import everyone, everywhere, pipeline


def loader():
    x, target = data(26)
    rows = list(zip(x, target, strict=True))
    return torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))


def train(accelerator, parameters, loss_of, clip):
    """Run the loop that the documentation of accelerate shows; return the losses."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    optimizer, scheduler, batches = accelerator.prepare(optimizer, scheduler, loader())
    losses = []
    for _ in range(2):
        for x, target in batches:
            with accelerator.accumulate():
                loss = loss_of(x, target)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    clip()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


@everywhere
def test_a_loop_equals_that_of_the_plain_model():
    model = sequence(6)
    plain = copy.deepcopy(model)
    with without_torchrun():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        reference = accelerator.prepare(plain)
        wanted = train(
            accelerator, plain.parameters(), lambda x, target: F.mse_loss(reference(x), target),
            lambda: accelerator.clip_grad_norm_(plain.parameters(), 0.1),
        )  # fmt: skip
    with pipeline(model, data(4)[0], loss=F.mse_loss, micro_batches=2) as pipe, as_under_torchrun():
        accelerator = make_accelerator(pipe, gradient_accumulation_steps=2)
        losses = train(
            accelerator, pipe.parameters(), lambda x, target: step_before_backward(pipe, x, target),
            lambda: pipe.clip_grad_norm_(0.1),
        )  # fmt: skip
        assert len(losses) == 14
        assert losses == pytest.approx(wanted, rel=1e-10)
        for name, tensor in pipe.state_dict().items():
            torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-9, atol=1e-11)
        assert accelerator.num_processes == 1
        mains = everyone(accelerator.is_main_process)
        assert mains == [True, *[False] * (len(mains) - 1)]


@everywhere
def test_gradients_arrive_in_the_backward_and_follow_the_loss():
    model = sequence(4)
    plain = copy.deepcopy(model)
    x, target = data(8)
    for batch in (x, x * 2):
        (F.mse_loss(plain(batch), target) * 3).backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    with pipeline(model, x, loss=F.mse_loss) as pipe:
        first, second = (step_before_backward(pipe, batch, target) for batch in (x, x * 2))
        assert all(parameter.grad is None for parameter in pipe.parameters())
        (first * 3 + second * 3).backward()
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-10, atol=1e-12)


def test_a_failed_step_leaves_gradients_as_they_were():
    x, target = data(8)
    with pipeline(sequence(4), x, loss=F.mse_loss) as pipe:
        pipe.step(x, target)
        before = [parameter.grad for parameter in pipe.parameters()]
        with pytest.raises(UsageError):
            step_before_backward(pipe, x.float(), target)
        assert all(now.grad is old for now, old in zip(pipe.parameters(), before, strict=True))


def test_bf16_is_that_of_the_accelerator():
    x, target = (tensor.float() for tensor in data(8))
    with pipeline(sequence(4).float(), x, loss=F.mse_loss) as pipe:
        accelerator = make_accelerator(pipe, mixed_precision="bf16")
        with accelerator.autocast():
            assert pipe.forward(x).dtype is torch.bfloat16
            loss = step_before_backward(pipe, x, target)
        exact = step_before_backward(pipe, x, target)
        assert loss != exact
        assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=0.05)


def test_what_a_pipeline_cannot_follow_is_refused():
    with pytest.raises(UsageError, match="expected a penstock"):
        make_accelerator(sequence(4))
    with (
        pipeline(sequence(4), data(8)[0], loss=F.mse_loss) as pipe,
        pytest.raises(UsageError, match=r"deepspeed_plugin: the pipeline .* use .bf16"),
    ):
        make_accelerator(pipe, mixed_precision="fp16", deepspeed_plugin=object())
