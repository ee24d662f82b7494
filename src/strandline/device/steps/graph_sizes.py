"""The sizes of steps that CUDA graphs are captured at."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from strandline.device.batches.padded_step import StepSize
from strandline.device.batches.prompt_room import MAX_PROMPTS, PromptRoom

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
        sizes: sizes of steps without drafts. Steps of prompts alone need no others.
    """
    depths = [*(depth for depth in VERIFIED_DEPTHS if depth < draft_tokens), draft_tokens]
    decodes = [replace(size, draft_tokens=depth) for size in sizes if not size.num_prompt_rows for depth in depths]
    mixed = [replace(size, draft_tokens=draft_tokens) for size in sizes if size.num_prompt_rows and size.num_decodes]
    return [replace(size, log_tokens=draft_tokens) for size in (*decodes, *mixed)]


def prompt_room(sizes: Sequence[StepSize]) -> PromptRoom:
    """Return the room of the largest step that verifies drafts."""
    num_rows = max((size.num_prompt_rows for size in sizes if size.has_drafts), default=0)
    return PromptRoom(num_rows, MAX_PROMPTS if num_rows else 0)
