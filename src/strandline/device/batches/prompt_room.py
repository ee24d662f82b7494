"""How much of prompts a captured step has room for, as the scheduler asks; imports no tensors."""

from collections.abc import Sequence
from typing import Final, NamedTuple

MAX_PROMPTS: Final = 15
"""Prompts of a padded step: sixteen sequences with the filler, as many as attention searches at once."""

SPARE_CHUNKS: Final = 48
"""Chunks beyond one per 64 rows: what cuts and the two ends of prompts add."""

MAX_CAPTURED_PREFIX: Final = 32768
"""Tokens before a prefill. Many rows after more are launched: kernels for prefixes need to know lengths."""

MAX_ROWS_AFTER_LONG_PREFIX: Final = 1024

CHUNKS_OF_PROMPT: Final = 3
"""Chunks of a prompt beyond one per 64 rows: of its two ends, and of a snapshot."""


class PromptRoom(NamedTuple):
    """How much of prompts a captured step has room for with decodes that verify drafts."""

    num_rows: int = 0
    num_prompts: int = 0

    def has_room_for(self, ranges: Sequence[tuple[int, int]], num_cuts: int = 0) -> bool:
        """Whether there is room for tokens ``[start, end)`` of some sequences, one or more of each.

        Args:
            num_cuts: snapshots among them, besides one for each.
        """
        if CHUNKS_OF_PROMPT * len(ranges) + num_cuts >= SPARE_CHUNKS:
            return False
        num_rows = sum(end - start for start, end in ranges)
        if any(start == end for start, end in ranges) or len(ranges) > self.num_prompts or num_rows > self.num_rows:
            return not ranges
        return not is_prefix_long(num_rows, max((start for start, _ in ranges), default=0))


NO_PROMPTS: Final = PromptRoom()


def is_prefix_long(num_prompt_rows: int, start: int) -> bool:
    """Whether a step has many rows of prompts, one of them after more tokens than graphs are for."""
    return num_prompt_rows > MAX_ROWS_AFTER_LONG_PREFIX and start > MAX_CAPTURED_PREFIX
