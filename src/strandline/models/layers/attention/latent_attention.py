"""Multi-head latent attention: a token keeps one latent for all heads (Kimi Linear, Ling 3).

The up projections of keys and values are folded into queries and outputs, so that attention reads latents alone. Only
prompts with many new tokens apply them to latents, where that takes fewer multiplications.

Projections that read the same input are one matrix (comments name the order of its rows); the published tensors are
split into it while loading.

Source: DeepSeek-AI, "DeepSeek-V2", section 2.1; ``transformers`` (``kimi_linear``, ``bailing_hybrid``).

Shape suffixes: T tokens of the step, E hidden size, H heads, K channels of a head's key that come from the latent, P
those that all heads share, V channels of a head's value, D channels of a latent and those shared, R channels of the
latent, Q channels of all heads' queries or of the latent that they are made of, B blocks, O heads' channels side by
side. Of a block, P are its tokens.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from strandline.config_fields import MAX_HEAD_DIM, MAX_HEADS, Fields
from strandline.kernels.arena import LayerMemory
from strandline.kernels.attention.latent_attention import latent_attention
from strandline.kernels.attention.latent_expansion import expanded_latent_attention, is_expansion_worthwhile
from strandline.kernels.batch import AttentionBatch, StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.gemm.linear import head_linear
from strandline.kernels.rowwise.norm import rms_norm
from strandline.kernels.rowwise.rotary import apply_rotary
from strandline.models.layers.attention.attention_parts import gate_heads
from strandline.models.layers.parts.projection import FusedProjection, Projection, SummedProjection
from strandline.models.layers.parts.shard import Shard
from strandline.models.layers.parts.site import Site, dtype_name
from strandline.models.layers.parts.step import Step
from strandline.models.layers.parts.targets import NamedTargets, interleaved, sharded, whole
from strandline.specs import LayerSpec, TensorSpec

MAX_LATENT: Final = 2**12

LATENT_EPS: Final = 1e-6
"""Epsilon of latents' norms in families whose configurations do not name it."""


@dataclass(frozen=True, slots=True)
class LatentAttentionConfig:
    """Sizes of the layer."""

    hidden_size: int
    num_heads: int
    latent_dim: int
    key_dim: int
    """Channels of a head's key that come from the latent."""
    shared_dim: int
    """Channels of a key that all heads share; 0: there are none."""
    value_dim: int
    eps: float
    """Epsilon of the norms of latents."""
    query_rank: int | None = None
    """Channels of the latent that queries are made of; None: they are made of the hidden state."""
    is_rotated: bool = False
    """Whether positions are embedded by rotation in queries, and in the part of keys that all heads share: neighbouring
    channels are rotated together."""
    is_gated: bool = False
    """Whether a sigmoid gate multiplies the result of each head."""

    @classmethod
    def read(cls, fields: Fields, eps: float = LATENT_EPS) -> "LatentAttentionConfig":
        """Read the sizes of a text configuration but ``query_rank``; raises as ``Fields``."""
        num_heads = fields.size("num_attention_heads", at_most=MAX_HEADS)
        if fields.size("num_key_value_heads", at_most=MAX_HEADS) != num_heads:
            fields.reject("num_key_value_heads", f"the number of attention heads, {num_heads}")
        if fields.flag("attention_bias"):
            fields.reject("attention_bias", "false")
        return cls(
            hidden_size=fields.size("hidden_size"),
            num_heads=num_heads,
            latent_dim=fields.size("kv_lora_rank", at_most=MAX_LATENT),
            key_dim=fields.size("qk_nope_head_dim", at_most=MAX_HEAD_DIM),
            shared_dim=fields.size("qk_rope_head_dim", at_least=0, at_most=MAX_HEAD_DIM),
            value_dim=fields.size("v_head_dim", at_most=MAX_HEAD_DIM),
            eps=eps,
        )

    def of(self, shard: Shard) -> "LatentAttentionConfig":
        """Return the sizes of a shard; raises as :class:`strandline.models.layers.parts.shard.Shard`."""
        return replace(self, num_heads=shard.part_of(self.num_heads, "attention heads"))


