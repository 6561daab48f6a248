"""Lightning on a pipeline: the same losses and weights as with the plain model."""

import copy
import warnings

import pytest
import torch
from torch import nn

import penstock
from huggingface_cases import as_under_torchrun, common_folder
from penstock.errors import UsageError
from penstock.integrations.one_process import without_torchrun
from pipelines import data, sequence
from runtime_everywhere import everywhere, pipeline

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what lightning imports
    import lightning

    from penstock.integrations.lightning import PipelineStrategy


pytestmark = pytest.mark.filterwarnings("ignore")  # lightning advises on workers, loggers and folders


class Module(lightning.LightningModule):
    """A module that trains as told, and writes down its losses."""

    def __init__(self, model, *, is_piped, factor=1.0):
        super().__init__()
        self.model, self.is_piped, self.factor, self.losses, self.validation = model, is_piped, factor, [], []

    def training_step(self, batch, index):
        if self.is_piped:
            loss = self.trainer.strategy.step(*batch)
        else:
            loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        self.log("loss", loss)
        return loss * self.factor

    def validation_step(self, batch, index):
        if self.is_piped:
            self.validation.append(float(self.trainer.strategy.pipe.evaluate(*batch)))
        else:
            self.validation.append(float(nn.functional.mse_loss(self.model(batch[0]), batch[1])))

    def configure_optimizers(self):
        own = self.trainer.strategy.pipe.parameters() if self.is_piped else self.parameters()
        optimizer = torch.optim.AdamW(own, lr=1e-2, eps=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def loader():
    x, target = data(26)
    rows = list(zip(x, target, strict=True))
    return torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))


def trainer(folder, strategy, *, epochs=2, **more):
    options = {
        "accelerator": "cpu", "devices": 1, "max_epochs": epochs, "accumulate_grad_batches": 2, "logger": False,
        "gradient_clip_val": 0.1, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return lightning.Trainer(strategy=strategy, default_root_dir=str(folder), **{**options, **more})


def plain(model, folder, *, factor=1.0, **more):
    module = Module(model, is_piped=False, factor=factor)
    with without_torchrun():
        trainer(folder, "auto", **more).fit(module, loader(), loader())
    return module


def small_pipeline(model, **options):
    return pipeline(model, data(4)[0], loss=nn.functional.mse_loss, micro_batches=2, **options)


def piped(model, folder, *, lanes=2, resume=None, factor=1.0, save=False, **more):
    with small_pipeline(model, lanes=lanes) as pipe, as_under_torchrun():
        module = Module(model, is_piped=True, factor=factor)
        made = trainer(folder, PipelineStrategy(pipe), **more)
        made.fit(module, loader(), loader(), ckpt_path=resume)
        if save:
            made.save_checkpoint(folder / "last.ckpt")
        module.state = pipe.state_dict()
    return module


@pytest.mark.slow
@everywhere
def test_a_training_equals_that_of_the_plain_model():
    """With accumulation, clipping, a scheduler, validation, and a loss that the module scales."""
    with common_folder() as folder:
        for factor in (1.0, 0.3):
            model = sequence(6)
            reference = copy.deepcopy(model)
            wanted, found = plain(reference, folder, factor=factor), piped(model, folder, factor=factor)
            assert len(found.losses) == 14
            assert found.losses == pytest.approx(wanted.losses, rel=1e-10)
            assert found.validation == pytest.approx(wanted.validation, rel=1e-10)
            for name, tensor in found.state.items():
                torch.testing.assert_close(tensor, reference.state_dict()[name], rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@everywhere
def test_a_training_resumes_from_a_checkpoint_that_plain_lightning_can_read():
    with common_folder() as folder:
        reference = sequence(6)
        wanted = plain(reference, folder, epochs=3)
        first = piped(sequence(6), folder, save=True)
        torch.manual_seed(5)  # the rest does not depend on the state of the process
        last = folder / "last.ckpt"
        state = torch.load(last, weights_only=False)["state_dict"]
        assert state.keys() == {f"model.{name}" for name in reference.state_dict()}
        assert all(torch.equal(state[f"model.{name}"], tensor) for name, tensor in first.state.items())
        with small_pipeline(sequence(6)) as pipe:
            module = Module(pipe.internals.captured.model, is_piped=True)
            batches = loader()
            for _ in range(2):
                list(batches)  # what the first two epochs drew
            trainer(folder, PipelineStrategy(pipe), epochs=3).fit(module, batches, loader(), ckpt_path=str(last))
            assert module.losses == pytest.approx(wanted.losses[14:], rel=1e-10)


def test_a_checkpoint_continues_on_another_number_of_lanes(tmp_path):
    whole = piped(sequence(6), tmp_path, epochs=2)
    piped(sequence(6), tmp_path, epochs=1, save=True)
    batches = loader()
    list(batches)
    model = sequence(6)
    with small_pipeline(model, lanes=3) as pipe:
        module = Module(model, is_piped=True)
        trainer(tmp_path, PipelineStrategy(pipe)).fit(module, batches, loader(), ckpt_path=str(tmp_path / "last.ckpt"))
    assert module.losses == pytest.approx(whole.losses[7:], rel=1e-10)


def test_old_checkpoints_are_deleted_with_their_folders(tmp_path):
    best = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path / "kept", save_top_k=1, monitor="loss", every_n_epochs=1
    )
    piped(sequence(4), tmp_path, epochs=3, enable_checkpointing=True, callbacks=[best])
    files = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert len(files) == 2
    assert files[1] == f"{files[0]}.lanes"


def test_settings_that_a_pipeline_cannot_follow_are_refused(tmp_path):
    model = sequence(4)
    with pytest.raises(UsageError, match="expected a penstock"):
        PipelineStrategy(model)
    with small_pipeline(model) as pipe:
        with pytest.raises(UsageError, match="precision: use"):
            trainer(tmp_path, PipelineStrategy(pipe), precision="64-true").fit(Module(model, is_piped=True), loader())
        with pytest.raises(UsageError, match="no attribute of the LightningModule"):
            trainer(tmp_path, PipelineStrategy(pipe)).fit(Module(sequence(4), is_piped=True), loader())
    options = {"schedule": "pipedream", "optimizer": lambda own: torch.optim.SGD(own, lr=0.1)}
    with small_pipeline(model, **options) as pipe, pytest.raises(UsageError, match="updates weights within the step"):
        PipelineStrategy(pipe)


def test_bf16_runs_the_lanes_under_autocast(tmp_path):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()).float()
    exact = copy.deepcopy(model)
    x, target = (tensor.float() for tensor in data(4))
    rows = torch.utils.data.DataLoader(list(zip(x, target, strict=True)), batch_size=4)
    losses = []
    for own, precision in ((model, "bf16-mixed"), (exact, "32-true")):
        with penstock.Pipeline(own, example=x, loss=nn.functional.mse_loss, lanes=2, micro_batches=2) as pipe:
            module = Module(own, is_piped=True)
            trainer(tmp_path, PipelineStrategy(pipe), precision=precision, epochs=1).fit(module, rows)
        losses.append(module.losses)
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
