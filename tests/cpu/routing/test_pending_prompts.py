"""Pending prompts are found in pieces of many blocks as they would be block by block."""

from collections.abc import Iterator
from random import Random

import pytest

from strandline.events.resumable import PromptHashes
from strandline.ids import BLOCK_TOKENS
from strandline.routing.pending_prompts import PIECE_BLOCKS, PendingPrompts

PATHS = 5
MOST_BLOCKS = 3 * PIECE_BLOCKS + 2


def prompt(choose: Random) -> PromptHashes:
    """Return a prompt that shares any number of blocks with others, often whole pieces."""
    num_shared = choose.choice([choose.randrange(MOST_BLOCKS), choose.randrange(4) * PIECE_BLOCKS])
    num_own = choose.choice([0, 1, choose.randrange(MOST_BLOCKS - num_shared)])
    path = choose.randrange(PATHS)
    return PromptHashes([0] * num_shared * BLOCK_TOKENS + [1 + path] * num_own * BLOCK_TOKENS)


class Plain:
    """The blocks that each request computes, one by one."""

    def __init__(self) -> None:
        self.computed: dict[str, tuple[int, set[int]]] = {}

    def hits(self, asked: PromptHashes) -> Iterator[tuple[int, int]]:
        seen = 0
        for num_blocks in range(len(asked.blocks), 0, -1):
            block = asked.blocks[num_blocks - 1]
            mask = 0
            for replica, blocks in self.computed.values():
                mask |= (block in blocks) << replica
            if mask & ~seen:
                yield num_blocks * BLOCK_TOKENS, mask & ~seen
                seen |= mask


@pytest.mark.parametrize("seed", range(4))
def test_hits_are_those_of_every_block(seed: int) -> None:
    choose, pending, plain = Random(seed), PendingPrompts(), Plain()
    for step in range(200):
        new, replica = prompt(choose), choose.randrange(4)
        num_held = choose.choice([0, choose.randrange(len(new.blocks) + 1)])
        pending.add(str(step), replica, new.blocks, num_held)
        plain.computed[str(step)] = replica, {*new.blocks[num_held:]}
        for name in choose.sample(sorted(plain.computed), choose.choice([0, 0, min(4, len(plain.computed))])):
            pending.remove(name)
            del plain.computed[name]
        if choose.random() < 0.05:
            pending.remove_replica(replica)
            plain.computed = {name: each for name, each in plain.computed.items() if each[0] != replica}
        asked = prompt(choose)
        assert [*pending.hits(asked)] == [*plain.hits(asked)]
    for name in plain.computed:
        pending.remove(name)
    pending.remove("unknown")
    assert (pending._prompts, pending._pieces) == ({}, {})
