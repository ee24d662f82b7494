"""Prompts that were routed: what their replicas hold or will hold soon, which events may not say yet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from strandline.events.resumable import PromptHashes
from strandline.ids import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class _Prompt:
    replica: int
    blocks: Sequence[int]


class PendingPrompts:
    """The blocks that replicas are about to compute."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}
        self._masks: dict[int, int] = {}
        """By block: the replicas that are about to compute it."""
        self._more: dict[tuple[int, int], int] = {}
        """By block and replica: number of prompts with that block there, beyond the first."""

    def add(self, request_id: str, replica: int, blocks: Sequence[int]) -> None:
        """Add a prompt's blocks from the one that it computes first."""
        self._prompts[request_id] = _Prompt(replica, blocks)
        bit = 1 << replica
        for block in blocks:
            mask = self._masks.get(block, 0)
            if mask & bit:
                self._more[block, replica] = self._more.get((block, replica), 0) + 1
            else:
                self._masks[block] = mask | bit

    def remove(self, request_id: str) -> None:
        """Forget a prompt. Unknown ones are ignored."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        for block in prompt.blocks:
            more = self._more.pop((block, prompt.replica), 0)
            if more > 1:
                self._more[block, prompt.replica] = more - 1
            elif not more:
                self._masks[block] &= ~(1 << prompt.replica)
                if not self._masks[block]:
                    del self._masks[block]

    def remove_replica(self, replica: int) -> None:
        """Forget all prompts of a replica."""
        for request_id in [name for name, prompt in self._prompts.items() if prompt.replica == replica]:
            self.remove(request_id)

    def hits(self, prompt: PromptHashes) -> Iterator[tuple[int, int]]:
        """Yield numbers of tokens that a prompt shares with pending ones, and masks of their replicas; most first.

        Whole blocks count.
        """
        seen = 0
        for num_blocks in range(len(prompt.blocks) if self._masks else 0, 0, -1):
            mask = self._masks.get(prompt.blocks[num_blocks - 1], 0) & ~seen
            if mask:
                yield num_blocks * BLOCK_TOKENS, mask
                seen |= mask
