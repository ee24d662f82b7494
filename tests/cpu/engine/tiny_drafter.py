"""Random drafters in the published layouts, and a reference implementation of what they draft, in float32.

The references compute everything anew for each block or token, from the outputs of the model's layers as transformers
returns them: no memory, one sequence at a time.
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

RANK = 4
DFLASH2: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "dflash_config": {
        **CONFIG["dflash_config"],
        "conv_kernel_size": 3,
        "conv_group_size": 8,
        "selector_rank": RANK,
        "selector_top_k": 7,
        "input_embedding_scale": 1.5,
        "output_multiplier": 0.7,
        "final_logit_softcapping": 5.0,
    },
}
DSPARK: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
BLOCK_DRAFTERS: dict[str, dict[str, Any]] = {"dflash": {}, "dflash2": DFLASH2, "dspark": DSPARK}
"""How configurations differ from that of DFlash."""


def method_of(config: dict[str, Any]) -> str:
    """Return the method of ``--speculative-config`` of a drafter of blocks."""
    return "dspark" if "DSpark" in config["architectures"][0] else "dflash"


def save_drafter(directory: Path, *, seed: int = 5, **changes: Any) -> Path:
    """Write a random drafter for the tiny model."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    (directory / "config.json").write_text(json.dumps(config))
    tensors, num_drafted = random_tensors(config, seed), config.get("draft_vocab_size")
    if num_drafted is not None:
        tensors |= own_head(num_drafted, config["hidden_size"], torch.Generator().manual_seed(seed))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def own_head(num_drafted: int, size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return a random output head of some of the tokens."""
    ids = torch.randperm(VOCAB_SIZE, generator=generator)[:num_drafted].sort().values
    return {
        "lm_head.weight": torch.randn(num_drafted, size, generator=generator) * 0.3,
        "d2t": ids - torch.arange(num_drafted),
        "t2d": torch.isin(torch.arange(VOCAB_SIZE), ids),
    }


def save_as_speculators(directory: Path, drafter: Path, copies: dict[str, Tensor]) -> Path:
    """Write a drafter as the library speculators does, with copies of tensors of the model."""
    plain, tensors = json.loads((drafter / "config.json").read_text()), load_file(drafter / "model.safetensors")
    outer = {"draft_vocab_size": plain.pop("draft_vocab_size", VOCAB_SIZE), "dtype": "float32"}
    if block := plain.pop("dflash_config", None):
        kind, outer["mask_token_id"] = method_of(plain), block["mask_token_id"]
        outer["aux_hidden_state_layer_ids"] = [layer + 1 for layer in block["target_layer_ids"]]
        outer |= {"block_size": plain.pop("block_size"), "sliding_window_non_causal": False}
        outer["architectures"] = ["DFlashSpeculator"]
        outer |= {name: plain.pop(name) for name in DSPARK if name in plain and name != "architectures"}
    else:
        kind, name = "eagle3", "eagle_aux_hidden_state_layer_ids"
        outer |= {name: plain.pop(name), "architectures": ["Eagle3DraftModel"]}
        outer["norm_before_residual"] = plain.pop("norm_before_residual", False)
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    layer = {name: value for name, value in plain.items() if name != "architectures"}
    verifier = {"architectures": ["Qwen3_5ForCausalLM"], "name_or_path": "owner/model"}
    methods = [{"proposal_type": "greedy", "speculative_tokens": 5, "accept_tolerance": 0.0, "verifier_accept_k": 1}]
    library = {"algorithm": kind, "proposal_methods": methods, "verifier": verifier}
    config = {**outer, "speculators_model_type": kind, "speculators_config": library, "transformer_layer_config": layer}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({**tensors, **copies}, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


EAGLE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "eagle_aux_hidden_state_layer_ids": [2, 1],
}


def save_eagle(directory: Path, target_size: int = 32, **changes: Any) -> Path:
    """Write a random EAGLE-3 drafter; without ``draft_vocab_size``, one that shares embedding and head."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in {**EAGLE, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    size, inner, head_dim, generator = config["hidden_size"], config["intermediate_size"], 8, torch.Generator()
    queries, keys = (config[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    num_layers = len(config["eagle_aux_hidden_state_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, num_layers * target_size), "norm.weight": (size,)}
    parts = {"q": (queries, 2 * size), "k": (keys, 2 * size), "v": (keys, 2 * size), "o": (size, queries)}
    shapes |= {f"midlayer.self_attn.{name}_proj.weight": shape for name, shape in parts.items()}
    parts = {"gate": (inner, size), "up": (inner, size), "down": (size, inner)}
    shapes |= {f"midlayer.mlp.{name}_proj.weight": shape for name, shape in parts.items()}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes |= {f"midlayer.{name}.weight": (size,) for name in norms}
    num_drafted = config.get("draft_vocab_size")
    if num_drafted is not None:
        shapes["embed_tokens.weight"] = (VOCAB_SIZE, size)
    if config["model_type"] == "qwen3":
        shapes |= {f"midlayer.self_attn.{name}_norm.weight": (head_dim,) for name in ("q", "k")}
    generator.manual_seed(7)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)
        for name, shape in sorted(shapes.items())
    }
    if num_drafted is not None:
        tensors |= own_head(num_drafted, size, generator)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
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
    if config["architectures"] == DFLASH2["architectures"]:
        shapes |= _dflash2_shapes(config)
    elif config["architectures"] == DSPARK["architectures"]:
        num_drafted, rank = config.get("draft_vocab_size", VOCAB_SIZE), config["markov_rank"]
        shapes |= {"markov_head.markov_w1.weight": (VOCAB_SIZE, rank)}
        shapes |= {"markov_head.markov_w2.weight": (num_drafted, rank)}
        shapes |= {"confidence_head.proj.weight": (1, size + rank), "confidence_head.proj.bias": (1,)}
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)
        for name, shape in sorted(shapes.items())
    }


def _dflash2_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    block, size = config["dflash_config"], config["hidden_size"]
    taps, rank = block["conv_kernel_size"], block["selector_rank"]
    shapes: dict[str, tuple[int, ...]] = {"candidate_selector.hidden_projection.weight": (rank, size)}
    for name in ("predecessor", "successor"):
        shapes[f"candidate_selector.{name}_codebook"] = (VOCAB_SIZE, rank)
    for index in range(config["num_hidden_layers"]):
        for part in ("attention", "mlp"):
            shapes[f"layers.{index}.{part}_conv.base_kernel"] = (2, taps, size)
            outputs = 2 * taps * size // block["conv_group_size"]
            shapes[f"layers.{index}.{part}_conv.kernel_projection.weight"] = (outputs, size)
    return shapes


def load_oracle(directory: Path) -> Any:
    """Load a model with transformers."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


class Layers:
    """Parts of a drafter, and the outputs of a model's layers."""

    def __init__(self, model: Any, drafter: Path) -> None:
        self.config = json.loads((drafter / "config.json").read_text())
        self.weights = load_file(drafter / "model.safetensors")
        self.model = model

    @torch.no_grad()
    def outputs(self, tokens: list[int], layers: list[int]) -> Tensor:
        """Return the outputs of some of the model's layers at every token, side by side."""
        outputs = self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
        # Others begin with the embedding.
        first = 0 if self.model.config.model_type.startswith("mamba") else 1
        return torch.cat([outputs[first + index][0] for index in layers], -1)

    def linear(self, rows: Tensor, name: str) -> Tensor:
        return rows @ self.weights[f"{name}.weight"].T

    def mlp(self, rows: Tensor, prefix: str) -> Tensor:
        gated = F.silu(self.linear(rows, f"{prefix}mlp.gate_proj")) * self.linear(rows, f"{prefix}mlp.up_proj")
        return self.linear(gated, f"{prefix}mlp.down_proj")

    def attention(self, prefix: str, rows: Tensor, context: Tensor, seen: list[list[int]]) -> Tensor:
        """Attend the last tokens of a context, each to those seen."""
        config, start = self.config, len(context) - len(rows)
        positions, heads = torch.arange(len(context)), config["num_attention_heads"]
        q = self.heads(rows, f"{prefix}self_attn.q", positions[start:])
        k = self.heads(context, f"{prefix}self_attn.k", positions)
        v = self.linear(context, f"{prefix}self_attn.v_proj").unflatten(1, (config["num_key_value_heads"], -1))
        k_HCD, v_HCD = (x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1) for x in (k, v))
        hidden = torch.ones(len(rows), len(context), dtype=torch.bool)
        for row, keys in enumerate(seen):
            hidden[row, keys] = False
        scores = q.transpose(0, 1) @ k_HCD.transpose(1, 2) * config["head_dim"] ** -0.5
        found = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v_HCD
        return self.linear(found.transpose(0, 1).flatten(1), f"{prefix}self_attn.o_proj")

    def heads(self, rows: Tensor, name: str, positions: Tensor) -> Tensor:
        """Return projected, normalised and rotated heads."""
        dim = self.config["head_dim"]
        heads = self.linear(rows, f"{name}_proj").unflatten(1, (-1, dim))
        if f"{name}_norm.weight" in self.weights:
            heads = self.norm(heads, f"{name}_norm")
        frequencies = self.config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angles = (positions[:, None] * frequencies)[:, None]
        low, high = heads.chunk(2, -1)
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)

    def norm(self, rows: Tensor, name: str) -> Tensor:
        variance = rows.pow(2).mean(-1, keepdim=True)
        return rows * (variance + self.config["rms_norm_eps"]).rsqrt() * self.weights[f"{name}.weight"]


