"""Changes to the device's memory that the cache asks for, as data.

Actions are carried out in order, before the step that they were issued for. Transfers only begin there: each reports
one ``Completion`` when it has ended, in any order, and no step waits for it.
"""

from dataclasses import dataclass
from typing import NamedTuple

from strandline.ids import PATH, BlockId, Lifetime, LogId, SlotId, TransferId
from strandline.records.account import SnapshotKind
from strandline.records.tokens import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class CopyTokens:
    """Copy the first ``num_tokens`` tokens of a block, keys and values of all layers that have them in such blocks."""

    src: BlockId
    dst: BlockId
    num_tokens: int
    lifetime: Lifetime = PATH


@dataclass(frozen=True, slots=True)
class MoveBlock:
    """Copy a whole block to ``dst``; ``src`` is free afterwards."""

    src: BlockId
    dst: BlockId
    lifetime: Lifetime = PATH


@dataclass(frozen=True, slots=True)
class DropBlocks:
    """These blocks are free. A runner in debug mode fills them with NaN."""

    blocks: tuple[int, ...]
    lifetime: Lifetime = PATH


@dataclass(frozen=True, slots=True)
class DropSlot:
    """This slot is free. A runner in debug mode fills it with NaN."""

    slot: SlotId


@dataclass(frozen=True, slots=True)
class FoldLog:
    """Fold the first ``num_tokens`` tokens of a log into the state in a slot: of decoded tokens all of them."""

    slot: SlotId
    log: LogId
    num_tokens: int
    holds_drafts: bool = False
    """Whether they are drafts that were accepted; else decoded tokens. A log keeps other tensors of each kind."""


class SnapshotCopy(NamedTuple):
    """A snapshot on the device, its slot and its window blocks, and the one address of both in a store."""

    slot: SlotId
    address: int
    windows: tuple[tuple[BlockId, ...], ...] = ()
    """For each size of windows, in the order of their tokens. Their bytes follow the slot's."""


@dataclass(frozen=True, slots=True)
class LoadIn:
    """Begin to copy whole blocks and snapshots from a store to the device.

    Nothing else reads or writes them, and no block is moved, before the transfer's completion.
    """

    transfer: TransferId
    store: str
    """Name of the store, which has its own addresses."""
    blocks: tuple[tuple[BlockId, int], ...]
    """Destination and address of each block."""
    snapshots: tuple[SnapshotCopy, ...]
    """Destination and address of each snapshot."""
    limit_s: float = float("inf")
    """How long computing takes: a store that outlives the process gives up after that."""

    @property
    def addresses(self) -> list[int]:
        """All addresses that it reads."""
        return [address for _, address in self.blocks] + [each.address for each in self.snapshots]


class StoredBlocks(NamedTuple):
    """Consecutive blocks of a path that are stored together."""

    first: int
    """The index of the first one."""
    addresses: tuple[int, ...]

    @property
    def end(self) -> int:
        """The index after the last one."""
        return self.first + len(self.addresses)


@dataclass(frozen=True, slots=True)
class StoredPath:
    """What a persistent store records of a snapshot and the blocks before it."""

    tree: str
    """Names the salt: a keyed hash of it."""
    data: bytes
    """The tokens before the snapshot, encoded."""
    blocks: StoredBlocks | None
    """The last ones of the whole blocks before it, which are stored: the store has the others. None: it has all."""
    address: int
    """The address of the snapshot; 0: it is the end of its blocks alone."""
    tail_address: int
    """The address of the block that contains its position; 0: its position is at a block's end."""
    kind: SnapshotKind
    interarrival_bin: int
    is_shared: bool

    @property
    def position(self) -> int:
        """The number of tokens before the snapshot."""
        return len(self.data) // TOKEN_BYTES

    @property
    def addresses(self) -> dict[int, int]:
        """The addresses of the blocks, by their indices, in order."""
        return {} if self.blocks is None else dict(enumerate(self.blocks.addresses, self.blocks.first))


@dataclass(frozen=True, slots=True)
class StoreOut:
    """Begin to copy whole blocks and snapshots to a store, with the content that they have now.

    Later actions and steps may overwrite them at once. A later ``LoadIn`` of the same addresses gets this content.
    Addresses are new numbers, used once.

    With a path, the store outlives the process, and what is copied is neither written, moved nor dropped before the
    completion. The sources are on the device (``blocks``, ``snapshots``) and in the store above (``stored``).
    """

    transfer: TransferId
    store: str
    blocks: tuple[tuple[BlockId, int], ...]
    """Source and address of each block."""
    snapshots: tuple[SnapshotCopy, ...]
    """Source and address of each snapshot."""
    stored: tuple[tuple[int, int], ...] = ()
    """Address in the store above, and address in this one."""
    path: StoredPath | None = None
    is_held: bool = False
    """Whether only a ``LoadIn`` that follows writes the sources: it can wait, and nothing needs to be copied aside."""
    is_final: bool = False
    """Whether the process ends soon, so that the store tries it although it pauses after a failure."""


@dataclass(frozen=True, slots=True)
class DropStored:
    """These addresses of a store are free.

    Loads from host memory that began before may still read them: the store overwrites nothing that they have not read.
    """

    store: str
    addresses: tuple[int, ...]


class FoundFile(NamedTuple):
    """A file of a store that another engine has written. The addresses of its items follow each other."""

    name: str
    first_address: int
    num_items: int


@dataclass(frozen=True, slots=True)
class EnterFiles:
    """What these files of a store hold can be loaded from now on, under these addresses."""

    store: str
    files: tuple[FoundFile, ...]
    gone: tuple[FoundFile, ...] = ()
    """Files that were entered and are gone: no load that begins later names their addresses."""


@dataclass(frozen=True, slots=True)
class CancelTransfer:
    """End a transfer early, if that is possible, as no request waits for it. Its completion is still reported."""

    transfer: TransferId


class Completion(NamedTuple):
    """The end of a transfer: the device's memory is neither read nor written for it any more."""

    transfer: TransferId
    is_done: bool
    """False: it failed or was cancelled; what it was to write has undefined content."""
    seconds: float = 0.0
    """How long the copying took; 0: unknown."""
    lost: tuple[int, ...] = ()
    """Addresses of the store that could not be read and never will be."""
    cause: str = ""
    """Why a store to files failed."""
    max_free_bytes: int | None = None
    """What the disk had room for when a store failed; None: unknown."""


Action = (
    CopyTokens
    | MoveBlock
    | DropBlocks
    | DropSlot
    | FoldLog
    | LoadIn
    | StoreOut
    | DropStored
    | EnterFiles
    | CancelTransfer
)
