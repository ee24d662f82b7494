"""One engine fetches from another: what is missing arrives; whatever goes wrong is an error on both sides."""

import errno
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Event, Thread
from typing import Any

import pytest

from strandline.specs import LayerSpec, ModelSpec, TensorSpec, kv_spec
from strandline.transfer import engine_calls
from strandline.transfer.client import Peer, Pull
from strandline.transfer.connection import Cause, Connection, TransferError
from strandline.transfer.engine_calls import EngineCalls
from strandline.transfer.layout import CHUNK_BYTES, Items, layout_of, pieces_of
from strandline.transfer.messages import Ask, Failed, Hello, Offer, Piece, Want
from strandline.transfer.movers import Content, Sink, SocketMover
from strandline.transfer.server import PullServer

LONG_S = 60.0
SHORT_S = 0.2
SPEC = ModelSpec(
    (kv_spec(4, 64, "float32"), LayerSpec(states=(TensorSpec("state", (4096, 96), "float32"),))), 32, "float32"
)
"""Large enough that a prefix takes several pieces."""
LAYOUT = layout_of(SPEC, weights="w", is_deterministic=False)
TOKENS = bytes(4 * 5000)
OFFER = Offer(5000, [(100, "mark"), (4992, "ladder"), (5000, "prompt_end")])
ASK = Ask("lease", "", TOKENS)


