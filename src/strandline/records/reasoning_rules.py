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
