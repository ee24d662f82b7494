"""How the reasoning in a request's outputs begins and ends."""

from typing import NamedTuple


class CallTag(NamedTuple):
    """A tag that opens a tool call."""

    text: str
    token_id: int | None
    """The token that is this tag; None: several spell it."""


class ReasoningRules(NamedTuple):
    """How the reasoning in a request's outputs begins and ends."""

    is_open: bool
    """The output begins inside the reasoning."""
    call_tag: CallTag | None = None
    """Tag of a tool call that ends open reasoning; None: none does."""
    is_continued: bool = False
    """The output continues text of the answer, which the prompt ends with."""


class ThinkingBudget(NamedTuple):
    """How many tokens each section of an output's reasoning may have."""

    max_tokens: int
    end_ids: tuple[int, ...]
    """Forced after these."""
    rules: ReasoningRules
    num_used: int = 0
    """Tokens of the open reasoning that the prompt ends with."""

    @property
    def num_free_tokens(self) -> int:
        """As many tokens of the output may be any, whatever they are."""
        return max(self.max_tokens - self.num_used, 0) if self.rules.is_open else self.max_tokens + 1
