"""What the cache wants done to the device's memory, as data.

Actions are carried out in the order they were issued, before the step they were issued for. The cache decides;
whoever owns the memory moves the bytes.
"""

from dataclasses import dataclass

from strandline.ids import BlockId, LogId, SlotId


@dataclass(frozen=True, slots=True)
class CopyTokens:
    """Copy the first ``num_tokens`` tokens of a block, keys and values of all layers."""

    src: BlockId
    dst: BlockId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class MoveBlock:
    """Copy a whole block to a new place; the old place is free afterwards."""

    src: BlockId
    dst: BlockId


@dataclass(frozen=True, slots=True)
class DropBlocks:
    """The content of these blocks is no longer needed. A debugging runner fills them with NaN."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropSlot:
    """A slot's content is no longer needed. A debugging runner fills it with NaN."""

    slot: SlotId


@dataclass(frozen=True, slots=True)
class FoldLog:
    """Fold the first tokens of a log into the state in a slot, which becomes what the slot's position claims."""

    slot: SlotId
    log: LogId
    num_tokens: int


Action = CopyTokens | MoveBlock | DropBlocks | DropSlot | FoldLog