class Reference(Layers):
    """What a drafter of blocks drafts for a model of transformers."""

    def features(self, tokens: list[int]) -> Tensor:
        """Return what is kept of every token, before the layers' projections."""
        outputs = self.outputs(tokens, self.config["dflash_config"]["target_layer_ids"])
        return self.norm(self.linear(outputs, "fc"), "hidden_norm")

    @torch.no_grad()
    def drafts(self, features: Tensor, tokens: list[int], num_drafts: int) -> list[int]:
        """Return drafts after tokens, given features of all but the last."""
        block, start = self.config["dflash_config"], len(tokens) - 1
        first_row = 0 if method_of(self.config) == "dspark" else 1
        ids = [tokens[-1], *[block["mask_token_id"]] * (num_drafts - 1 + first_row)]
        hidden = self.model.get_input_embeddings().weight[torch.tensor(ids)] * block.get("input_embedding_scale", 1)
        for index in range(self.config["num_hidden_layers"]):
            prefix = f"layers.{index}."
            normed = self.norm(hidden, f"{prefix}input_layernorm")
            convolved = self._convolved(normed, normed, f"{prefix}attention_conv", 0)
            seen = [self._seen(index, position, start + len(hidden)) for position in range(start, start + len(hidden))]
            mixed = self.attention(prefix, convolved, torch.cat([features[:start], convolved]), seen)
            hidden = hidden + self._convolved(mixed, normed, f"{prefix}attention_conv", 1)
            normed = self.norm(hidden, f"{prefix}post_attention_layernorm")
            fed = self.mlp(self._convolved(normed, normed, f"{prefix}mlp_conv", 0), prefix)
            hidden = hidden + self._convolved(fed, normed, f"{prefix}mlp_conv", 1)
        drafts = [tokens[-1]]
        for row in self.norm(hidden[first_row:], "norm"):
            drafts.append(self._draft(row, drafts[-1]))
        return drafts[1:]

    def _convolved(self, rows: Tensor, normed: Tensor, name: str, side: int) -> Tensor:
        """Return rows convolved along a block, one at a time."""
        base = self.weights.get(f"{name}.base_kernel")
        if base is None:
            return rows
        block, found = self.config["dflash_config"], []
        changes = self.linear(normed, f"{name}.kernel_projection").unflatten(1, (2, block["conv_kernel_size"], -1))
        for index, change in enumerate(changes):
            filters = base[side] + change[side].repeat_interleave(block["conv_group_size"], -1)
            taps = range(min(index + 1, len(filters)))
            found.append(torch.stack([filters[tap] * rows[index - tap] for tap in taps]).sum(0))
        return torch.stack(found)

    def _draft(self, row: Tensor, before: int) -> int:
        """Return the draft of a row, given the token before it."""
        head = self.weights.get("lm_head.weight", self.model.get_output_embeddings().weight)
        ids, logits = torch.arange(len(head)) + self.weights.get("d2t", 0), head @ row
        if "markov_head.markov_w1.weight" in self.weights:
            pair = self.weights["markov_head.markov_w1.weight"][before]
            logits = logits + self.weights["markov_head.markov_w2.weight"] @ pair
        if "candidate_selector.predecessor_codebook" in self.weights:
            block, cap = self.config["dflash_config"], self.config["dflash_config"]["final_logit_softcapping"]
            likeliest = logits.argsort(descending=True)[: block["selector_top_k"]]
            pair = self.weights["candidate_selector.predecessor_codebook"][before]
            pair = pair * self.linear(row[None], "candidate_selector.hidden_projection")[0]
            scores = cap * torch.tanh(logits[likeliest] * block["output_multiplier"] / cap)
            scores = scores + self.weights["candidate_selector.successor_codebook"][likeliest] @ pair
            return int(ids[likeliest[scores.argmax()]])
        return int(ids[logits.argmax()])

    def _seen(self, index: int, position: int, end: int) -> list[int]:
        config = self.config
        is_sliding = config["layer_types"][index] == "sliding_attention"
        is_causal = config.get("is_causal", config["dflash_config"].get("causal", is_sliding))
        first = max(0, position - config["sliding_window"] + 1) if is_sliding else 0
        return [*range(first, position + 1 if is_causal else end)]


