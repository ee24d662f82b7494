"""Events over ZeroMQ: in order, replayed when missed, stated anew when lost, and never in a step's way."""

import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import zmq

from strandline.cache.inspection.published import published_snapshots
from strandline.engine.caching.event_feed import EventFeed
from strandline.errors import ConfigError
from strandline.events import publisher as publisher_module
from strandline.events.publisher import EventPublisher
from strandline.events.resumable import PromptHashes
from strandline.events.subscriber import Subscriber
from strandline.events.wire import AllBlocksCleared, decode_batch
from strandline.kv_events_config import KVEventsConfig
from tests.cpu.cache.driver import Driver

TIMEOUT_S = 60.0
PROMPTS = [range(1000 * n, 1000 * n + 100 + 10 * n) for n in range(1, 7)]


class Engine:
    """A cache whose events are published."""

    def __init__(self, directory: Path, **fields: Any) -> None:
        self.endpoint, self.replay_endpoint = f"ipc://{directory}/live", f"ipc://{directory}/replay"
        endpoints = {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint}
        self.driver = Driver(emits_events=True)
        self.feed = EventFeed(self.driver.cache, KVEventsConfig(enable_kv_cache_events=True, **{**endpoints, **fields}))
        self.feed.flush()

    def serve(self, *prompts: range, salt: str = "") -> None:
        for prompt in prompts:
            self.driver.serve(prompt, salt=salt)
            self.feed.flush()

    def subscriber(self, **options: Any) -> Subscriber:
        return Subscriber(self.endpoint, self.replay_endpoint, **options)

    def close(self) -> None:
        self.feed.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.close()


def listen(engine: Engine, subscriber: Subscriber) -> None:
    """Let a subscriber catch up, and wait until it receives messages as they are published."""
    deadline_s = monotonic() + TIMEOUT_S
    assert subscriber.catch_up()
    prompt = 50_000
    while not subscriber.follow(0.02):
        assert monotonic() < deadline_s
        engine.serve(range(prompt, prompt + 10))
        prompt += 100
    catch_up(engine, subscriber)


def catch_up(engine: Engine, subscriber: Subscriber) -> None:
    """Wait until a subscriber has applied everything."""
    deadline_s = monotonic() + TIMEOUT_S
    while (
        subscriber.index.num_snapshots != len([*published_snapshots(engine.driver.cache)]) or not subscriber.is_complete
    ):
        assert monotonic() < deadline_s
        engine.feed.flush()
        subscriber.follow(0.02)
        assert subscriber.catch_up()
    predictions(engine, subscriber)


def predictions(engine: Engine, subscriber: Subscriber) -> list[int]:
    """Return the hits that a subscriber predicts, which are the cache's."""
    hits = [subscriber.index.hit_tokens(PromptHashes(prompt)) for prompt in PROMPTS]
    assert hits == [engine.driver.lookup(prompt).hit for prompt in PROMPTS]
    return hits


def test_a_late_subscriber_gets_what_it_missed(engine: Engine) -> None:
    engine.serve(*PROMPTS[:3])
    with engine.subscriber() as subscriber:
        assert not subscriber.is_complete
        listen(engine, subscriber)
        assert predictions(engine, subscriber)[:4] == [110, 120, 130, 0]


def test_live_messages_need_no_replay(engine: Engine) -> None:
    with engine.subscriber() as subscriber:
        listen(engine, subscriber)
        missed = subscriber.num_missed
        engine.serve(PROMPTS[0])
        assert subscriber.follow(TIMEOUT_S) == 1
        assert predictions(engine, subscriber)[0] == 110
        assert subscriber.num_missed == missed


def test_missed_messages_are_replayed_in_order(engine: Engine) -> None:
    with engine.subscriber() as subscriber:
        listen(engine, subscriber)
        missed = subscriber.num_missed
        engine.serve(*PROMPTS[:2])
        for _ in range(2):
            assert subscriber._live.poll(TIMEOUT_S * 1000)
            subscriber._live.recv_multipart()
        engine.serve(PROMPTS[2])
        assert subscriber.follow(TIMEOUT_S) == 3
        assert subscriber.num_missed == missed + 2
        assert predictions(engine, subscriber)[:4] == [110, 120, 130, 0]


def test_messages_lost_at_the_end_are_found_by_catching_up(engine: Engine) -> None:
    with engine.subscriber() as subscriber:
        listen(engine, subscriber)
        engine.serve(PROMPTS[0])
        assert subscriber._live.poll(TIMEOUT_S * 1000)
        subscriber._live.recv_multipart()
        assert subscriber.catch_up()
        assert predictions(engine, subscriber)[0] == 110


def test_what_is_no_longer_kept_is_stated_anew(tmp_path: Path) -> None:
    engine = Engine(tmp_path, buffer_steps=2)
    engine.serve(*PROMPTS)
    with engine.subscriber() as subscriber:
        assert subscriber.catch_up()
        assert not subscriber.is_complete
        listen(engine, subscriber)
        assert predictions(engine, subscriber) == [len(prompt) for prompt in PROMPTS]
    engine.close()


def test_evictions_are_followed(engine: Engine) -> None:
    engine.serve(*PROMPTS)
    with engine.subscriber() as subscriber:
        listen(engine, subscriber)
        engine.driver.drain()
        engine.feed.flush()
        catch_up(engine, subscriber)
        assert (subscriber.index.num_blocks, subscriber.index.num_snapshots) == (0, 0)


