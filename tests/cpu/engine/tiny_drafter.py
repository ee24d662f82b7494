"""Random drafters of blocks in the published layout, and a reference implementation of what they draft, in float32.

The reference computes everything anew for each block, from the outputs of the model's layers as transformers returns
them: no memory, one sequence, one head at a time.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.cpu.engine.tiny import VOCAB_SIZE

MASK_ID = VOCAB_SIZE - 1
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "block_size": 6,
    "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": [1, 0]},
}


def save_drafter(directory: Path, *, seed: int = 5, **changes: Any) -> Path:
    """Write a random drafter for the tiny model."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config, seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (config[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"fc.weight": (size, size * len(config["dflash_config"]["target_layer_ids"]))}
    for index in range(config["num_hidden_layers"]):
        parts = {"q": (queries, size), "k": (keys, size), "v": (keys, size), "o": (size, queries)}
        shapes |= {f"layers.{index}.self_attn.{name}_proj.weight": shape for name, shape in parts.items()}
        parts = {"gate": (inner, size), "up": (inner, size), "down": (size, inner)}
        shapes |= {f"layers.{index}.mlp.{name}_proj.weight": shape for name, shape in parts.items()}
        for name, width in {"input_layernorm": size, "post_attention_layernorm": size}.items():
            shapes[f"layers.{index}.{name}.weight"] = (width,)
        for name in ("q_norm", "k_norm"):
            shapes[f"layers.{index}.self_attn.{name}.weight"] = (head_dim,)
    shapes |= {"norm.weight": (size,), "hidden_norm.weight": (size,)}
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)
        for name, shape in sorted(shapes.items())
    }


def load_oracle(directory: Path) -> Any:
    """Load a model with transformers."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


class Reference:
    """What a drafter drafts for a model of transformers."""

    def __init__(self, model: Any, drafter: Path) -> None:
        self.config = json.loads((drafter / "config.json").read_text())
        self.weights = load_file(drafter / "model.safetensors")
        self.model = model

    @torch.no_grad()
    def features(self, tokens: list[int]) -> Tensor:
        """Return ``hidden_norm(fc(outputs of the target layers))`` of every token, each row on its own."""
        outputs = self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
        # Others begin with the embedding.
        first = 0 if self.model.config.model_type.startswith("mamba") else 1
        layers = [outputs[first + index][0] for index in self.config["dflash_config"]["target_layer_ids"]]
        return self._norm(torch.cat(layers, -1) @ self.weights["fc.weight"].T, "hidden_norm.weight")

    @torch.no_grad()
    def drafts(self, features: Tensor, newest: int, num_drafts: int) -> list[int]:
        """Return drafts after a token whose predecessors have these features."""
        start, head = len(features), self.model.get_output_embeddings().weight
        ids = torch.tensor([newest, *[self.config["dflash_config"]["mask_token_id"]] * num_drafts])
        hidden = self.model.get_input_embeddings().weight[ids]
        for index in range(self.config["num_hidden_layers"]):
            prefix = f"layers.{index}."
            hidden = hidden + self._attention(
                prefix, index, self._norm(hidden, f"{prefix}input_layernorm.weight"), features
            )
            normed = self._norm(hidden, f"{prefix}post_attention_layernorm.weight")
            gate, up = (normed @ self.weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            hidden = hidden + (F.silu(gate) * up) @ self.weights[f"{prefix}mlp.down_proj.weight"].T
        assert len(features) == start
        logits: list[int] = (self._norm(hidden[1:], "norm.weight") @ head.T).argmax(-1).tolist()
        return logits

    def _attention(self, prefix: str, index: int, block: Tensor, features: Tensor) -> Tensor:
        config, start = self.config, len(features)
        is_sliding = config["layer_types"][index] == "sliding_attention"
        is_causal = config.get("is_causal", config["dflash_config"].get("causal", is_sliding))
        window = config["sliding_window"] if is_sliding else 10**9
        positions = torch.arange(start + len(block))
        heads = config["num_attention_heads"]
        q = self._heads(block, f"{prefix}self_attn.q", positions[start:])
        k = self._heads(torch.cat([features, block]), f"{prefix}self_attn.k", positions)
        v = (torch.cat([features, block]) @ self.weights[f"{prefix}self_attn.v_proj.weight"].T).unflatten(
            1, (config["num_key_value_heads"], -1)
        )
        group = heads // config["num_key_value_heads"]
        rows = []
        for row, position in enumerate(range(start, start + len(block))):
            seen = [p for p in positions.tolist() if p > position - window and (p <= position or not is_causal)]
            parts = []
            for head in range(heads):
                scores = k[seen, head // group] @ q[row, head] * config["head_dim"] ** -0.5
                parts.append(scores.softmax(0) @ v[seen, head // group])
            rows.append(torch.cat(parts))
        return torch.stack(rows) @ self.weights[f"{prefix}self_attn.o_proj.weight"].T

    def _heads(self, rows: Tensor, name: str, positions: Tensor) -> Tensor:
        """Return projected, normalised and rotated heads."""
        dim = self.config["head_dim"]
        heads = self._norm(
            (rows @ self.weights[f"{name}_proj.weight"].T).unflatten(1, (-1, dim)), f"{name}_norm.weight"
        )
        frequencies = self.config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angles = (positions[:, None] * frequencies)[:, None]
        low, high = heads.chunk(2, -1)
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        variance = rows.pow(2).mean(-1, keepdim=True)
        return rows * (variance + self.config["rms_norm_eps"]).rsqrt() * self.weights[name]
