"""Prompts that were routed: what their replicas hold or will hold soon, which events may not say yet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Final

from strandline.events.resumable import PromptHashes
from strandline.ids import BLOCK_TOKENS

PIECE_BLOCKS: Final = 32


@dataclass(frozen=True, slots=True)
class _Prompt:
    replica: int
    blocks: Sequence[int]
    num_held: int

    def computed(self, start: int) -> Sequence[int]:
        """Return the blocks of a piece that the replica computes."""
        return self.blocks[max(start, self.num_held) : start + PIECE_BLOCKS]

    def starts(self) -> range:
        """Return where the pieces start in which the replica computes blocks."""
        return range(self.num_held - self.num_held % PIECE_BLOCKS, len(self.blocks), PIECE_BLOCKS)


@dataclass(slots=True)
class _Piece:
    """Up to ``PIECE_BLOCKS`` blocks of each of the prompts that have its first block in common."""

    masks: dict[int, int]
    """By block: the replicas that are about to compute it."""
    more: dict[tuple[int, int], int] = field(default_factory=dict)
    """By block and replica: number of prompts with that block there, beyond the first."""
    num_prompts: int = 1

    def add(self, replica: int, blocks: Sequence[int]) -> None:
        self.num_prompts += 1
        bit = 1 << replica
        for block in blocks:
            mask = self.masks.get(block, 0)
            if mask & bit:
                self.more[block, replica] = self.more.get((block, replica), 0) + 1
            else:
                self.masks[block] = mask | bit

    def remove(self, replica: int, blocks: Sequence[int]) -> None:
        self.num_prompts -= 1
        for block in blocks:
            more = self.more.pop((block, replica), 0)
            if more > 1:
                self.more[block, replica] = more - 1
            elif not more:
                self.masks[block] &= ~(1 << replica)
                if not self.masks[block]:
                    del self.masks[block]


class PendingPrompts:
    """The blocks that replicas are about to compute.

    They are stored in pieces, by the first block of each. Most pieces belong to one prompt alone, so few blocks are
    visited one by one.
    """

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}
        self._pieces: dict[int, _Prompt | _Piece] = {}
        """By first block: the only prompt, until its blocks are asked for."""

    def add(self, request_id: str, replica: int, blocks: Sequence[int], num_held: int) -> None:
        """Add a prompt.

        Args:
            blocks: all of the prompt's.
            num_held: the first ones, which the replica has; it computes the others.
        """
        prompt = self._prompts[request_id] = _Prompt(replica, blocks, num_held)
        for start in prompt.starts():
            piece = self._piece(blocks[start], start)
            if piece is None:
                self._pieces[blocks[start]] = prompt
            else:
                piece.add(replica, prompt.computed(start))

    def remove(self, request_id: str) -> None:
        """Forget a prompt. Unknown ones are ignored."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        for start in prompt.starts():
            piece = self._pieces[prompt.blocks[start]]
            if isinstance(piece, _Prompt) or piece.num_prompts == 1:
                del self._pieces[prompt.blocks[start]]
            else:
                piece.remove(prompt.replica, prompt.computed(start))

    def remove_replica(self, replica: int) -> None:
        """Forget all prompts of a replica."""
        for request_id in [name for name, prompt in self._prompts.items() if prompt.replica == replica]:
            self.remove(request_id)

    def hits(self, prompt: PromptHashes) -> Iterator[tuple[int, int]]:
        """Yield numbers of tokens that a prompt shares with pending ones, and masks of their replicas; most first.

        Whole blocks count.
        """
        seen = 0
        for start in reversed(range(0, len(prompt.blocks), PIECE_BLOCKS)):
            piece = self._piece(prompt.blocks[start], start)
            if piece is None:
                continue
            blocks = prompt.blocks[start : start + PIECE_BLOCKS]
            is_pending = map(piece.masks.__contains__, reversed(blocks))
            for num_blocks in compress(range(len(blocks), 0, -1), is_pending):
                mask = piece.masks[blocks[num_blocks - 1]] & ~seen
                if mask:
                    yield (start + num_blocks) * BLOCK_TOKENS, mask
                    seen |= mask

    def _piece(self, first: int, start: int) -> _Piece | None:
        """Return the piece that begins with a block at an index of its prompts, or None."""
        found = self._pieces.get(first)
        if not isinstance(found, _Prompt):
            return found
        piece = self._pieces[first] = _Piece(dict.fromkeys(found.computed(start), 1 << found.replica))
        return piece
