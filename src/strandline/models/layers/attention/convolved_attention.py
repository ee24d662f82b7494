"""Attention whose queries and keys are convolved over time, and half of whose values are the previous token's (ZAYA).

Queries and keys pass a depthwise convolution, then one that mixes the channels of each head. The second reads the first
at several delays: a single depthwise convolution of copies of the channels, one for each delay, computes all of them,
and delays the values. Its window is the layer's state.

Source: Figliolia et al., "Compressed Convolutional Attention"; ``transformers`` (``zaya``).

Shape suffixes: T tokens of the step, E hidden size, H query heads, G key/value heads, A all heads of queries and keys,
D head dim, O channels of the heads of one kind, C channels of a convolution, I inputs of a head in the second one, W
taps of both convolutions together, K taps of the second, S slots; of a window's memory R are the rows.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from strandline.config_fields import Fields
from strandline.errors import ConfigError
from strandline.kernels.arena import LayerMemory
from strandline.kernels.attention.attention import paged_attention
from strandline.kernels.attention.qkv import HeadNorm, prepare_qkv
from strandline.kernels.batch import KVMemory, StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.gemm.linear import head_linear
from strandline.kernels.recurrences.rerun import DraftLog, draft_log
from strandline.models.layers.attention.attention_parts import AttentionConfig, KeyValues, QueryKeyNorm
from strandline.models.layers.parts.convolution import MAX_TAPS, CausalConvolution, unfilled_filter
from strandline.models.layers.parts.projection import FusedProjection, SummedProjection
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, whole
from strandline.specs import LayerSpec

NORM_EPS: Final = 1e-12
"""Epsilon of the heads' norm, which keeps a head of zeros finite."""


@dataclass(frozen=True, slots=True)
class ConvolvedAttentionConfig:
    """Sizes of the layer."""

    attention: AttentionConfig
    num_depthwise_taps: int
    num_grouped_taps: int

    @classmethod
    def read(cls, fields: Fields) -> "ConvolvedAttentionConfig":
        """Read a text configuration; raises as :class:`strandline.config_fields.Fields`."""
        if fields.flag("attention_bias"):
            fields.reject("attention_bias", "false")
        taps = [fields.size(name, at_most=MAX_TAPS - 1) for name in ("cca_time0", "cca_time1")]
        if not 2 <= sum(taps) - 1 <= MAX_TAPS:
            fields.reject("cca_time1", f"such that both convolutions together have 2 to {MAX_TAPS} taps")
        return cls(AttentionConfig.read(fields, QueryKeyNorm.NONE), *taps)


@dataclass(frozen=True, slots=True)
class ConvolvedAttentionMemory:
    """A layer's share of all blocks, slots and logs."""

    kv: KVMemory
    window_SRC: Tensor
    log: DraftLog


class DelayedTaps(nn.Module):
    """The taps at each delay, for copies of the channels, and others that delay channels by one token.

    Args:
        num_channels: to be convolved.
        num_delays: number of delays of the convolved channels, from 0 on.
        num_others: channels that are only delayed; they follow the copies.
    """

    def __init__(self, num_channels: int, num_taps: int, num_delays: int, num_others: int, site: Site) -> None:
        all_channels, all_taps = num_delays * num_channels + num_others, num_taps + num_delays - 1
        super().__init__()
        self.register_buffer("weight_CW", unfilled_filter(all_channels, all_taps, site), persistent=False)
        self.num_delays = num_delays
        self.taps_CK = site.parameter(num_channels, num_taps)
        self.shift_C = site.parameter(num_channels)
        self.register_buffer("bias_C", self.weight_CW.new_zeros(all_channels), persistent=False)

    operations = ()
    weight_CW: Tensor
    bias_C: Tensor

    def use_kernels(self, kernels: Kernels) -> None:
        """Fill the filter."""
        del kernels
        num_channels, num_taps = self.taps_CK.shape
        for copy in range(self.num_delays):
            rows = slice(copy * num_channels, (copy + 1) * num_channels)
            self.weight_CW[rows, copy : copy + num_taps] = self.taps_CK
            self.bias_C[rows] = self.shift_C
        self.weight_CW[self.num_delays * num_channels :, -2] = 1.0


