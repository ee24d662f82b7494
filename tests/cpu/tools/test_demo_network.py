"""The training forward pass of the demo model against transformers: logits, gradients, the MTP layer."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

import strandline
from tools import demo_network

DEMO_FOLDER = Path(strandline.__file__).parent / "demo"


def load_oracle(state: dict[str, torch.Tensor], config: Qwen3_5TextConfig) -> Qwen3_5ForCausalLM:
    oracle = Qwen3_5ForCausalLM(config).float().eval()
    trunk = {name: tensor for name, tensor in state.items() if not name.startswith("mtp.")}
    missing, unexpected = oracle.load_state_dict(trunk, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    oracle.tie_weights()
    return oracle


def test_logits_and_gradients_equal_transformers() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    }
    model = demo_network.DemoModel(demo_network.Shape(**sizes))
    demo_network.initialise(model, 0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    oracle = load_oracle(model.state_dict(), Qwen3_5TextConfig(**sizes, tie_word_embeddings=True, rope_parameters=rope))
    ids, targets = torch.randint(0, 300, (2, 192)), torch.randint(0, 300, (2 * 192,))

    ours = model(ids) @ model.model.embed_tokens.weight.T
    theirs = oracle(ids).logits.flatten(0, 1)
    # Float32 sums in another order; logits are about 1.
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)

    F.cross_entropy(ours, targets).backward()
    F.cross_entropy(theirs, targets).backward()
    right = dict(oracle.named_parameters())
    for name, parameter in model.named_parameters():
        if not name.startswith("mtp."):
            error = (parameter.grad - right[name].grad).norm() / right[name].grad.norm()
            assert error < 2e-4, name


@torch.no_grad()
def test_shipped_mtp_layer_equals_a_transformers_decoder_layer() -> None:
    state: dict[str, torch.Tensor] = {}
    for file in DEMO_FOLDER.glob("*.safetensors"):
        state |= {name: tensor.float() for name, tensor in load_file(file).items()}
    model = demo_network.DemoModel(demo_network.Shape())
    model.load_state_dict(state)
    config = Qwen3_5TextConfig.from_pretrained(DEMO_FOLDER)
    oracle = load_oracle(state, config)
    ids = torch.randint(3, 4096, (1, 128), generator=torch.Generator().manual_seed(1))
    next_ids = ids.roll(-1, 1)

    def norm(name: str) -> Qwen3_5RMSNorm:
        module = Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)
        module.weight.copy_(state[f"mtp.{name}.weight"])
        return module

    hidden = oracle.model(ids).last_hidden_state
    layer = oracle.model.layers[3]
    prefix = "mtp.layers.0."
    layer.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
    embedded = oracle.model.embed_tokens(next_ids)
    joined = torch.cat([norm("pre_fc_norm_embedding")(embedded), norm("pre_fc_norm_hidden")(hidden)], dim=-1)
    x = F.linear(joined, state["mtp.fc.weight"])
    rope = oracle.model.rotary_emb(x, torch.arange(128).view(1, 1, -1).expand(3, 1, -1))
    mask = torch.full((128, 128), float("-inf")).triu(1)[None, None]
    theirs = norm("norm")(layer(x, position_embeddings=rope, attention_mask=mask))

    # Float32 sums in another order; the hidden states are about 1.
    torch.testing.assert_close(model.draft(model(ids), next_ids), theirs[0], atol=5e-4, rtol=1e-3)
