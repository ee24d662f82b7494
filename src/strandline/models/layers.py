"""The layers of Qwen3-Next and Qwen3.5: gated attention, Gated DeltaNet, feed-forward layers, and the decoder of them.

Projections that read the same input are one matrix (the comments name the order of its rows); the published
tensors are split into it while loading. Parameters need no gradient; ``A_log`` and ``dt_bias`` are float32.

Source: Yang et al., "Gated Delta Networks"; ``transformers`` (``qwen3_next``, ``qwen3_5``) for the composition.

Shape suffixes: T tokens of the step, E hidden size, G key/value or key heads, H query or value heads, D head dim of
attention, K and V channels of a key and of a value head, C channels of the convolution, W its taps, F intermediate
size, X experts, O rows of a fused projection, Z vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from strandline.errors import ConfigError
from strandline.kernels.activation import sigmoid_gate
from strandline.kernels.attention import paged_attention
from strandline.kernels.batch import KVMemory, LayerMemory, RecurrentMemory, StepBatch
from strandline.kernels.conv1d import causal_conv1d_prefill, causal_conv1d_update
from strandline.kernels.gdn import gdn_decode, gdn_prefill
from strandline.kernels.gdn_log import LOG_TOKENS, gdn_decode_logged
from strandline.kernels.linear import can_halve, can_pack, gated_linear, halve, linear, pack
from strandline.kernels.moe import mixture
from strandline.kernels.norm import (
    add_rms_norm_zero_centered,
    rms_norm_gated,
    rms_norm_zero_centered,
)
from strandline.kernels.qkv import prepare_qkv
from strandline.kernels.rotary import default_frequencies, rotary_table
from strandline.models.targets import NamedTargets, interleaved, whole
from strandline.specs import AttentionSpec, LayerSpec, LogSpec, ModelSpec, RecurrentSpec

RotaryTable = tuple[Tensor, Tensor]

PACKED = ("in_proj_OE", "out_proj_EO", "gate_up_FE", "down_EF", "shared_down_EF", "head_ZE")
"""Parameters that are only ever multiplied with."""

PROJECTION_ROWS = 8
"""A fused projection's rows are a multiple of this, so that every row of what it returns starts on 16 bytes."""

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Kinds of rotary embedding that turn the same position differently in a longer prompt: cached keys would be wrong."""


def parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """Return an unfilled parameter that takes no gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that specs use for a dtype."""
    return str(dtype).removeprefix("torch.")


def rotary_frequencies(config: Any) -> tuple[Tensor, float]:
    """Return ``inv_freq_F`` and the attention factor of a text configuration.

    Raises:
        ConfigError: its kind of rotary embedding is unknown, or depends on the prompt's length.
    """
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        rotary_dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        return default_frequencies(rope["rope_theta"], rotary_dim), 1.0
    if kind not in ROPE_INIT_FUNCTIONS or kind in LENGTH_DEPENDENT_ROPE:
        supported = ["default", *(k for k in ROPE_INIT_FUNCTIONS if k not in LENGTH_DEPENDENT_ROPE)]
        raise ConfigError(f"rope_type {kind!r} is not supported; supported: {', '.join(supported)}")
    inv_freq_F, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return inv_freq_F.float(), attention_factor


class GatedAttention(nn.Module):
    """Softmax attention with normalised queries and keys, partial rotary embedding and a sigmoid gate."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim: int = config.head_dim
        self.eps = config.rms_norm_eps
        hidden_size = config.hidden_size
        query_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.sizes = [query_rows, kv_rows, kv_rows, query_rows]
        self.in_proj_OE = parameter(sum(self.sizes), hidden_size, dtype=dtype, device=device)
        """Rows: query, key, value, gate."""
        self.out_proj_EO = parameter(hidden_size, query_rows, dtype=dtype, device=device)
        self.in_bias_O = self.out_bias_E = None
        if config.attention_bias:
            self.in_bias_O = parameter(sum(self.sizes), dtype=dtype, device=device)
            self.out_bias_E = parameter(hidden_size, dtype=dtype, device=device)
        self.q_norm_D = parameter(self.head_dim, dtype=dtype, device=device)
        self.k_norm_D = parameter(self.head_dim, dtype=dtype, device=device)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.num_kv_heads, self.head_dim, dtype_name(self.in_proj_OE.dtype))

    def forward(self, hidden_TE: Tensor, rotary: RotaryTable, batch: StepBatch, memory: LayerMemory) -> Tensor:
        assert isinstance(memory, KVMemory)
        projected_TO = linear(hidden_TE, self.in_proj_OE, self.in_bias_O)
        norms = (self.q_norm_D, self.k_norm_D, self.eps)
        q_THD = prepare_qkv(projected_TO, self.num_heads, *norms, rotary, memory, batch.attention)
        out_THD = paged_attention(q_THD, memory, batch.attention, batch.num_decodes, scale=self.head_dim**-0.5)
        gated_TO = sigmoid_gate(out_THD.flatten(1), projected_TO[:, -self.sizes[3] :])
        return linear(gated_TO, self.out_proj_EO, self.out_bias_E)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors; a head's gate rows follow its query rows there."""
        pairs = [("weight", self.in_proj_OE, self.out_proj_EO), ("bias", self.in_bias_O, self.out_bias_E)]
        for kind, fused, out_proj in pairs:
            if fused is not None and out_proj is not None:
                q, k, v, gate = fused.split(self.sizes)
                by_head = (self.num_heads, self.head_dim)
                yield f"{prefix}q_proj.{kind}", interleaved(q.unflatten(0, by_head), gate.unflatten(0, by_head))
                yield f"{prefix}k_proj.{kind}", whole(k)
                yield f"{prefix}v_proj.{kind}", whole(v)
                yield f"{prefix}o_proj.{kind}", whole(out_proj)
        yield f"{prefix}q_norm.weight", whole(self.q_norm_D)
        yield f"{prefix}k_norm.weight", whole(self.k_norm_D)


