"""A prompt with pictures that one engine has computed is continued by another, which encodes none of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from strandline import SamplingParams
from strandline.engine.loading import load_uni_executor
from strandline.ids import RequestId
from strandline.models.vision.tower import VisionTower
from strandline.records.events import Submission
from strandline.records.plan import NewRequest
from strandline.records.transfer_params import TransferParams, read_transfer_params
from tests.cpu.device.picture_driver import Prompt, random_picture, text
from tests.cpu.engine.test_hand_over import KEEP, NUM_TOKENS, Answer, Node, config_of, run
from tests.cpu.engine.vision_engine import preferred, save_vision_model

NAME = "qwen3_5-vision"
ASKED = Prompt.of(text(40), random_picture(3, 7), text(3), random_picture(6, 2), text(30))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    directory = save_vision_model(NAME, tmp_path)
    config = config_of(directory, max_model_len=256)
    found = [Node(load_uni_executor(config), directory, max_model_len=256) for _ in range(2)]
    yield found
    for node in found:
        assert node.core.hand_over is not None
        node.core.hand_over.close()


def submit(node: Node, name: str, prompt: Prompt, transfer: TransferParams, num_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    new = NewRequest(RequestId(name), prompt.token_ids, params, 0, frozenset(), ())
    pixels = {picture.digest: picture for _, picture in prompt.pictures}
    total = len(prompt.token_ids) + num_tokens
    node.answers[name] = Answer()
    node.core.add(Submission(new, total, transfer=transfer, pictures=prompt.spans, pixels=pixels))


def test_pictures_are_handed_over_as_words_are(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = nodes
    submit(producer, "prefill", ASKED, KEEP, 1)
    run([producer])
    params = read_transfer_params(producer.answers["prefill"].params)
    assert params is not None
    monkeypatch.setattr(VisionTower, "forward", None)
    submit(consumer, "decode", ASKED, params, NUM_TOKENS)
    run(nodes, lambda: consumer.is_idle)
    answer = consumer.answers["decode"]
    assert answer.hit == len(ASKED.token_ids)
    assert answer.tokens == preferred(NAME, ASKED, answer.tokens)
