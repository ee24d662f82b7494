"""How many waiting prompts begin in one step.

Prompts that come together could share one step: none of them has its first token before the last one is computed. Or
each could have a step of its own: then every step's fixed cost, such as reading all weights, delays those after it.
With ``g`` tokens of prompts in each step, the mean time to the first token of ``w`` waiting tokens grows as
``c w / g + g``, where ``c`` is how many tokens take as long as the fixed cost. It is least at ``g = sqrt(c w)``: few
prompts form small groups, and a long queue, whose time is that of its throughput, fills the steps.

Clients that send their next request when they have an answer profit more than once: prompts of one step end together,
and come together again; prompts of several steps stay apart.
"""

from math import sqrt
from typing import Final

SHARE_OF_NEW: Final = 0.1
"""Weight of a new prompt in the running average."""


class PromptGroups:
    """Ends the admission of prompts to a step.

    Args:
        fixed_tokens: how many tokens of prompts take as long as what a step with prompts costs beside; 0: steps are
            always filled.
    """

    def __init__(self, fixed_tokens: int) -> None:
        self._fixed_tokens = fixed_tokens
        self._mean_tokens: float | None = None
        """Tokens of a prompt that were not cached, on average; None: no prompt was admitted yet."""
        self._wanted = self._num_tokens = 0.0
        """The planned step's tokens of new prompts: how many are best, and how many there are."""

    def begin_step(self, num_waiting: int) -> None:
        """Choose the size of a step's group."""
        self._num_tokens = 0
        self._wanted = sqrt(self._fixed_tokens * num_waiting * (self._mean_tokens or 0.0))

    def add(self, num_tokens: int) -> None:
        """Count a prompt that is admitted, and its tokens that are not cached."""
        self._num_tokens += num_tokens
        mean = num_tokens if self._mean_tokens is None else self._mean_tokens
        self._mean_tokens = mean + SHARE_OF_NEW * (num_tokens - mean)

    @property
    def is_full(self) -> bool:
        """Whether further prompts are left to later steps: one more would be further from the best size."""
        return 0 < self._wanted <= self._num_tokens + (self._mean_tokens or 0.0) / 2 and self._num_tokens > 0