class LatentAttention(nn.Module):
    """Multi-head latent attention.

    Its recurrence is None: it keeps a stream alone.

    Args:
        site: the shard divides the heads; every rank computes and keeps the latents.
    """

    recurrence = None
    operations = (rms_norm, head_linear, latent_attention, expanded_latent_attention)

    def __init__(self, config: LatentAttentionConfig, site: Site) -> None:
        super().__init__()
        self.shard, self.dtype = site.shard, site.dtype
        self.config = config = config.of(site.shard)
        num_heads, hidden_size = config.num_heads, config.hidden_size
        self.query_dims = [config.key_dim, config.shared_dim]
        query_size, rank = num_heads * sum(self.query_dims), config.query_rank
        rows = (query_size if rank is None else rank, config.latent_dim, config.shared_dim)
        self.in_proj = FusedProjection(rows, hidden_size, site)
        """Rows: query or its latent, latent, shared part of the key."""
        self.query_norm_Q = None if rank is None else site.gain(rank)
        self.query_proj = None if rank is None else Projection(query_size, rank, site, shard=site.shard)
        self.latent_norm_R = site.gain(config.latent_dim)
        self.key_up_HKR = site.parameter(num_heads, config.key_dim, config.latent_dim)
        self.value_up_HVR = site.parameter(num_heads, config.value_dim, config.latent_dim)
        self.gate_proj = Projection(num_heads, hidden_size, site, shard=site.shard) if config.is_gated else None
        self.out_proj = SummedProjection(hidden_size, num_heads * config.value_dim, site)
        self.scale = sum(self.query_dims) ** -0.5

    @property
    def spec(self) -> LayerSpec:
        num_channels = self.config.latent_dim + self.config.shared_dim
        return LayerSpec(streams=(TensorSpec("latent", (num_channels,), dtype_name(self.dtype)),))

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._rms_norm, self._attend = kernels[rms_norm], kernels[latent_attention]
        self._head_linear, self._attend_expanded = kernels[head_linear], kernels[expanded_latent_attention]
        # Whether a token's prompt is long enough would depend on the step.
        self._may_expand = not kernels.workload.is_deterministic

    def bind(self, memory: LayerMemory) -> Tensor:
        """Return the layer's memory as ``forward`` takes it."""
        return memory.streams["latent"]

    def forward(self, hidden_TE: Tensor, step: Step, latent_BPD: Tensor) -> Tensor:
        query_TQ, latent_TD = self.project(hidden_TE)
        q_THD = self.queries(query_TQ)
        if self.config.is_rotated:
            num_rotated = self.config.shared_dim
            _rotate_pairs(q_THD[..., -num_rotated:], step)
            _rotate_pairs(latent_TD[:, -num_rotated:].unsqueeze(1), step)
        out_THV = self.attend(q_THD, latent_TD, latent_BPD, step.batch)
        if self.gate_proj is not None:
            out_THV = gate_heads(out_THV, self.gate_proj, hidden_TE)
        return self.out_proj.multiply(out_THV.flatten(1))

    def project(self, hidden_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries or their latents, and what is kept of each token."""
        query_TQ, latent_TR, shared_TP = self.in_proj.project(hidden_TE)
        if self.query_norm_Q is not None:
            query_TQ = self._rms_norm(query_TQ, self.query_norm_Q, self.config.eps)
        latent_TR = self._rms_norm(latent_TR, self.latent_norm_R, self.config.eps)
        return query_TQ, torch.cat((latent_TR, shared_TP), dim=-1)

    def queries(self, query_TQ: Tensor) -> Tensor:
        """Return the queries of all heads, ``q_THD``."""
        q_TO = query_TQ if self.query_proj is None else self.query_proj.multiply(query_TQ)
        q_THD: Tensor = q_TO.unflatten(-1, (self.config.num_heads, -1))
        return q_THD

    def attend(self, q_THD: Tensor, latent_TD: Tensor, latent_BPD: Tensor, batch: StepBatch) -> Tensor:
        """Store the step's latents, and attend every token to all up to itself; return ``out_THV``."""
        steps = (batch.attention, batch.num_decodes)
        if not self._expands(batch):
            return self._attend_folded(q_THD, latent_TD, latent_BPD, *steps)
        decodes_THV = self._attend_folded(q_THD[: batch.num_decodes], latent_TD, latent_BPD, *steps)
        ups = (self.key_up_HKR, self.value_up_HVR)
        prefills_THV = self._attend_expanded(q_THD[batch.num_decodes :], latent_BPD, *ups, *steps, scale=self.scale)
        return torch.cat((decodes_THV, prefills_THV)) if batch.num_decodes else prefills_THV

    def _attend_folded(
        self, q_THD: Tensor, latent_TD: Tensor, latent_BPD: Tensor, batch: AttentionBatch, num_decodes: int
    ) -> Tensor:
        """Store the step's latents, and attend the queries, if there are any, to latents."""
        num_queries, num_heads, _ = q_THD.shape
        folded_THD, latent_dim = self.folded(q_THD), self.config.latent_dim
        out_THR = self._attend(folded_THD, latent_TD, latent_BPD, batch, num_decodes, latent_dim, scale=self.scale)
        if not num_queries:
            return q_THD.new_empty(0, num_heads, self.config.value_dim)
        return self.values(out_THR)

    def values(self, out_THR: Tensor) -> Tensor:
        """Return the heads' results, ``out_THV``, given sums of latents."""
        return self._head_linear(out_THR, self.value_up_HVR)

    def folded(self, q_THD: Tensor) -> Tensor:
        """Return queries with which latents are multiplied."""
        q_THK, q_THP = q_THD.split(self.query_dims, dim=-1)
        q_THR = q_THD.new_empty(0, len(self.key_up_HKR), self.config.latent_dim)
        if len(q_THD):
            q_THR = self._head_linear(q_THK, self.key_up_HKR.mT)
        return torch.cat((q_THR, q_THP), dim=-1)

    def _expands(self, batch: StepBatch) -> bool:
        """Return whether the prefills attend to keys and values that are computed again."""
        its = self.config
        return self._may_expand and is_expansion_worthwhile(
            batch.attention,
            batch.num_decodes,
            latent_dim=its.latent_dim,
            shared_dim=its.shared_dim,
            key_dim=its.key_dim,
            value_dim=its.value_dim,
        )

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors."""
        query, _, _ = self.in_proj.weights
        if self.query_proj is None:
            yield f"{prefix}q_proj.weight", sharded(query, self.shard)
        else:
            assert self.query_norm_Q is not None
            yield f"{prefix}q_a_proj.weight", whole(query)
            yield f"{prefix}q_a_layernorm.weight", whole(self.query_norm_Q)
            yield from self.query_proj.targets(f"{prefix}q_b_proj.")
        yield f"{prefix}kv_a_proj_with_mqa.weight", whole(self.in_proj.weight_OI[len(query) :])
        yield f"{prefix}kv_a_layernorm.weight", whole(self.latent_norm_R)
        yield f"{prefix}kv_b_proj.weight", interleaved(self.key_up_HKR, self.value_up_HVR, shard=self.shard)
        yield from self.out_proj.targets(f"{prefix}o_proj.")
        if self.gate_proj is not None:
            yield from self.gate_proj.targets(f"{prefix}g_proj.")


def _rotate_pairs(x_THP: Tensor, step: Step) -> None:
    """Rotate neighbouring channels together, in place; they come out the first of all pairs before the second."""
    assert step.rotary is not None
    x_THP.copy_(apply_rotary(torch.cat((x_THP[..., 0::2], x_THP[..., 1::2]), dim=-1), step.rotary))
