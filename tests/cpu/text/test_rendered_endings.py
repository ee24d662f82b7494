"""Prompts that differ in the end of their last message: rendered once, with the tokens of the text they share."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import RequestError
from strandline.text.conversations import ChatRenderer
from tests.cpu.engine.tokenizers import CALLS_IN_JSON, chat_template, chat_tokenizer

RENDERER = ChatRenderer(chat_tokenizer(chat_template(CALLS_IN_JSON, thinks=False)))
TEXTS = st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "x", " ", "\n", "é", "<", "\ufdd0"])).map("".join)


@given(state=TEXTS, endings=st.lists(TEXTS, min_size=1, max_size=3))
@settings(deadline=None)
def test_tokens_are_those_of_whole_conversations(state: str, endings: list[str]) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "s" + state}]
    found = RENDERER.render_endings(messages, [f"\n{ending}?" for ending in endings])
    for ending, tail_ids in zip(endings, found.tails_ids, strict=True):
        whole = RENDERER.render([messages[0], {"role": "user", "content": f"s{state}\n{ending}?"}])
        assert found.head_ids + tail_ids == whole.token_ids
        assert whole.text.endswith(found.closing)


def test_template_that_alters_the_shared_text_is_refused() -> None:
    reversing = ChatRenderer(chat_tokenizer("{% for m in messages %}{{ m.content | reverse }}{% endfor %}"))
    with pytest.raises(RequestError, match="in a way that depends on them"):
        reversing.render_endings([{"role": "user", "content": "abc"}], ["1", "2"])
