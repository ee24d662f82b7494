"""Identifiers and marks that every room shares.

Ids are integers with a type of their own, so that a block id cannot be passed where a slot id is meant.
Index 0 is the *null* block, slot or log: it stands for fresh zeros, is never read from memory and never written.
"""

from enum import IntEnum
from typing import Final, NewType

BlockId = NewType("BlockId", int)
"""A place for 64 tokens of keys and values of all attention layers."""

SlotId = NewType("SlotId", int)
"""A place for the recurrent state of all layers of one sequence."""

LogId = NewType("LogId", int)
"""A place for the log of one running sequence: tokens that its recurrent layers have not folded into their state."""

RequestId = NewType("RequestId", str)

TransferId = NewType("TransferId", int)
"""A copy between the device's memory and a store: below the device, or of another engine."""

AUDIT_PREFIX: Final = "audit of "
"""Ids of requests that replay others begin with it; users' may not."""


class PendingToken(IntEnum):
    """Whether a sequence's one token is what the step before samples, which runs still."""

    NONE = 0
    GOES_ON = 1
    MAY_STOP = 2
    """If it is one of the request's stop tokens, the request has ended there and its state stays as it is."""


BLOCK_TOKENS: Final = 64
"""Tokens in a block. A constant: it depends neither on the model nor on the size of its recurrent state."""

NULL_BLOCK: Final = BlockId(0)
NULL_SLOT: Final = SlotId(0)
NULL_LOG: Final = LogId(0)

NO_TOKEN: Final = -1
"""Sampled where no token can be: the row's logits have no finite maximum."""
