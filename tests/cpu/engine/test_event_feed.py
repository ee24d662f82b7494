"""An engine's published events: a subscriber predicts the hit of every request."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.engine.caching.event_feed import EventFeed
from strandline.errors import ConfigError
from strandline.events.resumable import PromptHashes, ResumableIndex
from strandline.events.subscriber import Subscriber
from strandline.events.wire import WireEvent, to_wire
from strandline.kv_events_config import read_kv_events_config
from tests.cpu.cache.driver import Driver
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.tiny import VOCAB_SIZE

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def events_in(directory: Path) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{directory}/live",
        "replay_endpoint": f"ipc://{directory}/replay",
    }


def conversations(num_conversations: int) -> list[list[int]]:
    choose = random.Random(5)
    system = choose.choices(range(3, VOCAB_SIZE), k=150)
    return [system + choose.choices(range(3, VOCAB_SIZE), k=70 + 5 * n) for n in range(num_conversations)]


def predicted_and_hit(
    llm: LLM, subscriber: Subscriber, prompt: list[int], salt: str = ""
) -> tuple[int, int, list[int]]:
    """Run a prompt; return what was predicted before, what it hit, and its output."""
    assert subscriber.catch_up()
    predicted = subscriber.index.hit_tokens(PromptHashes(prompt, salt))
    request: dict[str, Any] = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
    [output] = llm.generate(request, PARAMS, use_tqdm=False)
    return predicted, output.cache_account.hit if output.cache_account else -1, output.outputs[0].token_ids


WAYS: dict[str, dict[str, Any]] = {
    "in turn": {"async_scheduling": False},
    "overlapped": {"async_scheduling": True},
    "deterministic": {"deterministic": True},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}},
    "suffixes": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}},
}


@pytest.mark.parametrize("way", WAYS)
def test_hits_of_an_engine_are_predicted(make_llm: MakeLLM, tmp_path: Path, way: str) -> None:
    llm = make_llm(kv_events_config=events_in(tmp_path), memory="500KiB", **WAYS[way])
    histories = conversations(6)
    hits = list[int]()
    with Subscriber(f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay") as subscriber:
        for turn in range(3):
            for index, history in enumerate(histories):
                predicted, hit, output = predicted_and_hit(llm, subscriber, history, "a" if index == 5 else "")
                assert predicted == hit
                hits.append(hit)
                history += [*output, turn + 3, 4]
        assert subscriber.is_complete
    stats = llm.engine.core.stats()
    assert stats.num_snapshots_evicted > 0
    assert sum(hit > 200 for hit in hits) > 2
    assert stats.num_events_published > len(hits)
    assert stats.num_events_dropped == 0
    assert any("cache events: published on ipc://" in line for line in llm.engine.describe())


def test_an_aborted_request_is_followed(make_llm: MakeLLM, tmp_path: Path) -> None:
    llm = make_llm(kv_events_config=events_in(tmp_path))
    [prompt] = conversations(1)
    llm.engine.add_request("a", prompt, PARAMS)
    for _ in range(4):
        llm.engine.step()
    llm.engine.abort("a")
    with Subscriber(f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay") as subscriber:
        predicted, hit, _ = predicted_and_hit(llm, subscriber, prompt)
        assert predicted == hit == len(prompt)


def reset(llm: LLM) -> None:
    assert llm.reset_prefix_cache()


@pytest.mark.parametrize("drop", [reset, LLM.sleep])
def test_what_is_dropped_between_steps_is_announced_at_once(
    make_llm: MakeLLM, tmp_path: Path, drop: Callable[[LLM], None]
) -> None:
    llm = make_llm(kv_events_config=events_in(tmp_path))
    [prompt] = conversations(1)
    with Subscriber(f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay") as subscriber:
        predicted_and_hit(llm, subscriber, prompt)
        assert subscriber.catch_up()
        assert subscriber.index.num_snapshots > 0
        drop(llm)
        assert subscriber.catch_up()
        assert (subscriber.index.num_blocks, subscriber.index.num_snapshots) == (0, 0)


def test_a_taken_endpoint_is_refused_at_start(make_llm: MakeLLM, tmp_path: Path) -> None:
    taken = {**events_in(tmp_path), "endpoint": "nonsense://*"}
    with pytest.raises(ConfigError, match="cannot bind to 'nonsense"):
        make_llm(kv_events_config=taken)


def test_kept_events_are_taken_once_and_need_no_publisher() -> None:
    driver = Driver(emits_events=True)
    feed, index = EventFeed(driver.cache, None, is_kept=True), ResumableIndex()
    for prompt in (range(200), range(300, 500)):
        driver.serve(prompt)
        feed.flush()
        for event in feed.take():
            index.apply(to_wire(event))
        assert index.hit_tokens(PromptHashes(prompt)) == len(prompt)
    assert not feed.take()
    assert (feed.endpoints, feed.describe(), feed.num_published, feed.num_dropped) == (None, [], 0, 0)
    feed.close()


def test_events_are_published_and_kept_alike(tmp_path: Path) -> None:
    driver, endpoints = Driver(emits_events=True), events_in(tmp_path)
    feed = EventFeed(driver.cache, read_kv_events_config(endpoints), 1, is_kept=True)
    driver.serve(range(200))
    feed.flush()
    kept = [to_wire(event) for event in feed.take()]
    published: list[WireEvent] = []
    sink: Any = SimpleNamespace(apply=published.append, clear=published.clear)
    with Subscriber(endpoints["endpoint"], endpoints["replay_endpoint"], sink=sink) as subscriber:
        assert subscriber.catch_up()
    assert kept == published
    feed.close()
