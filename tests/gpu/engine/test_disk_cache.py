"""The disk cache below a GPU: what is evicted and what is flushed comes back from files after a restart."""

from pathlib import Path

import pytest

from strandline.cache.evict_all import evict_all
from strandline.specs import SNAPSHOT_DTYPES
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.test_disk_cache import disk_of, serve, settle
from tests.cpu.engine.test_exactness import answers
from tests.cpu.engine.test_host_memory import LENGTHS, PROMPTS


@pytest.mark.parametrize("dtype", SNAPSHOT_DTYPES)
def test_what_a_gpu_had_outlives_an_orderly_end(make_llm: MakeLLM, tmp_path: Path, dtype: str) -> None:
    expected = answers(make_llm(enable_prefix_caching=False), PROMPTS)
    options = {"disk_cache": str(tmp_path / "cache"), "snapshot_dtype": dtype}
    with make_llm(**options) as first:
        serve(first, PROMPTS[:3])
        evict_all(first.engine.core.cache)
        settle(first)
        assert disk_of(first).num_snapshots >= 3
        answers(first, PROMPTS[3:])
    with make_llm(**options) as second:
        found, hits = serve(second)
        assert hits == list(LENGTHS)
        assert dtype != "float32" or found == expected
        assert disk_of(second).num_loads == len(PROMPTS)
        assert disk_of(second).num_loaded_bytes > 0
