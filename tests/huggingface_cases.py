"""Hugging Face cases: tiny models with random weights, rows of different lengths, and a collator; no dropout."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)
from transformers.utils.logging import disable_progress_bar

from runtime_everywhere import everyone, together

WORDS = 60
disable_progress_bar()  # a bar makes a semaphore, which a killed process leaves behind


def gpt2(layers=3):
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers, n_embd=16, n_head=2, vocab_size=WORDS, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def llama(layers=3):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2, vocab_size=WORDS,
            num_key_value_heads=2,
        )
    )  # fmt: skip


def bert(layers=3):
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2, vocab_size=WORDS,
            max_position_embeddings=32, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def texts(count=26, seed=1):
    """Return rows of different lengths, in the order of a generator."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 14, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, WORDS, (length,), generator=generator)} for length in lengths]


def labelled(count=24, seed=1):
    """Return the same with a class each."""
    return [{**row, "labels": int(row["input_ids"].sum()) % 3} for row in texts(count, seed)]


def collate(rows):
    """Pad rows to the longest; labels are the words, or the classes that the rows have."""
    longest = max(len(row["input_ids"]) for row in rows)
    words = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(words)
    for at, row in enumerate(rows):
        words[at, : len(row["input_ids"])], mask[at, : len(row["input_ids"])] = row["input_ids"], 1
    labels = words.masked_fill(mask == 0, -100)
    if "labels" in rows[0]:
        labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


@contextlib.contextmanager
def common_folder():
    """Make a folder that all processes know, and delete it."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(everyone(own)[0])
        together()


@contextlib.contextmanager
def as_under_torchrun():
    """Set the variables that torchrun sets, in processes."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.is_initialized():
            for name in ("RANK", "LOCAL_RANK"):
                patch.setenv(name, str(dist.get_rank()))
            for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                patch.setenv(name, str(dist.get_world_size()))
            patch.setenv("TORCHELASTIC_RUN_ID", "none")
        yield


def arguments(folder, **more):
    """Return arguments of a short training on the CPU that writes nothing but what is asked for."""
    given = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2, "logging_steps": 1,
        "learning_rate": 1e-2, "weight_decay": 0.1, "adam_epsilon": 1e-4, "use_cpu": True, "disable_tqdm": True,
        "report_to": [], "save_strategy": "no", "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**given, **more})


def figures(trainer, *names):
    """Return the logged numbers with these names, in order."""
    return [log[name] for log in trainer.state.log_history for name in names if name in log]
