"""Frames over TCP: what is sent arrives, and whatever else a peer does ends in a ``TransferError``."""

import socket
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strandline.transfer.checksum import checksum
from strandline.transfer.connection import HEAD, MAGIC, MAX_MESSAGE_BYTES, Cause, Connection, TransferError
from strandline.transfer.messages import ENCODER, Ask, Enough, Failed, Hello, Message, Offer, Piece, Placed, Want

LONG_S = 60.0
SHORT_S = 0.05

texts = st.text(max_size=20)
counts = st.integers(0, 2**40)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, texts, st.dictionaries(texts, texts, max_size=4)),
    st.builds(Ask, texts, texts, st.binary(max_size=200)),
    st.builds(Offer, counts, st.lists(st.tuples(counts, texts), max_size=4)),
    st.builds(Want, counts, st.lists(counts, max_size=4)),
    st.builds(Piece, counts),
    st.builds(
        Placed,
        st.binary(max_size=40),
        st.sampled_from(["DRAM", "VRAM"]),
        st.integers(0, 2**31 - 1),
        st.lists(st.integers(0, 2**63 - 1), max_size=4),
    ),
    st.builds(Enough),
    st.builds(Failed, texts, texts),
)


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection that waits long, and the other end of its socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with theirs, Connection(ours, LONG_S) as connection:
        yield connection, theirs


