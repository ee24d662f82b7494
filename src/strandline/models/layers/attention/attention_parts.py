"""What attention layers are made of: sizes, the projection, norms and gates of heads, and stored keys and values.

A layer (``attention.py`` and other files of this folder) names its parts, and its ``forward`` says in which order they
compute. Parts take the sizes of the whole layer and hold those of their shard.

Source: ``transformers`` (``llama``, ``qwen3``, ``qwen3_next``, ``qwen3_5``, ``olmo_hybrid``, ``lfm3``).

Shape suffixes: T tokens of the step, E hidden size, H query heads, D head dim, O rows of a fused projection.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from torch import Tensor, nn

from strandline.config_fields import MAX_HEADS, Fields, read_eps, read_head_dim
from strandline.kernels.arena import LayerMemory
from strandline.kernels.attention.qkv import HeadNorm
from strandline.kernels.batch import KVMemory
from strandline.kernels.binding import Kernels
from strandline.kernels.operation import Operation
from strandline.kernels.rowwise.norm import rms_norm
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows
from strandline.models.layers.parts.projection import FusedProjection, Projection
from strandline.models.layers.parts.shard import Shard
from strandline.models.layers.parts.site import Site, dtype_name
from strandline.models.layers.parts.targets import NamedTargets, interleaved, sharded, whole
from strandline.models.layers.parts.wide_norm import rms_norm_over_ranks
from strandline.specs import E4M3, LayerSpec, kv_spec

KV_HEADS: Final = "heads of keys and values"


class QueryKeyNorm(Enum):
    """How the heads of queries and keys are normalised before their positions are embedded."""

    NONE = "none"
    RMS = "RMS norm of each head"
    ZERO_CENTERED = "RMS norm of each head, whose weight is added to 1"
    WIDE = "RMS norm over all heads at once"


class OutputGate(Enum):
    """What the results of heads are multiplied by: sigmoids of what is projected from the layer's input."""

    NONE = "none"
    PER_HEAD = "a gate for each head"
    PER_CHANNEL = "a gate for each channel of each head"


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
    gate: OutputGate = OutputGate.NONE
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
        """Return the sizes of a shard; raises as :class:`strandline.models.layers.parts.shard.Shard`."""
        num_kv_heads = self.kv_shard(shard).part_of(self.num_kv_heads, KV_HEADS)
        return replace(self, num_heads=shard.part_of(self.num_heads, "attention heads"), num_kv_heads=num_kv_heads)

    def kv_shard(self, shard: Shard) -> Shard:
        """Return a shard's part of keys and values: several shards hold the same heads if there are fewer of these."""
        return shard.shared(self.num_kv_heads, KV_HEADS)

    @property
    def query_rows(self) -> int:
        """Channels of all heads of queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Channels of all heads of keys, and of values."""
        return self.num_kv_heads * self.head_dim


