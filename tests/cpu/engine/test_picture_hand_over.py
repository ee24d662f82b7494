"""Prompts with pictures that another engine continues."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from strandline.engine.loading import load_uni_executor
from strandline.models.vision.tower import VisionTower
from strandline.records.pictures import PlacedPicture
from strandline.records.transfer_params import read_transfer_params
from tests.cpu.device.picture_driver import Prompt, random_picture, text
from tests.cpu.engine.test_hand_over import KEEP, Answer, Node, config_of, run
from tests.cpu.engine.vision_engine import preferred, save_vision_model

NAME = "qwen3_5-vision"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    model, threads = save_vision_model(NAME, tmp_path), torch.get_num_threads()
    config = config_of(model, max_model_len=400)
    nodes = [Node(load_uni_executor(config), model, max_model_len=400) for _ in range(2)]
    yield nodes
    for node in nodes:
        assert node.core.hand_over is not None
        node.core.hand_over.close()
    torch.set_num_threads(threads)


def placed(prompt: Prompt) -> list[PlacedPicture]:
    return [PlacedPicture(*each) for each in prompt.pictures]


def hand_over(producer: Node, consumer: Node, kept: Prompt, asked: Prompt) -> Answer:
    """Compute a prompt on one engine; ask the other about one with what the first has kept."""
    producer.submit("kept", kept.token_ids, KEEP, placed(kept))
    run([producer])
    params = read_transfer_params(producer.answers["kept"].params)
    assert params is not None
    consumer.submit("asked", asked.token_ids, params, placed(asked))
    run([producer, consumer], lambda: consumer.is_idle)
    return consumer.answers["asked"]


def test_picture_is_continued_without_being_encoded_again(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = nodes
    encoded, forward = list[int](), VisionTower.forward
    monkeypatch.setattr(VisionTower, "forward", lambda *args: encoded.append(1) or forward(*args))
    prompt = Prompt.of(text(70), random_picture(3, 7), text(9, 1))
    answer = hand_over(producer, consumer, prompt, prompt)
    assert answer.hit == len(prompt.token_ids)
    assert answer.tokens == preferred(NAME, prompt, answer.tokens)
    assert len(encoded) == 1


def test_another_picture_gets_nothing_of_what_was_kept(nodes: list[Node]) -> None:
    kept = Prompt.of(text(70), random_picture(3, 7), text(9, 1))
    asked = Prompt.of(text(70), random_picture(3, 7, seed=1), text(9, 1))
    answer = hand_over(*nodes, kept, asked)
    assert answer.hit <= 70
    assert answer.tokens == preferred(NAME, asked, answer.tokens)
