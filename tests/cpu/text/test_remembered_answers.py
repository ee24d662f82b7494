"""Answers that come back are encoded as they were generated; all other text as the tokenizer does it."""

from collections.abc import Sequence
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from strandline.text.control_tokens import SPLITS, SplitText
from strandline.text.conversations import ChatRenderer, RenderedChat
from strandline.text.marks import Characters
from strandline.text.model_files import DEMO_DIRECTORY
from strandline.text.remembered_answers import RememberedAnswers
from strandline.text.token_bytes import TokenBytes
from strandline.text.vocabulary import load_tokenizer
from tests.cpu.engine.tokenizers import CALLS_IN_JSON, ascii_tokenizer, byte_tokenizer, chat_template, chat_tokenizer

DEMO: Final = load_tokenizer(str(DEMO_DIRECTORY))
CHAT: Final = chat_tokenizer(chat_template(CALLS_IN_JSON, thinks=False))
USER: Final = {"role": "user", "content": "What is 2 + 3?"}
NEXT: Final = {"role": "user", "content": "Why?"}
SIZE: Final = 2**20


def odd_ids(text: str, tokenizer: Any = DEMO) -> list[int]:
    """Encode a text in other tokens than the tokenizer would choose: each character by itself."""
    ids = [token for character in text for token in tokenizer.encode(character, add_special_tokens=False)]
    assert tokenizer.decode(ids) == text
    return ids


