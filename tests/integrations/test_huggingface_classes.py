"""Classes of transformers with other losses: PipelineTrainer is the Trainer without accumulation, and right with it."""

import contextlib
import io

import pytest
import torch
import transformers

from huggingface_cases import WORDS, arguments, collate, figures, texts
from penstock.integrations.huggingface import PipelineTrainer
from penstock.integrations.label_counts import uses_num_items
from runtime_everywhere import pipeline

SMALL = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": WORDS,
}  # fmt: skip
BERT = {**SMALL, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def with_labels(labels_of):
    def made(rows):
        batch = collate(rows)
        return {**batch, "labels": labels_of(batch["input_ids"], batch["attention_mask"] == 0)}

    return made


def tags(words, is_padding):
    return words.remainder(3).masked_fill(is_padding, -100)


def masked(words, is_padding):
    return words.masked_fill((words % 4 != 0) | is_padding, -100)


def several(words, is_padding):
    return torch.stack([(words == word).any(1).float() for word in (5, 6, 7)], 1)


def number(words, is_padding):
    return words[:, 0].float() / 10


def answers(rows):
    """Return questions with answers; rows have one length, since padding would be a place of an answer."""
    words = torch.stack([row["input_ids"][:4] for row in rows])
    return {"input_ids": words, "start_positions": words[:, 0] % 4, "end_positions": words[:, 1] % 4}


def pictures(rows):
    values = torch.stack([torch.linspace(0, float(row["input_ids"][0]) / WORDS, 3 * 8 * 8) for row in rows])
    return {"pixel_values": values.view(-1, 3, 8, 8), "labels": torch.tensor([len(r["input_ids"]) % 3 for r in rows])}


def bert(name, **more):
    return lambda: getattr(transformers, f"BertFor{name}")(transformers.BertConfig(**BERT, **more))


def t5():
    config = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**config, vocab_size=WORDS, decoder_start_token_id=0)
    )


def opt():
    config = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "dropout": 0.0}
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(**config, vocab_size=WORDS, max_position_embeddings=32, word_embed_proj_dim=16)
    )


def vit():
    config = {**BERT, "image_size": 8, "patch_size": 4, "num_labels": 3}
    del config["vocab_size"], config["max_position_embeddings"]
    return transformers.ViTForImageClassification(transformers.ViTConfig(**config))


# the model, the collator, and whether the class uses the number of labels
CASES = {
    "tokens": (bert("TokenClassification", num_labels=3), with_labels(tags), False),
    "masked words": (bert("MaskedLM"), with_labels(masked), False),
    "several classes": (
        bert("SequenceClassification", num_labels=3, problem_type="multi_label_classification"),
        with_labels(several),
        False,
    ),
    "numbers": (bert("SequenceClassification", num_labels=1), with_labels(number), False),
    "answers": (bert("QuestionAnswering"), answers, False),
    "translation": (t5, collate, False),
    "causal": (opt, collate, True),
    "pictures": (vit, pictures, True),
}


def train(kind, name, folder, **more):
    make, collator, _ = CASES[name]
    torch.manual_seed(0)
    model, rows = make(), texts(16)
    options = {
        "args": arguments(folder, remove_unused_columns=False, **more),
        "train_dataset": rows,
        "eval_dataset": rows[:6],
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if kind is PipelineTrainer:
            model = stack.enter_context(pipeline(model, collator(rows[:4]), micro_batches=2, path="replay"))
        trainer = kind(model, data_collator=collator, **options)
        trainer.train()
        return [*figures(trainer, "loss"), trainer.evaluate()["eval_loss"]]


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_the_trainer(tmp_path, name):
    make, _, is_used = CASES[name]
    assert uses_num_items(make()) == is_used
    once = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    wanted = train(transformers.Trainer, name, tmp_path, **once)
    assert train(PipelineTrainer, name, tmp_path, **once) == pytest.approx(wanted, rel=1e-6)
    accumulated = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    assert train(PipelineTrainer, name, tmp_path, **accumulated) == pytest.approx(wanted, rel=1e-6)
