"""Softmax attention over all earlier tokens, with or without an output gate (Qwen3-Next, Qwen3.5).

Projections that read the same input are one matrix (comments name the order of its rows); the published tensors are
split into it while loading.

Source: ``transformers`` (``llama``, ``qwen3``, ``qwen3_next``, ``qwen3_5``, ``olmo_hybrid``).

Shape suffixes: T tokens of the step, E hidden size, H query heads, D head dim, O rows of a fused projection.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor, nn

from strandline.config_fields import MAX_HEADS, Fields, read_eps, read_head_dim
from strandline.kernels.arena import LayerMemory
from strandline.kernels.attention.attention import paged_attention
from strandline.kernels.attention.qkv import HeadNorm, prepare_qkv
from strandline.kernels.batch import KVMemory
from strandline.kernels.binding import Kernels
from strandline.kernels.operation import Operation
from strandline.kernels.rowwise.activation import sigmoid_gate
from strandline.kernels.rowwise.norm import rms_norm
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows
from strandline.kernels.rowwise.quantizing import with_quantized
from strandline.models.layers.projection import Projection, SummedProjection
from strandline.models.layers.shard import Shard
from strandline.models.layers.site import Site, dtype_name
from strandline.models.layers.step import Step
from strandline.models.layers.targets import NamedTargets, Target, interleaved, sharded, whole
from strandline.models.layers.wide_norm import rms_norm_over_ranks
from strandline.specs import E4M3, LayerSpec, kv_spec

KV_HEADS: Final = "heads of keys and values"


class QueryKeyNorm(Enum):
    """How the heads of queries and keys are normalised before their positions are embedded."""

    NONE = "none"
    PLAIN = "plain"
    ZERO_CENTERED = "zero-centred"
    WIDE = "plain, over all heads at once"


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Sizes and options of the layer."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    has_bias: bool
    norm: QueryKeyNorm
    scale: float
    """Scale of the attention scores."""
    is_rotated: bool = True
    """Whether positions are embedded by rotation."""
    has_out_bias: bool | None = None
    """Whether the output projection has a bias; None: as the others."""
    window_tokens: int | None = None
    """Number of last tokens that each token attends to, itself included; None: all."""
    is_causal: bool = True
    """Whether a token attends to none after it; else to all tokens of the sequence that the step computes."""
    has_sinks: bool = False
    """Whether the softmax of each head has a further score, which is a parameter."""
    input_size: int | None = None
    """Features of the input; None: those of the output, ``hidden_size``."""

    @classmethod
    def read(
        cls, fields: Fields, norm: QueryKeyNorm, *, eps: float | None = None, has_bias: bool | None = None
    ) -> "AttentionConfig":
        """Read a text configuration; raises as :class:`strandline.config_fields.Fields`.

        Args:
            eps: epsilon of the norms of heads, where the configuration has another name for it.
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

    def of(self, shard: Shard) -> "AttentionConfig":
        """Return the sizes of a shard; raises as :class:`strandline.models.layers.shard.Shard`."""
        num_kv_heads = shard.shared(self.num_kv_heads, KV_HEADS).part_of(self.num_kv_heads, KV_HEADS)
        return replace(self, num_heads=shard.part_of(self.num_heads, "attention heads"), num_kv_heads=num_kv_heads)


@dataclass(slots=True)
class KVScales:
    """Scales that divide keys and values before they are stored in e4m3. Published with some weights."""

    key: float = 1.0
    value: float = 1.0


