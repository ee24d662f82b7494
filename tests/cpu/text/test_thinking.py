"""The matcher of a reasoning's budget, and the reasoning that a prompt ends with."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.errors import ConfigError
from strandline.reasoning_config import CLOSE, OPEN, read_reasoning_config
from strandline.records.reasoning_rules import CallTag, ReasoningRules, ThinkingBudget
from strandline.text.thinking import BudgetMatcher, num_open_tokens
from tests.cpu.engine.tokenizers import CHAT_VOCAB_SIZE, byte_tokenizer, chat_tokenizer

SPECIAL, PLAIN = chat_tokenizer(""), byte_tokenizer()
OPEN_ID, CLOSE_ID, CALL_ID = (SPECIAL.get_added_vocab()[tag] for tag in (OPEN, CLOSE, "<tool_call>"))
CALL = CallTag("<tool_call>", CALL_ID)
END = tuple(SPECIAL.encode("\nEnough.\n</think>\n\n"))
SHARDS = ["a", "\n", " ", "é", "<", "</think>", "<think>", "</", "</tool_call>"]


def allowed(matcher: BudgetMatcher) -> list[int]:
    words = np.zeros((2, -(-CHAT_VOCAB_SIZE // 32)), dtype=np.int32)
    matcher.fill(words, 1)
    assert not words[0].any()
    bits = np.unpackbits(words[1].view(np.uint8), bitorder="little")[:CHAT_VOCAB_SIZE]
    return [int(token) for token in np.flatnonzero(bits)]


def run(matcher: BudgetMatcher, wanted: Sequence[int], num_tokens: int) -> list[int]:
    """Return tokens: those wanted, in a circle, where they are allowed, and else the ones that are forced."""
    tokens, free, next_wanted = list[int](), list[int](), 0
    for step in range(num_tokens):
        choices = allowed(matcher)
        assert len(choices) in (1, CHAT_VOCAB_SIZE)
        assert (len(choices) == 1) == (matcher.num_free_tokens == 0)
        if len(choices) == 1:
            assert all(count <= step - before for before, count in enumerate(free)), "a token was said to be free"
            tokens.append(choices[0])
        else:
            tokens.append(wanted[next_wanted % len(wanted)])
            next_wanted += 1
        free.append(matcher.num_free_tokens)
        matcher.append(tokens[-1])
    return tokens


IDS = st.lists(st.sampled_from([65, 10, 66, OPEN_ID, CLOSE_ID, CALL_ID]), min_size=1, max_size=30)


@given(IDS, st.integers(0, 6), st.integers(0, 8), st.booleans(), st.booleans())
def test_each_section_is_ended_at_its_budget(
    wanted: list[int], max_tokens: int, num_used: int, is_open: bool, has_tools: bool
) -> None:
    rules = ReasoningRules(is_open, CALL if has_tools else None)
    budget = ThinkingBudget(max_tokens, END, rules, num_used if is_open else 0)
    tokens = run(BudgetMatcher(budget, SPECIAL, frozenset()), wanted, 40)
    # The same, told from the ids alone.
    used = budget.num_used if is_open else None
    may_open, expected, next_wanted = True, list[int](), 0
    while len(expected) < len(tokens):
        if used is not None and used >= max_tokens:
            expected += END
            used = None
            continue
        token = wanted[next_wanted % len(wanted)]
        next_wanted += 1
        is_first = not expected
        expected.append(token)
        if used is None:
            may_open = may_open and not (has_tools and token == CALL_ID)
            used = 0 if token == OPEN_ID and may_open else None
        elif token == CLOSE_ID or (has_tools and token == CALL_ID):
            used, may_open = None, may_open and token != CALL_ID
        else:
            used = 0 if token == OPEN_ID and is_first else used + 1
    assert tokens == expected[: len(tokens)]


@given(st.lists(st.sampled_from(SHARDS), max_size=12), st.integers(0, 9), st.booleans())
def test_reasoning_in_text_is_ended_at_its_budget(shards: list[str], max_tokens: int, is_open: bool) -> None:
    wanted = PLAIN.encode("".join(shards) + "bc")
    budget = ThinkingBudget(max_tokens, tuple(PLAIN.encode(f"#{CLOSE}")), ReasoningRules(is_open))
    text = PLAIN.decode(run(BudgetMatcher(budget, PLAIN), wanted, 60))
    inside = text.partition(f"#{CLOSE}")[0] if is_open else text.partition(OPEN)[2].partition(f"#{CLOSE}")[0]
    if f"#{CLOSE}" in text and OPEN not in inside and CLOSE not in inside:
        assert len(inside.encode()) >= max_tokens


@pytest.mark.parametrize("tokenizer", [SPECIAL, PLAIN], ids=["special tokens", "text"])
def test_prompt_ends_with_open_reasoning(tokenizer: object) -> None:
    for text, expected in [
        ("Hi <think>\n", 1),
        ("Hi <think>", 0),
        ("<think>ab</think><think>\nabc", 4),
        ("<think>" + 1000 * "é", 2000),
        ("Hi", None),
        ("<think>ab</think>" + 100 * "c", None),
        ("</think>", None),
    ]:
        ids = tokenizer.encode(text)  # type: ignore[attr-defined]
        assert num_open_tokens(ids, tokenizer) == expected, text


def test_a_spelled_tag_opens_a_section_where_a_line_begins() -> None:
    budget = ThinkingBudget(2, tuple(PLAIN.encode(CLOSE)), ReasoningRules(False))
    text = "a <think>bcde\n <think>fghij<think>kl\n<think>mnop"
    found = PLAIN.decode(run(BudgetMatcher(budget, PLAIN), PLAIN.encode(text), len(text) + 2 * len(CLOSE)))
    assert found == text.replace("fg", f"fg{CLOSE}").replace("mn", f"mn{CLOSE}")


@pytest.mark.parametrize("is_open", [False, True])
def test_continued_answer_has_further_sections(is_open: bool) -> None:
    rules = ReasoningRules(is_open, is_continued=True)
    budget = ThinkingBudget(3, END, rules, num_used=1)
    wanted = [65, 66, CLOSE_ID, 67, OPEN_ID, 68, 69, 70, 71, 72]
    tokens = run(BudgetMatcher(budget, SPECIAL), wanted, 9 + len(END))
    head = [65, 66, *END, CLOSE_ID, 67, OPEN_ID, 68, 69, 70] if is_open else [65, 66, CLOSE_ID, 67, OPEN_ID, 68, 69, 70]
    assert tokens == [*head, *END, 71][: len(tokens)]


def test_reasoning_config_is_that_of_vllm() -> None:
    config = read_reasoning_config('{"reasoning_start_str": "<think>", "reasoning_end_str": "So.\\n</think>\\n\\n"}')
    assert config.reasoning_end_str == "So.\n</think>\n\n"
    assert read_reasoning_config({}).reasoning_end_str == CLOSE
    for wrong in ("so", "</think> so", "<think></think>", "</think></think>", "</think>     ", 3):
        with pytest.raises(ConfigError, match="reasoning_end_str must end with </think>"):
            read_reasoning_config({"reasoning_end_str": wrong})
    with pytest.raises(ConfigError, match="reasoning_start_str must be '<think>'"):
        read_reasoning_config({"reasoning_start_str": "[THINK]"})
