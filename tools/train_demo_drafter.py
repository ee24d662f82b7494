"""Train the demo model's drafter of blocks (DFlash), on the replies of the conversations that the model was trained on.

    python tools/train_demo_drafter.py --output src/strandline/demo/dflash --seconds 1800

Runs on one CPU core. The model's weights stay as they are; the drafter sees the outputs of some of its layers. Blocks
begin at random tokens of replies; drafts far from the block's first token count less in the loss. To run the model
takes longer than to train the drafter, so a step runs it on one new row, and trains on rows of this and earlier steps.

Shape suffixes: B rows, T tokens of a row, A blocks of a row, C tokens of a block, X features, E hidden size, H heads, D
head size.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import demo_files
from demo_network import MLP, DemoModel, Shape
from train_demo import Mixture

from strandline.text.model_files import DEMO_DIRECTORY

SEED = 21
TARGET_LAYERS = (3, 7)
BLOCK_TOKENS = 8
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INNER_SIZE = 1, 4, 2, 32, 192
ROWS, ROW_TOKENS, BLOCKS = 8, 256, 10
MAX_ROWS = 2000
"""Rows that are trained on again."""
LEARNING_RATE, WARM_UP_STEPS, DECAY_SHARE = 3e-3, 20, 0.4
FADING = 0.85
"""Weight of a draft in the loss, relative to the one before it."""
MASK_TOKEN_ID = demo_files.SPECIAL_TOKENS.index(demo_files.END_OF_TEXT)
EPS, THETA = 1e-6, 1e4


class Norm(nn.Module):
    """RMS norm whose weight multiplies."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, EPS)


class Attention(nn.Module):
    """Attention of blocks to what is kept of the tokens before them, and to themselves."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden_size, NUM_HEADS * HEAD_DIM, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(hidden_size, NUM_KV_HEADS * HEAD_DIM, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(NUM_HEADS * HEAD_DIM, hidden_size, bias=False)
        self.q_norm, self.k_norm = Norm(HEAD_DIM), Norm(HEAD_DIM)

    def heads(self, projected: Tensor, norm: Norm, positions: Tensor) -> Tensor:
        x = norm(projected.unflatten(-1, (-1, HEAD_DIM)))
        frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = (positions[..., None] * frequencies)[..., None, :]
        low, high = x.chunk(2, -1)
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)

    def forward(self, block_BACE: Tensor, features_BTE: Tensor, starts_BA: Tensor) -> Tensor:
        num_tokens = features_BTE.shape[1]
        position_T, group = torch.arange(num_tokens), NUM_HEADS // NUM_KV_HEADS
        position_BAC = starts_BA[..., None] + torch.arange(BLOCK_TOKENS)
        q_BACHD = self.heads(self.q_proj(block_BACE), self.q_norm, position_BAC)
        k_BTHD = self.heads(self.k_proj(features_BTE), self.k_norm, position_T).repeat_interleave(group, -2)
        v_BTHD = self.v_proj(features_BTE).unflatten(-1, (-1, HEAD_DIM)).repeat_interleave(group, -2)
        own_k = self.heads(self.k_proj(block_BACE), self.k_norm, position_BAC).repeat_interleave(group, -2)
        own_v = self.v_proj(block_BACE).unflatten(-1, (-1, HEAD_DIM)).repeat_interleave(group, -2)
        before = torch.einsum("bachd,bthd->bahct", q_BACHD, k_BTHD)
        before = before.masked_fill((position_T >= starts_BA[..., None])[:, :, None, None], -torch.inf)
        own = torch.einsum("bachd,baxhd->bahcx", q_BACHD, own_k)
        weights = (torch.cat([before, own], -1) * HEAD_DIM**-0.5).softmax(-1)
        out = torch.einsum("bahct,bthd->bachd", weights[..., :num_tokens], v_BTHD)
        out = out + torch.einsum("bahcx,baxhd->bachd", weights[..., num_tokens:], own_v)
        projected: Tensor = self.o_proj(out.flatten(-2))
        return projected


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape.hidden_size), MLP(shape)
        self.input_layernorm, self.post_attention_layernorm = Norm(shape.hidden_size), Norm(shape.hidden_size)

    def forward(self, block_BACE: Tensor, features_BTE: Tensor, starts_BA: Tensor) -> Tensor:
        block_BACE = block_BACE + self.self_attn(self.input_layernorm(block_BACE), features_BTE, starts_BA)
        out: Tensor = block_BACE + self.mlp(self.post_attention_layernorm(block_BACE))
        return out


class Drafter(nn.Module):
    """Parameters have the published names."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        shape = Shape(hidden_size=hidden_size, intermediate_size=INNER_SIZE)
        self.fc = nn.Linear(hidden_size * len(TARGET_LAYERS), hidden_size, bias=False)
        self.hidden_norm, self.norm = Norm(hidden_size), Norm(hidden_size)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(NUM_LAYERS)])

    def forward(self, embedded_BACE: Tensor, features_BTX: Tensor, starts_BA: Tensor) -> Tensor:
        features_BTE = self.hidden_norm(self.fc(features_BTX))
        for layer in self.layers:
            embedded_BACE = layer(embedded_BACE, features_BTE, starts_BA)
        out: Tensor = self.norm(embedded_BACE)
        return out