class QKVProjection(FusedProjection):
    """Projections of one input to queries, keys and values, and to gates of channels, in this order.

    A layer without gates has no rows of them.
    """

    def __init__(self, config: AttentionConfig, site: Site) -> None:
        own = config.of(site.shard)
        gate_rows = own.query_rows if config.gate is OutputGate.PER_CHANNEL else 0
        rows = (own.query_rows, own.kv_rows, own.kv_rows, gate_rows)
        num_inputs = config.hidden_size if config.input_size is None else config.input_size
        super().__init__(rows, num_inputs, site, has_bias=config.has_bias)
        self.num_heads = own.num_heads
        self.query_shard, self.kv_shard = site.shard, config.kv_shard(site.shard)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors. The gate rows of a head follow its query rows."""
        for kind, fused in {"weight": self.weight_OI, "bias": self.bias_O}.items():
            if fused is None:
                continue
            q, k, v, gate = fused.split(self.part_rows)
            query = sharded(q, self.query_shard)
            if len(gate):
                heads = (rows.unflatten(0, (self.num_heads, -1)) for rows in (q, gate))
                query = interleaved(*heads, shard=self.query_shard)
            yield f"{prefix}q_proj.{kind}", query
            yield f"{prefix}k_proj.{kind}", sharded(k, self.kv_shard)
            yield f"{prefix}v_proj.{kind}", sharded(v, self.kv_shard)


class QueryKeyNorms(nn.Module):
    """The norms of queries and keys, if the layer has them: one over all heads, or a norm of each head."""

    def __init__(self, config: AttentionConfig, site: Site) -> None:
        super().__init__()
        self.kind, self.eps, own = config.norm, config.eps, config.of(site.shard)
        self.shards = site.shard, config.kv_shard(site.shard)
        weight = site.parameter if self.kind is QueryKeyNorm.ZERO_CENTERED else site.gain
        if self.kind is QueryKeyNorm.WIDE:
            self.q_norm, self.k_norm = weight(own.query_rows), weight(own.kv_rows)
        elif self.kind is not QueryKeyNorm.NONE:
            self.q_norm, self.k_norm = weight(own.head_dim), weight(own.head_dim)

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        return (rms_norm,) if self.kind is QueryKeyNorm.WIDE else ()

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        if self.kind is QueryKeyNorm.WIDE:
            self._rms_norm = rms_norm_over_ranks(kernels)

    def forward(self, q_TO: Tensor, k_TO: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys with their norms over all heads."""
        if self.kind is not QueryKeyNorm.WIDE:
            return q_TO, k_TO
        return self._rms_norm(q_TO, self.q_norm, self.eps), self._rms_norm(k_TO, self.k_norm, self.eps)

    @property
    def of_heads(self) -> HeadNorm | None:
        """The norm of each head, as kernels take it."""
        if self.kind in (QueryKeyNorm.NONE, QueryKeyNorm.WIDE):
            return None
        return HeadNorm(self.q_norm, self.k_norm, self.eps, self.kind is QueryKeyNorm.ZERO_CENTERED)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        if self.kind is QueryKeyNorm.NONE:
            return
        is_wide = self.kind is QueryKeyNorm.WIDE
        for name, weight, shard in zip("qk", (self.q_norm, self.k_norm), self.shards, strict=True):
            yield f"{prefix}{name}_norm.weight", sharded(weight, shard) if is_wide else whole(weight)


@dataclass(slots=True)
class KVScales:
    """Scales that divide keys and values before they are stored in e4m3. Published with some weights."""

    key: float = 1.0
    value: float = 1.0


class KeyValues(nn.Module):
    """The keys and values that a layer stores of each token.

    ``dtype`` and ``scales`` may be set until ``bind`` is called.
    """

    def __init__(self, config: AttentionConfig, site: Site) -> None:
        super().__init__()
        self.config, self.shard = config.of(site.shard), config.kv_shard(site.shard)
        self.dtype, self.scales = dtype_name(site.dtype), KVScales()

    @property
    def spec(self) -> LayerSpec:
        config = self.config
        spec = kv_spec(config.num_kv_heads, config.head_dim, self.dtype, num_shares=self.shard.count)
        return replace(spec, window_tokens=config.window_tokens)

    @property
    def shares(self) -> Sequence[tuple[int, int]]:
        """Channels of keys, and of values, with the number of shares that all of them are divided into."""
        return [(self.config.kv_rows, self.shard.count)] * 2

    def bind(self, memory: LayerMemory, sinks_H: Tensor | None = None) -> KVMemory:
        """Return the layer's share of all blocks as kernels take it.

        Args:
            sinks_H: see ``KVMemory``.
        """
        scales = self.scales if self.dtype == E4M3 else KVScales()
        streams = memory.streams["key"], memory.streams["value"]
        return KVMemory(*streams, scales.key, scales.value, sinks_H, memory.lifetime)


def gate_heads(out_THD: Tensor, gate_proj: Projection, hidden_TE: Rows) -> Tensor:
    """Multiply the results of heads, in place, by sigmoids of gates that are projected from the layer's input."""
    gate_TH = gate_proj.multiply(hidden_TE if gate_proj.takes_quantized else plain_rows(hidden_TE))
    return out_THD.mul_(gate_TH.float().sigmoid().to(out_THD.dtype).unsqueeze(-1))
