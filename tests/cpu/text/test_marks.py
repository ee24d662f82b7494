"""Marks of conversations, and the hits that snapshots at them bring."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline import LLM, SamplingParams
from strandline.errors import RequestError
from strandline.text.chat_messages import read_messages
from strandline.text.conversations import ChatRenderer
from strandline.text.marks import common_length
from strandline.text.model_files import DEMO_DIRECTORY
from strandline.text.vocabulary import load_tokenizer
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.engine.tokenizers import (
    CALLS_IN_XML,
    CHAT_VOCAB_SIZE,
    TEMPLATE,
    byte_tokenizer,
    chat_template,
    chat_tokenizer,
)

SYSTEM = {"role": "system", "content": "You answer in few words, and always in the same tone of voice."}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "description": "Finds a word.", "parameters": {"type": "object"}},
}
EPHEMERAL = {"type": "ephemeral"}
THINKING = chat_template(CALLS_IN_XML, thinks=True)
PLAIN = chat_template(CALLS_IN_XML, thinks=False)


def user(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def ends(template: str, messages: list[Any], **options: Any) -> list[str]:
    """Return the last characters before each mark."""
    tokenizer = chat_tokenizer(template)
    chat = ChatRenderer(tokenizer).render(messages, **options)
    return [tokenizer.decode(chat.token_ids[:mark])[-24:] for mark in chat.marks]


@pytest.fixture(scope="module")
def used_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory = save_tiny_model(tmp_path_factory.mktemp("chat"), vocab_size=CHAT_VOCAB_SIZE)
    chat_tokenizer(PLAIN).save_pretrained(directory)
    return LLM(str(directory), memory="16MiB", device="cpu")


@pytest.fixture
def llm(used_llm: LLM) -> LLM:
    """An LLM with an empty cache."""
    assert used_llm.reset_prefix_cache()
    return used_llm


def hits(llm: LLM, messages: list[Any], **options: Any) -> tuple[int, str]:
    """Ask; return the hit tokens and the text behind them."""
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False, **options)
    hit = output.num_cached_tokens
    return hit, llm.get_tokenizer().decode(output.prompt_token_ids[:hit])


def test_second_conversation_hits_the_system_prompt(llm: LLM) -> None:
    system = {"role": "system", "content": "Say it in the words of a captain who has seen the seven seas."}
    assert hits(llm, [system, user("Where is the harbour?")]) == (0, "")
    _, shared = hits(llm, [system, user("That was not asked before.")])
    assert shared == f"<|im_start|>system\n{system['content']}<|im_end|>\n"


def test_other_system_prompts_share_the_tools_at_first_sight(llm: LLM) -> None:
    hits(llm, [SYSTEM, user("x")], tools=[TOOL])
    _, shared = hits(llm, [{"role": "system", "content": "Rhyme."}, user("y")], tools=[TOOL])
    assert shared.endswith("}\n")
    assert "look_up" in shared
    assert "You" not in shared


def test_what_the_sender_marked_is_hit_by_another_end(llm: LLM) -> None:
    long = "A document of some length, about the tides and the moon, " * 3
    question = [{"type": "text", "text": long, "cache_control": EPHEMERAL}, {"type": "text", "text": "Who wrote it?"}]
    hits(llm, [user(question)])
    _, shared = hits(llm, [user([question[0], {"type": "text", "text": "When?"}])])
    assert shared == f"<|im_start|>user\n{long}"


def test_few_examples_before_a_question_are_shared_at_first_sight(llm: LLM) -> None:
    examples = [user("one plus one is"), {"role": "assistant", "content": "two"}]
    hits(llm, [*examples, user("two plus two is")])
    _, shared = hits(llm, [*examples, user("and what is ten plus one")])
    assert shared.endswith("two<|im_end|>\n")


def test_template_marks_system_turn_and_last_message() -> None:
    talk = [SYSTEM, user("Who are you, and where from?"), {"role": "assistant", "content": "I am I."}, user("More?")]
    found = ends(PLAIN, talk)
    assert len(found) == 2
    assert found[0].endswith("voice.<|im_end|>\n")
    assert found[1].endswith("I am I.<|im_end|>\n")


def test_an_opening_that_history_loses_is_marked_before() -> None:
    assert ends(THINKING, [user("Who are you?")])[-1].endswith("Who are you?<|im_end|>\n")
    assert ends(PLAIN, [user("Who are you?")]) == []


def test_marks_on_messages_parts_and_tools_are_their_ends() -> None:
    assert ends(PLAIN, [user("first", cache_control=EPHEMERAL), {"role": "assistant", "content": "so"}, user("z")])[
        0
    ].endswith("first<|im_end|>\n")
    parts = [{"type": "text", "text": "here", "cache_control": EPHEMERAL}, {"type": "text", "text": "there"}]
    assert ends(PLAIN, [user(parts)])[0].endswith("user\nhere")
    other = {**TOOL, "function": {**TOOL["function"], "name": "zebra"}, "cache_control": EPHEMERAL}
    found = ends(PLAIN, [user("x")], tools=[TOOL, other])
    assert any(end.endswith("}\n") for end in found)


def test_marks_are_counted_and_their_kind_is_checked() -> None:
    with pytest.raises(RequestError, match="at most 4 cache_control marks may be set, got 5"):
        ends(PLAIN, [user("x", cache_control=EPHEMERAL)] * 5)
    with pytest.raises(RequestError, match=r"must be \{'type': 'ephemeral'\}"):
        ends(PLAIN, [user("x", cache_control={"type": "eternal"})])


def breakpoints(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "prompt_cache_breakpoint": {"mode": "explicit"}} for text in texts]


def test_openai_breakpoints_mark_the_ends_of_their_parts() -> None:
    part, after = breakpoints("here")[0], {"type": "text", "text": "there"}
    assert ends(PLAIN, [user([part, after])])[0].endswith("user\nhere")
    assert ends(PLAIN, [user([{**part, "cache_control": None}, after])])[0].endswith("user\nhere")
    assert ends(PLAIN, [user([{**part, "prompt_cache_breakpoint": None}, after])]) == []


def test_the_latest_four_breakpoints_count() -> None:
    marked = read_messages([user(breakpoints("a", "b", "c")), user(breakpoints("d", "e"))])
    assert [entry.marks for entry in marked] == [[3, 5], [1, 3]]
    assert len(ends(PLAIN, [user(breakpoints(*"abcdefgh"))])) >= 4


def test_a_breakpoint_of_an_unknown_mode_is_refused() -> None:
    part = {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "implicit"}}
    with pytest.raises(RequestError, match=r"messages\[1\]: prompt_cache_breakpoint must be \{'mode': 'explicit'\}"):
        ends(PLAIN, [user("y"), user([part])])


def test_tools_for_a_template_that_knows_none_are_refused() -> None:
    with pytest.raises(RequestError, match="does not support tools"):
        ChatRenderer(byte_tokenizer(), TEMPLATE).render([user("x")], tools=[TOOL])


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_templates_read_thoughts_under_the_name_they_know(given: str, read: str) -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m." + read + " or '' }}|{{ m.content }};{% endfor %}"
    tokenizer = byte_tokenizer()
    messages = [user("x"), {"role": "assistant", "content": "y", given: "because"}, user("z")]
    chat = ChatRenderer(tokenizer, template).render(messages)
    assert tokenizer.decode(chat.token_ids) == "user:|x;assistant:because|y;user:|z;"


def test_template_without_special_tokens_marks_the_system_prompt() -> None:
    chat = ChatRenderer(byte_tokenizer(), TEMPLATE).render([SYSTEM, user("a question of some length")])
    assert chat.marks == (len(f"s:{SYSTEM['content']}|u:"),)


DEMO_TOKENIZER = load_tokenizer(str(DEMO_DIRECTORY))
DEMO_RENDERER = ChatRenderer(DEMO_TOKENIZER)
WORDS = st.text("ab c\n'é7", min_size=1, max_size=90)


@given(WORDS, WORDS, WORDS)
def test_mark_lies_where_tokens_of_part_and_whole_agree(head: str, one: str, two: str) -> None:
    part = {"type": "text", "text": head, "cache_control": EPHEMERAL}
    chats = [DEMO_RENDERER.render([user([part, {"type": "text", "text": tail}])]) for tail in (one, two)]
    alone = DEMO_TOKENIZER.encode(f"<|im_start|>user\n{head}", add_special_tokens=False)
    for chat in chats:
        agreeing = sum(1 for _ in _common(alone, chat.token_ids))
        assert agreeing in chat.marks


def _common(first: list[int], second: list[int]) -> Any:
    for ours, theirs in zip(first, second, strict=False):
        if ours != theirs:
            return
        yield ours


@given(st.text("ab", max_size=20), st.text("ab", max_size=20))
def test_the_common_length_is_that_of_a_plain_loop(first: str, second: str) -> None:
    assert common_length(first, second) == len(list(_common(list(first), list(second))))  # type: ignore[arg-type]


def test_marks_of_a_prompt_are_positions(llm: LLM) -> None:
    with pytest.raises(RequestError, match="marks must be token positions above 0"):
        llm.generate({"prompt": "x", "marks": [0]}, SamplingParams(max_tokens=1), use_tqdm=False)
