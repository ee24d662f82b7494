"""Multi-head latent attention to the tokens that an index chooses, by index keys beside latents (GLM-5.3-Flash).

A layer has an index of its own, or shares the choice of the layer before. Every token keeps its index key and the gates
that weigh it within its group, so that a sequence can be resumed inside of a group.

As long as all contexts of a step are known on the host to be within the index's budget, attention reads every token, by
the kernels of ordinary latent attention.

Source: DeepSeek-AI, "DeepSeek-V3.2", section 2.1; ``transformers`` (``glm5_next``).

Shape suffixes: T tokens of the step, E hidden size, H heads, Q channels of the latent that queries are made of, D what
is kept as a token's latent, R channels of the latent, V channels of a head's value, J index heads, C channels of an
index key, X those of an index key and then its gates, G tokens of a group, K chosen groups, B blocks, O rows of a fused
projection. Of a block, P are its tokens.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strandline.config_fields import MAX_HEAD_DIM, MAX_HEADS, MAX_SIZE, Fields, read_eps
from strandline.errors import EngineError
from strandline.kernels.arena import LayerMemory
from strandline.kernels.attention.indexed_latent_attention import (
    PooledIndex,
    choose_groups,
    indexed_latent_attention,
    is_read_whole,
)
from strandline.kernels.attention.stored_tokens import store_tokens
from strandline.kernels.batch import AttentionBatch
from strandline.kernels.binding import Kernels
from strandline.models.layers.attention.latent_attention import MAX_LATENT, LatentAttention, LatentAttentionConfig
from strandline.models.layers.parts.projection import PROJECTION_ROWS, FusedProjection, Projection
from strandline.models.layers.parts.site import Site, dtype_name
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, whole
from strandline.specs import LayerSpec, TensorSpec

INDEX_NORM_EPS: Final = 1e-6


@dataclass(frozen=True, slots=True)
class IndexedLatentAttentionConfig:
    """Sizes of the layer."""

    latent: LatentAttentionConfig
    num_index_heads: int
    index_dim: int
    group_tokens: int
    max_groups: int

    @classmethod
    def read(cls, fields: Fields) -> "IndexedLatentAttentionConfig":
        """Read a text configuration; raises as :class:`strandline.config_fields.Fields`."""
        if fields.size("qk_rope_head_dim", at_least=0) != 0:
            fields.reject("qk_rope_head_dim", "0: keys without positions")
        if not fields.flag("index_kpool_always_select_tail"):
            fields.reject("index_kpool_always_select_tail", "true")
        group_tokens, budget_tokens = fields.size("index_kpool"), fields.size("index_topk", at_most=MAX_SIZE)
        if budget_tokens % group_tokens:
            fields.reject("index_topk", f"a multiple of index_kpool, {group_tokens}")
        query_rank = fields.size("q_lora_rank", at_most=MAX_LATENT)
        return cls(
            replace(LatentAttentionConfig.read(fields, read_eps(fields)), query_rank=query_rank),
            num_index_heads=fields.size("index_n_heads", at_most=MAX_HEADS),
            index_dim=fields.size("index_head_dim", at_most=MAX_HEAD_DIM),
            group_tokens=group_tokens,
            max_groups=budget_tokens // group_tokens,
        )


class TokenIndex(nn.Module):
    """What chooses groups of tokens. It is not divided among shards: every rank computes it, and keeps index keys."""

    operations = (store_tokens, choose_groups)

    def __init__(self, config: IndexedLatentAttentionConfig, site: Site) -> None:
        super().__init__()
        self.config, query_rank = config, config.latent.query_rank
        assert query_rank is not None
        num_heads, dim = config.num_index_heads, config.index_dim
        rows = (dim, dim, num_heads)
        self.in_proj = FusedProjection(rows, config.latent.hidden_size, site, multiple=PROJECTION_ROWS)
        """Rows: index key, its gates, weights of index heads, and zeros."""
        self.query_proj = Projection(num_heads * dim, query_rank, site)
        self.key_norm_C = site.gain(dim)
        self.key_norm_bias_C = site.parameter(dim)
        self.gate_bias_GC = site.parameter(config.group_tokens, dim)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._store_tokens, self._choose_groups = kernels[store_tokens], kernels[choose_groups]
        self._index = PooledIndex(self.config.group_tokens, self.config.max_groups, self.gate_bias_GC)

    def store(self, hidden_TE: Tensor, index_BPX: Tensor, batch: AttentionBatch) -> Tensor:
        """Store the step's index keys and gates; return the weights of index heads, but for a factor, ``[T, J]``."""
        weight_TJ: Tensor
        key_TC, gate_TC, weight_TJ, _ = self.in_proj.project(hidden_TE)
        key_TC = F.layer_norm(key_TC, key_TC.shape[-1:], self.key_norm_C, self.key_norm_bias_C, INDEX_NORM_EPS)
        self._store_tokens(torch.cat((key_TC, gate_TC), dim=-1), index_BPX, batch)
        return weight_TJ

    def choose(self, query_TQ: Tensor, weight_TJ: Tensor, index_BPX: Tensor, batch: AttentionBatch) -> Tensor:
        """Return the groups that tokens attend to, ``group_TK``. Factors of all scores change no choice."""
        q_TJC = self.query_proj.multiply(query_TQ).unflatten(-1, (self.config.num_index_heads, -1))
        return self._choose_groups(q_TJC, weight_TJ, index_BPX, batch, self._index)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        key, gate, weight, _ = self.in_proj.weights
        yield f"{prefix}wk.weight", whole(key)
        yield f"{prefix}index_kpool_compress_gate", whole(gate)
        yield f"{prefix}weights_proj.weight", whole(weight)
        yield from self.query_proj.targets(f"{prefix}wq_b.")
        yield f"{prefix}k_norm.weight", whole(self.key_norm_C)
        yield f"{prefix}k_norm.bias", whole(self.key_norm_bias_C)
        yield f"{prefix}index_kpool_compress_ape", whole(self.gate_bias_GC)


