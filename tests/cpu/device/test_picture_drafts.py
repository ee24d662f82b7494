"""Draft layers read the embeddings and the positions of pictures, as the model does."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cpu.device.picture_driver import PictureDriver, Prompt, Running, random_picture, text
from tests.cpu.models.families import save

NAME = "qwen3_5-vision"
ATTENTION_LAYER = "model.language_model.layers.1."
EMBEDDING = "model.language_model.embed_tokens.weight"
NUM_DRAFTS = 3
TOLERANCE = 1e-4
"""Keys and values are about 1, and sums of float32 in other orders."""

SPECIAL = 60
"""A token that stands for a picture of one token."""

SMALL, WIDE, TALL = random_picture(1, 1), random_picture(3, 7), random_picture(6, 2)


def save_with_drafts(directory: Path) -> Path:
    """Write a model with a draft layer: a copy of its first layer of attention."""
    file = save(NAME, directory) / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(0)
    hidden_size = tensors[EMBEDDING].shape[1]
    for name in [name for name in tensors if name.startswith(ATTENTION_LAYER)]:
        tensors[name.replace(ATTENTION_LAYER, "mtp.layers.0.")] = tensors[name].clone()
    tensors["mtp.fc.weight"] = torch.randn(hidden_size, 2 * hidden_size, generator=generator) * 0.2
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{norm}.weight"] = torch.randn(hidden_size, generator=generator) * 0.2
    save_file(tensors, file, metadata={"format": "pt"})
    return file.parent


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_drafts(tmp_path_factory.mktemp("drafts"))


def memory_after(driver: PictureDriver, running: Running, ends: list[int]) -> Tensor:
    """Return what the draft layer keeps of a prompt that is computed up to each of ``ends``."""
    for end in ends:
        driver.step((running, end), next_drafts=NUM_DRAFTS)
    return draft_memory(driver, running)


def draft_memory(driver: PictureDriver, running: Running) -> Tensor:
    """Return the draft layer's keys and values of a prompt, which cover all positions."""
    length = len(running.prompt.token_ids)
    streams = driver.runner.arena.layers[-1].streams.values()
    parts = [stream[torch.tensor(running.blocks)].flatten(0, 1)[:length].flatten(1) for stream in streams]
    return torch.cat(parts, dim=1).clone()


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_pictures_of_one_token_are_drafted_after_as_words_are(directory: Path) -> None:
    driver = PictureDriver(directory, draft_tokens=NUM_DRAFTS)
    asked = Prompt.of(text(9), SMALL, text(3, 1), SMALL, text(4, 2))
    found = memory_after(driver, driver.start(asked), [len(asked.token_ids)])

    file = directory / "model.safetensors"
    original = load_file(file)
    tower = driver.runner.model.tower
    assert tower is not None
    pixels = torch.frombuffer(bytearray(SMALL.pixels), dtype=torch.uint8).view(SMALL.height, SMALL.width, 3)
    embedding = original[EMBEDDING].clone()
    embedding[SPECIAL] = tower([pixels])[0]
    save_file({**original, EMBEDDING: embedding}, file, metadata={"format": "pt"})
    try:
        words = PictureDriver(directory, draft_tokens=NUM_DRAFTS)
    finally:
        save_file(original, file, metadata={"format": "pt"})
    as_words = Prompt.of(text(9), [SPECIAL], text(3, 1), [SPECIAL], text(4, 2))
    assert SPECIAL not in (*text(9), *text(3, 1), *text(4, 2))
    assert_close(found, memory_after(words, words.start(as_words), [len(as_words.token_ids)]))


ASKED = Prompt.of(text(2), WIDE, text(1), TALL, text(40, 1), WIDE, text(9, 2))


@pytest.mark.parametrize("size", [1, 3, 21, 64])
def test_drafts_do_not_depend_on_where_prompts_are_cut(directory: Path, size: int) -> None:
    driver, length = PictureDriver(directory, draft_tokens=NUM_DRAFTS), len(ASKED.token_ids)
    whole = memory_after(driver, driver.start(ASKED), [length])
    assert_close(memory_after(driver, driver.start(ASKED), [*range(size, length, size), length]), whole)


def test_drafts_do_not_depend_on_where_prompts_resume(directory: Path) -> None:
    driver, length = PictureDriver(directory, draft_tokens=NUM_DRAFTS), len(ASKED.token_ids)
    cuts = [edge for span in ASKED.spans for edge in (span.start, span.end)]
    running = driver.start(ASKED)
    _, slots = driver.step((running, length), cuts=cuts, next_drafts=NUM_DRAFTS)
    for cut, slot in zip(cuts, slots, strict=True):
        assert_close(
            memory_after(driver, driver.fork(running, ASKED, cut, slot), [length]), draft_memory(driver, running)
        )
