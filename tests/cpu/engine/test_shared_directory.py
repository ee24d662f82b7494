"""One host tier of a machine: engines that share a directory hit what another one has evicted."""

import shutil
from pathlib import Path
from select import select
from typing import Any

import pytest

from strandline import LLM
from strandline.cache.tiers import adoption
from strandline.engine.caching import object_catalog
from strandline.errors import ConfigError
from strandline.transfer import shared_directory
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.test_disk_cache import close, serve
from tests.cpu.engine.test_exactness import answers
from tests.cpu.engine.test_host_memory import LENGTHS, PROMPTS, slabs
from tests.cpu.engine.test_object_store import look, objects_of


def sharing(make_llm: MakeLLM, directory: Path, size: str = "64MiB", **options: Any) -> LLM:
    """Build an LLM whose device has room for few prompts, above a shared directory."""
    url = f"file://{directory}"
    return make_llm(
        memory=slabs(make_llm(), 14), object_store=url, object_store_size=size, max_model_len=512, **options
    )


def test_prompts_that_one_engine_has_evicted_hit_in_another(make_llm: MakeLLM, tmp_path: Path) -> None:
    expected = answers(make_llm(enable_prefix_caching=False), PROMPTS)
    first, second = sharing(make_llm, tmp_path / "shared"), sharing(make_llm, tmp_path / "shared")
    assert serve(first) == (expected, [0] * len(PROMPTS))
    look(second)
    found, hits = serve(second)
    assert found == expected
    assert sum(hit > 0 for hit in hits) > 2, hits
    assert serve(first) == (expected, list(LENGTHS)), "the first one's index is not disturbed"
    close(first)
    third = sharing(make_llm, tmp_path / "shared")
    assert objects_of(third).num_snapshots > 0, "a new engine finds what is there"
    close(second)
    close(third)


def test_first_request_after_idling_hits_what_another_engine_wrote(
    make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_catalog, "MAX_PATHS", 1)  # running requests wait for few
    idle, other = sharing(make_llm, tmp_path / "shared"), sharing(make_llm, tmp_path / "shared")
    expected, _ = serve(other)
    discoveries = idle.engine.core.discoveries
    assert discoveries is not None
    assert select([discoveries], (), (), 60.0)[0], "what is new is found without a request"
    discoveries.catalog.refresh()
    found, hits = serve(idle)
    assert found == expected
    assert hits[0] > 0
    assert objects_of(idle).num_loads > 0
    close(idle)
    close(other)


def test_idle_engine_enters_and_forgets_what_comes_and_goes(
    make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption, "MAX_EVICTED", 1)
    idle, other = sharing(make_llm, tmp_path / "shared"), sharing(make_llm, tmp_path / "shared")
    core = idle.engine.core
    assert core.discoveries is not None
    serve(other)
    for is_there in (True, False):
        core.discoveries.catalog.refresh()
        most = 0
        while select([core.discoveries], (), (), 0.0)[0]:
            before = objects_of(idle).num_snapshots
            core.exchange()
            most = max(most, before - objects_of(idle).num_snapshots)
        assert (objects_of(idle).num_snapshots > 0, most) == (is_there, int(not is_there))
        shutil.rmtree(tmp_path / "shared", ignore_errors=True)
    store = core.executor._files
    assert (len(core.discoveries.catalog), store._entered, objects_of(idle).num_used_bytes) == (0, {}, 0)
    close(idle)
    close(other)


def test_engines_that_remove_each_others_files_give_the_same_answers(make_llm: MakeLLM, tmp_path: Path) -> None:
    expected = answers(make_llm(enable_prefix_caching=False), PROMPTS)
    size = 300_000
    engines = [sharing(make_llm, tmp_path / "shared", str(size)) for _ in range(2)]
    for turn in range(4):
        look(engines[turn % 2])
        assert serve(engines[turn % 2])[0] == expected
        files = [each for each in (tmp_path / "shared").glob("*/*.*") if each.suffix != ".json"]
        assert 0 < sum(shared_directory._rounded(each.stat().st_size) for each in files) <= size
    for engine in engines:
        close(engine)


def test_models_share_a_directory_without_meeting(make_llm: MakeLLM, tmp_path: Path) -> None:
    first = sharing(make_llm, tmp_path / "shared")
    serve(first)
    other = sharing(make_llm, tmp_path / "shared", snapshot_dtype="int8")
    assert objects_of(other).num_snapshots == 0
    close(first)
    close(other)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"object_store": "file:///dev/shm/x"}, "file:///dev/shm/x needs --object-store-size"),
        ({"object_store": "file://dev/shm"}, "or file:///DIR, got 'file://dev/shm'"),
        ({"object_store": "file:///proc/no-such", "object_store_size": "1MiB"}, "cannot be used: "),
        ({"object_store": "file:///dev/shm/x", "object_store_size": "1EiB"}, "--object-store-size"),
    ],
)
def test_directories_that_cannot_be_used_are_refused(make_llm: MakeLLM, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_llm(**options)
