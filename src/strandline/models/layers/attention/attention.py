"""Softmax attention: to all earlier tokens or to a window of them, with or without norms of heads, gates and sinks.

Source: ``transformers`` (``llama``, ``qwen3``, ``qwen3_next``, ``gpt_oss``, ``lfm3``).

Shape suffixes: T tokens of the step, E hidden size, H query heads, D head dim, O rows of a fused projection.
"""

from typing import Any

import torch
from torch import Tensor, nn

from strandline.kernels.arena import LayerMemory
from strandline.kernels.attention.attention import paged_attention
from strandline.kernels.attention.qkv import prepare_qkv
from strandline.kernels.batch import KVMemory
from strandline.kernels.binding import Kernels
from strandline.kernels.operation import Operation
from strandline.kernels.rowwise.activation import sigmoid_gate
from strandline.kernels.rowwise.quantized_rows import Rows
from strandline.kernels.rowwise.quantizing import with_quantized
from strandline.models.layers.attention.attention_parts import (
    AttentionConfig,
    KeyValues,
    OutputGate,
    QKVProjection,
    QueryKeyNorms,
    gate_heads,
)
from strandline.models.layers.parts.projection import Projection, SummedProjection
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, sharded
from strandline.specs import LayerSpec


class Attention(nn.Module):
    """Softmax attention.

    Its recurrence is None: it keeps only streams.

    Args:
        site: the shard divides the heads; several shards hold the same key/value heads if there are fewer of these.
    """

    recurrence = None

    def __init__(self, config: AttentionConfig, site: Site) -> None:
        super().__init__()
        self.shard, self.config = site.shard, config.of(site.shard)
        self.in_proj = QKVProjection(config, site)
        self.norms = QueryKeyNorms(config, site)
        self.kv = KeyValues(config, site)
        self.sinks_H = site.parameter(self.config.num_heads, dtype=torch.float32) if config.has_sinks else None
        self.gate_proj = None
        if config.gate is OutputGate.PER_HEAD:
            self.gate_proj = Projection(self.config.num_heads, config.hidden_size, site, shard=site.shard)
        has_out_bias = config.has_bias if config.has_out_bias is None else config.has_out_bias
        self.out_proj = SummedProjection(config.hidden_size, self.config.query_rows, site, has_bias=has_out_bias)

    @property
    def takes_quantized(self) -> bool:
        """Whether it takes quantised rows."""
        return self.in_proj.takes_quantized

    @property
    def spec(self) -> LayerSpec:
        return self.kv.spec

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        gates = with_quantized(sigmoid_gate) if self.config.gate is OutputGate.PER_CHANNEL else ()
        return (prepare_qkv, paged_attention, *gates)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._prepare_qkv, self._attend = kernels[prepare_qkv], kernels[paged_attention]
        if self.config.gate is OutputGate.PER_CHANNEL:
            self._sigmoid_gate = self.out_proj.fed_by(sigmoid_gate, kernels)

    def bind(self, memory: LayerMemory) -> KVMemory:
        """Return the layer's memory as ``forward`` takes it."""
        return self.kv.bind(memory, self.sinks_H)

    def forward(self, hidden_TE: Rows, step: Step, memory: KVMemory) -> Tensor:
        q_THD, gate_TO = self.prepare(hidden_TE, step, memory)
        return self.output(self.attend(q_THD, step, memory), hidden_TE, gate_TO)

    def prepare(self, hidden_TE: Rows, step: Step, memory: KVMemory) -> tuple[Tensor, Tensor]:
        """Store keys and values; return queries, and the gates of channels."""
        q_TO, k_TO, v_TO, gate_TO = self.in_proj.project(hidden_TE)
        q_TO, k_TO = self.norms(q_TO, k_TO)
        rotary = step.rotary_of(self.config.window_tokens) if self.config.is_rotated else None
        attention = step.batch.attention.of(memory.lifetime)
        return self._prepare_qkv(q_TO, k_TO, v_TO, self.norms.of_heads, rotary, memory, attention), gate_TO

    def attend(self, q_THD: Tensor, step: Step, memory: KVMemory) -> Tensor:
        """Attend to stored keys and values; return ``out_THD``."""
        return self._attend(
            q_THD,
            memory,
            step.batch.attention.of(memory.lifetime),
            step.batch.num_decodes,
            scale=self.config.scale,
            window_tokens=self.config.window_tokens,
            is_causal=self.config.is_causal,
        )

    def output(self, out_THD: Tensor, hidden_TE: Rows, gate_TO: Tensor) -> Tensor:
        """Return the projection of the heads' results, gated if the layer has gates."""
        if self.gate_proj is not None:
            out_THD = gate_heads(out_THD, self.gate_proj, hidden_TE)
        out_TO = out_THD.flatten(1)
        if self.config.gate is OutputGate.PER_CHANNEL:
            return self.out_proj.multiply(self._sigmoid_gate(out_TO, gate_TO))
        return self.out_proj.multiply(out_TO)

    def keep(self, hidden_TE: Tensor, step: Step, memory: KVMemory) -> None:
        """Store the step's keys and values only."""
        self.prepare(hidden_TE, step, memory)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield from self.in_proj.targets(prefix)
        yield from self.out_proj.targets(f"{prefix}o_proj.")
        if self.sinks_H is not None:
            yield f"{prefix}sinks", sharded(self.sinks_H, self.shard)
        yield from self.norms.targets(prefix)
        if self.gate_proj is not None:
            yield from self.gate_proj.targets(f"{prefix}gate_proj.")