class GroupChoice:
    """The groups that one layer has chosen for the tokens of the current step, for itself and the layer after.

    Not a dataclass: tensors in a module's dataclasses count as its weights (``model_memory.py``).
    """

    def __init__(self) -> None:
        self.group_TK: Tensor | None = None


@dataclass(frozen=True, slots=True)
class IndexedLatentMemory:
    """A layer's share of all blocks."""

    latent_BPD: Tensor
    index_BPX: Tensor | None
    """Index keys and gates; None: the layer has no index."""


class IndexedLatentAttention(nn.Module):
    """Latent attention, and its index or that of the layer before.

    Args:
        index: None: the layer before chooses.
        choice: where the choice is put, or taken from.
    """

    recurrence = None
    operations = (store_tokens, indexed_latent_attention)

    def __init__(
        self, config: IndexedLatentAttentionConfig, index: TokenIndex | None, choice: GroupChoice, site: Site
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.index, self.choice = config, site.dtype, index, choice
        self.attention = LatentAttention(config.latent, site)

    @property
    def spec(self) -> LayerSpec:
        spec = self.attention.spec
        if self.index is None:
            return spec
        index_key = TensorSpec("index_key", (2 * self.config.index_dim,), dtype_name(self.dtype))
        return replace(spec, streams=(*spec.streams, index_key))

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._store_tokens, self._attend_indexed = kernels[store_tokens], kernels[indexed_latent_attention]
        # Whether a token's step has no longer context would depend on other sequences.
        self._may_read_whole = not kernels.workload.is_deterministic

    def bind(self, memory: LayerMemory) -> IndexedLatentMemory:
        """Return the layer's memory as ``forward`` takes it."""
        return IndexedLatentMemory(self.attention.bind(memory), memory.streams.get("index_key"))

    def forward(self, hidden_TE: Tensor, step: Step, memory: IndexedLatentMemory) -> Tensor:
        attention, batch = self.attention, step.batch.attention
        query_TQ, latent_TD = attention.project(hidden_TE)
        is_whole = self._is_read_whole(batch)
        if self.index is not None and memory.index_BPX is not None:
            weight_TJ = self.index.store(hidden_TE, memory.index_BPX, batch)
            self.choice.group_TK = None
            if not is_whole:
                self.choice.group_TK = self.index.choose(query_TQ, weight_TJ, memory.index_BPX, batch)
        if is_whole:
            out_THV = attention.attend(attention.queries(query_TQ), latent_TD, memory.latent_BPD, step.batch)
        else:
            self._store_tokens(latent_TD, memory.latent_BPD, batch)
            out_THV = self._attend_chosen(attention.queries(query_TQ), memory.latent_BPD, batch)
        return attention.out_proj.multiply(out_THV.flatten(1))

    def _is_read_whole(self, batch: AttentionBatch) -> bool:
        config = self.config
        if not self._may_read_whole or not batch.has_lengths:
            return False
        return all(is_read_whole(length, config.group_tokens, config.max_groups) for length in batch.context_lens)

    def _attend_chosen(self, q_THD: Tensor, latent_BPD: Tensor, batch: AttentionBatch) -> Tensor:
        """Attend every token to the groups chosen for it; return ``out_THV``."""
        if self.choice.group_TK is None:
            raise EngineError("no layer has chosen tokens in this step")
        folded_THD, scale = self.attention.folded(q_THD), self.attention.scale
        sizes = (self.config.group_tokens, self.config.latent.latent_dim)
        out_THR = self._attend_indexed(folded_THD, latent_BPD, self.choice.group_TK, batch, *sizes, scale=scale)
        return self.attention.values(out_THR)

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        yield from self.attention.targets(prefix)
        if self.index is not None:
            yield from self.index.targets(f"{prefix}indexer.")
