"""How long prefills share steps with decodes.

While requests decode, prefills of more tokens than a threshold compute at most that many of a step's tokens, and a few
steps pass before their next share. So one long prompt does not hold up everyone's tokens. Where several wait, each
brings a share of its own into that step: a queue of long prompts costs first tokens and throughput more than it helps
those that decode.
"""

from collections.abc import Iterable
from typing import Final

from strandline.engine.requests.request import Request

STEPS_BETWEEN_SHARES: Final = (2, 8)
"""Fewest and most steps between two in which long prefills beside decodes get their share: most steps are decodes
alone, then."""

DECODES_BETWEEN_SHARES: Final = 32
"""Tokens decoded between two shares, within these limits: steps of few decodes are short, so more of them pass."""


class LongPrefills:
    """Hands out the tokens of steps to prefills.

    Args:
        threshold: prefills of more tokens are long; 0: none is.
        step_tokens: number of tokens of a whole step.
    """

    def __init__(self, threshold: int, step_tokens: int) -> None:
        self._threshold = threshold or step_tokens
        self._step_tokens = step_tokens
        self._share = self._left = 0
        """The planned step's tokens for long prefills together, and how many of them are left."""
        self._steps_since_share = max(STEPS_BETWEEN_SHARES)
        """Steps of decodes since the last in which long prefills got a share."""

    def begin_step(self, running: Iterable[Request]) -> None:
        """Choose how many tokens of a step beside these requests long prefills may compute."""
        self._share = self._left = self._share_beside(*self._count(running))

    def begin_step_alone(self) -> None:
        """Let long prefills compute a whole step: those that decoded have been preempted."""
        self._share = self._left = self._step_tokens

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
        """Whether the next step computes shares of long prompts beside decodes."""
        if self._steps_since_share < min(STEPS_BETWEEN_SHARES):
            return False
        num_decodes, num_long = self._count(running)
        return num_decodes > 0 and num_long > 0 and self._share_beside(num_decodes, num_long) > 0

    def _count(self, running: Iterable[Request]) -> tuple[int, int]:
        """Return how many requests have sampled a token and sample another in their next step; and long prefills."""
        num_decodes = num_long = 0
        threshold = self._threshold
        for request in running:
            if request.lease is not None and request.num_tokens - request.lease.computed > threshold:
                num_long += 1
            elif request.num_prompt_tokens < request.num_tokens < request.max_total:
                num_decodes += 1
        return num_decodes, num_long

    def _share_beside(self, num_decodes: int, num_long: int) -> int:
        if self._threshold >= self._step_tokens or not num_decodes:
            return self._step_tokens
        fewest, most = STEPS_BETWEEN_SHARES
        if self._steps_since_share < max(fewest, min(most, DECODES_BETWEEN_SHARES // num_decodes)):
            return 0
        # Long prompts that are about to be admitted get one share; and every decode keeps its token.
        return max(self._threshold, min(self._threshold * num_long, self._step_tokens - num_decodes))
