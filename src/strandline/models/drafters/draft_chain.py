"""How a draft of a block depends on the token before it, which may be a draft: DSpark, DFlash2.

All rows of a block are computed at once. Then drafts are chosen one after the other, each from its row's logits and
what two low-rank factors say of a pair of tokens. DSpark adds this to all logits; DFlash2, scaled by features of the
row, to those of the likeliest tokens, among which the draft is chosen.

Source: ``DSparkDraftModel`` and ``DFlash2DraftModel`` as published.

Shape suffixes: N rows, E hidden size, R rank of the factors, K candidates, V tokens that are drafted, Z tokens of this
rank's logits.
"""

from torch import Tensor, nn

from strandline.drafter_config import MarkovConfig, SelectorConfig
from strandline.kernels.binding import Kernels
from strandline.kernels.ranks import columns_of
from strandline.models.drafters.draft_head import DraftHead, on_columns
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import NamedTargets, whole


class MarkovHead(nn.Module):
    """A ``DraftChain`` that adds a term for each pair of tokens.

    Args:
        head: the drafter's own output head; None: it has none.
    """

    operations = ()

    def __init__(self, config: MarkovConfig, vocab_size: int, head: DraftHead | None, site: Site) -> None:
        super().__init__()
        self.vocab_size, self._heads = vocab_size, [] if head is None else [head]
        self.before_ZR = site.parameter(vocab_size, config.rank)
        self.after = Projection(vocab_size if head is None else len(head.draft_ids_V), config.rank, site)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute for these ranks from now on."""
        ranks = kernels.ranks
        self._first = columns_of(self.vocab_size, ranks.rank, ranks.size).start

    def logits_after(self, token_N: Tensor, logits_NZ: Tensor, hidden_NE: Tensor) -> Tensor:
        """Return the logits of drafts."""
        del hidden_NE
        terms_NV = self.after.multiply(self.before_ZR[token_N])
        if self._heads:
            return logits_NZ + self._heads[0].on_own_columns(terms_NV)
        own_NV = terms_NV[:, self._first : self._first + logits_NZ.shape[1]]
        logits_NZ = logits_NZ.clone()
        logits_NZ[:, : own_NV.shape[1]] += own_NV
        return logits_NZ

    def targets(self) -> NamedTargets:
        """Yield the published tensors."""
        yield "markov_head.markov_w1.weight", whole(self.before_ZR)
        yield from self.after.targets("markov_head.markov_w2.")


class CandidateSelector(nn.Module):
    """A ``DraftChain`` that chooses among the likeliest tokens."""

    operations = ()

    def __init__(self, config: SelectorConfig, vocab_size: int, hidden_size: int, site: Site) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.before_ZR, self.after_ZR = (site.parameter(vocab_size, config.rank) for _ in range(2))
        self.projection = Projection(config.rank, hidden_size, site)

    def use_kernels(self, kernels: Kernels) -> None:
        """Compute for these ranks from now on."""
        self._ranks = kernels.ranks
        self._first = columns_of(self.vocab_size, self._ranks.rank, self._ranks.size).start

    def logits_after(self, token_N: Tensor, logits_NZ: Tensor, hidden_NE: Tensor) -> Tensor:
        """Return the logits of drafts, minus infinity but for the candidates."""
        logit_NK, id_NK = self._candidates(logits_NZ)
        weighted_NR = (self.before_ZR[token_N] * self.projection.multiply(hidden_NE)).float()
        scores_NK = self._scaled(logit_NK) + (self.after_ZR[id_NK].float() @ weighted_NR[:, :, None]).squeeze(-1)
        return on_columns(scores_NK, id_NK, range(self._first, self._first + logits_NZ.shape[1]))

    def _candidates(self, logits_NZ: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens of all ranks."""
        count = min(self.config.num_candidates, logits_NZ.shape[1])
        logit_NK, id_NK = logits_NZ.float().topk(count)
        if self._ranks.size > 1:
            # The last tokens of the last rank may stand for none: their logits are infinite.
            id_NK = (id_NK + self._first).clamp_max(self.vocab_size - 1)
            logit_NK, id_NK = self._ranks.gather(logit_NK), self._ranks.gather(id_NK)
            logit_NK, index_NK = logit_NK.topk(count)
            id_NK = id_NK.gather(1, index_NK)
        return logit_NK, id_NK

    def _scaled(self, logit_NK: Tensor) -> Tensor:
        logit_NK, cap = logit_NK * self.config.multiplier, self.config.soft_cap
        return logit_NK if cap is None else (logit_NK / cap).tanh() * cap

    def targets(self) -> NamedTargets:
        """Yield the published tensors."""
        yield "candidate_selector.predecessor_codebook", whole(self.before_ZR)
        yield "candidate_selector.successor_codebook", whole(self.after_ZR)
        yield from self.projection.targets("candidate_selector.hidden_projection.")


def new_chain(
    config: MarkovConfig | SelectorConfig | None, shape: tuple[int, int], head: DraftHead | None, site: Site
) -> MarkovHead | CandidateSelector | None:
    """Return what makes drafts depend on the tokens before them; None: nothing does.

    Args:
        shape: shape of the embedding of the model that is drafted for.
        head: the drafter's own output head; None: it has none.
    """
    if isinstance(config, SelectorConfig):
        return CandidateSelector(config, *shape, site)
    return None if config is None else MarkovHead(config, shape[0], head, site)