def frame(message: Message, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame."""
    sent: list[bytes] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: sent.extend(map(bytes, arguments)) if name == "sendall" else None

    recorder: Any = Recorder()
    Connection(recorder, LONG_S).send(message, payload)
    return b"".join(sent)


@given(st.lists(st.tuples(messages, st.binary(max_size=3000)), max_size=5), st.integers(1, 400))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_frames_arrive_as_they_were_sent_however_they_are_cut(
    pair: tuple[Connection, socket.socket], frames: list[tuple[Message, bytes]], cut: int
) -> None:
    connection, peer = pair
    data = b"".join(frame(message, payload) for message, payload in frames)

    def send() -> None:
        for start in range(0, len(data), cut):
            peer.sendall(data[start : start + cut])

    sending = Thread(target=send)
    sending.start()
    assert [connection.receive(3000) for _ in frames] == frames
    sending.join()


@pytest.mark.parametrize(
    "placed",
    [
        *(Placed(b"", "DRAM", 0, [64, address]) for address in (-1, 2**63, 2**64 - 1)),
        *(Placed(b"", "DRAM", device, [64]) for device in (-1, 2**31)),
        *(Placed(b"", kind, 0, [64]) for kind in ("", "dram", "FILE")),
    ],
    ids=str,
)
def test_a_place_that_no_memory_has_is_garbled(pair: tuple[Connection, socket.socket], placed: Placed) -> None:
    connection, peer = pair
    peer.sendall(frame(placed))
    with pytest.raises(TransferError) as failure:
        connection.expect(Placed)
    assert failure.value.cause is Cause.GARBLED


@given(messages, st.binary(max_size=300), st.data())
@settings(max_examples=150, deadline=None)
def test_a_frame_with_a_wrong_byte_is_refused(message: Message, payload: bytes, data: st.DataObject) -> None:
    good = bytearray(frame(message, payload))
    index = data.draw(st.integers(0, len(good) - 1))
    good[index] ^= data.draw(st.integers(1, 255))
    theirs, ours = socket.socketpair()
    with theirs, Connection(_as_tcp(ours), LONG_S) as connection:
        theirs.sendall(good)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(TransferError) as failure:
            connection.receive(len(payload))
    assert failure.value.cause in (Cause.GARBLED, Cause.DISCONNECTED)


@given(st.binary(max_size=400))
@settings(max_examples=150, deadline=None)
def test_garbage_is_refused(garbage: bytes) -> None:
    theirs, ours = socket.socketpair()
    with theirs, Connection(_as_tcp(ours), LONG_S) as connection:
        theirs.sendall(garbage)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(TransferError) as failure:
            connection.receive()
    assert failure.value.cause in (Cause.GARBLED, Cause.DISCONNECTED)


def _as_tcp(connected: socket.socket) -> Any:
    """Return a socket that takes the options of TCP, which a pair of local sockets does not know."""

    class Local:
        def setsockopt(self, *options: int) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return getattr(connected, name)

    return Local()


@pytest.mark.parametrize("sent", [0, 1, HEAD.size, -1])
def test_a_peer_that_stops_sending_has_stalled(sent: int) -> None:
    data = frame(Enough(), b"x" * 100)
    theirs, ours = socket.socketpair()
    with theirs, Connection(_as_tcp(ours), SHORT_S) as connection:
        theirs.sendall(data[:sent])
        with pytest.raises(TransferError) as failure:
            connection.receive(100)
    assert failure.value.cause is Cause.STALLED


@pytest.mark.parametrize("sent", [0, 1, HEAD.size, -1])
def test_a_peer_that_goes_has_disconnected(pair: tuple[Connection, socket.socket], sent: int) -> None:
    connection, peer = pair
    peer.sendall(frame(Enough(), b"x" * 100)[:sent])
    peer.close()
    with pytest.raises(TransferError) as failure:
        connection.receive(100)
    assert failure.value.cause is Cause.DISCONNECTED


def test_a_peer_that_does_not_read_has_stalled() -> None:
    theirs, ours = socket.socketpair()
    with theirs, Connection(_as_tcp(ours), SHORT_S) as connection, pytest.raises(TransferError) as failure:
        connection.send(Piece(0), bytes(2**20))
    assert failure.value.cause is Cause.STALLED


@pytest.mark.parametrize(("message_bytes", "payload_bytes"), [(MAX_MESSAGE_BYTES + 1, 0), (0, 5), (0, 2**63)])
def test_too_long_a_frame_is_refused_before_memory_is_taken(
    pair: tuple[Connection, socket.socket], message_bytes: int, payload_bytes: int
) -> None:
    connection, peer = pair
    peer.sendall(HEAD.pack(MAGIC, message_bytes, payload_bytes, 0))
    with pytest.raises(TransferError, match="are the most") as failure:
        connection.receive(4)
    assert failure.value.cause is Cause.GARBLED


def test_what_is_no_message_is_refused(pair: tuple[Connection, socket.socket]) -> None:
    connection, peer = pair
    good = frame(Enough())
    wrong = ENCODER.encode(["Enough"])
    assert len(wrong) != len(good)
    peer.sendall(HEAD.pack(MAGIC, len(wrong), 0, checksum(wrong, checksum(b""))) + wrong)
    with pytest.raises(TransferError, match="not a message"):
        connection.receive()


def test_another_message_than_expected_is_refused(pair: tuple[Connection, socket.socket]) -> None:
    connection, peer = pair
    peer.sendall(frame(Enough()) + frame(Piece(1), b"abc") + frame(Failed("no_room", "full")) + frame(Failed("?", "")))
    with pytest.raises(TransferError, match="Enough with 0 bytes came instead of Piece with 3"):
        connection.expect(Piece, 3)
    with pytest.raises(TransferError, match="Piece with 3 bytes came instead of Piece with 4"):
        connection.expect(Piece, 4)
    for cause in (Cause.NO_ROOM, Cause.GARBLED):
        with pytest.raises(TransferError) as failure:
            connection.expect(Piece, 4)
        assert failure.value.cause is cause


def test_nobody_at_an_address_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for host, wrong in (("127.0.0.1", port), ("127.0.0.1", 2**17), ("a" * 100, 1)):
        with pytest.raises(TransferError) as failure:
            Connection.to(host, wrong, SHORT_S)
        assert failure.value.cause is Cause.UNREACHABLE


def test_a_connection_that_is_closed_by_another_thread_fails(pair: tuple[Connection, socket.socket]) -> None:
    connection, _ = pair
    closing = Thread(target=connection.close)
    closing.start()
    with pytest.raises(TransferError) as failure:
        connection.receive()
    closing.join()
    assert failure.value.cause is Cause.DISCONNECTED
