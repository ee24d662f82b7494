"""The messages between two engines.

The engine that fetches a prefix connects. Both send ``Hello``. It sends ``Ask``, gets an ``Offer``, and sends ``Want``,
or ``Enough`` if there is nothing to fetch. Then come the pieces that ``pieces_of`` yields, each in one or more
``Piece`` frames, and ``Enough`` ends it. With NIXL, ``Placed`` comes instead of the pieces, and ``Enough`` is answered
by ``Enough``. Either side sends ``Failed`` where it cannot go on.
"""

from itertools import pairwise
from typing import Annotated, Final, Literal

import msgspec

from strandline.ids import BLOCK_TOKENS
from strandline.records.tokens import TOKEN_BYTES


class Hello(msgspec.Struct, tag=True):
    """Who a side is."""

    engine_id: str
    layout: dict[str, str]
    """What must be equal on both sides, by name (``layout_of``)."""


class Ask(msgspec.Struct, tag=True):
    """What of a prompt do you have?"""

    lease_id: str
    """The lease under which the prompt is kept; empty: none."""
    salt: str
    """What the prompt's prefix is cached under, if there is no such lease."""
    tokens: bytes
    """Encoded (``records.tokens.encode``)."""


class Offer(msgspec.Struct, tag=True):
    """A prefix that can be fetched."""

    num_tokens: int
    """0: none."""
    snapshots: list[tuple[int, str]]
    """Positions and kinds of the snapshots in it, by position. If there are any, the last is at its end."""

    @property
    def num_blocks(self) -> int:
        """Blocks that hold the prefix, the last one in part."""
        return -(-self.num_tokens // BLOCK_TOKENS)

    def is_consistent(self, prompt_bytes: int) -> bool:
        """Whether it is a prefix of an encoded prompt, with different snapshots in it, in order, up to its end."""
        positions = [position for position, _ in self.snapshots]
        in_order = all(low < high for low, high in pairwise([0, *positions]))
        is_inside = 0 < self.num_tokens * TOKEN_BYTES <= prompt_bytes
        return is_inside and in_order and (not positions or positions[-1] == self.num_tokens)


class Want(msgspec.Struct, tag=True):
    """What is missing of the prefix that was offered."""

    first_block: Annotated[int, msgspec.Meta(ge=0)]
    """All of its blocks from this one on are missing; as many as it has: none are."""
    positions: list[int]
    """Positions of snapshots."""


class Piece(msgspec.Struct, tag=True):
    """A part of what was wanted, as the bytes after this message: at most ``CHUNK_BYTES`` of one piece."""

    index: int
    start: int = 0
    """Where in the piece the bytes begin."""


class Placed(msgspec.Struct, tag=True):
    """Where what was wanted lies, for a NIXL agent to read."""

    agent: bytes
    """The metadata of the agent that has registered it."""
    kind: Literal["DRAM", "VRAM"]
    """NIXL's name of the kind of memory."""
    device: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    addresses: list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]
    """The address of each block and each slot, in the order of the pieces."""


class Enough(msgspec.Struct, tag=True):
    """Everything that was wanted has come: the lease is not needed any more. As an answer: it was kept until now."""


class Failed(msgspec.Struct, tag=True):
    """I cannot go on."""

    cause: str
    reason: str


Message = Hello | Ask | Offer | Want | Piece | Placed | Enough | Failed
ENCODER: Final = msgspec.msgpack.Encoder()
DECODER: Final = msgspec.msgpack.Decoder(Message)