class Attention(nn.Module):
    """Softmax attention.

    Its recurrence is None: it keeps only streams. Their ``kv_dtype`` may be changed before it is bound.

    Args:
        site: the shard divides the heads; several shards hold the same key/value heads if there are fewer of these.
        is_gated: whether the input projection has gate rows after the values, as many as for queries.
        num_in_rows: rows of the input projection, where it has others.
    """

    recurrence = None
    operations: tuple[Operation[..., Any], ...] = (prepare_qkv, paged_attention)

    def __init__(
        self, config: AttentionConfig, site: Site, *, is_gated: bool = False, num_in_rows: int | None = None
    ) -> None:
        super().__init__()
        self.shard, self.kv_shard = site.shard, site.shard.shared(config.num_kv_heads, KV_HEADS)
        self.config = config = config.of(site.shard)
        self.dtype = site.dtype
        self.kv_dtype, self.kv_scales = dtype_name(site.dtype), KVScales()
        head_dim, hidden_size = config.head_dim, config.hidden_size
        query_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.sizes = [query_rows, kv_rows, kv_rows, query_rows if is_gated else 0]
        input_size = hidden_size if config.input_size is None else config.input_size
        num_in_rows = sum(self.sizes) if num_in_rows is None else num_in_rows
        self.in_proj = Projection(num_in_rows, input_size, site, has_bias=config.has_bias)
        """Rows: query, key, value, gate."""
        has_out_bias = config.has_bias if config.has_out_bias is None else config.has_out_bias
        self.out_proj = SummedProjection(hidden_size, query_rows, site, has_bias=has_out_bias)
        self.sinks_H = site.parameter(config.num_heads, dtype=torch.float32) if config.has_sinks else None
        if config.norm is QueryKeyNorm.WIDE:
            self.operations = (*self.operations, rms_norm)
            self.q_norm_O = site.gain(query_rows)
            self.k_norm_O = site.gain(kv_rows)
        elif config.norm is not QueryKeyNorm.NONE:
            weight = site.parameter if config.norm is QueryKeyNorm.ZERO_CENTERED else site.gain
            self.q_norm_D, self.k_norm_D = weight(head_dim), weight(head_dim)

    @property
    def takes_quantized(self) -> bool:
        """Whether it takes quantised rows."""
        return self.in_proj.takes_quantized

    @property
    def spec(self) -> LayerSpec:
        config, num_shares = self.config, self.kv_shard.count
        spec = kv_spec(config.num_kv_heads, config.head_dim, self.kv_dtype, num_shares=num_shares)
        return replace(spec, window_tokens=self.config.window_tokens)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._prepare_qkv, self._attend = kernels[prepare_qkv], kernels[paged_attention]
        if self.config.norm is QueryKeyNorm.WIDE:
            self._rms_norm = rms_norm_over_ranks(kernels)

    def bind(self, memory: LayerMemory) -> KVMemory:
        """Return the layer's memory as ``forward`` takes it."""
        scales = self.kv_scales if self.kv_dtype == E4M3 else KVScales()
        streams = memory.streams["key"], memory.streams["value"]
        return KVMemory(*streams, scales.key, scales.value, self.sinks_H, memory.lifetime)

    def forward(self, hidden_TE: Rows, step: Step, memory: KVMemory) -> Tensor:
        out_TO, _ = self._attended(hidden_TE, step, memory)
        return self.out_proj.multiply(out_TO)

    def _attended(self, hidden_TE: Rows, step: Step, memory: KVMemory) -> tuple[Tensor, Tensor]:
        """Return the heads' results side by side, and the gate's rows."""
        q_THD, gate_TO = self._prepared(hidden_TE, step, memory)
        config = self.config
        options: dict[str, Any] = {}
        if config.window_tokens is not None:
            options["window_tokens"] = config.window_tokens
        if not config.is_causal:
            options["is_causal"] = False
        rows = (q_THD, memory, step.batch.attention.of(memory.lifetime), step.batch.num_decodes)
        out_THD = self._attend(*rows, scale=config.scale, **options)
        return out_THD.flatten(1), gate_TO

    def keep(self, hidden_TE: Tensor, step: Step, memory: KVMemory) -> None:
        """Store the step's keys and values only."""
        self._prepared(hidden_TE, step, memory)

    def _prepared(self, hidden_TE: Rows, step: Step, memory: KVMemory) -> tuple[Tensor, Tensor]:
        """Store keys and values; return the queries, and the gate's rows."""
        config = self.config
        q_TO, k_TO, v_TO, gate_TO = self.in_proj.multiply(hidden_TE).split(self.sizes, dim=-1)
        rotary = step.rotary_of(config.window_tokens) if config.is_rotated else None
        if config.norm is QueryKeyNorm.WIDE:
            q_TO = self._rms_norm(q_TO, self.q_norm_O, config.eps)
            k_TO = self._rms_norm(k_TO, self.k_norm_O, config.eps)
        attention = step.batch.attention.of(memory.lifetime)
        return self._prepare_qkv(q_TO, k_TO, v_TO, self._norm(), rotary, memory, attention), gate_TO

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
                yield f"{prefix}k_proj.{kind}", sharded(k, self.kv_shard)
                yield f"{prefix}v_proj.{kind}", sharded(v, self.kv_shard)
        yield from self.out_proj.targets(f"{prefix}o_proj.")
        if self.sinks_H is not None:
            yield f"{prefix}sinks", sharded(self.sinks_H, self.shard)
        if self.config.norm is QueryKeyNorm.WIDE:
            yield f"{prefix}q_norm.weight", sharded(self.q_norm_O, self.shard)
            yield f"{prefix}k_norm.weight", sharded(self.k_norm_O, self.kv_shard)
        elif self.config.norm is not QueryKeyNorm.NONE:
            yield f"{prefix}q_norm.weight", whole(self.q_norm_D)
            yield f"{prefix}k_norm.weight", whole(self.k_norm_D)

    def _query_target(self, query: Tensor, gate: Tensor) -> Target:
        """Return the target of the published query projection."""
        del gate
        return sharded(query, self.shard)


