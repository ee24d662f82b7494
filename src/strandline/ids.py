"""Identifiers and constants that every room shares.

Ids are integers with distinct types, so that a block id cannot be passed where a slot id is meant.
Index 0 is the *null* block, slot or log: it stands for fresh zeros, is never read from memory and never written.
"""

from enum import IntEnum
from typing import Final, NewType

BlockId = NewType("BlockId", int)
"""Memory for the keys and values of 64 tokens in all attention layers."""

SlotId = NewType("SlotId", int)
"""Memory for the recurrent state of one sequence in all layers."""

LogId = NewType("LogId", int)
"""Memory for the log of one running sequence: tokens that are not folded into its recurrent state yet."""

Lifetime = NewType("Lifetime", int)
"""How long blocks are needed. Those of each lifetime have a size and ids of their own.

``PATH``, or the number of a size of windows, from 1: blocks of layers with such windows are needed until these have
passed them.
"""

RequestId = NewType("RequestId", str)

TransferId = NewType("TransferId", int)
"""A copy between device memory and a store: host memory, a disk or another engine."""

AUDIT_PREFIX: Final = "audit of "
"""Prefix of the ids of audit replays; reserved."""


class PendingToken(IntEnum):
    """Whether a sequence's token is being sampled by the previous step, which still runs."""

    NONE = 0
    GOES_ON = 1
    MAY_STOP = 2
    """If the token is one of the request's stop tokens, the request has ended and its state must not advance."""


BLOCK_TOKENS: Final = 64
"""Tokens in a block. A constant: it depends neither on the model nor on the size of its recurrent state."""

PATH: Final = Lifetime(0)
"""The lifetime of keys and values of layers that attend to all tokens before."""

NULL_BLOCK: Final = BlockId(0)
NULL_SLOT: Final = SlotId(0)
NULL_LOG: Final = LogId(0)

NO_ADDRESS: Final = 0
"""The address in a store of what is not there. Stores number what they hold from 1."""

FIRST_VIRTUAL_ID: Final = 2**31
"""The least id of a picture's token. No vocabulary has as many tokens."""

NO_TOKEN: Final = -1
"""The sampled token of a row whose logits have no finite maximum."""