class EagleReference(Layers):
    """What an EAGLE-3 drafter drafts for a model of transformers."""

    def features(self, tokens: list[int]) -> Tensor:
        """Return the features of every token."""
        layers = [layer - 1 for layer in self.config["eagle_aux_hidden_state_layer_ids"]]
        return self.linear(self.outputs(tokens, layers), "fc")

    @torch.no_grad()
    def drafts(self, features: Tensor, tokens: list[int], num_drafts: int) -> list[int]:
        """Return drafts after tokens, given features of all but the last."""
        features, tokens, drafts = features[: len(tokens) - 1], list(tokens), list[int]()
        shared = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
        embedding, head = (
            self.weights.get(f"{name}.weight", own)
            for name, own in zip(("embed_tokens", "lm_head"), shared, strict=True)
        )
        ids = torch.arange(len(head)) + self.weights.get("d2t", 0)
        for _ in range(num_drafts):
            hidden = self._last(features, embedding[torch.tensor(tokens[1:])])
            token = int(ids[(self.norm(hidden, "norm") @ head.T).argmax()])
            features = torch.cat([features, hidden[None]])
            tokens, drafts = [*tokens, token], [*drafts, token]
        return drafts

    def _last(self, features: Tensor, embedded: Tensor) -> Tensor:
        """Return the hidden state of the last pair."""
        normed = self.norm(features, "midlayer.hidden_norm")
        pairs = torch.cat([self.norm(embedded, "midlayer.input_layernorm"), normed], -1)
        residual = normed[-1:] if self.config.get("norm_before_residual") else features[-1:]
        hidden = residual + self.attention("midlayer.", pairs[-1:], pairs, [[*range(len(pairs))]])
        return (hidden + self.mlp(self.norm(hidden, "midlayer.post_attention_layernorm"), "midlayer."))[0]
