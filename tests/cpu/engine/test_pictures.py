"""Answers about pictures equal transformers', cached or not, in every mode of the engine."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from strandline import LLM
from strandline.device.uni_executor import UniExecutor
from strandline.engine.core import new_warm_up
from strandline.models.vision.tower import VisionTower
from tests.cpu.device.picture_driver import Prompt, random_picture, text
from tests.cpu.device.test_picture_drafts import save_with_drafts
from tests.cpu.engine.conftest import llm_maker
from tests.cpu.engine.eager_graphs import replay_eagerly
from tests.cpu.engine.test_ranks import making
from tests.cpu.engine.vision_engine import PREPROCESSOR, Asked, ask, preferred, save_vision_model

MODELS = ["qwen3_5-vision", "qwen3_5_moe-vision", "qwen4_exp-vision"]
WIDE, TALL, SMALL = random_picture(3, 7), random_picture(6, 2), random_picture(1, 1)
PROMPTS = [
    Prompt.of(text(9), WIDE, text(12, 1)),
    Prompt.of(text(5, 1), TALL, text(5), WIDE, text(3)),
    Prompt.of(text(60, 2)),
    Prompt.of(text(40), WIDE, text(1, 1), TALL, text(30, 2), SMALL, text(90, 3)),
]

AUDIT_TOLERANCE = 1e-3
"""Log-probabilities, cached and not, are sums of float32 in other orders."""

MakeVisionLLM = Callable[..., LLM]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    for name in MODELS:
        save_vision_model(name, folder)
    return folder


@pytest.fixture
def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> MakeVisionLLM:
    def make_llm(name: str = MODELS[0], **options: Any) -> LLM:
        return llm_maker(folder / name, monkeypatch, device="cpu")(**options)

    return make_llm


def check_answers(name: str, prompts: list[Prompt], answers: list[list[int]]) -> None:
    assert answers == [preferred(name, *each) for each in zip(prompts, answers, strict=True)]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Heights and widths of pictures that towers encode."""
    found, forward = list[tuple[int, int]](), VisionTower.forward

    def spy(tower: VisionTower, pictures: Sequence[Tensor]) -> Tensor:
        found.extend((len(pixels), len(pixels[0])) for pixels in pictures)
        return forward(tower, pictures)

    monkeypatch.setattr(VisionTower, "forward", spy)
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "short steps": {"max_num_batched_tokens": 16},
    "deterministic": {"deterministic": True},
    "overlapped": {"async_scheduling": True},
    "no cache": {"enable_prefix_caching": False},
    "n-gram drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "audited": {"audit_rate": 1.0},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_answers_about_pictures_equal_transformers(make: MakeVisionLLM, name: str, options: str) -> None:
    llm = make(name, **OPTIONS[options])
    first = ask(llm, *PROMPTS)
    check_answers(name, PROMPTS, first)
    assert ask(llm, *PROMPTS) == first
    assert llm.engine.core.audits.largest_difference < AUDIT_TOLERANCE


def run_one(llm: LLM, prompt: Prompt, **options: Any) -> tuple[list[int], int]:
    """Return the answer to a prompt, and how many of its tokens were hit."""
    asked = Asked(llm)
    asked.add("one", prompt, **options)
    asked.run()
    return asked.answers["one"], asked.hit_tokens("one")


@pytest.mark.parametrize("name", MODELS)
def test_next_turns_hit_all_pictures_and_encode_none_again(
    make: MakeVisionLLM, encoded: list[tuple[int, int]], name: str
) -> None:
    llm, asked = make(name), Prompt.of(text(9), WIDE, text(12, 1))
    pictures, known = [WIDE, TALL, SMALL, random_picture(2, 2)], 0
    for turn, picture in enumerate(pictures[1:]):
        answer, num_hit = run_one(llm, asked)
        assert answer == preferred(name, asked, answer)
        assert num_hit == known
        assert encoded == [(each.height, each.width) for each in pictures[: turn + 1]]
        known = len(asked.token_ids) + len(answer) - 1
        asked = asked.and_then(answer, text(3, turn), picture, text(4, turn))


def test_hits_end_where_pictures_differ(make: MakeVisionLLM) -> None:
    llm, others = make(), [random_picture(3, 7, seed) for seed in (1, 2)]
    for index, picture in enumerate([WIDE, *others]):
        asked = Prompt.of(text(80), picture, text(12, 1))
        answer, num_hit = run_one(llm, asked)
        assert answer == preferred(MODELS[0], asked, answer)
        assert num_hit <= (80 if index else 0)
    assert run_one(llm, Prompt.of(text(80), WIDE, text(12, 1)))[1] == len(Prompt.of(text(80), WIDE, text(12)).token_ids)


