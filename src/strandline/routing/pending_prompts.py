"""Prompts that were routed and are not computed yet: what their replicas will hold soon, which no event says yet."""

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
        self._replicas: dict[int, list[int]] = {}
        """By block: the replicas that are about to compute it, as often as they are."""

    def add(self, request_id: str, replica: int, blocks: Sequence[int]) -> None:
        """Add a prompt's blocks from the one that it computes first."""
        self._prompts[request_id] = _Prompt(replica, blocks)
        for block in blocks:
            self._replicas.setdefault(block, []).append(replica)

    def remove(self, request_id: str) -> None:
        """Forget a prompt. Unknown ones are ignored."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        for block in prompt.blocks:
            replicas = self._replicas[block]
            replicas.remove(prompt.replica)
            if not replicas:
                del self._replicas[block]

    def hits(self, prompt: PromptHashes) -> Iterator[tuple[int, int]]:
        """Yield numbers of tokens that a prompt shares with pending ones, and masks of their replicas; most first.

        Whole blocks count.
        """
        seen = 0
        for num_blocks in range(len(prompt.blocks) if self._replicas else 0, 0, -1):
            replicas = self._replicas.get(prompt.blocks[num_blocks - 1])
            if replicas is None:
                continue
            mask = 0
            for replica in replicas:
                mask |= 1 << replica
            if mask & ~seen:
                yield num_blocks * BLOCK_TOKENS, mask & ~seen
                seen |= mask
