"""Changes to the device's memory that the cache asks for, as data.

Actions are carried out in order, before the step that they were issued for.
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
    """Copy a whole block to ``dst``; ``src`` is free afterwards."""

    src: BlockId
    dst: BlockId


@dataclass(frozen=True, slots=True)
class DropBlocks:
    """These blocks are free. A runner in debug mode fills them with NaN."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropSlot:
    """This slot is free. A runner in debug mode fills it with NaN."""

    slot: SlotId


@dataclass(frozen=True, slots=True)
class FoldLog:
    """Fold the first ``num_tokens`` tokens of a log into the state in a slot."""

    slot: SlotId
    log: LogId
    num_tokens: int


Action = CopyTokens | MoveBlock | DropBlocks | DropSlot | FoldLog