class GatedDeltaNet(nn.Module):
    """The recurrent layer: a short convolution over queries, keys and values, then the gated delta rule."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.num_key_heads, self.num_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.eps = config.rms_norm_eps
        self.state_dtype: str = getattr(config, "mamba_ssm_dtype", None) or "float32"
        key_rows, value_rows = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        self.conv_sizes = [key_rows, key_rows, value_rows]
        self.sizes = [sum(self.conv_sizes), value_rows, self.num_heads, self.num_heads]
        self.in_proj_OE = parameter(sum(self.sizes), config.hidden_size, dtype=dtype, device=device)
        """Rows: query, key, value, output gate (z), write strength (b), decay (a)."""
        self.conv_CW = parameter(self.sizes[0], config.linear_conv_kernel_dim, dtype=dtype, device=device)
        self.A_log_H = parameter(self.num_heads, dtype=torch.float32, device=device)
        self.dt_bias_H = parameter(self.num_heads, dtype=torch.float32, device=device)
        self.norm_V = parameter(self.value_dim, dtype=dtype, device=device)
        self.out_proj_EO = parameter(config.hidden_size, value_rows, dtype=dtype, device=device)

    @property
    def spec(self) -> RecurrentSpec:
        channels, taps = self.conv_CW.shape
        state_shape = (self.num_heads, self.key_dim, self.value_dim)
        window_dtype, log = dtype_name(self.conv_CW.dtype), LogSpec(LOG_TOKENS, self.num_key_heads)
        return RecurrentSpec(state_shape, self.state_dtype, (taps - 1, channels), window_dtype, log)

    def forward(self, hidden_TE: Tensor, rotary: RotaryTable, batch: StepBatch, memory: LayerMemory) -> Tensor:
        del rotary
        assert isinstance(memory, RecurrentMemory)
        x_TC, z_TO, b_TH, a_TH = linear(hidden_TE, self.in_proj_OE).split(self.sizes, dim=-1)
        num_decodes = batch.num_decodes
        if num_decodes == len(hidden_TE):
            out_THV = self._decode(x_TC, a_TH, b_TH, batch, memory)
        elif num_decodes == 0:
            out_THV = self._prefill(x_TC, a_TH, b_TH, batch, memory)
        else:
            (x_DC, x_RC), (a_DH, a_RH), (b_DH, b_RH) = (
                x.split([num_decodes, len(x) - num_decodes]) for x in (x_TC, a_TH, b_TH)
            )
            decoded = self._decode(x_DC, a_DH, b_DH, batch, memory)
            out_THV = torch.cat((decoded, self._prefill(x_RC, a_RH, b_RH, batch, memory)))
        out_THV = rms_norm_gated(out_THV, z_TO.view(out_THV.shape), self.norm_V, self.eps)
        return linear(out_THV.flatten(1), self.out_proj_EO)

    def _decode(self, x_NC: Tensor, a_NH: Tensor, b_NH: Tensor, batch: StepBatch, memory: RecurrentMemory) -> Tensor:
        decodes, slots = slice(0, len(x_NC)), batch.recurrent
        src_N, dst_N = slots.src_N[decodes], slots.dst_N[decodes]
        window = (memory.window_SRC, slots.window_src_N[decodes], slots.window_offset_N[decodes], dst_N)
        y_NC = causal_conv1d_update(x_NC, self.conv_CW, None, *window, "silu")
        q_NGK, k_NGK, v_NHV = self._heads(y_NC)
        inputs = (q_NGK, k_NGK, v_NHV, a_NH, b_NH, self.A_log_H, self.dt_bias_H, memory.state_SHKV, src_N, dst_N)
        if memory.log is not None and slots.log is not None:
            return gdn_decode_logged(*inputs, memory.log, slots.log)
        return gdn_decode(*inputs)

    def _prefill(self, x_TC: Tensor, a_TH: Tensor, b_TH: Tensor, batch: StepBatch, memory: RecurrentMemory) -> Tensor:
        prefills, slots = slice(batch.num_decodes, None), batch.recurrent
        src_N, dst_N = slots.src_N[prefills], slots.dst_N[prefills]
        window = (memory.window_SRC, slots.window_src_N[prefills], slots.window_offset_N[prefills], dst_N)
        y_TC = causal_conv1d_prefill(x_TC, self.conv_CW, None, *window, slots.chunks, "silu")
        q_TGK, k_TGK, v_THV = self._heads(y_TC)
        gates = (a_TH, b_TH, self.A_log_H, self.dt_bias_H)
        return gdn_prefill(q_TGK, k_TGK, v_THV, *gates, memory.state_SHKV, src_N, dst_N, slots.chunks)

    def _heads(self, y_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = y_TC.split(self.conv_sizes, dim=-1)
        return (
            q.view(len(y_TC), -1, self.key_dim),
            k.view(len(y_TC), -1, self.key_dim),
            v.view(len(y_TC), -1, self.value_dim),
        )

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors but for the input projections, which differ between families."""
        yield f"{prefix}conv1d.weight", whole(self.conv_CW.unsqueeze(1))
        yield f"{prefix}A_log", whole(self.A_log_H)
        yield f"{prefix}dt_bias", whole(self.dt_bias_H)
        yield f"{prefix}norm.weight", whole(self.norm_V)
        yield f"{prefix}out_proj.weight", whole(self.out_proj_EO)


