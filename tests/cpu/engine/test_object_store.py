"""The object store: what one engine has evicted, another one loads, and a server that fails costs time but no token."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from strandline import LLM
from strandline.errors import ConfigError
from strandline.records.control import ResetCache
from strandline.records.tier_stats import TierStats
from strandline.transfer.bucket import Bucket
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.test_disk_cache import close, serve
from tests.cpu.engine.test_exactness import answers
from tests.cpu.engine.test_host_memory import LENGTHS, PROMPTS, slabs, tier_stats
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.transfer.object_server import delete_objects


@pytest.fixture
def expected(make_llm: MakeLLM) -> list[list[int]]:
    return answers(make_llm(enable_prefix_caching=False), PROMPTS)


def objects_of(llm: LLM) -> TierStats:
    _, objects = tier_stats(llm)
    assert objects.name == "objects"
    return objects


def with_objects(make_llm: MakeLLM, url: str, **options: Any) -> LLM:
    """Build an LLM whose device has room for few prompts, with an object store below it."""
    return make_llm(memory=slabs(make_llm(), 14), object_store=url, max_model_len=512, **options)


def test_evicted_prompts_come_back_in_another_engine(
    make_llm: MakeLLM,
    store_url: str,
    expected: list[list[int]],
) -> None:
    first = with_objects(make_llm, store_url)
    assert serve(first) == (expected, [0] * len(PROMPTS))
    found, hits = serve(first)
    assert (found, hits) == (expected, list(LENGTHS)), "what the device has evicted comes back"
    assert objects_of(first).num_loads > 0
    second = with_objects(make_llm, store_url)
    assert (objects_of(second).num_loads, objects_of(second).num_snapshots > 0) == (0, True)
    found, hits = serve(second)
    assert found == expected
    assert sum(hit > 0 for hit in hits) >= len(PROMPTS) - 2, hits
    assert objects_of(second).num_loads >= len(PROMPTS) - 2
    close(first)
    close(second)


def look(llm: LLM) -> None:
    """Look for what other engines have stored, and enter it."""
    discoveries = llm.engine.core.discoveries
    assert discoveries is not None
    discoveries.catalog.refresh()
    for _ in range(100):
        discoveries.turn()


def test_engines_find_what_others_store_while_both_run(
    make_llm: MakeLLM,
    store_url: str,
    expected: list[list[int]],
) -> None:
    first, second = with_objects(make_llm, store_url), with_objects(make_llm, store_url)
    serve(first)
    look(second)
    found, hits = serve(second)
    assert found == expected
    assert sum(hit > 0 for hit in hits) > 2, hits
    num_stored, num_used = objects_of(second).num_snapshots, objects_of(second).num_used_bytes
    look(second)
    assert (objects_of(second).num_snapshots, objects_of(second).num_used_bytes) == (num_stored, num_used)
    close(first)
    close(second)


def test_nothing_that_others_have_stored_is_hit_after_a_reset(
    make_llm: MakeLLM,
    store_url: str,
    expected: list[list[int]],
) -> None:
    first, second = with_objects(make_llm, store_url), with_objects(make_llm, store_url)
    serve(first)
    discoveries = second.engine.core.discoveries
    assert discoveries is not None
    discoveries.catalog.refresh()
    assert second.reset_prefix_cache()
    look(second)
    assert objects_of(second).num_snapshots > 0, "it has found what it must not hit"
    assert serve(second) == (expected, [0] * len(PROMPTS))
    assert sum(serve(second)[1]) > 0
    assert serve(first) == (expected, list(LENGTHS)), "others are not concerned"
    close(first)
    close(second)


def test_engines_with_other_weights_share_nothing_in_one_epoch(
    make_llm: MakeLLM, store_url: str, tmp_path: Path
) -> None:
    """All engines of a server begin the same epoch, but one that was restarted has the model's own weights again."""
    first, second = with_objects(make_llm, store_url), with_objects(make_llm, store_url)
    first.update_weights_from_disk(str(save_tiny_model(tmp_path / "other", seed=5)))
    for llm in (first, second):
        assert llm.engine.core.control.apply(ResetCache("later", forced=True))
    found, _ = serve(first)
    look(second)
    assert objects_of(second).num_snapshots > 0, "it has found what it must not hit"
    others, hits = serve(second)
    assert hits == [0] * len(PROMPTS)
    assert others != found
    close(first)
    close(second)


def test_what_only_memory_has_outlives_an_orderly_end(
    make_llm: MakeLLM,
    store_url: str,
    expected: list[list[int]],
) -> None:
    first = make_llm(object_store=store_url)
    assert serve(first)[0] == expected
    assert objects_of(first).num_snapshots == 0
    report = first.engine.core.flush()
    assert report is not None
    assert (report.num_bytes > 0, report.num_failed, "MiB to the object store in" in str(report)) == (True, 0, True)
    close(first)
    second = make_llm(object_store=store_url)
    found, hits = serve(second)
    assert found == expected
    assert all(hits), hits
    close(second)


def test_a_server_that_fails_costs_no_token(
    make_llm: MakeLLM,
    store_url: str,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    llm = with_objects(make_llm, store_url)
    serve(llm)

    async def fail(*_: object) -> None:
        await asyncio.sleep(0.2)
        raise OSError("the server is busy")

    monkeypatch.setattr(Bucket, "read", fail)
    assert serve(llm)[0] == expected
    assert objects_of(llm).num_failed_loads == 1, "no other load is tried for a while"
    assert "a prefix could not be read from the object store" in caplog.text
    assert "the server is busy" in caplog.text
    monkeypatch.undo()
    assert serve(llm)[0] == expected
    close(llm)


def test_expired_objects_are_stored_again(
    make_llm: MakeLLM,
    store_url: str,
    expected: list[list[int]],
) -> None:
    llm = with_objects(make_llm, store_url)
    serve(llm)
    before = objects_of(llm)
    assert delete_objects(store_url) > 0
    assert serve(llm)[0] == expected
    after = objects_of(llm)
    assert after.num_failed_loads > before.num_failed_loads
    assert after.num_snapshots_demoted > before.num_snapshots_demoted
    assert delete_objects(store_url) > 0
    close(llm)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"object_store": "/tmp/cache"},
            "--object-store must be s3://BUCKET, s3://BUCKET/PREFIX or file:///DIR, got '/tmp/cache'",
        ),
        ({"object_store_size": "1GiB"}, "there is none; add --object-store s3://BUCKET/PREFIX"),
        ({"object_store": "s3://b", "disk_cache": "d"}, "--object-store cannot be combined with --disk-cache"),
        ({"object_store": "s3://b", "object_store_size": "much"}, "--object-store-size must be a size"),
        (
            {"object_store": "s3://no-such-bucket"},
            "cannot be used: .* NoSuchBucket: The specified bucket does not exist",
        ),
    ],
)
def test_wrong_object_stores_are_refused(
    make_llm: MakeLLM,
    store_url: str,
    options: dict[str, Any],
    text: str,
) -> None:
    with pytest.raises(ConfigError, match=text):
        make_llm(**options)
