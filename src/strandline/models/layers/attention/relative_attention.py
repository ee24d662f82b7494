"""Attention whose keys and values are convolved over time, and whose scores depend on distances (Inkling).

Positions are embedded neither in queries nor in keys: each token projects, beside its query, factors of learnt profiles
over distances, which are added to its scores (``relative_attention.py``). Keys and values pass a short
convolution and are added to its result; its window is the layer's state.

Source: ``transformers`` (``inkling``).

Shape suffixes: T tokens of the step, E hidden size, H query heads, D head dim, O rows of a fused projection, C
profiles, X distances, S slots; of a window's memory R are the rows, and C its channels; W taps.
"""

from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor, nn

from strandline.config_fields import MAX_HEAD_DIM, MAX_HEADS, UNLIMITED_POSITION, Fields, read_eps
from strandline.kernels.arena import LayerMemory
from strandline.kernels.attention.qkv import prepare_qkv
from strandline.kernels.attention.relative_attention import RelativeScores, relative_attention
from strandline.kernels.batch import KVMemory, StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.recurrences.rerun import DraftLog
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows
from strandline.models.layers.attention.attention_parts import (
    AttentionConfig,
    KeyValues,
    QKVProjection,
    QueryKeyNorm,
    QueryKeyNorms,
)
from strandline.models.layers.parts.convolution import MAX_TAPS, CausalConvolution, ResidualTaps
from strandline.models.layers.parts.projection import Projection, SummedProjection
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, sharded, whole
from strandline.specs import LayerSpec

WINDOW: Final = "kv_window"
"""Name of the layer's window, of keys and values before the convolution."""


@dataclass(frozen=True, slots=True)
class LogScaling:
    """Scores are multiplied by ``1 + alpha * log(tokens / floor)``, where tokens up to the query are more than that."""

    floor_tokens: int
    alpha: float


@dataclass(frozen=True, slots=True)
class RelativeAttentionConfig:
    """Sizes of the layer."""

    attention: AttentionConfig
    num_taps: int
    num_profiles: int
    num_distances: int
    log_scaling: LogScaling | None

    @classmethod
    def read(cls, fields: Fields, *, is_sliding: bool) -> "RelativeAttentionConfig":
        """Read a text configuration; raises as :class:`strandline.config_fields.Fields`.

        Args:
            is_sliding: whether the layer has a window, and heads of its own.
        """
        heads, log_scaling = "swa_" if is_sliding else "", None
        num_heads = fields.size(f"{heads}num_attention_heads", at_most=MAX_HEADS)
        num_kv_heads = fields.size(f"{heads}num_key_value_heads", at_most=MAX_HEADS)
        if num_heads % num_kv_heads:
            fields.reject(f"{heads}num_key_value_heads", f"a divisor of {heads}num_attention_heads, {num_heads}")
        head_dim = fields.size(f"{heads}head_dim", at_most=MAX_HEAD_DIM)
        if head_dim % 2:
            fields.reject(f"{heads}head_dim", "even")
        if not is_sliding and fields.value("log_scaling_n_floor") is not None:
            floor_tokens = fields.size("log_scaling_n_floor", at_most=UNLIMITED_POSITION)
            log_scaling = LogScaling(floor_tokens, fields.number("log_scaling_alpha", at_least=0, at_most=100))
        distances = fields.size("sliding_window_size" if is_sliding else "rel_extent", at_most=UNLIMITED_POSITION)
        return cls(
            AttentionConfig(
                fields.size("hidden_size"),
                num_heads,
                num_kv_heads,
                head_dim,
                read_eps(fields),
                has_bias=False,
                norm=QueryKeyNorm.RMS,
                scale=1 / head_dim,  # both queries and keys are normalised
                is_rotated=False,
                window_tokens=distances if is_sliding else None,
            ),
            fields.size("conv_kernel_size", at_least=2, at_most=MAX_TAPS),
            fields.size("d_rel", at_most=MAX_HEAD_DIM),
            distances,
            log_scaling,
        )


@dataclass(frozen=True, slots=True)
class RelativeAttentionMemory:
    """A layer's share of all blocks, slots and logs."""

    kv: KVMemory
    window_SRC: Tensor
    log: DraftLog


