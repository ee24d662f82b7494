"""Sleep, resets of the cache and new weights, offline."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.errors import ConfigError, RequestError
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.engine.vision_engine import save_vision_model

PROMPT = list(range(90))
PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
MEMORY = 192 * 2**20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two models that differ in their weights alone."""
    directory = tmp_path_factory.mktemp("models")
    return str(save_tiny_model(directory / "a", seed=1)), str(save_tiny_model(directory / "b", seed=2))


@pytest.fixture(scope="module")
def llm(models: tuple[str, str]) -> Iterator[LLM]:
    with LLM(models[0], memory=MEMORY, host_memory="64MiB", device="cpu", skip_tokenizer_init=True) as llm:
        yield llm


def answer(llm: LLM, prompt: Any = None) -> tuple[list[int], int]:
    """Return the output's tokens, and how many tokens of the prompt were hit."""
    [output] = llm.generate([prompt or PROMPT], PARAMS, use_tqdm=False)
    return output.outputs[0].token_ids, output.num_cached_tokens


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("level", [1, 2])
def test_sleeper_gives_memory_back_and_wakes_warm(llm: LLM, level: int) -> None:
    llm.reset_prefix_cache()
    tokens, _ = answer(llm)
    llm.engine.core.executor.runner.arena.prefault(0)  # type: ignore[attr-defined]
    llm.engine.core.executor.runner.arena.bytes[MEMORY // 2 :].add_(1)  # type: ignore[attr-defined]
    awake_bytes = resident_bytes()
    llm.sleep(level)
    assert awake_bytes - resident_bytes() > 0.4 * MEMORY
    with pytest.raises(RequestError, match="asleep"):
        answer(llm)
    llm.wake_up(["weights"])
    with pytest.raises(RequestError, match="asleep"):
        answer(llm)
    llm.wake_up()
    found, num_hit = answer(llm)
    assert found == tokens
    assert num_hit > 0  # from host memory


def test_reset_drops_what_is_cached_in_every_tier(llm: LLM) -> None:
    tokens, _ = answer(llm)
    assert answer(llm)[1] == len(PROMPT)
    assert llm.reset_prefix_cache()
    assert answer(llm) == (tokens, 0)


def test_new_weights_answer_as_their_own_engine(llm: LLM, models: tuple[str, str]) -> None:
    before, _ = answer(llm)
    with LLM(models[1], memory="16MiB", device="cpu", skip_tokenizer_init=True) as other:
        expected, _ = answer(other)
    assert before != expected
    llm.update_weights_from_disk(models[1])
    assert answer(llm) == (expected, 0)
    assert answer(llm) == (expected, len(PROMPT))
    llm.sleep(2)
    llm.update_weights_from_disk(models[0])  # as trainers do: no weights are read twice
    llm.wake_up(["kv_cache"])
    assert answer(llm) == (before, 0)


def test_level_two_reads_the_last_weights_again(llm: LLM, models: tuple[str, str]) -> None:
    llm.update_weights_from_disk(models[1])
    expected, _ = answer(llm)
    llm.sleep(2)
    llm.wake_up()
    assert answer(llm, PROMPT[:-1] + PROMPT[-1:])[0] == expected
    llm.update_weights_from_disk(models[0])


def test_second_sleep_gives_back_what_the_first_kept(llm: LLM, models: tuple[str, str], tmp_path: Path) -> None:
    llm.update_weights_from_disk(shutil.copytree(models[1], tmp_path / "b"))
    expected, _ = answer(llm)
    llm.sleep(1)
    llm.wake_up(["weights"])
    llm.sleep(1)
    llm.sleep(2)
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(ConfigError):
        llm.wake_up()
    for tags in ("weights", ["cuda_graph"]):
        with pytest.raises(RequestError, match="tags must be a list of weights, kv_cache"):
            llm.wake_up(tags)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="asleep"):
        answer(llm)
    llm.update_weights_from_disk(models[1])
    llm.wake_up()
    assert answer(llm)[0] == expected
    llm.update_weights_from_disk(models[0])


@pytest.mark.usefixtures("forked_workers")
def test_ranks_sleep_and_change_weights_together(models: tuple[str, str]) -> None:
    options: dict[str, Any] = {"memory": "16MiB", "device": "cpu", "skip_tokenizer_init": True}
    with LLM(models[1], **options) as other:
        expected = answer(other)
    with LLM(models[0], **options, tensor_parallel_size=2) as llm:
        before = answer(llm)
        llm.update_weights_from_disk(models[1])
        assert answer(llm) == expected != before
        llm.sleep(2)
        llm.wake_up()
        assert answer(llm)[0] == expected[0]


def test_other_models_weights_are_refused(llm: LLM, tmp_path: Path) -> None:
    before, _ = answer(llm)
    other = save_tiny_model(tmp_path / "wide", hidden_size=48)
    for path in (str(other), str(tmp_path / "none")):
        with pytest.raises(ConfigError):
            llm.update_weights_from_disk(path)
    assert answer(llm)[0] == before


@pytest.mark.parametrize("kind", ["adapters", "pictures"])
def test_engines_whose_weights_stay_sleep_lightly(kind: str, models: tuple[str, str], tmp_path: Path) -> None:
    options: dict[str, Any] = {"memory": "16MiB", "device": "cpu", "skip_tokenizer_init": True}
    model = models[0] if kind == "adapters" else str(save_vision_model("qwen3_5-vision", tmp_path))
    with LLM(model, **options, enable_lora=kind == "adapters") as llm:
        answer(llm)
        before = answer(llm)
        for change in (lambda: llm.sleep(2), lambda: llm.update_weights_from_disk(model)):
            with pytest.raises(ConfigError, match="--language-model-only"):
                change()
        assert answer(llm) == before  # nothing was given back or dropped
        llm.sleep(1)
        llm.wake_up()
        assert answer(llm)[0] == before[0]
