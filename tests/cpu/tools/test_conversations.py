"""Training conversations of the demo model."""

from random import Random

from strandline.demo.facts import estimate_tokens
from tools.conversations import make_conversation


def test_a_conversation_fills_its_tokens() -> None:
    for seed in range(20):
        messages = make_conversation(Random(seed), 1000)
        assert messages[-1]["role"] == "assistant"
        assert 800 < sum(estimate_tokens(m["content"]) + 5 for m in messages) < 1200
