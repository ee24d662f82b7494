"""Gated softmax attention to the tokens that an index chooses, by index keys beside keys and values (Qwen4-Exp).

As long as all contexts of a step are known on the host to be within the index's budget, attention reads every token, by
the kernels of ordinary attention.

Source: ``transformers`` (``qwen4_exp``).

Shape suffixes: T tokens of the step, E hidden size, H query heads, D head dim, J index heads, C channels of an index
key, O rows of a fused projection, B blocks, P tokens in a block, F rotated pairs of a head.
"""

from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor, nn

from strandline.config_fields import MAX_HEAD_DIM, MAX_HEADS, Fields
from strandline.kernels.arena import LayerMemory
from strandline.kernels.attention.indexed_attention import GroupIndex, IndexedMemory, indexed_attention
from strandline.kernels.attention.stored_tokens import store_tokens
from strandline.kernels.batch import AttentionBatch, StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.rowwise.norm import rms_norm_zero_centered
from strandline.kernels.rowwise.rotary import apply_rotary, interleaved_dimensions
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.attention.attention_parts import AttentionConfig, OutputGate, QueryKeyNorm
from strandline.models.layers.parts.projection import FusedProjection
from strandline.models.layers.parts.rotary import RotaryFrequencies
from strandline.models.layers.parts.site import Site, dtype_name
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, whole
from strandline.specs import LayerSpec, TensorSpec

INDEX_KEY: Final = "index_key"
POSITION: Final = "rotary_position"


@dataclass(frozen=True, slots=True)
class IndexedAttentionConfig:
    """Sizes of the layer."""

    attention: AttentionConfig
    num_index_heads: int
    index_dim: int
    group_tokens: int
    max_groups: int
    rotary: RotaryFrequencies

    @classmethod
    def read(cls, fields: Fields, rotary: RotaryFrequencies) -> "IndexedAttentionConfig":
        """Read a text configuration; raises as :class:`strandline.config_fields.Fields`.

        Args:
            rotary: frequencies of attention and index alike.
        """
        if fields.size("indexer_kv_heads") != 1:
            fields.reject("indexer_kv_heads", "1")
        group_tokens, budget_tokens = fields.size("indexer_compress_ratio"), fields.size("indexer_budget")
        if budget_tokens % group_tokens:
            fields.reject("indexer_budget", f"a multiple of indexer_compress_ratio, {group_tokens}")
        rotary_dim = 2 * len(rotary.inv_freq_F)
        return cls(
            replace(AttentionConfig.read(fields, QueryKeyNorm.ZERO_CENTERED), gate=OutputGate.PER_CHANNEL),
            num_index_heads=fields.size("indexer_n_heads", at_most=MAX_HEADS),
            index_dim=fields.size("indexer_head_dim", at_least=rotary_dim, at_most=MAX_HEAD_DIM),
            group_tokens=group_tokens,
            max_groups=budget_tokens // group_tokens,
            rotary=rotary,
        )


class IndexedAttention(nn.Module):
    """Attention and its index, which is not divided among shards: every rank computes it, and keeps the index keys."""

    recurrence = None
    operations = (rms_norm_zero_centered, store_tokens, indexed_attention)

    def __init__(self, config: IndexedAttentionConfig, site: Site) -> None:
        super().__init__()
        self.config, self.dtype = config, site.dtype
        self.attention = Attention(config.attention, site)
        rows = (config.num_index_heads * config.index_dim, config.index_dim)
        self.index_proj = FusedProjection(rows, config.attention.hidden_size, site)
        """Rows: index queries, index key."""
        self.index_q_norm_C, self.index_k_norm_C = (site.parameter(config.index_dim) for _ in range(2))
        self.keeps_positions = False
        """Whether positions for rotary embeddings are stored, because they do not follow from where a token is."""
        rotary = config.rotary
        dimension_F = interleaved_dimensions(len(rotary.inv_freq_F), rotary.sections)
        self.register_buffer("inv_freq_F", rotary.inv_freq_F.to(site.device), persistent=False)
        self.register_buffer("dimension_F", dimension_F.to(site.device), persistent=False)

    inv_freq_F: Tensor
    dimension_F: Tensor

    @property
    def spec(self) -> LayerSpec:
        spec, index_key = self.attention.spec, TensorSpec(INDEX_KEY, (self.config.index_dim,), dtype_name(self.dtype))
        positions = (TensorSpec(POSITION, (3,), "float32"),) if self.keeps_positions else ()
        return replace(spec, streams=(*spec.streams, index_key, *positions))

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._rms_norm, self._attend_indexed = kernels[rms_norm_zero_centered], kernels[indexed_attention]
        self._store_tokens = kernels[store_tokens]
        # Whether a token's step has no longer context would depend on other sequences.
        self._may_read_whole = not kernels.workload.is_deterministic
        config = self.config
        self._index = GroupIndex(
            config.group_tokens,
            config.max_groups,
            self.index_k_norm_C,
            config.attention.eps,
            self.inv_freq_F,
            self.dimension_F,
            config.rotary.attention_factor,
        )

    def bind(self, memory: LayerMemory) -> IndexedMemory:
        """Return the layer's memory as ``forward`` takes it."""
        return IndexedMemory(self.attention.bind(memory), memory.streams[INDEX_KEY], memory.streams.get(POSITION))

    def forward(self, hidden_TE: Tensor, step: Step, memory: IndexedMemory) -> Tensor:
        q_THD, gate_TO = self.attention.prepare(hidden_TE, step, memory.kv)
        index_q_TJC = self._index_queries(hidden_TE, step, memory.index_BPC)
        if memory.position_BP3 is not None:
            positions_T3 = _positions_3T(step.batch).T.contiguous().float()
            self._store_tokens(positions_T3, memory.position_BP3, step.batch.attention)
        batch, scale = step.batch.attention, self.config.attention.scale
        if self._is_read_whole(batch):
            out_THD = self.attention.attend(q_THD, step, memory.kv)
        else:
            out_THD = self._attend_indexed(q_THD, index_q_TJC, memory, batch, self._index, scale=scale)
        return self.attention.output(out_THD, hidden_TE, gate_TO)

    def _is_read_whole(self, batch: AttentionBatch) -> bool:
        is_known = self._may_read_whole and batch.has_lengths
        return is_known and all(map(self._index.is_whole, batch.context_lens))

    def _index_queries(self, hidden_TE: Tensor, step: Step, index_BPC: Tensor) -> Tensor:
        """Store the step's index keys; return its index queries."""
        q_TO, key_TC = self.index_proj.project(hidden_TE)
        self._store_tokens(key_TC, index_BPC, step.batch.attention)
        q_TJC = q_TO.unflatten(-1, (self.config.num_index_heads, -1)).contiguous()
        q_TJC = self._rms_norm(q_TJC, self.index_q_norm_C, self.config.attention.eps)
        return q_TJC if step.rotary is None else apply_rotary(q_TJC, step.rotary)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield from self.attention.targets(prefix)
        yield from self.index_proj.targets(f"{prefix}indexer.index_qk_proj.")
        yield f"{prefix}indexer.q_layernorm.weight", whole(self.index_q_norm_C)
        yield f"{prefix}indexer.k_layernorm.weight", whole(self.index_k_norm_C)


def _positions_3T(batch: StepBatch) -> Tensor:
    """Return the positions for rotary embeddings: time, height and width."""
    positions_3T = (batch.positions_T if batch.rotary is None else batch.rotary).expand(3, -1)
    return positions_3T if batch.picture_offsets is None else positions_3T + batch.picture_offsets
