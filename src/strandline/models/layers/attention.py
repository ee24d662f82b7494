"""Gated softmax attention (Qwen3-Next, Qwen3.5).

Projections that read the same input are one matrix (comments name the order of its rows); the published tensors are
split into it while loading.

Source: ``transformers`` (``qwen3_next``, ``qwen3_5``).

Shape suffixes: T tokens of the step, E hidden size, H query heads, D head dim, O rows of a fused projection.
"""

from typing import Any

import torch
from torch import Tensor, nn

from strandline.kernels.activation import sigmoid_gate
from strandline.kernels.arena import LayerMemory
from strandline.kernels.attention import paged_attention
from strandline.kernels.batch import KVMemory, StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.qkv import prepare_qkv
from strandline.models.layers.parameters import dtype_name, parameter
from strandline.models.layers.projection import Projection
from strandline.models.layers.rotary import RotaryTable
from strandline.models.targets import NamedTargets, interleaved, whole
from strandline.specs import LayerSpec, kv_spec


class GatedAttention(nn.Module):
    """Softmax attention with normalised queries and keys, partial rotary embedding and a sigmoid gate.

    Its recurrence is None: it keeps streams alone.

    Args:
        dtype: of activations, keys and values, and of the weights until they are packed.
    """

    recurrence = None
    operations = (prepare_qkv, paged_attention, sigmoid_gate)

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim: int = config.head_dim
        self.eps = config.rms_norm_eps
        self.dtype = dtype
        hidden_size = config.hidden_size
        query_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.sizes = [query_rows, kv_rows, kv_rows, query_rows]
        has_bias = config.attention_bias
        self.in_proj = Projection(sum(self.sizes), hidden_size, dtype, device, has_bias=has_bias)
        """Rows: query, key, value, gate."""
        self.out_proj = Projection(hidden_size, query_rows, dtype, device, has_bias=has_bias)
        self.q_norm_D = parameter(self.head_dim, dtype=dtype, device=device)
        self.k_norm_D = parameter(self.head_dim, dtype=dtype, device=device)

    @property
    def spec(self) -> LayerSpec:
        return kv_spec(self.num_kv_heads, self.head_dim, dtype_name(self.dtype))

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._prepare_qkv, self._attend = kernels[prepare_qkv], kernels[paged_attention]
        self._sigmoid_gate = kernels[sigmoid_gate]

    def bind(self, memory: LayerMemory) -> KVMemory:
        """Return the layer's memory as ``forward`` takes it."""
        return KVMemory(memory.streams["key"], memory.streams["value"])

    def forward(self, hidden_TE: Tensor, rotary: RotaryTable, batch: StepBatch, memory: KVMemory) -> Tensor:
        q_TO, k_TO, v_TO, gate_TO = self.in_proj.multiply(hidden_TE).split(self.sizes, dim=-1)
        norms = (self.q_norm_D, self.k_norm_D, self.eps)
        q_THD = self._prepare_qkv(q_TO, k_TO, v_TO, *norms, rotary, memory, batch.attention)
        out_THD = self._attend(q_THD, memory, batch.attention, batch.num_decodes, scale=self.head_dim**-0.5)
        gated_TO = self._sigmoid_gate(out_THD.flatten(1), gate_TO)
        return self.out_proj.multiply(gated_TO)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors; a head's gate rows follow its query rows there."""
        in_proj, out_proj = self.in_proj, self.out_proj
        pairs = [("weight", in_proj.weight_OI, out_proj.weight_OI), ("bias", in_proj.bias_O, out_proj.bias_O)]
        for kind, fused, out in pairs:
            if fused is not None and out is not None:
                q, k, v, gate = fused.split(self.sizes)
                by_head = (self.num_heads, self.head_dim)
                yield f"{prefix}q_proj.{kind}", interleaved(q.unflatten(0, by_head), gate.unflatten(0, by_head))
                yield f"{prefix}k_proj.{kind}", whole(k)
                yield f"{prefix}v_proj.{kind}", whole(v)
                yield f"{prefix}o_proj.{kind}", whole(out)
        yield f"{prefix}q_norm.weight", whole(self.q_norm_D)
        yield f"{prefix}k_norm.weight", whole(self.k_norm_D)