class ConvolvedAttention(nn.Module):
    """The layer. Its halves of values are not divided by head: it runs on one rank."""

    recurrence = None
    operations = (prepare_qkv, paged_attention, head_linear)

    def __init__(self, config: ConvolvedAttentionConfig, site: Site) -> None:
        if site.shard.count > 1:
            raise ConfigError(f"--tensor-parallel-size {site.shard.count}: convolved attention is computed on one rank")
        super().__init__()
        self.config = attention = config.attention
        self.dtype, head_dim, hidden_size = site.dtype, attention.head_dim, attention.hidden_size
        num_taps, num_delays = config.num_depthwise_taps, config.num_grouped_taps
        num_convolved, num_delayed = attention.query_rows + attention.kv_rows, attention.kv_rows // 2
        rows = (attention.query_rows, attention.kv_rows, num_delayed, num_delayed)
        self.in_proj = FusedProjection(rows, hidden_size, site)
        """Rows: query, key, half of the value, and the half that the next token reads."""
        self.conv = CausalConvolution(
            DelayedTaps(num_convolved, num_taps, num_delays, num_delayed, site), None, site, "window"
        )
        self.grouped_CDK = site.parameter(num_convolved, head_dim, num_delays)
        self.grouped_bias_C = site.parameter(num_convolved)
        self.key_scale_G = site.parameter(attention.num_kv_heads)
        self.kv = KeyValues(attention, site)
        self.out_proj = SummedProjection(hidden_size, attention.query_rows, site)
        self.register_buffer("ones_D", torch.ones(head_dim, dtype=site.dtype, device=site.device), persistent=False)

    ones_D: Tensor

    @property
    def spec(self) -> LayerSpec:
        return replace(self.kv.spec, states=(self.conv.window,), draft_log=(replace(self.conv.logged, name="x"),))

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._prepare_qkv, self._attend = kernels[prepare_qkv], kernels[paged_attention]
        self._head_linear = kernels[head_linear]
        # Of a head, the inputs are its channels at one delay after another.
        weight_ADDK = self.grouped_CDK.unflatten(0, (-1, self.config.head_dim))
        self._mix_ADI = weight_ADDK.transpose(2, 3).flatten(2)

    def bind(self, memory: LayerMemory) -> ConvolvedAttentionMemory:
        """Return the layer's memory as ``forward`` takes it."""
        return ConvolvedAttentionMemory(self.kv.bind(memory), memory.states["window"], draft_log(memory))

    def rerun(self, batch: StepBatch, memory: ConvolvedAttentionMemory) -> None:
        """Advance the window over logged tokens alone."""
        self.conv.rerun(batch, memory.window_SRC, memory.log)

    def forward(self, hidden_TE: Tensor, step: Step, memory: ConvolvedAttentionMemory) -> Tensor:
        q_TO, k_TO, v_TO = self._convolved(hidden_TE, step.batch, memory)
        norm = HeadNorm(self.ones_D, self.ones_D, NORM_EPS, is_zero_centered=False)
        q_THD = self._prepare_qkv(q_TO, k_TO, v_TO, norm, step.rotary, memory.kv, step.batch.attention)
        # The published scale is of keys: as part of the queries it leaves what is stored alone.
        scale_H = self.key_scale_G.repeat_interleave(self.config.num_heads // self.config.num_kv_heads)
        q_THD = q_THD * scale_H.unsqueeze(-1)
        out_THD = self._attend(q_THD, memory.kv, step.batch.attention, step.batch.num_decodes, scale=self.config.scale)
        return self.out_proj.multiply(out_THD.flatten(1))

    def _convolved(
        self, hidden_TE: Tensor, batch: StepBatch, memory: ConvolvedAttentionMemory
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values."""
        q_TO, k_TO, v_TO, delayed_TO = self.in_proj.project(hidden_TE)
        x_TC = torch.cat((*(q_TO, k_TO) * self.conv.filter.num_delays, delayed_TO), dim=-1)
        y_TC = self.conv.convolve(x_TC, batch, memory.window_SRC, memory.log)
        *mixed_rows, _, num_delayed = self.in_proj.part_rows
        y_TC, delayed_TO = y_TC.split([y_TC.shape[1] - num_delayed, num_delayed], dim=-1)
        mixed_TC = self._mixed(y_TC)
        q_TGHD, k_TG1D = self._residuals(q_TO, k_TO)
        mixed_q_TO, mixed_k_TO = mixed_TC.split(mixed_rows, dim=-1)
        return mixed_q_TO + q_TGHD.flatten(1), mixed_k_TO + k_TG1D.flatten(1), torch.cat((v_TO, delayed_TO), dim=-1)

    def _mixed(self, y_TC: Tensor) -> Tensor:
        """Return the second convolution of queries and keys, given the first at each delay, the longest first."""
        head_dim, num_delays = self.config.head_dim, self.conv.filter.num_delays
        y_TAI = y_TC.unflatten(-1, (num_delays, -1, head_dim)).transpose(1, 2).flatten(2)
        return self._head_linear(y_TAI, self._mix_ADI).flatten(1) + self.grouped_bias_C

    def _residuals(self, q_TO: Tensor, k_TO: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is added to the convolved: means of queries and their keys, and of these for each key."""
        config = self.config
        q_TGHD = q_TO.unflatten(-1, (config.num_kv_heads, -1, config.head_dim))
        q_TGHD = (q_TGHD + k_TO.unflatten(-1, (config.num_kv_heads, 1, config.head_dim))) * 0.5
        return q_TGHD, q_TGHD.mean(dim=2, keepdim=True)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        names = ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")
        for name, rows in zip(names, self.in_proj.weights, strict=True):
            yield f"{prefix}qkv_proj.{name}.weight", whole(rows)
        yield f"{prefix}qkv_proj.conv_qk_depthwise.weight", whole(self.conv.filter.taps_CK.unsqueeze(1))
        yield f"{prefix}qkv_proj.conv_qk_depthwise.bias", whole(self.conv.filter.shift_C)
        yield f"{prefix}qkv_proj.conv_qk_grouped.weight", whole(self.grouped_CDK)
        yield f"{prefix}qkv_proj.conv_qk_grouped.bias", whole(self.grouped_bias_C)
        yield f"{prefix}qk_norm.temp", whole(self.key_scale_G)
        yield from self.out_proj.targets(f"{prefix}o_proj.")
