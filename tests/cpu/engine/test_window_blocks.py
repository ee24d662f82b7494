"""Layers with windows: memory follows the windows, hits and tokens stay the same.

Freed memory is NaN here, so that a kernel that reads a block before a window changes the tokens.
"""

from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.device.sizing import slabs_for
from strandline.engine.loading import load_uni_executor
from strandline.ids import BLOCK_TOKENS
from strandline.models.layers.attention.attention import Attention
from strandline.models.layers.attention.attention_parts import AttentionConfig
from strandline.specs import ModelSpec
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_disk_cache import disk_of, serve
from tests.cpu.engine.test_exactness import GREEDY, answers, tokens
from tests.cpu.engine.test_hand_over import NUM_TOKENS, Node, config_of, decode, prefill
from tests.cpu.engine.test_host_memory import LENGTHS, PROMPTS, tier_stats
from tests.cpu.models import families

TWO_SIZES = " of two sizes"
"""Suffix of a family two of whose layers have windows, the first a short one and the second a long one."""
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
"""Enough that the answer takes another block, and frees one before each window."""


def save(family: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save a tiny model. No published family has windows of two sizes, so its layers are built with other windows."""
    name = family.removesuffix(TWO_SIZES)
    if name != family:
        build, sizes = Attention.__init__, cycle((32, 160))

        def build_other(layer: Attention, config: AttentionConfig, *args: Any, **options: Any) -> None:
            if config.window_tokens is not None:
                config = replace(config, window_tokens=next(sizes))
            build(layer, config, *args, **options)

        monkeypatch.setattr(Attention, "__init__", build_other)
    return families.save(name, path)


def num_window_blocks(llm: LLM) -> int:
    """Return how many window blocks the device holds."""
    return sum(llm.engine.cache.memory_use().num_window_blocks)


@pytest.mark.parametrize(
    ("family", "max_num_batched_tokens"),
    [
        ("lfm3", 65),
        ("lara_mini", 2048),
        ("inkling", 65),
        ("recurrent_gemma-odd", 65),
        ("recurrent_gemma-odd", 2048),
        (f"gemma3{TWO_SIZES}", 65),
        (f"lfm3-odd{TWO_SIZES}", 65),
    ],
)
def test_answers_and_hits_are_those_of_whole_paths(
    family: str, max_num_batched_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_llm = llm_maker(save(family, tmp_path, monkeypatch), monkeypatch, device="cpu")
    check_answers_and_hits(partial(make_llm, max_num_batched_tokens=max_num_batched_tokens), monkeypatch)


def check_answers_and_hits(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that engines with window blocks and with whole paths hit and answer the same, as without a cache."""
    found = []
    for has_windows in (True, False):
        with monkeypatch.context() as patch:
            if not has_windows:
                patch.setattr(ModelSpec, "has_windows", False)
            llm = make_llm(memory="16MiB")
        spec = llm.engine.core.spec
        assert spec.has_window_blocks == has_windows
        first = tokens(300)
        [output] = llm.generate([first], LONG, use_tqdm=False)
        longer = [*first, *output.outputs[0].token_ids, *tokens(5, seed=1)]
        again = llm.generate([longer, [*first[:200], *tokens(50, seed=2)], first], SHORT, use_tqdm=False)
        found.append([(each.num_cached_tokens, each.outputs[0].token_ids) for each in (output, *again)])
        if has_windows:
            num_blocks = sum(size.num_tokens // BLOCK_TOKENS + 2 for size in spec.window_sizes)
            most = llm.engine.cache.stats().num_snapshots * num_blocks
            assert 0 < num_window_blocks(llm) <= most
    if llm.engine.core.spec.has_states:
        assert found[0] == found[1]
    else:  # without window blocks, it resumes without snapshots
        assert [answer for _, answer in found[0]] == [answer for _, answer in found[1]]
        assert [hit for hit, _ in found[0]] == [0, 449, 0, 299]
    uncached = make_llm(enable_prefix_caching=False, memory="16MiB")
    assert [list(each) for _, each in found[0][:1]] == [
        list(each.outputs[0].token_ids) for each in uncached.generate([first], LONG, use_tqdm=False)
    ]


@pytest.fixture(params=["lfm3", "inkling", "recurrent_gemma-odd", "gemma3", f"gemma3{TWO_SIZES}"])
def make_small(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    """Build LLMs whose device has room for few prompts."""
    make_llm = llm_maker(save(request.param, tmp_path, monkeypatch), monkeypatch, device="cpu")
    spec = make_llm(memory="16MiB").engine.core.spec
    assert spec.has_window_blocks
    num_slabs = slabs_for(spec, 400) + (3 if spec.has_states else 1)
    return partial(make_llm, memory=num_slabs * spec.slab_bytes, max_model_len=400)


@pytest.fixture
def expected(make_small: MakeLLM) -> list[list[int]]:
    return answers(make_small(enable_prefix_caching=False), PROMPTS)


@pytest.mark.parametrize("snapshot_dtype", ["float32", "int8"])
def test_evicted_windows_come_back_from_host_memory(
    make_small: MakeLLM, expected: list[list[int]], snapshot_dtype: str
) -> None:
    llm = make_small(host_memory="8MiB", snapshot_dtype=snapshot_dtype)
    assert llm.engine.core.spec.has_window_blocks
    assert serve_in_turn(llm) == (expected, [0] * len(PROMPTS))
    found, hits = serve_in_turn(llm)
    assert hits == whole_hits(llm)
    assert snapshot_dtype == "int8" or found == expected
    [host] = tier_stats(llm)
    assert host.num_loads >= len(PROMPTS) - 3


def test_windows_come_back_from_files_after_a_restart(
    make_small: MakeLLM, expected: list[list[int]], tmp_path: Path
) -> None:
    first = make_small(disk_cache=str(tmp_path / "cache"))
    assert serve(first) == (expected, [0] * len(PROMPTS))
    assert serve(first) == (expected, whole_hits(first))
    assert disk_of(first).num_loads > 0
    first.engine.core.close()
    second = make_small(disk_cache=str(tmp_path / "cache"))
    assert disk_of(second).num_snapshots > 0
    found, hits = serve(second)
    assert found == expected
    assert sum(hit > 0 for hit in hits) >= len(PROMPTS) - 2, hits
    assert disk_of(second).num_loads >= len(PROMPTS) - 2
    second.engine.core.close()


@pytest.mark.parametrize("family", ["lfm3", "inkling", "recurrent_gemma-odd", "gemma3", f"lfm3-odd{TWO_SIZES}"])
def test_windows_are_fetched_from_another_engine(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save(family, tmp_path, monkeypatch)
    make_llm = llm_maker(directory, monkeypatch, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = answers(make_llm(enable_prefix_caching=False, memory="16MiB"), PROMPTS, params)
    options = {"memory": "16MiB", "max_model_len": 400}
    producer, consumer = (
        Node(load_uni_executor(config_of(directory, **options)), directory, **options) for _ in range(2)
    )
    assert producer.core.spec.has_window_blocks
    num_computed = int(not producer.core.spec.has_states)
    for count, prompt, answer in zip(LENGTHS, PROMPTS, expected, strict=True):
        found = decode(producer, consumer, prompt, prefill(producer, prompt))
        assert (found.tokens, found.hit, found.lost) == (answer, count - num_computed, 0)
    assert consumer.cache.stats().loads.num_done == len(PROMPTS)
    for node in (producer, consumer):
        node.check_nothing_leaks()
        for windows in node.cache.internals().memory.windows:
            assert windows.allocator.num_blocks == windows.num_evictable > 0
            assert windows.allocator.num_held_slabs == 0
        assert node.core.hand_over is not None
        node.core.hand_over.close()


@pytest.mark.parametrize("make_small", ["gemma3"], indirect=True)
def test_damaged_files_of_windows_cost_time_but_no_token(
    make_small: MakeLLM, expected: list[list[int]], tmp_path: Path
) -> None:
    first = make_small(disk_cache=str(tmp_path / "cache"))
    assert serve(first)[0] == expected
    first.engine.core.close()
    damaged = sorted((tmp_path / "cache").glob("*.snapshot"))
    assert damaged
    for path in damaged:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    second = make_small(disk_cache=str(tmp_path / "cache"))
    assert serve(second) == (expected, [0] * len(PROMPTS))
    assert disk_of(second).num_failed_loads > 0
    second.engine.core.close()


def whole_hits(llm: LLM) -> list[int]:
    """Return the hits of prompts that are cached whole: without states, the last token is computed."""
    return [length - (not llm.engine.core.spec.has_states) for length in LENGTHS]


def serve_in_turn(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """Return answers and hits of prompts that come one after the other."""
    outputs = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
    return [list(each.outputs[0].token_ids) for each in outputs], [each.num_cached_tokens for each in outputs]


@pytest.mark.parametrize(
    ("family", "host_memory", "line"),
    [
        ("lfm3", None, "store the last "),
        ("lfm3", "8MiB", "store the last "),
        ("gemma3", None, "store the last "),
        ("gemma3", "8MiB", "store the last "),
        ("recurrent_gemma-odd", None, "tokens of a request, and of a snapshot in at most "),
        ("qwen3_5", None, None),
    ],
)
def test_start_says_what_windows_save(
    family: str, host_memory: str | None, line: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_llm = llm_maker(families.save(family, tmp_path), monkeypatch, device="cpu")
    llm = make_llm(host_memory=host_memory, memory="16MiB")
    found = [text for text in llm.engine.describe() if text.startswith("windows:")]
    assert len(found) == (line is not None)
    assert all(line in text for text in found if line is not None)
    [block] = [text for text in llm.engine.describe() if text.startswith("block:")]
    assert block.startswith("block: 256 bytes for 64 tokens;") == family.startswith("recurrent_gemma")
