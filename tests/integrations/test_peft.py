"""LoRA by peft in a pipeline: exact, saved as peft does, and free of cost for frozen lanes."""

import copy
import warnings

import pytest
import torch
from safetensors.torch import load_file

from huggingface_cases import arguments, bert, collate, common_folder, figures, gpt2, labelled, llama, texts
from penstock.errors import UsageError
from penstock.integrations.adapters import load_adapter, save_adapter
from penstock.integrations.huggingface import PipelineTrainer
from penstock.integrations.one_process import as_one_process, without_torchrun
from penstock.schedule.actions import Kind
from runtime_everywhere import everywhere, pipeline

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what peft imports
    import peft


def lora(model, **more):
    """Return a model with adapters whose two factors are both random, so that all gradients count."""
    torch.manual_seed(3)
    targets = ["c_attn"] if "GPT2" in type(model).__name__ else ["q_proj", "v_proj"]
    if "Bert" in type(model).__name__:
        targets = ["query", "value"]
    options = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "target_modules": targets, "init_lora_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GPT-2's layers are Conv1D, which peft says
        return peft.get_peft_model(model, peft.LoraConfig(**options, **more))


def small_pipeline(model, rows, **options):
    return pipeline(model, collate(rows[:4]), **{"micro_batches": 2, "path": "replay", **options})


@everywhere
def test_loss_and_gradients_are_those_of_the_plain_peft_model():
    rows = texts(6)
    for make, schedule in ((llama, "zb_h1"), (gpt2, "1f1b")):
        model = lora(make(4))
        plain = copy.deepcopy(model)
        with small_pipeline(model, rows, schedule=schedule) as pipe:
            loss, wanted = pipe.step(collate(rows)), plain(**collate(rows)).loss
            wanted.backward()
            torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=1e-6)
            reference = dict(plain.named_parameters())
            for name, parameter in pipe.named_parameters():
                assert parameter.requires_grad == reference[name].requires_grad
                if parameter.requires_grad:
                    torch.testing.assert_close(parameter.grad, reference[name].grad, rtol=1e-4, atol=1e-6, msg=name)
                else:
                    assert parameter.grad is None
            assert any("lora_A" in name for name, _ in pipe.named_parameters())


@everywhere
def test_an_adapter_is_saved_and_loaded_as_peft_does():
    rows, more = labelled(8), {"task_type": "SEQ_CLS"}  # which also saves the head
    with common_folder() as folder:
        model = lora(bert(), **more)
        with small_pipeline(model, rows) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
            pipe.step(collate(rows))
            optimizer.step()
            save_adapter(pipe, folder / "ours", save_embedding_layers=False)
            trained = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
            pipe.internals.gather(None)
        fresh = lora(bert(), **more)
        with small_pipeline(fresh, rows) as pipe:
            assert any((trained[name] != tensor).any() for name, tensor in pipe.state_dict().items())
            load_adapter(pipe, folder / "ours")
            assert all(torch.equal(trained[name], tensor) for name, tensor in pipe.state_dict().items())
            pipe.internals.gather(None)
        back = peft.PeftModel.from_pretrained(bert(), folder / "ours")
        for name, tensor in trained.items():
            assert torch.equal(back.state_dict()[name], tensor), name
        back.save_pretrained(folder / "theirs", save_embedding_layers=False)
        ours, theirs = (load_file(folder / which / "adapter_model.safetensors") for which in ("ours", "theirs"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class Seen:
    """A watch that writes down which tensors actions of a stage make."""

    def __init__(self):
        self.made = {}

    def before(self, lane, number, instruction):
        return True

    def after(self, lane, number, instruction, values):
        self.made.setdefault((instruction.stage, instruction.kind), []).extend(values)

    def failed(self, lane, number, instruction):
        pass


@everywhere
def test_frozen_lanes_make_no_gradient_and_no_state():
    rows = texts(6)
    model = lora(llama(4), layers_to_transform=[3])  # only the last layer trains
    with small_pipeline(model, rows, schedule="zb_h1") as pipe:
        pipe.watch = seen = Seen()
        optimizer = torch.optim.AdamW(pipe.parameters())
        pipe.step(collate(rows))
        optimizer.step()
        trained = {name for name, parameter in pipe.named_parameters() if parameter in optimizer.state}
        assert all("layers.3" in name and "lora" in name for name in trained)
        if 0 in pipe.lanes:
            assert not seen.made.get((0, Kind.I))
            assert not seen.made.get((0, Kind.W))
            assert not seen.made.get((0, Kind.B))
        if 1 in pipe.lanes:
            assert len(trained) == 4
            assert seen.made[1, Kind.W]


@pytest.mark.slow
@everywhere
def test_the_trainer_trains_adapters():
    from transformers import Trainer

    rows = texts()
    with common_folder() as folder:
        reference, model = lora(llama()), lora(llama())
        more = {"save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-1}
        args = arguments(folder / "plain", **{**more, "save_strategy": "no"})
        with without_torchrun(), as_one_process(args, is_first=True):
            wanted = Trainer(reference, args, train_dataset=rows, data_collator=collate)
            wanted.train()
        with small_pipeline(model, rows) as pipe:
            args = arguments(folder / "run", **more)
            found = PipelineTrainer(pipe, args, train_dataset=rows, data_collator=collate)
            found.train()
            assert figures(found, "loss") == pytest.approx(figures(wanted, "loss"), rel=1e-6)
        assert figures(found, "loss")[-1] < figures(found, "loss")[0]
        saved = load_file(folder / "run" / "checkpoint-3" / "adapter_model.safetensors")
        assert all("lora" in name for name in saved)
        with small_pipeline(lora(llama()), rows) as pipe:
            rest = PipelineTrainer(pipe, args, train_dataset=rows, data_collator=collate)
            rest.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-3"))
            assert figures(rest, "loss") == pytest.approx(figures(found, "loss"), rel=1e-6)


def test_an_adapter_of_another_model_is_refused(tmp_path):
    rows = texts(4)
    with small_pipeline(lora(llama(4)), rows) as pipe:
        save_adapter(pipe, tmp_path / "four", save_embedding_layers=False)
    with small_pipeline(lora(llama(3)), rows) as pipe:
        with pytest.raises(UsageError, match="weights that the model lacks"):
            load_adapter(pipe, tmp_path / "four")
        with pytest.raises(UsageError, match="does not exist"):
            load_adapter(pipe, tmp_path)
    model, x = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), torch.ones(4, 2)
    with (
        pipeline(model, x, loss=torch.nn.MSELoss(), micro_batches=2) as pipe,
        pytest.raises(UsageError, match="is no peft model"),
    ):
        save_adapter(pipe, tmp_path)
