"""Tiny random Nemotrons with a draft layer, in the published layout, and what that layer computes.

transformers has no draft layer. Behind the projection of its two inputs it consists of two layers of the model's kinds
and a norm, and is computed here by transformers' model of those two, given what the projection returns.

Source: vLLM (``nemotron_h_mtp.py``) and NVIDIA's NeMo AutoModel (``nemotron_v3/mtp.py``).
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.cpu.models import families, fp8

KINDS = {"nemotron_h": ("full_attention", "moe"), "nemotron_h-odd": ("full_attention", "mlp")}
"""Families of ``families``, and the published layers of their draft layers."""


@dataclass(frozen=True)
class DraftOracle:
    """A model and a draft layer, in float32."""

    model: Any
    layers: Any
    """The draft layer: a model of two layers whose final norm is the draft layer's."""
    tensors: dict[str, Tensor]
    """Published with its first layer: ``enorm``, ``hnorm``, ``eh_proj``."""

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """Return the final hidden state behind every token."""
        hidden: Tensor = self.model.base_model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return hidden

    def draft(self, hidden_TE: Tensor, following: Sequence[int]) -> Tensor:
        """Return the draft layer's hidden states, given the model's behind tokens, and the token after each."""
        embedded_TE = self.model.get_input_embeddings()(torch.tensor(following))
        eps, size = self.model.config.layer_norm_epsilon, hidden_TE.shape[-1]
        normed = [
            F.rms_norm(values_TE, (size,), self.tensors[name], eps)
            for values_TE, name in ((embedded_TE, "enorm"), (hidden_TE, "hnorm"))
        ]
        joined_TE = F.linear(torch.cat(normed, -1), self.tensors["eh_proj"])
        drafted: Tensor = self.layers.base_model(inputs_embeds=joined_TE[None], use_cache=False).last_hidden_state[0]
        return drafted

    def logits(self, hidden_TE: Tensor) -> Tensor:
        logits: Tensor = self.model.lm_head(hidden_TE)
        return logits

    def drafts(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """Return what is drafted behind a text: all but the first token from the draft layer's own hidden states."""
        hidden_TE, following = self.hidden(tokens[:-1]), [*tokens[1:]]
        for _ in range(count):
            last_1E = self.draft(hidden_TE, following)[-1:]
            hidden_TE = torch.cat((hidden_TE, last_1E))
            following.append(int(self.logits(last_1E).argmax()))
        return tuple(following[len(tokens) - 1 :])


@cache
def oracle(name: str) -> DraftOracle:
    config = families.config_of(name)
    config.layer_types = list(KINDS[name])
    size = config.hidden_size
    layers = families.random_model(config, 7)
    tensors = {norm: 1 + 0.2 * torch.randn(size) for norm in ("enorm", "hnorm")}
    return DraftOracle(families.oracle(name), layers, tensors | {"eh_proj": torch.randn(size, 2 * size) * size**-0.5})


def save(name: str, directory: Path) -> Path:
    """Write a model with its draft layer."""
    drafting, target = oracle(name), directory / f"{name}-drafts"
    shutil.copytree(families.save(name, directory), target, dirs_exist_ok=True)
    drafting.layers.save_pretrained(directory / "layers")
    added = {f"mtp.layers.0.{part}.weight": tensor for part, tensor in drafting.tensors.items()}
    for key, tensor in load_file(directory / "layers" / "model.safetensors").items():
        if "layers." in key:
            added[f"mtp.{key.removeprefix('backbone.')}"] = tensor
        elif "norm_f" in key:
            added["mtp.layers.1.final_layernorm.weight"] = tensor
    fp8.change_tensors(target, lambda tensors: tensors.update(added))
    kinds = list(KINDS[name])
    fp8.change_json(target / "config.json", num_nextn_predict_layers=1, mtp_layers_block_type=kinds)
    return target