class RelativeAttention(nn.Module):
    """The layer. Profiles are not divided among shards; the factors of each head are."""

    recurrence = None
    operations = (prepare_qkv, relative_attention)

    def __init__(self, config: RelativeAttentionConfig, site: Site) -> None:
        super().__init__()
        attention = config.attention
        self.config, self.own = config, attention.of(site.shard)
        """The layer, and the sizes of this shard's attention."""
        self.in_proj = QKVProjection(attention, site)
        self.mix_proj = Projection(
            self.own.num_heads * config.num_profiles, attention.hidden_size, site, shard=site.shard
        )
        self.profiles_CX = site.parameter(config.num_profiles, config.num_distances)
        self.norms, self.kv = QueryKeyNorms(attention, site), KeyValues(attention, site)
        self.conv = CausalConvolution(ResidualTaps(2 * self.own.kv_rows, config.num_taps, site), None, site, WINDOW)
        self.out_proj = SummedProjection(attention.hidden_size, self.own.query_rows, site)

    @property
    def takes_quantized(self) -> bool:
        """Whether it takes quantised rows."""
        return self.in_proj.takes_quantized

    @property
    def spec(self) -> LayerSpec:
        window = self.conv.window.divided(*self.kv.shares, dim=1)
        return replace(self.kv.spec, states=(window,), draft_log=(self.conv.logged,))

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._prepare_qkv, self._attend_relative = kernels[prepare_qkv], kernels[relative_attention]

    def bind(self, memory: LayerMemory) -> RelativeAttentionMemory:
        """Return the layer's memory as ``forward`` takes it."""
        return RelativeAttentionMemory(self.kv.bind(memory), *self.conv.bind(memory))

    def rerun(self, batch: StepBatch, memory: RelativeAttentionMemory) -> None:
        """Advance the window over logged tokens alone."""
        self.conv.rerun(batch, memory.window_SRC, memory.log)

    def forward(self, hidden_TE: Rows, step: Step, memory: RelativeAttentionMemory) -> Tensor:
        own = self.own
        q_TO, kv_TO = self.in_proj.multiply(hidden_TE).split([own.query_rows, 2 * own.kv_rows], dim=-1)
        kv_TO = self.conv.convolve(kv_TO, step.batch, memory.window_SRC, memory.log)
        k_TO, v_TO = kv_TO.chunk(2, dim=-1)
        attention = step.batch.attention.of(memory.kv.lifetime)
        q_THD = self._prepare_qkv(q_TO, k_TO, v_TO, self.norms.of_heads, None, memory.kv, attention)
        mix_in_TE = hidden_TE if self.mix_proj.takes_quantized else plain_rows(hidden_TE)
        mix_THC = self.mix_proj.multiply(mix_in_TE).unflatten(-1, (own.num_heads, -1))
        if self.config.log_scaling is not None:
            factor_T11 = score_factors(step.batch.positions_T, self.config.log_scaling).view(-1, 1, 1)
            q_THD, mix_THC = ((x * factor_T11).to(x.dtype) for x in (q_THD, mix_THC))
        out_THD = self._attend_relative(
            q_THD,
            RelativeScores(mix_THC, self.profiles_CX),
            memory.kv,
            attention,
            step.batch.num_decodes,
            scale=own.scale,
            window_tokens=own.window_tokens,
        )
        return self.out_proj.multiply(out_THD.flatten(1))

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield from self.in_proj.targets(prefix)
        yield from self.out_proj.targets(f"{prefix}o_proj.")
        yield from self.norms.targets(prefix)
        yield from self.mix_proj.targets(f"{prefix}r_proj.")
        yield f"{prefix}rel_logits_proj.proj", whole(self.profiles_CX)
        for name, taps_CW in zip("kv", self.conv.filter.taps_CW.chunk(2), strict=True):
            yield f"{prefix}{name}_sconv.conv1d.weight", sharded(taps_CW.unsqueeze(1), self.kv.shard)


def score_factors(positions_T: Tensor, scaling: LogScaling) -> Tensor:
    """Return what the scores of queries at these positions are multiplied by, in float32."""
    excess_T = ((positions_T + 1).float() / scaling.floor_tokens).clamp_min(1.0)
    return excess_T.log_().mul_(scaling.alpha).add_(1.0)
