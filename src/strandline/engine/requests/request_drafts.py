"""What drafting keeps of a request between its steps."""

from dataclasses import dataclass
from typing import NamedTuple

from strandline.engine.requests.draft_counters import DraftCounters
from strandline.engine.requests.suffix_index import SuffixIndex


class Proposals(NamedTuple):
    """What may follow the first tokens of a request."""

    num_tokens: int
    drafted: tuple[int, ...]
    looked_up: tuple[int, ...]


@dataclass(slots=True, eq=False)
class RequestDrafts:
    """Drafts of a request, and how well earlier ones agreed. Without speculative decoding, nothing changes it."""

    drafted: tuple[int, ...] = ()
    """What the model's draft layer, or a drafter, drafted for the tokens after the last one."""
    is_looked_up: bool = False
    """Whether the drafts that the request verifies were looked up in earlier text."""
    proposals: Proposals | None = None
    """What was last drafted and looked up, to be compared with what follows (``ChoosingDrafter``)."""
    rates: list[float] | None = None
    """How often what was drafted agreed, and what was looked up; None before the first."""
    counters: DraftCounters | None = None
    """Counters of verified drafts; None before the first."""
    suffixes: SuffixIndex | None = None
    """Index of the request's tokens for suffix decoding; None before the first search."""
