"""How long prefills share steps with decodes.

While requests decode, prefills of more tokens than a threshold compute at most that many of a step's tokens together,
and a few steps pass before their next share. So one long prompt does not hold up everyone's tokens.
"""

from collections.abc import Iterable
from typing import Final

from strandline.engine.request import Request

STEPS_BETWEEN_SHARES: Final = (2, 8)
"""Fewest and most steps between two in which long prefills beside decodes get their share: most steps are decodes
alone, then."""

DECODES_BETWEEN_SHARES: Final = 32
"""Tokens decoded between two shares, within these limits: steps of few decodes are short, so more of them pass."""


class LongPrefills:
    """Hands out the tokens of steps to prefills.

    Args:
        threshold: prefills of more tokens are long; 0: none is.
        step_tokens: of a whole step.
    """

    def __init__(self, threshold: int, step_tokens: int) -> None:
        self._threshold = threshold or step_tokens
        self._step_tokens = step_tokens
        self._share = self._left = 0
        """The planned step's tokens for long prefills, and how many of them are left."""
        self._steps_since_share = max(STEPS_BETWEEN_SHARES)
        """Steps of decodes since the last in which long prefills got a share."""

    def begin_step(self, num_decodes: int) -> None:
        """Choose how many tokens of a step beside these decodes long prefills may compute."""
        self._share = self._left = self._share_beside(num_decodes)

    def allow(self, num_tokens: int, budget: int) -> int:
        """Return how many of a prefill's tokens the step computes."""
        if not self.is_long(num_tokens):
            return min(num_tokens, budget)
        allowed = min(num_tokens, budget, self._left)
        self._left -= allowed
        return allowed

    def is_held(self, num_tokens: int) -> bool:
        """Whether a prefill of that many tokens gets none of the step's."""
        return self.is_long(num_tokens) and self._left == 0

    def end_step(self) -> None:
        """Count the step."""
        self._steps_since_share = 0 if self._left < self._share else self._steps_since_share + 1

    def is_long(self, num_tokens: int) -> bool:
        """Whether a prefill of that many tokens is long."""
        return num_tokens > self._threshold

    def is_due(self, running: Iterable[Request]) -> bool:
        """Whether the next step computes a share of a long prompt beside decodes."""
        if self._steps_since_share < min(STEPS_BETWEEN_SHARES):
            return False
        pending = (request.num_tokens - request.lease.computed for request in running if request.lease is not None)
        if not any(map(self.is_long, pending)):
            return False
        num_decodes = count_decodes(running)
        return num_decodes > 0 and self._share_beside(num_decodes) > 0

    def _share_beside(self, num_decodes: int) -> int:
        if self._threshold >= self._step_tokens or not num_decodes:
            return self._step_tokens
        fewest, most = STEPS_BETWEEN_SHARES
        between = max(fewest, min(most, DECODES_BETWEEN_SHARES // num_decodes))
        return self._threshold if self._steps_since_share >= between else 0


def count_decodes(running: Iterable[Request]) -> int:
    """Return how many running requests have sampled a token, and sample another in their next step."""
    return sum(request.num_prompt_tokens < request.num_tokens < request.max_total for request in running)