class HeadGatedAttention(Attention):
    """Softmax attention with a sigmoid gate per head."""

    def __init__(self, config: AttentionConfig, site: Site) -> None:
        super().__init__(config, site)
        self.gate_proj = Projection(self.config.num_heads, config.hidden_size, site, shard=site.shard)

    def forward(self, hidden_TE: Rows, step: Step, memory: KVMemory) -> Tensor:
        out_TO, _ = self._attended(hidden_TE, step, memory)
        gate_TH = self.gate_proj.multiply(hidden_TE if self.gate_proj.takes_quantized else plain_rows(hidden_TE))
        return self.out_proj.multiply(gate_heads(out_TO.unflatten(-1, (self.config.num_heads, -1)), gate_TH).flatten(1))

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield from super().targets(prefix)
        yield from self.gate_proj.targets(f"{prefix}gate_proj.")


def gate_heads(out_THD: Tensor, gate_TH: Tensor) -> Tensor:
    """Multiply the results of heads, in place, by sigmoids of their gates."""
    return out_THD.mul_(gate_TH.float().sigmoid().to(out_THD.dtype).unsqueeze(-1))


class GatedAttention(Attention):
    """Softmax attention with a sigmoid gate per output channel."""

    operations = (*Attention.operations, *with_quantized(sigmoid_gate))

    def __init__(self, config: AttentionConfig, site: Site) -> None:
        super().__init__(config, site, is_gated=True)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        super().use_kernels(kernels)
        self._sigmoid_gate = self.out_proj.fed_by(sigmoid_gate, kernels)

    def forward(self, hidden_TE: Rows, step: Step, memory: KVMemory) -> Tensor:
        out_TO, gate_TO = self._attended(hidden_TE, step, memory)
        return self.out_proj.multiply(self._sigmoid_gate(out_TO, gate_TO))

    def _query_target(self, query: Tensor, gate: Tensor) -> Target:
        """Return the target of the published query projection, where a head's gate rows follow its query rows."""
        by_head = (self.config.num_heads, self.config.head_dim)
        return interleaved(query.unflatten(0, by_head), gate.unflatten(0, by_head), shard=self.shard)
