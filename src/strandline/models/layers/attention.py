"""Softmax attention over all tokens before, plain and behind an output gate (Qwen3-Next, Qwen3.5).

Projections that read the same input are one matrix (comments name the order of its rows); the published tensors are
split into it while loading.

Source: ``transformers`` (``llama``, ``qwen3``, ``qwen3_next``, ``qwen3_5``, ``olmo_hybrid``).

Shape suffixes: T tokens of the step, E hidden size, H query heads, D head dim, O rows of a fused projection.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from strandline.kernels.activation import sigmoid_gate
from strandline.kernels.arena import LayerMemory
from strandline.kernels.attention import paged_attention
from strandline.kernels.batch import KVMemory, StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.norm import rms_norm
from strandline.kernels.operation import Operation
from strandline.kernels.qkv import HeadNorm, prepare_qkv
from strandline.model_config import MAX_HEADS, Fields, read_eps, read_head_dim
from strandline.models.layers.parameters import dtype_name, gain, parameter
from strandline.models.layers.projection import Projection
from strandline.models.layers.rotary import RotaryTable
from strandline.models.targets import NamedTargets, Target, interleaved, whole
from strandline.specs import E4M3, LayerSpec, kv_spec


class QueryKeyNorm(Enum):
    """How the heads of queries and keys are normalised before their positions are embedded."""

    NONE = "none"
    PLAIN = "plain"
    ZERO_CENTERED = "zero-centred"
    WIDE = "plain, over all heads at once"


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Sizes of the layer, and what it leaves out."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    has_bias: bool
    norm: QueryKeyNorm
    scale: float
    """Of the products of queries and keys."""
    is_rotated: bool = True
    """Whether positions are embedded."""
    has_out_bias: bool | None = None
    """Whether the output projection has a bias; None: as the others."""
    window_tokens: int | None = None
    """Tokens that each token sees, the last ones, itself among them; None: all."""

    @classmethod
    def read(
        cls, fields: Fields, norm: QueryKeyNorm, *, eps: float | None = None, has_bias: bool | None = None
    ) -> "AttentionConfig":
        """Read a text configuration; raises as :class:`strandline.model_config.Fields`.

        Args:
            eps: of the norms of heads, where the configuration has another name for it.
            has_bias: whether the projections have one, where the configuration does not say.
        """
        num_heads = fields.size("num_attention_heads", at_most=MAX_HEADS)
        num_kv_heads = fields.size("num_key_value_heads", at_most=MAX_HEADS)
        if num_heads % num_kv_heads:
            fields.reject("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
        head_dim = read_head_dim(fields)
        if head_dim % 2:
            fields.reject("head_dim", "even")
        eps = read_eps(fields) if eps is None else eps
        has_bias = fields.flag("attention_bias") if has_bias is None else has_bias
        hidden_size = fields.size("hidden_size")
        return cls(hidden_size, num_heads, num_kv_heads, head_dim, eps, has_bias, norm, head_dim**-0.5)


@dataclass(slots=True)
class KVScales:
    """What keys and values are divided by before they are kept in e4m3. Published with some weights."""

    key: float = 1.0
    value: float = 1.0


class Attention(nn.Module):
    """Softmax attention.

    Its recurrence is None: it keeps streams alone. ``kv_dtype``, theirs, may be changed before it is bound.

    Args:
        dtype: of activations, keys and values, and of the weights until they are packed.
        num_gate_rows: rows of the input projection behind the values, for a gate.
    """

    recurrence = None
    operations: tuple[Operation[..., Any], ...] = (prepare_qkv, paged_attention)

    def __init__(
        self, config: AttentionConfig, dtype: torch.dtype, device: torch.device | str, *, num_gate_rows: int = 0
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.kv_dtype, self.kv_scales = dtype_name(dtype), KVScales()
        head_dim, hidden_size = config.head_dim, config.hidden_size
        query_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.sizes = [query_rows, kv_rows, kv_rows, num_gate_rows]
        self.in_proj = Projection(sum(self.sizes), hidden_size, dtype, device, has_bias=config.has_bias)
        """Rows: query, key, value, gate."""
        has_out_bias = config.has_bias if config.has_out_bias is None else config.has_out_bias
        self.out_proj = Projection(hidden_size, query_rows, dtype, device, has_bias=has_out_bias)
        if config.norm is QueryKeyNorm.WIDE:
            self.operations = (*self.operations, rms_norm)
            self.q_norm_O = gain(query_rows, dtype=dtype, device=device)
            self.k_norm_O = gain(kv_rows, dtype=dtype, device=device)
        elif config.norm is not QueryKeyNorm.NONE:
            weight = parameter if config.norm is QueryKeyNorm.ZERO_CENTERED else gain
            self.q_norm_D = weight(head_dim, dtype=dtype, device=device)
            self.k_norm_D = weight(head_dim, dtype=dtype, device=device)

    @property
    def spec(self) -> LayerSpec:
        return kv_spec(self.config.num_kv_heads, self.config.head_dim, self.kv_dtype)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._prepare_qkv, self._attend = kernels[prepare_qkv], kernels[paged_attention]
        if self.config.norm is QueryKeyNorm.WIDE:
            self._rms_norm = kernels[rms_norm]

    def bind(self, memory: LayerMemory) -> KVMemory:
        """Return the layer's memory as ``forward`` takes it."""
        scales = self.kv_scales if self.kv_dtype == E4M3 else KVScales()
        return KVMemory(memory.streams["key"], memory.streams["value"], scales.key, scales.value)

    def forward(self, hidden_TE: Tensor, rotary: RotaryTable | None, batch: StepBatch, memory: KVMemory) -> Tensor:
        out_TO, _ = self._attended(hidden_TE, rotary, batch, memory)
        return self.out_proj.multiply(out_TO)

    def _attended(
        self, hidden_TE: Tensor, rotary: RotaryTable | None, batch: StepBatch, memory: KVMemory
    ) -> tuple[Tensor, Tensor]:
        """Return the heads' results side by side, and the gate's rows."""
        config = self.config
        q_TO, k_TO, v_TO, gate_TO = self.in_proj.multiply(hidden_TE).split(self.sizes, dim=-1)
        rotary = rotary if config.is_rotated else None
        if config.norm is QueryKeyNorm.WIDE:
            q_TO = self._rms_norm(q_TO, self.q_norm_O, config.eps)
            k_TO = self._rms_norm(k_TO, self.k_norm_O, config.eps)
        q_THD = self._prepare_qkv(q_TO, k_TO, v_TO, self._norm(), rotary, memory, batch.attention)
        window = {} if config.window_tokens is None else {"window_tokens": config.window_tokens}
        out_THD = self._attend(q_THD, memory, batch.attention, batch.num_decodes, scale=config.scale, **window)
        return out_THD.flatten(1), gate_TO

    def _norm(self) -> HeadNorm | None:
        kind = self.config.norm
        if kind in (QueryKeyNorm.NONE, QueryKeyNorm.WIDE):
            return None
        return HeadNorm(self.q_norm_D, self.k_norm_D, self.config.eps, kind is QueryKeyNorm.ZERO_CENTERED)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        for kind, fused in {"weight": self.in_proj.weight_OI, "bias": self.in_proj.bias_O}.items():
            if fused is not None:
                q, k, v, gate = fused.split(self.sizes)
                yield f"{prefix}q_proj.{kind}", self._query_target(q, gate)
                yield f"{prefix}k_proj.{kind}", whole(k)
                yield f"{prefix}v_proj.{kind}", whole(v)
        yield from self.out_proj.targets(f"{prefix}o_proj.")
        if self.config.norm is QueryKeyNorm.WIDE:
            yield f"{prefix}q_norm.weight", whole(self.q_norm_O)
            yield f"{prefix}k_norm.weight", whole(self.k_norm_O)
        elif self.config.norm is not QueryKeyNorm.NONE:
            yield f"{prefix}q_norm.weight", whole(self.q_norm_D)
            yield f"{prefix}k_norm.weight", whole(self.k_norm_D)

    def _query_target(self, query: Tensor, gate: Tensor) -> Target:
        """Return where the published query projection goes."""
        del gate
        return whole(query)


class GatedAttention(Attention):
    """Softmax attention behind a sigmoid gate of as many channels."""

    operations = (*Attention.operations, sigmoid_gate)

    def __init__(self, config: AttentionConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(config, dtype, device, num_gate_rows=config.num_heads * config.head_dim)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        super().use_kernels(kernels)
        self._sigmoid_gate = kernels[sigmoid_gate]

    def forward(self, hidden_TE: Tensor, rotary: RotaryTable | None, batch: StepBatch, memory: KVMemory) -> Tensor:
        out_TO, gate_TO = self._attended(hidden_TE, rotary, batch, memory)
        return self.out_proj.multiply(self._sigmoid_gate(out_TO, gate_TO))

    def _query_target(self, query: Tensor, gate: Tensor) -> Target:
        """Return where the published query projection goes: a head's gate rows follow its query rows there."""
        by_head = (self.config.num_heads, self.config.head_dim)
        return interleaved(query.unflatten(0, by_head), gate.unflatten(0, by_head))
