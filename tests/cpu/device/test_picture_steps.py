"""Runners answer prompts with pictures as transformers do, however their tokens are spread over steps."""

from pathlib import Path

import pytest

from tests.cpu.device.picture_driver import (
    PictureDriver,
    Prompt,
    expected_logprobs,
    generate,
    logprobs_of,
    random_picture,
    text,
)
from tests.cpu.models.families import oracle, save

MODELS = ["qwen3_5-vision", "qwen3_5_moe-vision", "qwen4_exp-vision"]
TOLERANCE = 2e-4
"""Log-probabilities are between -10 and 0; either side sums float32 in its own order."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vision")
    return {name: save(name, folder) for name in MODELS}


WIDE, TALL, SMALL = random_picture(3, 7), random_picture(6, 2), random_picture(1, 1)
PROMPTS = {
    "text": Prompt.of(text(30)),
    "one": Prompt.of(text(9), WIDE, text(12, 1)),
    "first and last": Prompt.of(TALL, text(5), WIDE),
    "two": Prompt.of(text(40), WIDE, text(1, 1), TALL, text(30, 2)),
    "many": Prompt.of(text(2), SMALL, text(1), WIDE, text(2, 1), TALL, text(1, 2), WIDE, text(70, 3)),
}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", MODELS)
def test_prompts_with_pictures_equal_transformers(directories: dict[str, Path], name: str, prompt: str) -> None:
    driver, asked = PictureDriver(directories[name]), PROMPTS[prompt]
    expected, _ = expected_logprobs(oracle(name), asked)
    found = logprobs_of(driver, driver.start(asked), [len(asked.token_ids)])
    assert found == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("size", [1, 2, 5, 16, 64])
@pytest.mark.parametrize("name", MODELS)
def test_prompts_may_be_cut_inside_pictures(directories: dict[str, Path], name: str, size: int) -> None:
    driver, asked = PictureDriver(directories[name]), PROMPTS["many"]
    expected, _ = expected_logprobs(oracle(name), asked)
    length = len(asked.token_ids)
    found = logprobs_of(driver, driver.start(asked), [*range(size, length, size), length])
    assert found == pytest.approx(expected, abs=TOLERANCE)
    assert driver.num_encoded == len(asked.pictures)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", MODELS)
def test_decoded_tokens_equal_transformers(directories: dict[str, Path], name: str, prompt: str) -> None:
    driver, asked = PictureDriver(directories[name]), PROMPTS[prompt]
    answer = generate(driver, driver.start(asked), 8)
    for count in range(8):
        _, greedy = expected_logprobs(oracle(name), asked.followed_by(answer[:count]))
        assert greedy == answer[count]


@pytest.mark.parametrize("name", MODELS)
def test_prompts_resume_before_and_after_every_picture(directories: dict[str, Path], name: str) -> None:
    driver, asked = PictureDriver(directories[name]), PROMPTS["many"]
    expected, _ = expected_logprobs(oracle(name), asked)
    cuts = [edge for span in asked.spans for edge in (span.start, span.end)]
    running = driver.start(asked)
    _, slots = driver.step((running, len(asked.token_ids)), cuts=cuts)
    for cut, slot in zip(cuts, slots, strict=True):
        num_before = driver.num_encoded
        resumed = driver.fork(running, asked, cut, slot)
        found = logprobs_of(driver, resumed, [len(asked.token_ids)])
        assert found == pytest.approx(expected[cut:], abs=TOLERANCE)
        assert driver.num_encoded - num_before == sum(span.start >= cut for span in asked.spans)


def test_swapped_pictures_give_other_answers(directories: dict[str, Path]) -> None:
    name = MODELS[0]
    first, second = random_picture(2, 3), random_picture(2, 3, seed=1)
    found = []
    for pictures in ((first, second), (second, first), (first, first)):
        asked = Prompt.of(text(3), pictures[0], text(2), pictures[1], text(20, 1))
        driver = PictureDriver(directories[name])
        found.append(logprobs_of(driver, driver.start(asked), [len(asked.token_ids)]))
        expected, _ = expected_logprobs(oracle(name), asked)
        assert found[-1] == pytest.approx(expected, abs=TOLERANCE)
    assert not any(found[0] == pytest.approx(other, abs=0.01) for other in found[1:])


def test_text_and_pictures_share_steps(directories: dict[str, Path]) -> None:
    name, driver = MODELS[0], PictureDriver(directories[MODELS[0]])
    asked = [PROMPTS["one"], PROMPTS["text"], PROMPTS["two"]]
    running = [driver.start(prompt) for prompt in asked]
    found: list[list[float]] = [[], [], []]
    decoding = driver.start(PROMPTS["one"])
    generate(driver, decoding, 1)
    for share in (0.3, 0.6, 1.0):
        ends = [int(share * len(prompt.token_ids)) for prompt in asked]
        parts = [(decoding, len(decoding.prompt.token_ids)), *zip(running, ends, strict=True)]
        result, _ = driver.step(*parts)
        decoding.prompt = decoding.prompt.followed_by(result.token_ids[0])
        for index in range(3):
            found[index] += [each.logprob for each in result.prompt_logprobs.get(index + 1, ())]
    for prompt, logprobs in zip(asked, found, strict=True):
        expected, _ = expected_logprobs(oracle(name), prompt)
        assert logprobs == pytest.approx(expected[:-1], abs=TOLERANCE)
    alone = PictureDriver(directories[name])
    assert list(decoding.prompt.token_ids[-4:]) == generate(alone, alone.start(PROMPTS["one"]), 4)


def test_deterministic_answers_have_the_same_bits_in_any_company(directories: dict[str, Path]) -> None:
    asked = PROMPTS["many"]
    length, found = len(asked.token_ids), []
    for size in (64, 128, 192):
        driver = PictureDriver(directories[MODELS[0]], deterministic=True)
        found.append(logprobs_of(driver, driver.start(asked), [*range(size, length, size), length]))
    running, other = driver.start(asked), driver.start(PROMPTS["two"])
    result, _ = driver.step((running, length), (other, 64))
    found.append([each.logprob for each in (*result.prompt_logprobs[0], *result.logprobs[0])])
    assert all(each == found[0] for each in found[1:])
