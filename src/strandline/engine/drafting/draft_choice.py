"""The choice, per request, between what a drafter has drafted and what was looked up in earlier text.

Both are compared with the tokens that the request then gets, whichever of them was verified. So no step is spent on
trying the other one.
"""

from typing import Final

from strandline.engine.requests.request import Proposals, Request
from strandline.records.tokens import decode

FIRST_RATE: Final = 0.7
"""Share of drafts that agree, assumed before any."""

FADING: Final = 0.02
"""Weight of the newest draft in the rates of all requests."""

FADING_OF_REQUEST: Final = 0.1
"""The same in those of a request, which begin with the rates of all."""


class DraftChoice:
    """Chooses what is likely to have more drafts accepted."""

    def __init__(self) -> None:
        self._rates = [FIRST_RATE, FIRST_RATE]
        """How often a draft agreed after agreeing ones, by its position in ``Proposals`` after the first."""

    def prefers_looked_up(self, request: Request, drafted: tuple[int, ...], looked_up: tuple[int, ...]) -> bool:
        """Whether a request should verify what was looked up after its last token, rather than what was drafted."""
        if request.draft_rates is None:
            request.draft_rates = [*self._rates]
        self._compare(request, request.draft_rates)
        request.proposals = Proposals(len(request.tokens), drafted, looked_up)
        by_drafter, by_lookup = request.draft_rates
        return _expected_tokens(by_lookup, len(looked_up)) > _expected_tokens(by_drafter, len(drafted))

    def _compare(self, request: Request, rates: list[float]) -> None:
        """Compare the last proposals with the tokens that have come since."""
        if request.proposals is None:
            return
        start, *proposals = request.proposals
        most = max(map(len, proposals))
        found = decode(request.tokens.slice(start, min(start + most, len(request.tokens))))
        for index, proposed in enumerate(proposals):
            for draft, token in zip(proposed, found, strict=False):
                rates[index] += FADING_OF_REQUEST * ((draft == token) - rates[index])
                self._rates[index] += FADING * ((draft == token) - self._rates[index])
                if draft != token:
                    break
        request.proposals = None


def _expected_tokens(rate: float, num_drafts: int) -> float:
    """Return how many of consecutive drafts agree on average."""
    return sum(rate**count for count in range(1, num_drafts + 1))
