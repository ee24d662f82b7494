"""Attention whose queries and keys are clipped, with a sink for each token, an output gate, and relative scores.

As in ``relative_attention.py``, positions are embedded neither in queries nor in keys, and keys and values pass a short
convolution. Layers without a window read queries, keys and values from three inputs, and each token adds to the taps of
the convolution of its keys and values what it projects.

Projections that read the same input are one matrix (comments name the order of its rows); the published tensors are
split into it while loading.

Source: ``transformers`` (``inkling2``).

Shape suffixes: T tokens of the step, E hidden size, H query heads, G heads of keys and values, D head dim, O rows of a
projection, C profiles, X distances, Q inputs, W taps.
"""

from dataclasses import dataclass, replace
from math import sqrt
from typing import Final

import torch
from torch import Tensor, nn

from strandline.config_fields import Fields
from strandline.kernels.arena import LayerMemory
from strandline.kernels.attention.qkv import prepare_qkv
from strandline.kernels.attention.relative_attention import RelativeScores, relative_attention
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.rowwise.activation import sigmoid_gate
from strandline.kernels.rowwise.head_clip import clip_heads
from strandline.kernels.rowwise.norm import rms_norm
from strandline.kernels.rowwise.quantizing import with_quantized
from strandline.models.layers.attention.attention_parts import KeyValues, QueryKeyNorm
from strandline.models.layers.attention.relative_attention import (
    WINDOW,
    RelativeAttentionConfig,
    RelativeAttentionMemory,
    score_factors,
)
from strandline.models.layers.parts.convolution import CausalConvolution, Delays, ResidualTaps
from strandline.models.layers.parts.projection import PROJECTION_ROWS, FusedProjection, SummedProjection
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, sharded, whole
from strandline.specs import LayerSpec

MAX_THRESHOLD: Final = 1e6


@dataclass(frozen=True, slots=True)
class ClippedAttentionConfig:
    """Sizes and options of the layer."""

    relative: RelativeAttentionConfig
    threshold: float
    """Length that heads of queries and keys are clipped to."""
    profile_threshold: float
    """The same of the factors of profiles."""

    @classmethod
    def read(cls, fields: Fields, *, is_sliding: bool) -> "ClippedAttentionConfig":
        """Read a text configuration; arguments and errors as of ``RelativeAttentionConfig``."""
        relative = RelativeAttentionConfig.read(fields, is_sliding=is_sliding)
        attention = relative.attention
        attention = replace(attention, norm=QueryKeyNorm.NONE, scale=attention.head_dim**-0.5)
        thresholds = (
            fields.number(f"{name}_l2_clip_threshold", at_least=1e-6, at_most=MAX_THRESHOLD) for name in ("qk", "rel")
        )
        return cls(replace(relative, attention=attention), *thresholds)

    @property
    def is_dynamic(self) -> bool:
        """Whether tokens add to taps."""
        return self.relative.attention.window_tokens is None


