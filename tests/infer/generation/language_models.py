"""Small random language models of transformers, and what `model.generate` returns for one prompt at a time."""

from __future__ import annotations

import torch
import transformers as hf

VOCABULARY = 128
_BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
_GROUPED = {**_BASE, "num_key_value_heads": 2}
_GPT = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
_THREE_LOCAL = ["sliding_attention"] * 3 + ["full_attention"]

CAUSAL = {
    "llama": lambda: (hf.LlamaForCausalLM, hf.LlamaConfig(**_GROUPED)),
    "gpt2": lambda: (hf.GPT2LMHeadModel, hf.GPT2Config(**_GPT, n_embd=32, n_layer=4, n_head=4, n_positions=256)),
    "qwen2": lambda: (hf.Qwen2ForCausalLM, hf.Qwen2Config(**_GROUPED)),
    "mistral": lambda: (hf.MistralForCausalLM, hf.MistralConfig(**_GROUPED, sliding_window=8)),
    "mixtral": lambda: (hf.MixtralForCausalLM, hf.MixtralConfig(**_GROUPED, num_local_experts=4)),
    "gemma2": lambda: (hf.Gemma2ForCausalLM, hf.Gemma2Config(**_GROUPED, head_dim=8, sliding_window=8)),
    "gemma3": lambda: (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig(**_GROUPED, head_dim=8, sliding_window=8, layer_types=_THREE_LOCAL),
    ),
    "opt": lambda: (
        hf.OPTForCausalLM,
        hf.OPTConfig(
            vocab_size=VOCABULARY, hidden_size=32, ffn_dim=64, num_hidden_layers=4, num_attention_heads=4,
            max_position_embeddings=256, word_embed_proj_dim=16, bos_token_id=None, eos_token_id=None, pad_token_id=1,
        ),
    ),
    "bloom": lambda: (hf.BloomForCausalLM, hf.BloomConfig(**_GPT, hidden_size=32, n_layer=4, n_head=4)),
    "falcon": lambda: (
        hf.FalconForCausalLM,
        hf.FalconConfig(**_GPT, hidden_size=32, num_hidden_layers=4, num_attention_heads=4),
    ),
    "phi3": lambda: (
        hf.Phi3ForCausalLM,
        hf.Phi3Config(
            **_GROUPED, original_max_position_embeddings=48,
            rope_parameters={
                "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [2.0] * 4, "short_factor": [1.0] * 4,
                "factor": 4.0, "original_max_position_embeddings": 48,
            },
        ),
    ),
    "gpt_neo": lambda: (
        hf.GPTNeoForCausalLM,
        hf.GPTNeoConfig(
            **_GPT, hidden_size=32, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]],
            window_size=8, max_position_embeddings=256,
        ),
    ),
}  # fmt: skip
PAIRS = {
    "t5": lambda: (
        hf.T5ForConditionalGeneration,
        hf.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4, pad_token_id=0,
            eos_token_id=None, decoder_start_token_id=0,
        ),
    ),
    "bart": lambda: (
        hf.BartForConditionalGeneration,
        hf.BartConfig(
            vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=4, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=256,
            eos_token_id=None, bos_token_id=None, pad_token_id=1, decoder_start_token_id=2, forced_eos_token_id=None,
        ),
    ),
}  # fmt: skip


def make(name):
    """Return a model whose tokens vary: its weights are larger than those of an untrained model."""
    kind, config = {**CAUSAL, **PAIRS}[name]()
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    return model


def prompts(*lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def alone(model, given, count, **options):
    """Return the tokens of `model.generate` for each prompt alone."""
    options = {"do_sample": False, **options}
    return [model.generate(prompt[None], max_new_tokens=count, **options)[0] for prompt in given]


def sampled_alone(model, given, count, seed, **options):
    """Return the sampled tokens of each prompt alone; each prompt has the next seed."""
    found = []
    for at, prompt in enumerate(given):
        torch.manual_seed(seed + at)
        found += alone(model, [prompt], count, do_sample=True, **options)
    return found


def are_equal(found, wanted):
    return [tokens.tolist() for tokens in found] == [tokens.tolist() for tokens in wanted]
