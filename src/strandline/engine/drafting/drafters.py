"""Drafters: they propose tokens that a request may generate next, to be verified in one step (speculative decoding)."""

from itertools import takewhile
from typing import Final, Protocol

from strandline.engine.drafting.draft_depth import DraftDepth
from strandline.engine.drafting.earlier_answers import EarlierAnswers
from strandline.engine.drafting.suffix_drafter import SuffixDrafter
from strandline.engine.requests.request import Request
from strandline.engine.requests.request_drafts import Proposals
from strandline.records.pictures import is_virtual
from strandline.records.tokens import TOKEN_BYTES, TokenBuffer, decode
from strandline.speculative_config import SpeculativeConfig

FIRST_RATE: Final = 0.7
"""Share of drafts that agree, assumed before any."""

FADING: Final = 0.02
"""Weight of the newest draft in the rates of all requests."""

FADING_OF_REQUEST: Final = 0.1
"""The same in those of a request, which begin with the rates of all."""


class Drafter(Protocol):
    """Proposes drafts."""

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        """Return at most ``max_tokens`` tokens that may follow those of a request; all of these are known."""


class NgramDrafter:
    """Continues the request's last tokens as they were continued before, in its prompt or its output.

    Args:
        max_match: the longest run of last tokens to search for; the longest that is found counts.
        min_match: the shortest.
    """

    def __init__(self, max_match: int, min_match: int) -> None:
        self._max_match, self._min_match = max_match, min_match

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        """Return the tokens after the last earlier match of the request's last tokens."""
        tokens = request.tokens
        for num_match in range(min(self._max_match, len(tokens) - 1), self._min_match - 1, -1):
            match = _last_match(tokens, tokens.slice(len(tokens) - num_match, len(tokens)))
            if match is not None:
                start = match + num_match
                following = decode(tokens.slice(start, min(start + max_tokens, len(tokens))))
                return tuple(takewhile(lambda token: not is_virtual(token), following))
        return ()


class DraftLayerDrafter:
    """Hands on what layers, the model's draft layer or a drafter's, drafted after the last step."""

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        """Return the drafts after the request's last token."""
        return request.drafts.drafted[:max_tokens]


class ChoosingDrafter:
    """Hands on what layers drafted or, where that is likely to be accepted further, what is looked up.

    The layers draft after every step, whichever drafts it verified. Both are compared with the tokens that the request
    then gets. So no step is spent on trying the other one.
    """

    def __init__(self, lookup: Drafter) -> None:
        self.lookup = lookup
        self._rates = [FIRST_RATE, FIRST_RATE]
        """How often a draft agreed after agreeing ones, by its position in ``Proposals`` after the first."""

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        """Return the drafts after the request's last token, and note in it whether they were looked up."""
        is_looked_up, proposals = self._choose(request, max_tokens)
        request.drafts.is_looked_up = is_looked_up
        return proposals.looked_up if is_looked_up else proposals.drafted

    def prefers_looked_up(self, request: Request, max_tokens: int) -> bool:
        """Whether a request should verify what was looked up, though the step under way verifies what was drafted."""
        return self._choose(request, max_tokens)[0]

    def _choose(self, request: Request, max_tokens: int) -> tuple[bool, Proposals]:
        """Return what may follow the request's last token, and whether it should verify what was looked up."""
        looked_up = self.lookup.propose(request, max_tokens)
        drafts = request.drafts
        if drafts.rates is None:
            drafts.rates = [*self._rates]
        self._compare(request, drafts.rates)
        drafts.proposals = proposals = Proposals(len(request.tokens), drafts.drafted[:max_tokens], looked_up)
        by_drafter, by_lookup = drafts.rates
        most_drafted = _expected_tokens(by_drafter, len(proposals.drafted))
        return _expected_tokens(by_lookup, len(looked_up)) > most_drafted, proposals

    def _compare(self, request: Request, rates: list[float]) -> None:
        """Compare the last proposals with the tokens that have come since."""
        if request.drafts.proposals is None:
            return
        start, *proposals = request.drafts.proposals
        most = max(map(len, proposals))
        found = decode(request.tokens.slice(start, min(start + most, len(request.tokens))))
        for index, proposed in enumerate(proposals):
            for draft, token in zip(proposed, found, strict=False):
                rates[index] += FADING_OF_REQUEST * ((draft == token) - rates[index])
                self._rates[index] += FADING * ((draft == token) - self._rates[index])
                if draft != token:
                    break
        request.drafts.proposals = None


def _expected_tokens(rate: float, num_drafts: int) -> float:
    """Return how many of consecutive drafts agree on average."""
    return sum(rate**count for count in range(1, num_drafts + 1))


def _last_match(tokens: TokenBuffer, key: bytes) -> int | None:
    """Return the last token at which a key begins that ends before the last token; None: nowhere."""
    data, end = tokens.data, len(tokens.data) - TOKEN_BYTES
    while (offset := data.rfind(key, 0, end)) >= 0:
        if offset % TOKEN_BYTES == 0:
            return offset // TOKEN_BYTES
        # It lies across tokens: a key that begins before may still match.
        end = offset + len(key) - 1
    return None


def new_drafter(config: SpeculativeConfig) -> Drafter:
    """Return what makes drafts as configured."""
    if config.lookup_method is None:
        return DraftLayerDrafter()
    lookup = _new_lookup(config)
    return ChoosingDrafter(lookup) if config.has_drafter else lookup


def _new_lookup(config: SpeculativeConfig) -> Drafter:
    if config.lookup_method == "ngram":
        return NgramDrafter(config.max_match, config.min_match)
    return SuffixDrafter(
        EarlierAnswers(config.suffix_decoding_max_cached_requests),
        max_drafts=config.num_speculative_tokens,
        max_depth=config.suffix_decoding_max_tree_depth,
        max_factor=config.suffix_decoding_max_spec_factor,
        min_probability=config.suffix_decoding_min_token_prob,
    )


def new_draft_depth(config: SpeculativeConfig) -> DraftDepth | None:
    """Return what chooses the number of drafts; None: it is fixed."""
    if not config.adaptive:
        return None
    return DraftDepth(config.num_speculative_tokens, has_draft_layer=config.has_drafter)
