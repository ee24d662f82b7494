"""A small random model that speaks the demo model's tokens, and whose draft layer agrees with it on most of them.

Tests that compare engines with each other, and need text or drafts, run it: a step takes a fraction of the demo model's
computing. The next token follows from the last one, in short cycles, unless the layers choose another: every few
tokens. The draft layer sees the last token, too, so that it drafts the same unless the layers choose another.
"""

import atexit
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strandline.text.model_files import DEMO_DIRECTORY
from tests.cpu.engine.tiny import save_tiny_model

VOCAB_SIZE: Final = 4096
HIDDEN_SIZE: Final = 32
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
CYCLE_TOKENS: Final = 8
"""Tokens that follow one another, and begin anew."""
LAYERS_RANGE: Final = 0.15
"""Standard deviation of the layers' weights: the larger, the more often context decides the next token."""


@cache
def small_demo() -> str:
    """Write the model into a folder that this process removes when it ends; return the folder."""
    folder = TemporaryDirectory(prefix="small-demo-")
    atexit.register(folder.cleanup)
    save_small_demo(Path(folder.name))
    return folder.name


def save_small_demo(directory: Path) -> None:
    """Write the model, with a recurrent and an attention layer, in float32."""
    save_tiny_model(
        directory,
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        max_position_embeddings=8192,
        initializer_range=LAYERS_RANGE,
        eos_token_id=2,
    )
    for name in TOKENIZER_FILES:
        shutil.copy(Path(DEMO_DIRECTORY) / name, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    embedding = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = embedding.view(-1, CYCLE_TOKENS, HIDDEN_SIZE).roll(1, 1).flatten(0, 1)
    tensors |= {f"mtp.{name}": tensor for name, tensor in draft_layer(tensors, generator).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def draft_layer(tensors: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Return a draft layer that passes the last token's embedding on."""
    prefix = "model.layers.1."
    layer = {
        f"layers.0.{name.removeprefix(prefix)}": tensor[..., torch.randperm(tensor.shape[-1], generator=generator)]
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    zeros = {f"{name}.weight": torch.zeros(HIDDEN_SIZE) for name in norms}
    noise = 0.02 * torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=generator)
    return {**layer, **zeros, "fc.weight": torch.cat([torch.eye(HIDDEN_SIZE), noise], dim=1)}
