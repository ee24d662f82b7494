"""Answers about pictures are those of transformers on a GPU, too: from CUDA graphs and from launched kernels."""

import json
from pathlib import Path
from typing import Any

import pytest

from strandline import LLM
from strandline.device.steps.graphs import StepGraphs
from tests.cpu.device.picture_driver import Prompt, random_picture, text
from tests.cpu.device.test_picture_drafts import save_with_drafts
from tests.cpu.engine.conftest import llm_maker
from tests.cpu.engine.vision_engine import PREPROCESSOR, Asked, ask, preferred, save_vision_model

SETTINGS: dict[str, Any] = {"device": "cuda", "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512}
WIDE, TALL, SMALL = random_picture(3, 7), random_picture(6, 2), random_picture(1, 1)
PROMPTS = [
    Prompt.of(text(9), WIDE, text(12, 1)),
    Prompt.of(text(5, 1), TALL, text(5), WIDE, text(3)),
    Prompt.of(text(60, 2)),
    Prompt.of(text(40), WIDE, text(1, 1), TALL, text(30, 2), SMALL, text(90, 3)),
]


def check(llm: LLM, name: str) -> None:
    """Ask together, again with whole hits, and one after another while others decode."""
    expected = ask(llm, *PROMPTS, num_tokens=12)
    assert expected == [preferred(name, *each) for each in zip(PROMPTS, expected, strict=True)]
    assert ask(llm, *PROMPTS, num_tokens=12) == expected
    asked = Asked(llm)
    for index, prompt in enumerate(PROMPTS):
        asked.add(str(index), prompt, 12, salt="staggered")
        for _ in range(3):
            asked.step()
    asked.run()
    assert [asked.answers[str(index)] for index in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("name", ["qwen3_5-vision", "qwen3_5_moe-vision", "qwen4_exp-vision"])
def test_answers_about_pictures_equal_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    if "deterministic" in options and name == "qwen4_exp-vision":
        pytest.skip("indexed attention has no batch-invariant kernels")
    check(llm_maker(save_vision_model(name, tmp_path), monkeypatch, **SETTINGS)(**options), name)


def test_steps_with_pictures_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_maker(save_vision_model("qwen3_5-vision", tmp_path), monkeypatch, **SETTINGS)()
    find, found = StepGraphs.find, list[bool]()

    def spy(graphs: StepGraphs, host: Any, **options: Any) -> Any:
        step = find(graphs, host, **options)
        found.append(step is not None and host.picture_offsets is not None)
        return step

    monkeypatch.setattr(StepGraphs, "find", spy)
    check(llm, "qwen3_5-vision")
    assert any(found)


@pytest.mark.parametrize("adaptive", [False, True])
def test_drafts_change_no_answer_about_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adaptive: bool
) -> None:
    directory = save_with_drafts(tmp_path)
    (directory / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    speculation = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": adaptive}
    check(llm_maker(directory, monkeypatch, **SETTINGS)(speculative_config=speculation), "qwen3_5-vision")
