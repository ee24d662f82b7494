"""The sizes of steps that CUDA graphs are captured at."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from strandline.device.padded_step import MAX_PROMPTS, SPARE_CHUNKS, StepSize

PROMPT_ROWS: Final = (64, 128, 256, 512, 1024)
DECODES_BESIDE_PROMPTS: Final = (0, 16, 64, 128)
"""And as many as there may be. Steps with fewer rows of prompts than of decodes are padded to as many."""

MANY_PROMPT_ROWS: Final = (1536, 2048, 3072, 4096)
"""Beyond the last, a GPU takes longer to run a step than the host to launch it: 70 ms for a mixture of 35B weights on
an H200's host, whose GPU computes 2,048 tokens in 40 ms."""
DIVIDED_PROMPT_ROWS: Final = (6144, 8192)
"""Also, with several ranks: each computes a part of a step, and launches as much as one that computes all."""
DECODES_BESIDE_MANY: Final = (16,)
"""And as many as there may be: among thousands of rows, padding costs little."""

VERIFIED_DEPTHS: Final = (1, 2, 4, 8)
"""Drafts per sequence in steps that verify some, and as many as there may be."""

MAX_CAPTURED_PREFIX: Final = 32768
"""Tokens before a prefill. Many rows after more are launched: kernels for prefixes need to know lengths."""


def graph_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, num_ranks: int = 1, *, takes_pictures: bool = False
) -> list[StepSize]:
    """Return the sizes to capture: close together where a step is short, so that padding costs little."""
    many_rows = MANY_PROMPT_ROWS if num_ranks == 1 else (*MANY_PROMPT_ROWS, *DIVIDED_PROMPT_ROWS)
    ladder = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, max_num_seqs, 32)]
    decodes = [*(count for count in ladder if count < max_num_seqs), max_num_seqs]
    beside = [*(count for count in DECODES_BESIDE_PROMPTS if count < max_num_seqs), max_num_seqs]
    beside_many = sorted({min(count, max_num_seqs) for count in (*DECODES_BESIDE_MANY, max_num_seqs)})
    mixed = [
        StepSize(count, num_rows, takes_pictures)
        for counts, rows in ((beside, PROMPT_ROWS), (beside_many, many_rows))
        for count in counts
        for num_rows in rows
        if count <= num_rows < 2 * max_num_batched_tokens
    ]
    return [*map(StepSize, decodes), *mixed]


def verification_sizes(sizes: Sequence[StepSize], draft_tokens: int) -> list[StepSize]:
    """Return the sizes of steps that verify or make drafts: few, or as many as there may be.

    Args:
        sizes: of steps without drafts. Steps of prompts alone need no others.
    """
    depths = [*(depth for depth in VERIFIED_DEPTHS if depth < draft_tokens), draft_tokens]
    decodes = [replace(size, draft_tokens=depth) for size in sizes if not size.num_prompt_rows for depth in depths]
    mixed = [replace(size, draft_tokens=draft_tokens) for size in sizes if size.num_prompt_rows and size.num_decodes]
    return [replace(size, log_tokens=draft_tokens) for size in (*decodes, *mixed)]


CHUNKS_OF_PROMPT: Final = 3
"""Chunks of a prompt beyond one per 64 rows: of its two ends, and of a snapshot."""


class PromptRoom(NamedTuple):
    """How much of prompts a captured step has room for with decodes that verify drafts."""

    num_rows: int = 0
    num_prompts: int = 0

    @classmethod
    def of(cls, sizes: Sequence[StepSize]) -> "PromptRoom":
        """Return the room in the largest step."""
        num_rows = max((size.num_prompt_rows for size in sizes if size.has_drafts), default=0)
        return cls(num_rows, MAX_PROMPTS if num_rows else 0)

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
    return num_prompt_rows > PROMPT_ROWS[-1] and start > MAX_CAPTURED_PREFIX
