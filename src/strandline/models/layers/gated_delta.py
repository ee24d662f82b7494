"""Gated DeltaNet: a short convolution over queries, keys and values, then the gated delta rule.

Projections that read the same input are one matrix (comments name the order of its rows); the published tensors are
split into it while loading. ``A_log`` and ``dt_bias`` are float32.

Source: Yang et al., "Gated Delta Networks"; ``transformers`` (``qwen3_next``, ``qwen3_5``) for the composition.

Shape suffixes: T tokens of the step, D those of decodes, R those of prefills, N sequences, E hidden size, G key heads,
H value heads, K and V channels of a key and of a value head, C channels of the convolution, W its taps, O rows of a
fused projection.
"""

from typing import Any

import torch
from torch import Tensor, nn

from strandline.kernels.batch import LayerMemory, RecurrentMemory, StepBatch
from strandline.kernels.conv1d import causal_conv1d_prefill, causal_conv1d_update
from strandline.kernels.gdn import gdn_decode, gdn_prefill
from strandline.kernels.gdn_log import LOG_TOKENS, gdn_decode_logged
from strandline.kernels.linear import linear
from strandline.kernels.norm import rms_norm_gated
from strandline.models.layers.parameters import dtype_name, parameter
from strandline.models.layers.rotary import RotaryTable
from strandline.models.targets import NamedTargets, whole
from strandline.specs import LogSpec, RecurrentSpec


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
        window = (memory.window_SRC, src_N, dst_N)
        y_NC = causal_conv1d_update(x_NC, self.conv_CW, None, *window, "silu")
        q_NGK, k_NGK, v_NHV = self._heads(y_NC)
        inputs = (q_NGK, k_NGK, v_NHV, a_NH, b_NH, self.A_log_H, self.dt_bias_H, memory.state_SHKV, src_N, dst_N)
        if memory.log is not None and slots.log is not None:
            return gdn_decode_logged(*inputs, memory.log, slots.log)
        return gdn_decode(*inputs)

    def _prefill(self, x_TC: Tensor, a_TH: Tensor, b_TH: Tensor, batch: StepBatch, memory: RecurrentMemory) -> Tensor:
        prefills, slots = slice(batch.num_decodes, None), batch.recurrent
        src_N, dst_N = slots.src_N[prefills], slots.dst_N[prefills]
        window = (memory.window_SRC, src_N, dst_N)
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