MIXERS: dict[str, type[GatedAttention] | type[GatedDeltaNet]] = {
    "linear_attention": GatedDeltaNet,
    "full_attention": GatedAttention,
}
"""By the names that a configuration's ``layer_types`` has for them."""


class GatedMlp(nn.Module):
    """A feed-forward layer with a gated linear unit."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.gate_up_FE = parameter(2 * intermediate_size, hidden_size, dtype=dtype, device=device)
        self.down_EF = parameter(hidden_size, intermediate_size, dtype=dtype, device=device)

    def forward(self, hidden_TE: Tensor) -> Tensor:
        return linear(gated_linear(hidden_TE, self.gate_up_FE), self.down_EF)

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors."""
        del names
        gate, up = self.gate_up_FE.chunk(2)
        yield f"{prefix}gate_proj.weight", whole(gate)
        yield f"{prefix}up_proj.weight", whole(up)
        yield f"{prefix}down_proj.weight", whole(self.down_EF)


class SparseMoe(nn.Module):
    """A mixture of experts with one shared expert behind a sigmoid gate."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device | str, *, is_normalised: bool) -> None:
        super().__init__()
        hidden_size, size = config.hidden_size, config.moe_intermediate_size
        shared_size: int = config.shared_expert_intermediate_size
        self.top_k = config.num_experts_per_tok
        self.is_normalised = is_normalised
        self.sizes = [2 * shared_size, config.num_experts, 1]
        self.sizes.append(-sum(self.sizes) % PROJECTION_ROWS)
        self.in_proj_OE = parameter(sum(self.sizes), hidden_size, dtype=dtype, device=device)
        """Rows: the shared expert's gate and up projections, the router, the shared expert's gate, and zeros."""
        self.in_proj_OE[-self.sizes[-1] :].zero_()
        self.shared_down_EF = parameter(hidden_size, shared_size, dtype=dtype, device=device)
        self.gate_up_XFE = parameter(config.num_experts, 2 * size, hidden_size, dtype=dtype, device=device)
        self.down_XEF = parameter(config.num_experts, hidden_size, size, dtype=dtype, device=device)

    def forward(self, hidden_TE: Tensor) -> Tensor:
        projected_TO = linear(hidden_TE, self.in_proj_OE)
        experts = (self.gate_up_XFE, self.down_XEF, self.shared_down_EF)
        return mixture(hidden_TE, projected_TO, *experts, self.top_k, is_normalised=self.is_normalised)

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors; the experts come as one tensor, or as one each, whichever is in ``names``."""
        shared, router, shared_gate, _ = self.in_proj_OE.split(self.sizes)
        gate, up = shared.chunk(2)
        yield f"{prefix}gate.weight", whole(router)
        yield f"{prefix}shared_expert_gate.weight", whole(shared_gate)
        yield f"{prefix}shared_expert.gate_proj.weight", whole(gate)
        yield f"{prefix}shared_expert.up_proj.weight", whole(up)
        yield f"{prefix}shared_expert.down_proj.weight", whole(self.shared_down_EF)
        if f"{prefix}experts.gate_up_proj" in names:
            yield f"{prefix}experts.gate_up_proj", whole(self.gate_up_XFE)
            yield f"{prefix}experts.down_proj", whole(self.down_XEF)
            return
        for expert, (gate_up_FE, down_EF) in enumerate(zip(self.gate_up_XFE, self.down_XEF, strict=True)):
            gate, up = gate_up_FE.chunk(2)
            yield f"{prefix}experts.{expert}.gate_proj.weight", whole(gate)
            yield f"{prefix}experts.{expert}.up_proj.weight", whole(up)
            yield f"{prefix}experts.{expert}.down_proj.weight", whole(down_EF)