def load_model() -> DemoModel:
    model = DemoModel(Shape())
    state: dict[str, Tensor] = {}
    for file in DEMO_DIRECTORY.glob("*.safetensors"):
        state |= {name: tensor.float() for name, tensor in load_file(file).items()}
    model.load_state_dict(state)
    return model.requires_grad_(requires_grad=False)


@torch.no_grad()
def layer_outputs(model: DemoModel, ids_BT: Tensor) -> Tensor:
    """Return the outputs of the target layers side by side."""
    batch, length = ids_BT.shape
    positions_N = torch.arange(length).repeat(batch)
    x, outputs = model.model.embed_tokens(ids_BT.flatten()), {}
    for index, layer in enumerate(model.model.layers):
        outputs[index] = x = layer(x, positions_N, batch)
    return torch.cat([outputs[index] for index in TARGET_LAYERS], -1).view(batch, length, -1)


def draw_starts(weights: np.ndarray, rng: np.random.Generator) -> Tensor:
    """Return first tokens of blocks that are within replies: where the next token is one of a reply's."""
    starts = []
    for row in weights:
        found = np.flatnonzero(row[1:] > 0.5)
        found = found[(found > 0) & (found < len(row) - BLOCK_TOKENS)]
        starts.append(rng.choice(found, BLOCKS) if len(found) else np.full(BLOCKS, 1))
    return torch.from_numpy(np.stack(starts))


class Row(NamedTuple):
    """A conversation, and what the drafter reads of it."""

    ids_T: Tensor
    weights_T: Tensor
    features_TX: Tensor


def loss_of(drafter: Drafter, embedding: Tensor, rows: list[Row], starts_BA: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, and by position the share of drafts that are right, with all drafts before them."""
    ids_BT, weights_BT, features_BTX = (torch.stack(parts) for parts in zip(*rows, strict=True))
    index_BAC = starts_BA[..., None] + torch.arange(BLOCK_TOKENS)
    rows_B11 = torch.arange(len(ids_BT))[:, None, None]
    tokens_BAC, weights_BAC = ids_BT[rows_B11, index_BAC], weights_BT[rows_B11, index_BAC]
    inputs_BAC = tokens_BAC.clone()
    inputs_BAC[..., 1:] = MASK_TOKEN_ID
    hidden = drafter(F.embedding(inputs_BAC, embedding), features_BTX, starts_BA)[..., 1:, :]
    logits = hidden @ embedding.T
    loss = F.cross_entropy(logits.flatten(0, 2), tokens_BAC[..., 1:].flatten(), reduction="none").view(
        hidden.shape[:-1]
    )
    # What follows a reply's end is not drafted.
    is_reply = (weights_BAC[..., 1:] > 0.5).cumprod(-1)
    weight = is_reply * FADING ** torch.arange(BLOCK_TOKENS - 1)
    right = ((logits.argmax(-1) == tokens_BAC[..., 1:]) * is_reply).cumprod(-1)
    return (loss * weight).sum() / weight.sum(), right.float().sum((0, 1)) / is_reply[..., 0].sum()


def train(seconds: float) -> Drafter:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    model, rng = load_model(), np.random.default_rng(SEED)
    drafter, mixture = Drafter(model.shape.hidden_size), Mixture.load(DEMO_DIRECTORY)
    optimiser = torch.optim.AdamW(drafter.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    began, step, average = time.monotonic(), 0, torch.zeros(BLOCK_TOKENS - 1)
    known, embedding = deque[Row](maxlen=MAX_ROWS), model.model.embed_tokens.weight
    while (share := (time.monotonic() - began) / seconds) < 1:
        ids, weights = (torch.from_numpy(part) for part in mixture.batch(f"{SEED}:{step}", 1, ROW_TOKENS))
        known.append(Row(ids[0].long(), weights[0].float(), layer_outputs(model, ids.long())[0]))
        rows = [known[-1], *(known[index] for index in rng.integers(len(known), size=ROWS - 1))]
        loss, right = loss_of(drafter, embedding, rows, draw_starts(np.stack([row.weights_T for row in rows]), rng))
        for group in optimiser.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * min(1.0, (1 - share) / DECAY_SHARE)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimiser.step()
        average = right if step == 0 else average.lerp(right, 0.05)
        step += 1
        if step % 50 == 0:
            tokens = 1 + float(average.sum())
            print(
                f"{step:5d} steps, {time.monotonic() - began:5.0f} s, loss {loss:.3f}, {tokens:.2f} tokens a step",
                flush=True,
            )
    return drafter


def export(drafter: Drafter, output: Path) -> None:
    """Write the drafter in the published layout, in bfloat16."""
    output.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to(torch.bfloat16) for name, tensor in drafter.state_dict().items()}
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    shape = Shape()
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": INNER_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "layer_types": ["full_attention"] * NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 8192,
        "block_size": BLOCK_TOKENS,
        "num_target_layers": shape.num_hidden_layers,
        "dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [*TARGET_LAYERS]},
    }
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1800)
    options = parser.parse_args()
    export(train(options.seconds), options.output)


if __name__ == "__main__":
    main()