def test_messages_of_a_process_that_is_gone_are_ignored(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    with first.subscriber() as subscriber:
        listen(first, subscriber)
        first.serve(*PROMPTS[:3])
        for _ in range(3):  # they have arrived, and are replayed before they are read
            assert subscriber._live.poll(TIMEOUT_S * 1000)
        assert subscriber.catch_up()
        first.close()
        second = Engine(tmp_path)
        second.serve(PROMPTS[4])
        assert subscriber.catch_up()
        assert predictions(second, subscriber) == [0, 0, 0, 0, 150, 0]
        subscriber.follow()
        assert predictions(second, subscriber) == [0, 0, 0, 0, 150, 0]
        second.close()


def test_many_events_are_divided_into_messages(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for start in range(0, 30_000, 1000):
        engine.driver.serve(range(start, start + 900))
    engine.feed.flush()
    with engine.subscriber() as subscriber:
        assert subscriber.catch_up()
        assert 2 < subscriber._next_number < 20
        catch_up(engine, subscriber)
    engine.close()


@pytest.mark.parametrize("is_live", [False, True], ids=["idle", "serving"])
def test_a_restarted_engine_is_noticed(tmp_path: Path, is_live: bool) -> None:
    first = Engine(tmp_path)
    first.serve(*PROMPTS)
    with first.subscriber() as subscriber:
        listen(first, subscriber)
        first.close()
        second = Engine(tmp_path)
        if is_live:
            listen(second, subscriber)
            second.serve(PROMPTS[2])
        catch_up(second, subscriber)
        assert predictions(second, subscriber) == [0, 0, 130 * is_live, 0, 0, 0]
        second.close()


def test_a_full_queue_drops_counts_and_states_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_open = threading.Event()
    encode = publisher_module.encode_batch

    def encode_when_open(*arguments: Any) -> bytes:
        assert is_open.wait(TIMEOUT_S)
        return encode(*arguments)

    monkeypatch.setattr(publisher_module, "encode_batch", encode_when_open)
    engine = Engine(tmp_path, max_queue_size=2)
    engine.serve(*PROMPTS)
    assert engine.feed.num_dropped > 0
    assert engine.feed.num_published == 0
    is_open.set()
    with engine.subscriber() as subscriber:
        catch_up(engine, subscriber)
        assert predictions(engine, subscriber) == [len(prompt) for prompt in PROMPTS]
    assert engine.feed.num_published > 0
    engine.close()


def test_an_error_of_the_thread_leaves_the_engine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = {*threading.enumerate()}
    engine = Engine(tmp_path)
    [thread] = {*threading.enumerate()} - before
    monkeypatch.setattr(publisher_module, "encode_batch", lambda *_: 1 / 0)
    engine.serve(PROMPTS[0])
    thread.join(TIMEOUT_S)
    engine.serve(*PROMPTS[1:])
    assert engine.feed.num_dropped > 0
    assert "not published any more" in caplog.text
    engine.close()


def test_a_client_of_vllms_protocol_is_answered(engine: Engine) -> None:
    engine.serve(PROMPTS[0])
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.connect(engine.replay_endpoint)
        client.send_multipart((b"", b"malformed"))
        client.send_multipart((b"", (0).to_bytes(8, "big")))
        answers: list[tuple[int, bytes]] = []
        while not answers or answers[-1][1]:
            assert client.poll(TIMEOUT_S * 1000)
            empty, number, payload = client.recv_multipart()
            assert empty == b""
            answers.append((int.from_bytes(number, "big", signed=True), payload))
    assert [number for number, _ in answers] == [*range(len(answers) - 1), -1]
    batches = [decode_batch(payload) for _, payload in answers[:-1]]
    assert isinstance(batches[0].events[0], AllBlocksCleared)
    assert [batch.ts for batch in batches] == sorted(batch.ts for batch in batches)


def test_a_topic_begins_each_message(tmp_path: Path) -> None:
    engine = Engine(tmp_path, topic="kv@pod-1")
    with engine.subscriber(topic="kv@") as subscriber, engine.subscriber(topic="other") as deaf:
        listen(engine, subscriber)
        assert deaf.follow() == 0
    engine.close()


def test_without_a_replay_endpoint_a_gap_empties_the_index(tmp_path: Path) -> None:
    engine = Engine(tmp_path, replay_endpoint=None)
    engine.serve(PROMPTS[0])
    deadline_s = monotonic() + TIMEOUT_S
    while not engine.feed.num_published:
        assert monotonic() < deadline_s
    with Subscriber(engine.endpoint) as subscriber:
        while not subscriber.follow(0.02):
            assert monotonic() < deadline_s
            engine.serve(range(90_000, 90_100))
            engine.driver.drain()
        assert not subscriber.is_complete
        assert subscriber.index.hit_tokens(PromptHashes(PROMPTS[0])) == 0
        assert not subscriber.catch_up()
    engine.close()


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_a_taken_or_wrong_endpoint_is_refused(engine: Engine, tmp_path: Path, field: str) -> None:
    for wrong in ("tcp://*:none", "nonsense://*"):
        config = KVEventsConfig(**{"endpoint": f"ipc://{tmp_path}/free", field: wrong})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="kv-events-config"):
            EventPublisher(config)


def test_a_discarded_publisher_frees_its_endpoint(tmp_path: Path) -> None:
    for _ in range(3):
        before = {*threading.enumerate()}
        publisher = EventPublisher(KVEventsConfig(endpoint=f"ipc://{tmp_path}/live"))
        [thread] = {*threading.enumerate()} - before
        del publisher
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