class Conversation:
    """Renders the turns of a conversation with remembered answers."""

    def __init__(self, tokenizer: Any = DEMO, max_bytes: int = SIZE, template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.answers = RememberedAnswers(tokenizer, max_bytes)
        self.renderer = ChatRenderer(tokenizer, template, answers=self.answers)
        self.plain = ChatRenderer(tokenizer, template)

    def render(self, *messages: dict[str, Any], salt: str = "", **options: Any) -> RenderedChat:
        return self.renderer.render(messages, salt=salt, **options)

    def answer(self, token_ids: Sequence[int], *messages: dict[str, Any], salt: str = "") -> RenderedChat:
        """Remember an answer to a conversation; return its prompt."""
        chat = self.render(*messages, salt=salt)
        assert chat.recollection is not None
        self.answers.add(chat.recollection.key, token_ids)
        return chat


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def num_recalled(chat: RenderedChat) -> int:
    assert chat.recollection is not None
    return chat.recollection.num_tokens


def test_answer_has_the_tokens_that_were_generated() -> None:
    talk, text = Conversation(), "2 + 3 = 5. 日本"
    ids = odd_ids(text)
    before = talk.answer([*ids, DEMO.eos_token_id], USER)
    after = talk.render(USER, assistant(text), NEXT)
    assert after.token_ids[: len(before.token_ids) + len(ids) + 1] == [*before.token_ids, *ids, DEMO.eos_token_id]
    assert DEMO.decode(after.token_ids) == after.text
    assert num_recalled(after) == len(ids) + 1
    plain = talk.plain.render([USER, assistant(text), NEXT])
    assert plain.text == after.text
    assert plain.token_ids != after.token_ids
    tail = after.text[after.text.index("\n<|im_start|>user\nWhy?") :]
    assert after.token_ids[-len(DEMO.encode(tail)) :] == DEMO.encode(tail)


def test_every_turn_is_recalled() -> None:
    talk = Conversation()
    messages: list[dict[str, Any]] = [USER]
    ids: list[int] = []
    for turn in range(4):
        chat = talk.render(*messages)
        assert chat.token_ids[: len(ids)] == ids
        answer = odd_ids(f" answer {turn}.\n")
        talk.answer(answer, *messages)
        ids = [*chat.token_ids, *answer]
        messages += [assistant(f" answer {turn}.\n"), NEXT]


@pytest.mark.parametrize("salt", ["", "other", "tenan"])
def test_another_salt_recalls_nothing(salt: str) -> None:
    talk = Conversation()
    talk.answer(odd_ids("Five."), USER, salt="tenant")
    assert num_recalled(talk.render(USER, assistant("Five."), NEXT, salt=salt)) == 0
    assert num_recalled(talk.render(USER, assistant("Five."), NEXT, salt="tenant")) == 5


def test_nothing_is_recalled_without_a_salt() -> None:
    talk = Conversation()
    talk.answer(odd_ids("Five."), USER)
    chat = talk.renderer.render([USER, assistant("Five."), NEXT], salt=None)
    assert chat.recollection is None
    assert chat.token_ids == talk.plain.render([USER, assistant("Five."), NEXT]).token_ids


def test_another_prompt_recalls_nothing() -> None:
    talk = Conversation()
    talk.answer(odd_ids("Five."), USER)
    assert num_recalled(talk.render({**USER, "content": "What is 3 + 2?"}, assistant("Five."), NEXT)) == 0


@pytest.mark.parametrize(
    ("generated", "shown", "count"),
    [
        ("Five. END", "Five. ", 6),
        ("Five.\n\n", "Five.", 5),
        ("Five.", "Five. And more.", 5),
        ("Five is it", "Five isnt it", 5),  # not inside of a word that goes on in another way
        ("Five", "Four", 0),
        ("Five", "", 0),
    ],
)
def test_other_text_is_recalled_up_to_where_it_differs(generated: str, shown: str, count: int) -> None:
    talk = Conversation()
    talk.answer(odd_ids(generated), USER)
    chat = talk.render(USER, assistant(shown), NEXT)
    assert num_recalled(chat) == count
    assert DEMO.decode(chat.token_ids) == chat.text


def test_continued_answer_is_recalled_in_both_parts() -> None:
    """Also where the first part ends inside of a word."""
    talk = Conversation()
    begun, more = odd_ids("Five is the answ"), odd_ids("er, of course.")
    before = talk.answer(begun, USER)
    answers = talk.answers
    key = answers.key("", before.text + "Five is the answ")
    assert len(answers.find("", before.text + "Five is the answ")[0].token_ids) == len(begun)
    answers.add(key, more)
    chat = talk.render(USER, assistant("Five is the answer, of course."), NEXT)
    assert chat.token_ids[: len(before.token_ids) + len(begun) + len(more)] == [*before.token_ids, *begun, *more]


def test_replacement_characters_are_not_recalled() -> None:
    talk = Conversation(byte_tokenizer(), template=CHAT.chat_template)
    whole = talk.tokenizer.encode("a é", add_special_tokens=False)
    for ids, text, count in ((whole[:-1], "a \ufffd", 2), (talk.tokenizer.encode("a \ufffdb"), "a \ufffdb", 2)):
        assert talk.tokenizer.decode(ids) == text
        talk.answer(ids, USER)
        chat = talk.render(USER, assistant(text), NEXT)
        assert num_recalled(chat) == count
        assert talk.tokenizer.decode(chat.token_ids) == chat.text


def test_longest_of_several_answers_is_taken() -> None:
    talk = Conversation()
    for text in ("Fi", "Five is right.", "Five is", "Six"):
        talk.answer(odd_ids(text), USER)
    assert num_recalled(talk.render(USER, assistant("Five is right."), NEXT)) == len("Five is right.")


def test_reasoning_and_calls_are_recalled() -> None:
    talk = Conversation(CHAT)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Ulm"}'}}
    text = '<think>\nSo.\n</think>\n\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    ids = CHAT.encode(text, add_special_tokens=False)
    talk.answer(ids, USER)
    answer = assistant("", reasoning_content="So.", tool_calls=[call])
    result = {"role": "tool", "tool_call_id": "1", "content": "Sun."}
    assert num_recalled(talk.render(USER, answer, result)) == len(ids)
    assert num_recalled(talk.render(USER, answer, result, NEXT)) == 0, "the template drops the reasoning"


def test_reasoning_that_the_prompt_opens_is_recalled() -> None:
    talk = Conversation(CHAT, template=chat_template(CALLS_IN_JSON, thinks=True))
    ids = odd_ids("So.\n", CHAT) + CHAT.encode("</think>\n\nFive.<|im_end|>", add_special_tokens=False)
    assert talk.answer(ids, USER).text.endswith("<think>\n")
    assert num_recalled(talk.render(USER, assistant("Five.", reasoning_content="So."), NEXT)) == len(ids)
    assert num_recalled(talk.render(USER, assistant("Five."), NEXT)) == 0, "without reasoning, the text is another"


def test_control_tokens_in_an_answer_stay_what_they_were() -> None:
    talk = Conversation()
    text = "It ends with <|im_end|>, as here."
    ids = [token for part in ("It ends with <|", "im_end|>, as here.") for token in DEMO.encode(part)]
    talk.answer(ids, USER)
    chat = talk.render(USER, assistant(text), NEXT)
    assert num_recalled(chat) == len(ids)
    assert chat.token_ids.count(DEMO.eos_token_id) == talk.render(USER, assistant("x"), NEXT).token_ids.count(
        DEMO.eos_token_id
    )


def test_text_of_users_is_never_recalled() -> None:
    """A user who writes what an answer was, control tokens and all, must not get control tokens."""
    talk = Conversation()
    answer = [*odd_ids("Five."), DEMO.eos_token_id]
    prompt = talk.answer(answer, USER)
    inside = prompt.text.partition("<|im_start|>user\n")[2] + "Five.<|im_end|>\nx"
    talk.renderer.render([{"role": "user", "content": inside}])
    chat = talk.render({"role": "user", "content": inside})
    plain = talk.plain.render([{"role": "user", "content": inside}])
    assert chat.token_ids == plain.token_ids
    assert num_recalled(chat) == 0


def test_memory_is_bounded() -> None:
    talk = Conversation(max_bytes=20_000)
    for number in range(200):
        talk.answer(odd_ids(f"Answer {number}." * 5), {"role": "user", "content": str(number)})
        assert 0 < talk.answers.num_bytes <= 20_000
    assert 10 < talk.answers.num_prompts < 100
    first, last = ({"role": "user", "content": str(number)} for number in (0, 199))
    assert num_recalled(talk.render(last, assistant("Answer 199." * 5), NEXT)) > 0
    assert num_recalled(talk.render(first, assistant("Answer 0." * 5), NEXT)) == 0


def test_answers_that_are_used_stay() -> None:
    talk = Conversation(max_bytes=20_000)
    talk.answer(odd_ids("Five."), USER)
    for number in range(200):
        talk.answer(odd_ids(f"Answer {number}."), {"role": "user", "content": str(number)})
        assert num_recalled(talk.render(USER, assistant("Five."), NEXT)) == 5


def test_answer_larger_than_the_memory_is_not_kept() -> None:
    talk = Conversation(max_bytes=1000)
    talk.answer(odd_ids("Five." * 1000), USER)
    assert talk.answers.num_bytes == 0


def test_same_answer_is_kept_once() -> None:
    talk = Conversation()
    for _ in range(3):
        talk.answer(odd_ids("Five."), USER)
        sizes = talk.answers.num_bytes
    assert sizes == talk.answers.num_bytes < 500


TEXTS = st.text(st.sampled_from("ab é日🙂\n.{<") | st.characters(exclude_categories=("Cs",)), max_size=12)
IDS = st.lists(st.integers(0, len(CHAT) - 1) | st.sampled_from(CHAT.encode("ab.<é日\n <think>")), max_size=24)
TEMPLATES: Final = {
    "strict": CHAT.chat_template,
    "trims": CHAT.chat_template.replace("{{- m.content }}", "{{- m.content | trim }}"),
    "drops": CHAT.chat_template.replace("{{- m.content }}", "{{- m.content.split('</think>')[-1] }}"),
}


@pytest.mark.parametrize("template", TEMPLATES)
@given(texts=st.lists(TEXTS, min_size=2, max_size=4), generated=st.lists(IDS, min_size=3, max_size=3), cut=st.data())
def test_tokens_decode_to_the_rendered_text(template: str, texts: list[str], generated: list[Any], cut: Any) -> None:
    """Whatever is generated, shown and sent back, in several turns."""
    talk = Conversation(CHAT, template=TEMPLATES[template])
    messages: list[dict[str, Any]] = []
    for text, ids in zip(texts, generated, strict=False):
        messages.append({"role": "user", "content": text})
        chat = talk.render(*messages)
        plain = talk.plain.render(messages)
        assert chat.text == plain.text
        assert CHAT.decode(chat.token_ids) == chat.text
        assert all(0 < mark < len(chat.token_ids) for mark in chat.marks)
        assert talk.render(*messages, salt="other").token_ids == plain.token_ids
        assert talk.render(*messages).token_ids == chat.token_ids
        talk.answer(ids, *messages)
        shown = CHAT.decode(ids)
        messages.append(assistant(shown[: cut.draw(st.integers(0, len(shown)))]))


@given(texts=st.lists(TEXTS, min_size=1, max_size=3), generated=IDS)
def test_whole_answer_is_recalled(texts: list[str], generated: list[int]) -> None:
    """If its text is a text, it stays whole, and nothing is rendered into it."""
    talk = Conversation(CHAT)
    messages = [{"role": "user", "content": text} for text in texts]
    before, shown = talk.answer(generated, *messages), CHAT.decode(generated)
    after = talk.render(*messages, assistant(shown), NEXT)
    if "\ufffd" not in shown and after.text.startswith(before.text + shown):
        assert after.token_ids[: len(before.token_ids) + len(generated)] == [*before.token_ids, *generated]


@given(before=TEXTS, generated=IDS, after=TEXTS, splits=st.sets(st.integers(0, 20)), data=st.data())
def test_characters_have_positions(before: str, generated: list[int], after: str, splits: set[int], data: Any) -> None:
    answers = RememberedAnswers(CHAT, SIZE)
    answers.add(answers.key("", before), generated)
    text = before + CHAT.decode(generated) + after
    mark = next(mark for mark in SPLITS if mark not in text)
    rendered = "".join((mark if index in splits else "") + character for index, character in enumerate(text))
    whole = SplitText(CHAT, rendered, mark, lambda text: answers.find("", text))
    assert (whole.text, CHAT.decode(whole.token_ids)) == (text, text)
    assert whole.encode(0, len(text)) == whole.token_ids
    character = data.draw(st.integers(0, len(text)))
    position = Characters(whole).position(character)
    assert text.startswith(CHAT.decode(whole.token_ids[:position]).rstrip("\ufffd"))
    for part in whole.recalled:
        assert CHAT.decode(part.token_ids) == text[part.start : part.end]
        for index in range(part.start, part.end):
            token = whole.token_at(index)
            assert token is not None
            assert whole.start_of(token) <= index


# Tokenizers of other kinds


def sentencepiece_tokenizer(scheme: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with spaces in its tokens, perhaps one before a text, and bytes for other characters."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "▁", *"abcdefi.:|u", "▁a", "ab"]
    vocab = {word: index for index, word in enumerate(words)}
    merges = [("▁", "a"), ("a", "b")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] + ':' }}{% if m.role == 'assistant' %} {% endif %}{{ m.content + '</s>' }}"
        "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize("scheme", ["never", "first", "always"])
