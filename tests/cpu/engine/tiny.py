"""A tiny random Qwen3.5, made and saved by transformers, and the tokens it generates there: the engine's oracle."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

VOCAB_SIZE = 97


def save_tiny_model(directory: Path, *, seed: int = 1, **changes: Any) -> Path:
    """Write a random float32 model with two recurrent and one attention layer to every three."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": 0.4,
        "eos_token_id": None,
    }
    values |= changes
    kind = Qwen3_5MoeTextConfig if "num_experts" in values else Qwen3_5TextConfig
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**values), dtype=torch.float32)
    model.save_pretrained(directory)
    return directory


def greedy_tokens(directory: Path, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """Return the token that transformers prefers in each place of answers to prompts.

    They are the answers themselves if, and only if, these are what it generates greedily: each of their tokens is then
    the preferred one after those that precede it. So one forward pass takes a whole answer.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    preferred = []
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
            preferred.append(logits.argmax(-1).tolist())
    return preferred