class ClippedAttention(nn.Module):
    """The layer. Heads are divided among shards, and what belongs to them."""

    recurrence = None
    operations = (prepare_qkv, relative_attention, clip_heads, rms_norm, *with_quantized(sigmoid_gate))

    def __init__(self, config: ClippedAttentionConfig, site: Site) -> None:
        super().__init__()
        relative, self.shard = config.relative, site.shard
        self.config, self.own = config, relative.attention.of(site.shard)
        """The layer, and the sizes of this shard's attention."""
        own, num_heads = self.own, self.own.num_heads
        rows = (own.query_rows, own.query_rows, num_heads * relative.num_profiles, num_heads)
        self.in_proj = FusedProjection(rows, own.hidden_size, site, multiple=PROJECTION_ROWS)
        """Rows: query, gate, factors of profiles, sinks, and zeros."""
        kv_rows = (own.kv_rows, own.num_kv_heads * relative.num_taps if config.is_dynamic else 0)
        # Rows of both: keys or values, what is added to taps.
        self.k_proj, self.v_proj = (FusedProjection(kv_rows, own.hidden_size, site) for _ in range(2))
        self.kv = KeyValues(relative.attention, site)
        self.q_scale_HD = site.gain(num_heads, own.head_dim)
        self.mix_scale_HC = site.gain(num_heads, relative.num_profiles)
        self.profiles_CX = site.parameter(relative.num_profiles, relative.num_distances)
        self.out_proj = SummedProjection(own.hidden_size, own.query_rows, site)
        num_channels, num_taps = 2 * own.kv_rows, relative.num_taps
        taps: Delays | ResidualTaps
        if config.is_dynamic:
            taps = Delays(num_channels, num_taps - 1, site)
            self.taps_WC = site.parameter(num_taps, num_channels)
        else:
            taps = ResidualTaps(num_channels, num_taps, site, scale=1 / sqrt(num_taps + 1))
        self.conv = CausalConvolution(taps, None, site, WINDOW)
        ones_D = torch.ones(own.head_dim, dtype=site.dtype, device=site.device)
        self.register_buffer("ones_D", ones_D, persistent=False)

    ones_D: Tensor

    @property
    def spec(self) -> LayerSpec:
        num_copies = self.conv.filter.num_delays if isinstance(self.conv.filter, Delays) else 1
        window = self.conv.window.divided(*[*self.kv.shares] * num_copies, dim=1)
        return replace(self.kv.spec, states=(window,), draft_log=(self.conv.logged,))

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._prepare_qkv, self._attend_relative = kernels[prepare_qkv], kernels[relative_attention]
        self._clip_heads, self._rms_norm = kernels[clip_heads], kernels[rms_norm]
        self._sigmoid_gate = self.out_proj.fed_by(sigmoid_gate, kernels)

    def bind(self, memory: LayerMemory) -> RelativeAttentionMemory:
        """Return the layer's memory as ``forward`` takes it."""
        return RelativeAttentionMemory(self.kv.bind(memory), *self.conv.bind(memory))

    def rerun(self, batch: StepBatch, memory: RelativeAttentionMemory) -> None:
        """Advance the window over logged tokens alone."""
        self.conv.rerun(batch, memory.window_SRC, memory.log)

    def forward(self, inputs_QTE: Tensor, step: Step, memory: RelativeAttentionMemory) -> Tensor:
        """Attend, and advance the memory.

        Args:
            inputs_QTE: what queries, keys and values are made of: three inputs, or one.
        """
        config, own, batch = self.config, self.own, step.batch
        q_in_TE, k_in_TE, v_in_TE = inputs_QTE if len(inputs_QTE) > 1 else (inputs_QTE[0],) * 3
        q_TO, gate_TO, mix_TO, sinks_TH, _ = self.in_proj.project(q_in_TE)
        k_TGD, v_TGD = self._keys_and_values(k_in_TE, v_in_TE, batch, memory)
        q_THD, mix_THC = (x.unflatten(-1, (own.num_heads, -1)) for x in (q_TO, mix_TO))
        scaling = config.relative.log_scaling
        factor_T = None if scaling is None else score_factors(batch.positions_T, scaling)
        q_THD = self._clip_heads(q_THD, config.threshold, self.q_scale_HD, factor_T)
        mix_THC = self._clip_heads(mix_THC, config.profile_threshold, self.mix_scale_HC, factor_T)
        attention = batch.attention.of(memory.kv.lifetime)
        q_TO, k_TO, v_TO = (x.flatten(1) for x in (q_THD, k_TGD, v_TGD))
        q_THD = self._prepare_qkv(q_TO, k_TO, v_TO, None, None, memory.kv, attention)
        out_THD = self._attend_relative(
            q_THD,
            RelativeScores(mix_THC, self.profiles_CX, sinks_TH),
            memory.kv,
            attention,
            batch.num_decodes,
            scale=own.scale,
            window_tokens=own.window_tokens,
        )
        return self.out_proj.multiply(self._sigmoid_gate(out_THD.flatten(1), gate_TO))

    def _keys_and_values(
        self, k_in_TE: Tensor, v_in_TE: Tensor, batch: StepBatch, memory: RelativeAttentionMemory
    ) -> tuple[Tensor, Tensor]:
        """Return convolved keys, clipped, and convolved values, normalised."""
        parts = (self.k_proj.project(k_in_TE), self.v_proj.project(v_in_TE))
        kv_TO, dynamic_TO = (torch.cat(part, dim=-1) for part in zip(*parts, strict=True))
        where = (batch, memory.window_SRC, memory.log)
        if isinstance(self.conv.filter, Delays):
            num_delays = self.conv.filter.num_delays
            delayed = self.conv.convolve(kv_TO.repeat(1, num_delays), *where).chunk(num_delays, dim=-1)
            kv_TO = self._weighed((kv_TO, *delayed), dynamic_TO)
        else:
            kv_TO = self.conv.convolve(kv_TO, *where)
        heads = (2, self.own.num_kv_heads, self.own.head_dim)
        k_TGD, v_TGD = kv_TO.unflatten(-1, heads).unbind(1)
        normed_TGD = self._rms_norm(v_TGD.contiguous(), self.ones_D, self.own.eps)
        return self._clip_heads(k_TGD, self.config.threshold), normed_TGD

    def _weighed(self, delayed: tuple[Tensor, ...], dynamic_TO: Tensor) -> Tensor:
        """Return the sum of the inputs at some delays, each times its taps, and the last input."""
        num_taps, head_dim = len(delayed), self.own.head_dim
        dynamic_TGW = dynamic_TO.float().unflatten(-1, (-1, num_taps))
        taps_WGD = self.taps_WC.float().unflatten(-1, (-1, head_dim))
        inputs = [x.float().unflatten(-1, (-1, head_dim)) for x in delayed]
        total_TGD = inputs[0]
        for tap, x_TGD in enumerate(inputs):
            total_TGD = total_TGD + x_TGD * (taps_WGD[tap] + dynamic_TGW[..., tap, None])
        mean_TO: Tensor = (total_TGD / sqrt(2 * num_taps + 1)).flatten(1)
        return mean_TO.to(delayed[0].dtype)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        q, gate, mix, sinks, _ = self.in_proj.weights
        for name, rows in {"wq_du": q, "gate_attn": gate, "wr_du": mix, "attn_sink_proj": sinks}.items():
            yield f"{prefix}{name}.weight", sharded(rows, self.shard)
        for index, (name, proj) in enumerate({"k": self.k_proj, "v": self.v_proj}.items()):
            rows, dynamic = proj.weights
            yield f"{prefix}w{name}_dv.weight", sharded(rows, self.kv.shard)
            if isinstance(self.conv.filter, Delays):
                taps_WC = self.taps_WC.chunk(2, dim=1)[index]
                yield f"{prefix}{name}_sconv.weight_proj", sharded(dynamic, self.kv.shard)
                yield f"{prefix}{name}_sconv.static_w", sharded(taps_WC, self.kv.shard, dim=1)
            else:
                taps_CW = self.conv.filter.taps_CW.chunk(2)[index]
                yield f"{prefix}{name}_sconv.weight", sharded(taps_CW.unsqueeze(1), self.kv.shard)
        yield from self.out_proj.targets(f"{prefix}wo_ud.")
        yield f"{prefix}q_l2_clip.scale", sharded(self.q_scale_HD, self.shard)
        yield f"{prefix}rel_l2_clip.scale", sharded(self.mix_scale_HC, self.shard)
        yield f"{prefix}rel_logits_proj.proj", whole(self.profiles_CX)
