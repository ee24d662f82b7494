"""The embedding of tokens, and the output head, which may be the same matrix.

Shape suffixes: T tokens of the step, N rows whose logits are wanted, E hidden size, Z vocabulary of this rank,
X encoded tokens of pictures.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strandline.config_fields import Fields, read_vocab_size
from strandline.kernels.binding import Kernels
from strandline.kernels.gemm.linear import Linear, bind_linear, linear
from strandline.kernels.gemm.weights import DenseWeight, ScaledWeight
from strandline.kernels.operation import Operation
from strandline.kernels.ranks import columns_of
from strandline.kernels.rowwise.embedding import embed_held
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, Target, spanned, whole
from strandline.models.layers.streams.residual import ResidualNorm


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """Sizes of the embedding and of the output head, and how their results are scaled."""

    vocab_size: int
    hidden_size: int
    is_tied: bool
    """Whether the output head is the embedding."""
    num_published: int | None = None
    """Rows of the published embedding and head; those past the vocabulary are not read. None: as many as the vocabulary
    has tokens."""
    norm: ResidualNorm | None = None
    """Norm of the tokens' embeddings; None: they have none."""
    multiplier: float = 1.0
    """Multiplies the tokens' embeddings, before the norm."""
    logits_multiplier: float = 1.0
    """Multiplies the logits, before they are capped."""
    logits_soft_cap: float | None = None
    """Limit of the logits' size, approached smoothly; None: there is none."""

    @classmethod
    def read(cls, fields: Fields) -> "EmbeddingConfig":
        """Read the sizes of a text configuration; raises as :class:`strandline.config_fields.Fields`."""
        return cls(read_vocab_size(fields), fields.size("hidden_size"), fields.flag("tie_word_embeddings"))


class Embedding(nn.Module):
    """The embedding and the output head.

    Args:
        site: the shard divides the vocabulary, for both.
    """

    def __init__(self, config: EmbeddingConfig, site: Site) -> None:
        super().__init__()
        self.config, self.shard = config, site.shard
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        columns = columns_of(vocab_size, site.shard.index, site.shard.count)
        self.held_tokens = range(min(columns.start, vocab_size), min(columns.stop, vocab_size))
        self.embed_ZE = site.parameter(len(columns), hidden_size)
        self.embed_norm_E = None if config.norm is None else config.norm.weight(site, hidden_size)
        self.head = None if config.is_tied else Projection(len(columns), hidden_size, site)
        # Rows to spare, at the end, are zeros.
        for weight in (self.embed_ZE, None if self.head is None else self.head.weight_OI):
            if weight is not None:
                weight[len(self.held_tokens) :].zero_()
        self.num_draftable: int | None = None
        """The first tokens, which alone are drafted; None: all. To be set before ``use_kernels``."""
        self.draft_weight: ScaledWeight | None = None
        """The output head of drafts, if it is another one. To be set before ``use_kernels``."""

    @property
    def operations(self) -> tuple[Operation[..., Any], ...]:
        norms = () if self.config.norm is None else (self.config.norm.norm,)
        return (*norms, linear, embed_held)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._ranks = kernels.ranks
        self._embed_held = kernels[embed_held]
        if self.config.norm is not None:
            self._norm = kernels[self.config.norm.norm]
        self._tied_head = bind_linear(kernels, DenseWeight(self.embed_ZE))
        self._draft_head: Linear | None = None
        if self.draft_weight is not None:
            self._draft_head = bind_linear(kernels, self.draft_weight)
        elif self.num_draftable is not None and self.draft_rows is not None:
            self._draft_head = bind_linear(kernels, DenseWeight(self.draft_rows))

    @property
    def draft_rows(self) -> Tensor | None:
        """The output head's rows of tokens that are drafted; None: it is in a form whose rows cannot be sliced."""
        head = DenseWeight(self.embed_ZE) if self.head is None else self.head.weight
        return head.values_OI[: self.num_draftable] if isinstance(head, DenseWeight) else None

    def inputs(self, token_ids_T: Tensor, encoded_XE: Tensor | None) -> Tensor:
        """Return what the first layer reads of tokens: embeddings that are scaled and normalised.

        Args:
            encoded_XE: embeddings of pictures' tokens; None: there are no pictures.
        """
        embedded_TE = multiplied(self.rows(token_ids_T, encoded_XE), self.config.multiplier)
        if self.config.norm is not None and self.embed_norm_E is not None:
            embedded_TE = self._norm(embedded_TE, self.embed_norm_E, self.config.norm.eps)
        return embedded_TE

    def rows(self, token_ids_T: Tensor, encoded_XE: Tensor | None = None) -> Tensor:
        """Return the embeddings of tokens as they are published. Arguments as in ``inputs``."""
        if self.shard.count == 1 and encoded_XE is None:
            return F.embedding(token_ids_T, self.embed_ZE)
        held = self.held_tokens
        encoded_XE = encoded_XE if self.shard.is_first else None
        embedded_TE = self._embed_held(token_ids_T, self.embed_ZE, held.start, len(held), encoded_XE)
        return embedded_TE if self.shard.count == 1 else self._ranks.sum(embedded_TE)

    @torch.no_grad()
    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return logits of the tokens that this rank has, ``columns_of`` the vocabulary, in the activations' dtype.

        They are minus infinity where a column stands for no token.
        """
        logits_NZ = multiplied(self._head_products(hidden_NE), self.config.logits_multiplier)
        if (cap := self.config.logits_soft_cap) is not None:
            logits_NZ.div_(cap).tanh_().mul_(cap)
        return self._without_spare(logits_NZ)

    @torch.no_grad()
    def draft_logits(self, hidden_NE: Tensor) -> Tensor:
        """Return logits of the tokens that are drafted, neither scaled nor capped, whose order is the same."""
        if self._draft_head is not None:
            return self._without_spare(self._draft_head(hidden_NE))
        return self._without_spare(self._head_products(hidden_NE))[:, : self.num_draftable]

    def _head_products(self, hidden_NE: Tensor) -> Tensor:
        return self._tied_head(hidden_NE) if self.head is None else self.head.multiply(hidden_NE)

    def _without_spare(self, logits_NZ: Tensor) -> Tensor:
        """Make logits minus infinity where a column stands for no token."""
        if logits_NZ.shape[1] > len(self.held_tokens):
            logits_NZ[:, len(self.held_tokens) :] = -torch.inf
        return logits_NZ

    def targets(self, prefix: str) -> NamedTargets:
        """Yield the published tensors of the embedding."""
        yield f"{prefix}embed_tokens.weight", self.published(self.embed_ZE)
        if self.embed_norm_E is not None:
            yield f"{prefix}embed_norm.weight", whole(self.embed_norm_E)

    def head_targets(self, names: frozenset[str]) -> NamedTargets:
        """Yield the published output head. A tied one may be published all the same: it is the embedding once more."""
        if self.head is not None or "lm_head.weight" in names:
            yield "lm_head.weight", self.published(self.embed_ZE if self.head is None else self.head.weight_OI)

    def published(self, rows_ZE: Tensor) -> Target:
        """Return the target of the published embedding or head, given its rows here."""
        config = self.config
        num_published = config.vocab_size if config.num_published is None else config.num_published
        return spanned(rows_ZE, self.held_tokens, num_published)


def multiplied(x: Tensor, multiplier: float) -> Tensor:
    """Multiply a tensor in place, and return it."""
    return x if multiplier == 1.0 else x.mul_(multiplier)