def content(block: int = 0, position: int = 0) -> bytes:
    """Return the bytes of a block, or of the snapshot at a position."""
    pattern = f"{block},{position};".encode()
    size = SPEC.raw_slot_bytes if position else SPEC.raw_block_bytes
    return (pattern * (size // len(pattern) + 1))[:size]


def content_of(start: int, end: int, positions: tuple[int, ...]) -> bytes:
    return b"".join([*map(content, range(start, end)), *(content(position=p) for p in positions)])


def wanted_content(want: Want) -> bytes:
    """Return all bytes of what is wanted, in order."""
    return content_of(want.first_block, OFFER.num_blocks, tuple(want.positions))


WANTED = [
    Want(3, [100, 5000]),
    Want(79, [5000]),
    Want(0, []),
    Want(0, [100, 4992, 5000]),
]


@dataclass
class Memory:
    """An engine that has a prefix, and one that lacks it."""

    offered: Offer | None = OFFER
    wanted: Want | None = field(default_factory=lambda: Want(3, [100, 5000]))
    asks: list[Ask] = field(default_factory=list)
    ends: list[tuple[str, bool]] = field(default_factory=list)
    written: dict[tuple[int, int, tuple[int, ...]], bytes] = field(default_factory=dict)
    has_ended: Event = field(default_factory=Event)

    def offer(self, ask: Ask) -> tuple[str, Offer] | None:
        self.asks.append(ask)
        return None if self.offered is None else ("hold", self.offered)

    def read(self, hold: str, items: Items) -> memoryview:
        return memoryview(content_of(*items[:3]))

    def addresses(self, hold: str, items: Items) -> list[int]:
        raise NotImplementedError("sockets read")

    def end(self, hold: str, is_done: bool) -> None:
        self.ends.append((hold, is_done))
        self.has_ended.set()

    def write(self, items: Items, data: memoryview) -> None:
        self.written[items[:3]] = bytes(data)

    @property
    def sink(self) -> Sink:
        return sink_of(self.write)

    @property
    def all_written(self) -> bytes:
        """All bytes in order."""
        return b"".join(self.written[key] for key in sorted(self.written))


def sink_of(write: Callable[[Items, memoryview], None]) -> Sink:
    return Sink(lambda num_bytes: memoryview(bytearray(num_bytes)), write)


@pytest.fixture
def calls() -> Iterator[EngineCalls]:
    """Calls that a thread runs, as an engine's does."""
    calls = EngineCalls()
    is_stopped = Event()

    def run() -> None:
        while not is_stopped.is_set():
            calls.run()
            is_stopped.wait(0.0005)

    thread = Thread(target=run)
    thread.start()
    yield calls
    is_stopped.set()
    thread.join()
    calls.close()


MakeServer = Callable[..., PullServer]


@pytest.fixture
def make_server(calls: EngineCalls) -> Iterator[MakeServer]:
    servers = []

    def make(
        memory: Memory,
        *,
        layout: dict[str, str] = LAYOUT,
        timeout_s: float = LONG_S,
        mover: SocketMover | None = None,
    ) -> PullServer:
        hello, mover = Hello("producer", layout), mover or SocketMover()
        server = PullServer(("127.0.0.1", 0), hello, calls, memory, SPEC, mover, timeout_s=timeout_s, patience_s=0)
        servers.append(server)
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def pull_from(port: int, memory: Memory, *, engine_id: str = "producer", timeout_s: float = LONG_S) -> int:
    """Fetch what a memory wants into it; return how many bytes came."""
    peer, hello = Peer("127.0.0.1", port, engine_id), Hello("consumer", LAYOUT)
    pull = Pull(peer, hello, SPEC, SocketMover(), timeout_s=timeout_s)
    try:
        offer = pull.ask(ASK)
        if offer.num_tokens and memory.wanted is not None:
            return pull.fetch(memory.wanted, memory.sink)
        pull.enough()
        return 0
    finally:
        pull.close()


@pytest.mark.parametrize("wanted", WANTED)
def test_what_is_wanted_arrives_and_nothing_else(make_server: MakeServer, wanted: Want) -> None:
    source, sink = Memory(), Memory(wanted=wanted)
    num_bytes = pull_from(make_server(source).port, sink)
    assert source.asks == [ASK]
    expected = wanted_content(wanted)
    assert sink.all_written == expected
    assert num_bytes == len(expected)
    assert all(data == content_of(*items) for items, data in sink.written.items())
    assert source.has_ended.wait(LONG_S)
    assert source.ends == [("hold", True)]


class ByteFlipper:
    """A connection that changes a byte of one chunk after its checksum was computed."""

    def __init__(self, connection: Connection, index: int, start: int) -> None:
        self._connection, self._place = connection, Piece(index, start)

    def send(self, message: Any, payload: memoryview, *, payload_checksum: int) -> None:
        data = bytearray(payload)
        if message == self._place:
            data[-1] ^= 1
        self._connection.send(message, data, payload_checksum=payload_checksum)

    def expect(self, kind: Any) -> Any:
        return self._connection.expect(kind)


@pytest.mark.parametrize(("index", "start"), [(0, 0), (0, 2 * CHUNK_BYTES), (2, 0)])
def test_a_piece_with_a_wrong_byte_is_not_written(make_server: MakeServer, index: int, start: int) -> None:
    class FlippingMover(SocketMover):
        def give(self, connection: Connection, pieces: Sequence[Items], content: Content) -> None:
            flipper: Any = ByteFlipper(connection, index, start)
            super().give(flipper, pieces, content)

    sink = Memory(wanted=Want(0, [100, 5000]))
    assert sink.wanted is not None
    pieces = list(pieces_of(sink.wanted.first_block, sink.wanted.positions, SPEC, past=79))
    assert start < pieces[index].num_bytes
    with pytest.raises(TransferError, match="another checksum") as failure:
        pull_from(make_server(Memory(), mover=FlippingMover()).port, sink)
    assert failure.value.cause is Cause.GARBLED
    assert pieces[index][:3] not in sink.written


def test_nothing_is_written_after_a_pull_has_failed(make_server: MakeServer) -> None:
    class EndingMover(SocketMover):
        def give(self, connection: Connection, pieces: Sequence[Items], content: Content) -> None:
            with suppress(TransferError):
                super().give(connection, pieces[:2], content)

    under_way = [0]

    def write(items: Items, data: memoryview) -> None:
        under_way[0] += 1
        has_failed.wait(SHORT_S)
        under_way[0] -= 1

    has_failed = Event()
    server = make_server(Memory(), mover=EndingMover(), timeout_s=SHORT_S)
    pull = Pull(Peer("127.0.0.1", server.port, ""), Hello("consumer", LAYOUT), SPEC, SocketMover(), timeout_s=LONG_S)
    pull.ask(ASK)
    with pytest.raises(TransferError):
        pull.fetch(Want(0, [100, 4992, 5000]), sink_of(write))
    assert under_way == [0]


def test_a_write_that_fails_is_the_pulls_failure(make_server: MakeServer) -> None:
    def write(items: Items, data: memoryview) -> None:
        raise TransferError(Cause.NO_ROOM, "rank 1 could not copy it")

    server = make_server(Memory())
    pull = Pull(Peer("127.0.0.1", server.port, ""), Hello("consumer", LAYOUT), SPEC, SocketMover(), timeout_s=LONG_S)
    pull.ask(ASK)
    with pytest.raises(TransferError, match="rank 1") as failure:
        pull.fetch(Want(0, [100, 4992, 5000]), sink_of(write))
    assert failure.value.cause is Cause.NO_ROOM


def test_pieces_are_cut_by_size() -> None:
    pieces = list(pieces_of(3, [100, 4992, 5000], SPEC, past=79))
    assert len(pieces) == 3
    assert sum(piece.num_bytes for piece in pieces) == 76 * SPEC.raw_block_bytes + 3 * SPEC.raw_slot_bytes
    assert max(piece.num_bytes for piece in pieces) <= max(8 * 2**20, SPEC.raw_slot_bytes)
    assert list(pieces_of(79, [], SPEC, past=79)) == []
    two = list(pieces_of(70, [5000], SPEC, past=79))
    assert [piece[:3] for piece in two] == [(70, 79, ()), (79, 79, (5000,))]


@pytest.mark.parametrize("source", [Memory(offered=None), Memory()])
def test_nothing_travels_when_nothing_is_missing(make_server: MakeServer, source: Memory) -> None:
    sink = Memory(wanted=None)
    assert pull_from(make_server(source).port, sink) == 0
    assert not sink.written
    if source.offered is not None:
        assert source.has_ended.wait(LONG_S)
        assert source.ends == [("hold", True)]


@pytest.mark.parametrize("changed", ["weights", "layers", "block", "window block", "protocol", "tensor-parallel size"])
def test_another_layout_is_refused_with_the_difference(make_server: MakeServer, changed: str) -> None:
    source = Memory()
    with pytest.raises(TransferError, match=f"{changed}: .* here, other there") as failure:
        pull_from(make_server(source, layout={**LAYOUT, changed: "other"}).port, Memory())
    assert failure.value.cause is Cause.REFUSED
    assert not source.asks


def test_layouts_differ_where_models_do() -> None:
    def layout(spec: ModelSpec = SPEC, weights: str = "w", is_deterministic: bool = False) -> dict[str, str]:
        return layout_of(spec, weights=weights, is_deterministic=is_deterministic)

    other_dtype = ModelSpec((kv_spec(4, 64, "bfloat16"), SPEC.layers[1]), 32, "float32")
    other_order = ModelSpec(SPEC.layers[::-1], 32, "float32")
    layouts = [layout(), layout(weights="v"), layout(is_deterministic=True), layout(other_dtype), layout(other_order)]
    for window_tokens in (64, 128):
        layers = (replace(SPEC.layers[0], window_tokens=window_tokens), SPEC.layers[1])
        layouts.append(layout(ModelSpec(layers, 32, "float32", has_window_blocks=True)))
    assert len({tuple(layout.items()) for layout in layouts}) == len(layouts)
    assert layout() == LAYOUT


def test_another_engine_in_a_peers_place_is_not_asked(make_server: MakeServer) -> None:
    source = Memory()
    with pytest.raises(TransferError, match="engine producer has taken the place of older"):
        pull_from(make_server(source).port, Memory(), engine_id="older")
    assert not source.asks


@pytest.mark.parametrize(
    "want",
    [
        Want(80, []),
        Want(-1, []),
        Want(79, [99]),
        Want(0, [5000, 5001]),
        Piece(0),
        Hello("", {}),
    ],
)
def test_more_than_was_offered_is_refused(make_server: MakeServer, want: Any) -> None:
    source = Memory()
    server = make_server(source)
    with Connection.to("127.0.0.1", server.port, LONG_S) as connection:
        connection.send(Hello("consumer", LAYOUT))
        connection.expect(Hello)
        connection.send(ASK)
        connection.expect(Offer)
        connection.send(want)
        with pytest.raises(TransferError) as failure:
            connection.expect(Piece)
    assert failure.value.cause is Cause.GARBLED
    assert source.has_ended.wait(LONG_S)
    assert source.ends == [("hold", False)]


@pytest.mark.parametrize(("cause", "counted"), [("no_room", "no_room"), ("stalled", "stalled"), ("?", "garbled")])
def test_a_consumer_that_gives_up_is_counted_by_its_cause(make_server: MakeServer, cause: str, counted: str) -> None:
    source = Memory()
    server = make_server(source)
    with Connection.to("127.0.0.1", server.port, LONG_S) as connection:
        for message in (Hello("consumer", LAYOUT), ASK, Failed(cause, "enough of it")):
            connection.send(message)
        connection.expect(Hello)
        connection.expect(Offer)
        with pytest.raises(TransferError, match="enough of it"):
            connection.expect(Piece)
    assert server.counters.read().outcomes == {counted: 1}
    assert source.has_ended.wait(LONG_S)
    assert source.ends == [("hold", False)]


@pytest.mark.parametrize("num_messages", range(4))
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_consumer_that_dies_or_stalls_ends_its_hold(
    make_server: MakeServer, num_messages: int, is_killed: bool
) -> None:
    source = Memory()
    server = make_server(source, timeout_s=LONG_S if is_killed else SHORT_S)
    sent = [Hello("consumer", LAYOUT), ASK, Want(0, [5000])]
    with Connection.to("127.0.0.1", server.port, LONG_S) as connection:
        for message in sent[:num_messages]:
            connection.send(message)
        if num_messages >= 2:
            connection.expect(Hello)
            connection.expect(Offer)
        if is_killed:
            connection.close()
        if num_messages >= 2:
            assert source.has_ended.wait(LONG_S)
    assert source.ends == ([("hold", False)] if num_messages >= 2 else [])


@pytest.mark.parametrize("num_answers", range(4))
@pytest.mark.parametrize("end", ["dies", "stalls", "garbles"])
def test_a_producer_that_dies_stalls_or_garbles_is_an_error(num_answers: int, end: str) -> None:
    piece = next(pieces_of(3, [100, 5000], SPEC, past=OFFER.num_blocks))
    answers: list[tuple[Any, bytes]] = [
        (Hello("producer", LAYOUT), b""),
        (OFFER, b""),
        (Piece(0), content_of(*piece[:3])[:CHUNK_BYTES]),
    ]
    is_over = Event()

    def produce(listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        with Connection(accepted, LONG_S) as connection:
            for answer in answers[:num_answers]:
                connection.receive()
                connection.send(*answer)
            if end == "garbles":
                accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9)
            if end != "dies":
                is_over.wait(LONG_S)

    sink = Memory()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=produce, args=[listener])
        thread.start()
        with pytest.raises(TransferError) as failure:
            pull_from(listener.getsockname()[1], sink, timeout_s=SHORT_S if end == "stalls" else LONG_S)
        is_over.set()
        thread.join()
    assert failure.value.cause is {"dies": Cause.DISCONNECTED, "stalls": Cause.STALLED, "garbles": Cause.GARBLED}[end]


@pytest.mark.parametrize(
    "offer",
    [
        Offer(5001, [(5001, "prompt_end")]),
        Offer(-5, []),
        Offer(100, [(200, "mark")]),
        Offer(100, [(50, "mark")]),
        Offer(100, [(100, "mark"), (50, "mark"), (100, "mark")]),
        Offer(100, [(0, "mark"), (100, "mark")]),
    ],
)
def test_an_offer_that_contradicts_itself_is_refused(make_server: MakeServer, offer: Offer) -> None:
    with pytest.raises(TransferError) as failure:
        pull_from(make_server(Memory(offered=offer)).port, Memory())
    assert failure.value.cause is Cause.GARBLED


def test_a_server_goes_on_after_it_could_not_accept(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, errors = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def accept_later(listener: socket.socket) -> tuple[socket.socket, Any]:
        if errors:
            raise errors.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    monkeypatch.setattr("strandline.transfer.server.PAUSE_S", 0.0)
    target = Memory()
    assert pull_from(make_server(Memory()).port, target) == len(target.all_written) > 0
    assert not errors


def test_calls_of_an_engine_that_has_ended_fail() -> None:
    calls = EngineCalls()
    waiting = calls.submit(print)
    calls.close()
    assert waiting.cancelled()
    with pytest.raises(TransferError, match="the engine has ended"):
        calls.call(print)


def test_a_call_that_nobody_waits_for_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what it keeps for a peer would be kept for ever."""
    monkeypatch.setattr(engine_calls, "ENGINE_TIMEOUT_S", 0.01)
    calls, kept = EngineCalls(), list[str]()
    with pytest.raises(TransferError, match="does not answer"):
        calls.call(kept.append, "a prefix")
    calls.submit(kept.append, "another")
    calls.run()
    assert kept == ["another"]