class DecoderLayer(nn.Module):
    """A mixer of tokens and a feed-forward layer, each on the normalised residual stream."""

    def __init__(
        self,
        config: Any,
        mixer: GatedAttention | GatedDeltaNet,
        mlp: GatedMlp | SparseMoe,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.mixer = mixer
        self.mlp = mlp
        self.mixer_norm_E = parameter(config.hidden_size, dtype=dtype, device=device)
        self.mlp_norm_E = parameter(config.hidden_size, dtype=dtype, device=device)

    def forward(
        self, normed_TE: Tensor, residual_TE: Tensor, rotary: RotaryTable, batch: StepBatch, memory: LayerMemory
    ) -> tuple[Tensor, Tensor]:
        """Return what the layer adds to the residual stream at its end, and the stream without that."""
        mixed_TE = self.mixer(normed_TE, rotary, batch, memory)
        normed_TE, residual_TE = add_rms_norm_zero_centered(mixed_TE, residual_TE, self.mlp_norm_E, self.eps)
        return self.mlp(normed_TE), residual_TE

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors but for those that the mixer leaves to the family."""
        yield f"{prefix}input_layernorm.weight", whole(self.mixer_norm_E)
        yield f"{prefix}post_attention_layernorm.weight", whole(self.mlp_norm_E)
        yield from self.mlp.targets(f"{prefix}mlp.", names)
        mixer = "self_attn." if isinstance(self.mixer, GatedAttention) else "linear_attn."
        yield from self.mixer.targets(f"{prefix}{mixer}")


class Decoder(nn.Module):
    """Embedding, layers, final norm and output head.

    Args:
        is_tied: whether the output head is the embedding.
    """

    def __init__(
        self,
        config: Any,
        layers: Sequence[DecoderLayer],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        is_tied: bool,
    ) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise ConfigError(f"hidden_act {config.hidden_act!r} is not supported; supported: silu")
        self.eps = config.rms_norm_eps
        self.embed_ZE = parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(layers)
        self.norm_E = parameter(config.hidden_size, dtype=dtype, device=device)
        self.is_tied = is_tied
        self.head_ZE = self.embed_ZE if is_tied else parameter(*self.embed_ZE.shape, dtype=dtype, device=device)
        inv_freq_F, self.attention_factor = rotary_frequencies(config)
        self.inv_freq_F = nn.Buffer(inv_freq_F.to(device), persistent=False)

    @property
    def spec(self) -> ModelSpec:
        specs: list[LayerSpec] = [layer.mixer.spec for layer in self._layers()]
        return ModelSpec(tuple(specs), self.embed_ZE.shape[1], dtype_name(self.embed_ZE.dtype))

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    @torch.no_grad()
    def forward(self, batch: StepBatch, memory: Sequence[LayerMemory]) -> Tensor:
        """Return the final, normalised hidden state of every row of the step, and advance the memory."""
        residual_TE = F.embedding(batch.token_ids_T, self.embed_ZE)
        rotary = rotary_table(batch.positions_T, self.inv_freq_F, self.attention_factor)
        layers = self._layers()
        norms = [*(layer.mixer_norm_E for layer in layers[1:]), self.norm_E]
        normed_TE = rms_norm_zero_centered(residual_TE, layers[0].mixer_norm_E, self.eps)
        for layer, layer_memory, norm_E in zip(layers, memory, norms, strict=True):
            added_TE, residual_TE = layer(normed_TE, residual_TE, rotary, batch, layer_memory)
            normed_TE, residual_TE = add_rms_norm_zero_centered(added_TE, residual_TE, norm_E, self.eps)
        return normed_TE

    def pack(self) -> None:
        """Lay the weights out for fast products, where that exists; they cannot be loaded or moved afterwards."""
        for module in self.modules():
            for name, weight in module.named_parameters(recurse=False):
                # The embedding is indexed, too: a head tied to it stays as it is.
                if name in PACKED and weight is not self.embed_ZE and can_pack(weight):
                    setattr(module, name, nn.Parameter(pack(weight.data), requires_grad=False))

    def halve(self) -> None:
        """Keep in float16 what of a float32 model on a CPU loses nothing by it (``kernels/linear.py``)."""
        for module in self.modules():
            for name, weight in module.named_parameters(recurse=False):
                if name in PACKED and weight is not self.embed_ZE and can_halve(weight):
                    setattr(module, name, halve(weight.data))

    @torch.no_grad()
    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return logits ``[N, vocabulary]``, in the model's dtype."""
        return linear(hidden_NE, self.head_ZE)

    def targets(self, prefix: str, names: frozenset[str]) -> NamedTargets:
        """Yield the published tensors but for those that mixers leave to the family."""
        yield f"{prefix}embed_tokens.weight", whole(self.embed_ZE)
        yield f"{prefix}norm.weight", whole(self.norm_E)
        for index, layer in enumerate(self._layers()):
            yield from layer.targets(f"{prefix}layers.{index}.", names)
        # A tied head may be published all the same: it is the embedding once more.
        if not self.is_tied or "lm_head.weight" in names:
            yield "lm_head.weight", whole(self.head_ZE)