def test_one_picture_at_two_positions_is_encoded_once(make: MakeVisionLLM, encoded: list[tuple[int, int]]) -> None:
    asked = Prompt.of(text(5), WIDE, text(3), WIDE, text(2), WIDE)
    answer, _ = run_one(make(), asked)
    assert answer == preferred(MODELS[0], asked, answer)
    assert len(encoded) == 1


def test_preempted_requests_go_on_after_their_pictures(make: MakeVisionLLM) -> None:
    slab = make().engine.core.spec.slab_bytes
    prompts = [Prompt.of(text(20, seed), WIDE, text(20)) for seed in range(4)]
    expected = ask(make(enable_prefix_caching=False), *prompts, num_tokens=80)
    llm = make(memory=9 * slab, max_model_len=150)
    assert ask(llm, *prompts, num_tokens=80) == expected
    assert llm.engine.scheduler.num_preemptions > 0
    check_answers(MODELS[0], prompts, expected)


def test_pictures_come_back_from_host_memory_and_disk(
    make: MakeVisionLLM, encoded: list[tuple[int, int]], tmp_path: Path
) -> None:
    prompts = [Prompt.of(text(70, seed), random_picture(3, 7, seed), text(30)) for seed in range(8)]
    slab = make().engine.core.spec.slab_bytes
    options: dict[str, Any] = {
        "memory": 14 * slab,
        "max_model_len": 256,
        "host_memory": 12 * slab,
        "disk_cache": str(tmp_path),
        "disk_cache_size": "1GiB",
    }
    llm = make(**options)
    expected = [run_one(llm, prompt)[0] for prompt in prompts]
    check_answers(MODELS[0], prompts, expected)
    assert len(encoded) == len(prompts)
    again = [run_one(llm, prompt) for prompt in prompts]
    assert [answer for answer, _ in again] == expected
    assert sum(num_hit == len(prompt.token_ids) for prompt, (_, num_hit) in zip(prompts, again, strict=True)) >= 6
    llm.close()
    restarted = make(**options)
    num_before = len(encoded)
    found = [run_one(restarted, prompt) for prompt in prompts]
    assert [answer for answer, _ in found] == expected
    assert len(encoded) - num_before <= 2


@pytest.mark.parametrize("name", MODELS)
def test_several_ranks_answer_as_one(folder: Path, encoded: list[tuple[int, int]], name: str) -> None:
    with making(folder / name, 2) as make_divided:
        llm = make_divided()
        found = ask(llm, *PROMPTS)
        check_answers(name, PROMPTS, found)
        assert ask(llm, *PROMPTS) == found
    assert len(encoded) == 3, "each picture of a step is encoded by one rank"


def test_warm_up_encodes_a_picture(make: MakeVisionLLM, encoded: list[tuple[int, int]]) -> None:
    llm = make(max_num_seqs=4, max_num_batched_tokens=64)
    new_warm_up(llm.config, llm.engine.core.executor).run()
    assert len(encoded) == 1
    check_answers(MODELS[0], PROMPTS, ask(llm, *PROMPTS))


def test_models_may_be_served_without_their_tower(make: MakeVisionLLM, encoded: list[tuple[int, int]]) -> None:
    llm = make(language_model_only=True)
    assert llm.engine.core.limits.max_picture_tokens == 0
    [answer] = ask(llm, PROMPTS[2])
    assert answer == preferred(MODELS[0], PROMPTS[2], answer)
    assert not encoded


@pytest.mark.parametrize("method", [{"method": "mtp"}, {"method": "mtp", "adaptive": False}])
def test_drafts_change_no_answer_about_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any]
) -> None:
    directory = save_with_drafts(tmp_path)
    (directory / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    make_drafting = llm_maker(directory, monkeypatch, device="cpu")
    prompts = [*PROMPTS, Prompt.of(text(3), WIDE)]
    expected = ask(make_drafting(), *prompts, num_tokens=12)
    check_answers(MODELS[0], prompts, expected)
    llm = make_drafting(speculative_config={"num_speculative_tokens": 3, **method})
    assert ask(llm, *prompts, num_tokens=12) == expected
    assert ask(llm, *prompts, num_tokens=12) == expected
    if not method.get("adaptive", True):
        assert llm.engine.core.stats().speculation.num_draft_tokens > 0


def test_padded_steps_with_prompts_take_pictures(make: MakeVisionLLM) -> None:
    expected = ask(make(), *PROMPTS, num_tokens=12)
    llm = make(max_num_batched_tokens=64, async_scheduling=True)
    executor = llm.engine.core.executor
    assert isinstance(executor, UniExecutor)
    graphs = replay_eagerly(executor.runner, 0, 8, 512, replays_plain=True)
    asked = Asked(llm)
    for index, prompt in enumerate(PROMPTS):
        asked.add(str(index), prompt, 12)
        asked.step()
    asked.run()
    assert [asked.answers[str(index)] for index in range(len(PROMPTS))] == expected
    assert min(graphs.num_replayed.values()) >= 5