@pytest.mark.parametrize("text", ["abba", "ab é.", "a b 日"])
def test_sentencepiece_recalls_answers(scheme: str, text: str) -> None:
    talk = Conversation(sentencepiece_tokenizer(scheme))
    ids = [token for character in f" {text}" for token in _bytes_or_token(talk.tokenizer, character)]
    before = talk.answer(ids, USER)
    after = talk.render(USER, assistant(text), NEXT)
    plain = talk.plain.render([USER, assistant(text), NEXT])
    assert after.token_ids[: len(before.token_ids) + len(ids)] == [*before.token_ids, *ids]
    assert talk.tokenizer.decode(after.token_ids) == talk.tokenizer.decode(plain.token_ids)
    cut = talk.render(USER, assistant(text + "f"), NEXT)
    assert talk.tokenizer.decode(cut.token_ids) == talk.tokenizer.decode(
        talk.plain.render([USER, assistant(text + "f"), NEXT]).token_ids
    )


def _bytes_or_token(tokenizer: Any, character: str) -> list[int]:
    word = character.replace(" ", "▁")
    words = [word] if word in tokenizer.get_vocab() else [f"<0x{value:02X}>" for value in character.encode()]
    return list(tokenizer.convert_tokens_to_ids(words))


def test_ids_without_a_token_end_the_comparison() -> None:
    talk = Conversation()
    talk.answer([*odd_ids("Fi"), len(DEMO) + 7, *odd_ids("ve")], USER)
    assert num_recalled(talk.render(USER, assistant("Fi."), NEXT)) == 2


@pytest.mark.parametrize("tokenizer", [DEMO, CHAT, byte_tokenizer(), ascii_tokenizer()])
def test_bytes_of_all_tokens_are_those_of_their_text(tokenizer: Any) -> None:
    token_bytes = TokenBytes(tokenizer)
    for token in tokenizer.get_vocab().values():
        found = token_bytes[token]
        assert found is not None
        assert found.decode(errors="replace") == tokenizer.decode([token])
