"""What operators and trainers ask of an engine between its steps."""

from typing import Final, Literal
from uuid import uuid4

import msgspec

from strandline.records.weight_transfer import SentTensors, TransferGroup

PauseMode = Literal["abort", "wait", "keep"]
"""How unfinished requests are handled: they are ended, finished first, or frozen."""
Memory = Literal["weights", "kv_cache"]
"""What a sleeping engine has given back."""
MEMORIES: tuple[Memory, ...] = ("weights", "kv_cache")


def new_epoch() -> str:
    """Return a name for an epoch of the cache, which no other one has had."""
    return uuid4().hex


class Pause(msgspec.Struct, tag=True, frozen=True):
    """Run no step until ``Resume``."""

    epoch: str | None
    """The cache is reset, and this epoch of it begins; None: the cache stays."""


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Run steps again."""


class ResetCache(msgspec.Struct, tag=True, frozen=True):
    """Drop all that is cached, and compute unfinished requests anew. Refused while requests run, unless ``forced``."""

    epoch: str
    """See ``Pause``."""
    forced: bool


class Sleep(msgspec.Struct, tag=True, frozen=True):
    """Give memory back, and run no step until all of it is taken again."""

    level: int
    """1: weights stay in the host's memory. 2: they are read again."""
    memories: tuple[Memory, ...] = MEMORIES
    """What to give back."""


class WakeUp(msgspec.Struct, tag=True, frozen=True):
    """Take memory again."""

    memories: tuple[Memory, ...]


class JoinTrainer(msgspec.Struct, tag=True, frozen=True):
    """Join the group in which a trainer sends weights."""

    group: TransferGroup


class LeaveTrainer(msgspec.Struct, tag=True, frozen=True):
    """Leave that group."""


class BeginWeights(msgspec.Struct, tag=True, frozen=True):
    """Begin to receive weights."""


class ReceiveWeights(msgspec.Struct, tag=True, frozen=True):
    """Receive tensors; the weights in use stay."""

    sent: tuple[SentTensors, ...]
    """One for all ranks of the server, or one for each."""


class PrepareWeights(msgspec.Struct, tag=True, frozen=True):
    """Read and check other weights; those in use stay."""

    path: str | None
    """A directory that holds them; None: those that were received."""


class UseWeights(msgspec.Struct, tag=True, frozen=True):
    """Compute with the prepared weights from now on, also what unfinished requests have computed."""

    epoch: str
    """See ``Pause``."""


class DropWeights(msgspec.Struct, tag=True, frozen=True):
    """Forget the prepared weights."""


WeightsAction = JoinTrainer | LeaveTrainer | BeginWeights | ReceiveWeights | PrepareWeights | UseWeights | DropWeights
Action = Pause | Resume | ResetCache | Sleep | WakeUp | WeightsAction

HANDS_OVER: Final = (
    "an engine with --kv-transfer-config keeps its memory, its cache and its weights, as other engines may read its "
    "memory at any time; it can be paused without clearing its cache"
)
READS_NO_WEIGHTS: Final = (
    "weights are read again, as sleep of level 2 does on waking, only in engines without --enable-lora that read no "
    "pictures (--language-model-only)"
)


def refusal_of(action: Action, *, hands_over: bool, changes_weights: bool) -> str | None:
    """Return why an engine cannot do what is asked; None: it can, as far as its configuration tells.

    Args:
        hands_over: whether other engines may read its memory at any time.
        changes_weights: whether it can read other weights.
    """
    match action:
        case Resume() | Pause(None) | LeaveTrainer() | DropWeights():
            return None
        case _ if hands_over:
            return HANDS_OVER
        case JoinTrainer() | BeginWeights() | ReceiveWeights() | PrepareWeights() | UseWeights() if not changes_weights:
            return READS_NO_WEIGHTS
        case Sleep(level) if level > 1 and not changes_weights:
            return READS_NO_WEIGHTS
        case _:
            return None
