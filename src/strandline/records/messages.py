"""Messages between the HTTP process and the engine process: msgpack over a pair of ZeroMQ sockets."""

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from strandline.config import EngineConfig
from strandline.ids import RequestId
from strandline.records.adapters import LoadedAdapter
from strandline.records.cache_questions import CacheAnswer, CacheQuestion, CacheState
from strandline.records.control import Action
from strandline.records.events import CoreStats, Limits, StepEvents, Submission
from strandline.records.pictures import Picture


class Start(msgspec.Struct, tag=True):
    """First message: the configuration to load."""

    config: EngineConfig


class Submit(msgspec.Struct, tag=True):
    """Run these sequences."""

    submissions: list[Submission]
    pictures: list[Picture] = []
    """Those of all sequences, each once, instead of the sequences' own."""

    @classmethod
    def of(cls, submissions: Sequence[Submission], left_out: Container[bytes] = ()) -> "Submit":
        """Return the message that runs these sequences.

        Args:
            left_out: digests of pictures that it does not have: the engine asks for those that it needs.
        """
        pictures = {
            digest: picture for each in submissions for digest, picture in each.pixels.items() if digest not in left_out
        }
        return cls([replace(each, pixels={}) if each.pixels else each for each in submissions], [*pictures.values()])

    def complete(self) -> list[Submission]:
        """Return the sequences with their pictures."""
        pixels = {picture.digest: picture for picture in self.pictures}
        return [replace(each, pixels=pixels) if each.pictures else each for each in self.submissions]


class SendPictures(msgspec.Struct, tag=True):
    """The answer to ``AskPictures``."""

    pictures: list[Picture]


class Finish(msgspec.Struct, tag=True):
    """End these sequences, before the next step."""

    request_ids: list[RequestId]


class AskStats(msgspec.Struct, tag=True):
    """Answer with ``Stats``."""


class AskCache(msgspec.Struct, tag=True):
    """Answer with ``CacheShown`` of the same number."""

    number: int
    salt: str


class AskWhy(msgspec.Struct, tag=True):
    """Answer with ``Explained`` of the same number."""

    number: int
    question: CacheQuestion


class Flush(msgspec.Struct, tag=True):
    """Write entries only in memory to files; answer with ``Flushed`` of the same number. No step follows."""

    number: int


class LoadAdapter(msgspec.Struct, tag=True):
    """Read a LoRA adapter; answer with ``AdapterLoaded`` of the same number."""

    number: int
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, tag=True):
    """Forget a LoRA adapter once no request uses it."""

    digest: str


class Control(msgspec.Struct, tag=True):
    """Answer with ``Controlled`` of the same number when it is done."""

    number: int
    action: Action


class FlushReport(msgspec.Struct, frozen=True):
    """The result of a flush."""

    num_bytes: int
    """Written: slots and whole blocks, of all ranks."""
    num_left: int
    """Snapshots, or paths of a model that keeps none, for which there was no time."""
    seconds: float
    num_failed: int = 0
    """Snapshots, or paths, that could not be written."""
    failure: str = ""
    """Why."""
    tier: str = "disk cache"
    """What messages call the tier of the files."""

    def __add__(self, other: "FlushReport") -> "FlushReport":
        """Return the report of two engines that flushed at the same time."""
        return FlushReport(
            self.num_bytes + other.num_bytes,
            self.num_left + other.num_left,
            max(self.seconds, other.seconds),
            self.num_failed + other.num_failed,
            self.failure or other.failure,
            self.tier,
        )

    def __str__(self) -> str:
        left = f"; there was no time for {_snapshots(self.num_left)}" if self.num_left else ""
        if self.num_failed:
            left += f"; {_snapshots(self.num_failed)} could not be written: {self.failure}"
        return f"wrote {self.num_bytes / 2**20:,.1f} MiB to the {self.tier} in {self.seconds:.1f} s{left}"


def _snapshots(number: int) -> str:
    return f"{number:,} snapshot{'s' if number != 1 else ''}"


class EventEndpoints(msgspec.Struct, frozen=True):
    """The addresses of an engine's cache events, with the ports that were chosen if the configuration allows any."""

    live: str
    replay: str | None


class Ready(msgspec.Struct, tag=True):
    """The model is loaded; requests can be sent."""

    limits: Limits
    lines: list[str]
    """The cache's capacity, as lines for the log."""
    events: EventEndpoints | None = None
    """Where cache events are published; None: nowhere."""


class Refused(msgspec.Struct, tag=True):
    """The configuration does not allow a start; the process exits."""

    message: str


class Stepped(msgspec.Struct, tag=True):
    """A step has finished."""

    events: StepEvents


class AskPictures(msgspec.Struct, tag=True):
    """Answer with ``SendPictures``, unless the sequences that have these pictures have been ended."""

    digests: list[bytes]


class Stats(msgspec.Struct, tag=True):
    """The answer to ``AskStats``."""

    stats: CoreStats


class CacheShown(msgspec.Struct, tag=True):
    """The answer to ``AskCache``."""

    number: int
    state: CacheState


class Explained(msgspec.Struct, tag=True):
    """The answer to ``AskWhy``."""

    number: int
    answer: CacheAnswer


class Flushed(msgspec.Struct, tag=True):
    """The answer to ``Flush``."""

    number: int
    report: FlushReport | None
    """None: no files outlive the process."""


class AdapterLoaded(msgspec.Struct, tag=True):
    """The answer to ``LoadAdapter``."""

    number: int
    adapter: LoadedAdapter | str
    """Or why it cannot be served."""


class LacksMemory(msgspec.Struct, tag=True):
    """Why something could not be done: there was too little memory."""

    reason: str


class Controlled(msgspec.Struct, tag=True):
    """The answer to ``Control``."""

    number: int
    result: bool | str | LacksMemory
    """Whether it was done, or why it could not be."""


class CacheChanged(msgspec.Struct, tag=True):
    """What the cache can resume has changed. With several engines only; sent before the step that changed it."""

    batch: bytes
    """Encoded as the published events are (``events/wire.py``)."""


class Died(msgspec.Struct, tag=True):
    """An internal error; the process exits."""

    message: str


ToCore = (
    Start
    | Submit
    | SendPictures
    | Finish
    | AskStats
    | AskCache
    | AskWhy
    | Flush
    | LoadAdapter
    | UnloadAdapter
    | Control
)
FromCore = (
    Ready
    | Refused
    | Stepped
    | AskPictures
    | Stats
    | CacheShown
    | Explained
    | Flushed
    | AdapterLoaded
    | Controlled
    | CacheChanged
    | Died
)

FLUSH_S: Final = 20.0
"""How long a flush takes at most, and what it has begun to write after that."""

ENCODER: Final = msgspec.msgpack.Encoder()
TO_CORE: Final = msgspec.msgpack.Decoder(ToCore)
FROM_CORE: Final = msgspec.msgpack.Decoder(FromCore)
