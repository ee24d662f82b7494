"""What each dataset asks: exact lengths, shared prefixes, recorded texts, real answers in the next turn."""

import json
from argparse import ArgumentTypeError
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from strandline.bench.serving.datasets import make_sessions
from strandline.bench.serving.flags import picture_size, seconds_range
from strandline.bench.serving.maker import Maker
from strandline.bench.serving.prompt_vocabulary import Vocabulary, load_vocabulary
from strandline.bench.serving.session import Answer, Ask, Session
from strandline.errors import ConfigError
from strandline.records.tokens import decode, encode
from tests.cpu.bench.conftest import serve_options
from tests.cpu.engine.tokenizers import TEMPLATE, byte_tokenizer


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """A vocabulary of bytes with a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Vocabulary(range(200), tokenizer)


def sessions_of(vocabulary: Vocabulary, *flags: str, max_model_len: int | None = None) -> list[Session]:
    options = serve_options(*flags)
    is_chat = options.backend == "openai-chat"
    return make_sessions(Maker(vocabulary, options, is_chat=is_chat, max_model_len=max_model_len))


def talk(session: Session, *answers: Answer) -> list[Ask]:
    """Answer a session's asks, all alike once the answers run out; return them."""
    asks = session.asks()
    seen = [next(asks)]
    for turn in range(100):
        try:
            seen.append(asks.send(answers[min(turn, len(answers) - 1)] if answers else Answer()))
        except StopIteration:
            break
    return seen


def single_asks(sessions: list[Session]) -> list[Ask]:
    asks = [talk(session) for session in sessions]
    assert all(len(each) == 1 for each in asks)
    return [ask for [ask] in asks]


def test_random_prompts_have_exactly_the_lengths_that_were_asked_for(vocabulary: Vocabulary) -> None:
    flags = ["--num-prompts", "5", "--random-input-len", "70", "--random-output-len", "9", "--random-prefix-len", "30"]
    asks = single_asks(sessions_of(vocabulary, *flags))
    assert [(len(ask.prompt), ask.max_tokens) for ask in asks] == [(100, 9)] * 5
    assert len({str(ask.prompt[:30]) for ask in asks}) == 1
    assert len({str(ask.prompt[30:40]) for ask in asks}) == 5
    assert all(ask.tokens is not None and decode(ask.tokens) == ask.prompt for ask in asks)
    assert asks == single_asks(sessions_of(vocabulary, *flags)), "the same seed gives the same prompts"
    assert asks != single_asks(sessions_of(vocabulary, *flags, "--seed", "1"))


def test_random_lengths_vary_within_the_ratio(vocabulary: Vocabulary) -> None:
    flags = ["--num-prompts", "200", "--random-input-len", "40", "--random-output-len", "10"]
    asks = single_asks(sessions_of(vocabulary, *flags, "--random-range-ratio", "0.5"))
    assert {len(ask.prompt) for ask in asks} == set(range(20, 61))
    assert {ask.max_tokens for ask in asks} == set(range(5, 16))


def test_special_tokens_are_never_drawn() -> None:
    vocabulary = load_vocabulary("demo", None)
    special = set(vocabulary.tokenizer.all_special_ids) | set(vocabulary.tokenizer.added_tokens_decoder)
    [ask] = single_asks(sessions_of(vocabulary, "--num-prompts", "1", "--random-input-len", "50000"))
    assert special
    assert not special & set(ask.prompt)


def test_prefixes_are_repeated_equally_often(vocabulary: Vocabulary) -> None:
    flags = ["--dataset-name", "prefix_repetition", "--num-prompts", "13", "--prefix-repetition-num-prefixes", "3"]
    flags += ["--prefix-repetition-prefix-len", "20", "--prefix-repetition-suffix-len", "5"]
    asks = single_asks(sessions_of(vocabulary, *flags))
    prefixes = [str(ask.prompt[:20]) for ask in asks]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4, 4, 4]
    assert {len(ask.prompt) for ask in asks} == {25}
    ordered = single_asks(sessions_of(vocabulary, *flags, "--disable-shuffle"))
    assert len({str(ask.prompt[:20]) for ask in ordered[:4]}) == 1
    assert ordered != asks


def write_conversations(path: Path, *conversations: list[str]) -> str:
    rows = [
        {"conversations": [{"from": ("human", "gpt")[index % 2], "value": text} for index, text in enumerate(texts)]}
        for texts in conversations
    ]
    path.write_text(json.dumps(rows))
    return str(path)


def test_sharegpt_takes_first_messages_and_their_answers_lengths(vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = write_conversations(
        tmp_path / "s.json", ["hello", "hi there"], ["abc", "too short a prompt"], ["x" * 1025, "too long"], ["alone"],
        ["question", "an answer", "more", "yet more"],
    )  # fmt: skip
    flags = ["--dataset-name", "sharegpt", "--dataset-path", path, "--disable-shuffle"]
    asks = single_asks(sessions_of(vocabulary, *flags, "--no-oversample"))
    assert [(len(ask.prompt), ask.max_tokens) for ask in asks] == [(5, 8), (8, 9)]
    assert len(single_asks(sessions_of(vocabulary, *flags, "--num-prompts", "7"))) == 7
    [ask, *_] = single_asks(sessions_of(vocabulary, *flags, "--sharegpt-output-len", "3", "--backend", "openai-chat"))
    assert (ask.prompt, ask.max_tokens) == ([{"role": "user", "content": "hello"}], 3)
    assert ask.tokens is not None, "the template's tokens are known, to reckon what could be cached"


def test_custom_prompts_go_through_the_template_unless_told_otherwise(vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 7}\n{"prompt": "two", "output_tokens": 8}\n')
    flags = ["--dataset-name", "custom", "--dataset-path", str(path), "--disable-shuffle", "--num-prompts", "2"]
    asks = single_asks(sessions_of(vocabulary, *flags, "--custom-output-len", "-1"))
    assert [ask.max_tokens for ask in asks] == [7, 8]
    assert vocabulary.decode(asks[0].prompt) == "u:one|a:"  # type: ignore[arg-type]
    plain = single_asks(sessions_of(vocabulary, *flags, "--skip-chat-template"))
    assert [(vocabulary.decode(ask.prompt), ask.max_tokens) for ask in plain] == [("one", 256), ("two", 256)]  # type: ignore[arg-type]
    blind = single_asks(sessions_of(Vocabulary(()), *flags))
    assert [(ask.prompt, ask.tokens) for ask in blind] == [("one", None), ("two", None)]


MULTI_TURN = ["--dataset-name", "multi-turn", "--multi-turn-num-turns", "3", "--num-prompts", "5"]
LENGTHS = ["--multi-turn-system-len", "10", "--multi-turn-user-len", "4", "--multi-turn-output-len", "6"]


def test_next_turn_holds_the_tokens_reported_by_the_server(vocabulary: Vocabulary) -> None:
    sessions = sessions_of(vocabulary, *MULTI_TURN, *LENGTHS)
    assert len(sessions) == 2, "enough for five requests of three turns each"
    first, second, third = talk(sessions[0], Answer(token_ids=[250, 251]), Answer(token_ids=[252]))
    assert second.prompt[:16] == [*first.prompt, 250, 251]  # type: ignore[misc]
    assert third.prompt[:21] == [*second.prompt, 252]  # type: ignore[misc]
    assert [len(ask.prompt) for ask in (first, second, third)] == [14, 20, 25]
    assert talk(sessions[1])[0].prompt[:10] == first.prompt[:10], "all share the system prompt"
    assert first.body == {"return_token_ids": True}


def test_next_turn_holds_text_if_server_reports_no_tokens(vocabulary: Vocabulary) -> None:
    [session, _] = sessions_of(vocabulary, *MULTI_TURN, *LENGTHS)
    first, second, _ = talk(session, Answer(text="so"))
    assert second.prompt[:16] == [*first.prompt, *vocabulary.encode("so")]  # type: ignore[misc]
    [session, _] = sessions_of(Vocabulary(range(99)), *MULTI_TURN, *LENGTHS)
    with pytest.raises(ConfigError, match="needs a --tokenizer"):
        talk(session, Answer(text="so"))


def test_a_chats_next_turn_holds_the_answer_as_a_message(vocabulary: Vocabulary) -> None:
    [session, _] = sessions_of(vocabulary, *MULTI_TURN, *LENGTHS, "--backend", "openai-chat")
    first, second, third = talk(session, Answer(text="so"), Answer(text="and so"))
    assert [message["role"] for message in third.prompt] == ["system", "user", "assistant", "user", "assistant", "user"]  # type: ignore[index]
    assert (second.prompt[2], third.prompt[4]) == (  # type: ignore[index]
        {"role": "assistant", "content": "so"},
        {"role": "assistant", "content": "and so"},
    )
    assert third.prompt[:2] == first.prompt


def test_recorded_conversations_are_answered_anew(vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = write_conversations(tmp_path / "s.json", ["one", "recorded", "two", "also", "three"])
    [session] = sessions_of(vocabulary, "--dataset-name", "multi-turn", "--dataset-path", path)
    asks = talk(session, Answer(text="REAL"))
    assert [ask.max_tokens for ask in asks] == [8, 4]
    assert vocabulary.decode(asks[1].prompt) == "u:one|a:REAL|u:two|a:"  # type: ignore[arg-type]


def test_a_conversation_ends_when_a_turn_fails(vocabulary: Vocabulary) -> None:
    for flags in ([], ["--backend", "openai-chat"]):
        [session, _] = sessions_of(vocabulary, *MULTI_TURN, *LENGTHS, *flags)
        assert len(talk(session, Answer(error="HTTP 500"))) == 1


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_pauses_are_drawn_from_the_seed(vocabulary: Vocabulary, backend: str) -> None:
    answers = [Answer(text="so"), Answer(text="so")]

    def pauses(*flags: str) -> list[list[float]]:
        sessions = sessions_of(vocabulary, *MULTI_TURN, *LENGTHS, "--backend", backend, *flags)
        return [[ask.think_s for ask in talk(session, *answers)] for session in sessions]

    assert pauses() == [[0.0] * 3] * 2
    assert pauses("--multi-turn-think-time", "4") == [[0.0, 4.0, 4.0]] * 2
    drawn = pauses("--multi-turn-think-time", "1:6")
    assert drawn == pauses("--multi-turn-think-time", "1:6")
    assert drawn != pauses("--multi-turn-think-time", "1:6", "--seed", "7")
    assert [turns[0] for turns in drawn] == [0.0, 0.0]
    others = [think_s for turns in drawn for think_s in turns[1:]]
    assert len(set(others)) == 4
    assert all(1 <= think_s <= 6 for think_s in others)


def test_recorded_conversations_pause_too(vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = write_conversations(tmp_path / "s.json", ["one", "recorded", "two", "also", "three"])
    flags = ["--dataset-name", "multi-turn", "--dataset-path", path, "--multi-turn-think-time", "2"]
    [session] = sessions_of(vocabulary, *flags)
    assert [ask.think_s for ask in talk(session, Answer(text="REAL"))] == [0.0, 2.0]
    assert not session.holds_its_place


def test_conversations_that_pause_free_their_place(vocabulary: Vocabulary) -> None:
    def keeps(*flags: str) -> set[bool]:
        return {session.holds_its_place for session in sessions_of(vocabulary, *MULTI_TURN, *LENGTHS, *flags)}

    assert keeps() == {True}
    assert keeps("--multi-turn-think-time", "0:6") == {False}
    assert keeps("--multi-turn-think-time", "0:6", "--multi-turn-keep-place") == {True}


@pytest.mark.parametrize("text", ["-1", "6:0", "1:2:3", "", "soon", "nan", "0:inf"])
def test_pauses_are_seconds(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="neither a number of seconds"):
        seconds_range(text)


def test_a_trace_keeps_its_prefixes_and_its_times(vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": [1000, 2000, 3000], "output": 5, "t": 10.0, "session": "a"},
        {"prompt": [1000, 2000, 4001], "output": [7, 8], "t": 14.0, "session": "a"},
        {"prompt": list(range(90)), "output": 20, "t": 12.0, "session": "b"},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    flags = ["--dataset-name", "trace", "--dataset-path", str(path), "--trace-speed", "2"]
    one, other = sessions_of(vocabulary, *flags)
    assert (one.start_s, other.start_s) == (0.0, 1.0)
    first, second = talk(one)
    assert (first.prompt, first.max_tokens, first.at_s) == ([0, 0, 0], 5, 0.0)
    assert (second.prompt, second.max_tokens, second.at_s) == ([0, 0, 1], 2, 2.0)
    assert second.tokens == encode([0, 0, 1])
    maker = Maker(vocabulary, serve_options(*flags), is_chat=False, max_model_len=100)
    assert [list(session.asks()) for session in make_sessions(maker)][1] == []
    assert maker.num_skipped == 1, "90 tokens and 20 to generate are more than 100"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--dataset-path", "x.json"], "reads no file"),
        (["--dataset-name", "custom", "--dataset-path", "none.jsonl"], "none.jsonl"),
        (["--random-range-ratio", "1"], r"must be in \[0, 1\)"),
        (["--dataset-name", "prefix_repetition", "--num-prompts", "3"], "from 1 to --num-prompts"),
        (["--dataset-name", "multi-turn", "--multi-turn-num-turns", "0"], "--multi-turn-num-turns must be at least 1"),
        (["--dataset-name", "trace", "--dataset-path", "x", "--backend", "openai-chat"], "--backend openai"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_dataset_that_cannot_be_made_says_why(vocabulary: Vocabulary, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sessions_of(vocabulary, *flags)


def test_random_tokens_need_a_vocabulary() -> None:
    with pytest.raises(ConfigError, match="--vocab-size"):
        sessions_of(load_vocabulary(None, None))
    assert len(sessions_of(load_vocabulary(None, 50), "--num-prompts", "2")) == 2


SCREENSHOTS = ["--dataset-name", "screenshots", "--backend", "openai-chat", "--screenshot-size", "100x60"]


def pictures_of(ask: Ask) -> list[str]:
    messages: Any = ask.prompt
    parts = [part for message in messages for part in message["content"] if isinstance(part, dict)]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def test_every_turn_shows_a_new_screenshot_after_real_answers(vocabulary: Vocabulary) -> None:
    flags = [*SCREENSHOTS, "--num-prompts", "6", "--multi-turn-num-turns", "3", "--multi-turn-user-len", "20"]
    sessions = sessions_of(vocabulary, *flags)
    assert len(sessions) == 2
    talks = [talk(session, Answer(text="seen")) for session in sessions]
    for asks in talks:
        assert [len(pictures_of(ask)) for ask in asks] == [1, 2, 3]
        last: Any = asks[2].prompt
        assert last[:-2] == asks[1].prompt
        assert last[-2] == {"role": "assistant", "content": "seen"}
    pictures = [picture for asks in talks for picture in pictures_of(asks[2])]
    assert len(set(pictures)) == 6
    assert len({str(asks[0].prompt[0]) for asks in talks}) == 1, "the system prompt is shared"
    again = [talk(session, Answer(text="seen")) for session in sessions_of(vocabulary, *flags)]
    assert again == talks, "the same seed gives the same pictures"


def test_screenshots_are_valid_files_of_the_size_asked_for(vocabulary: Vocabulary) -> None:
    image = pytest.importorskip("PIL.Image")
    [session] = sessions_of(vocabulary, *SCREENSHOTS, "--num-prompts", "1", "--multi-turn-num-turns", "1")
    [url] = pictures_of(talk(session)[0])
    opened = image.open(BytesIO(b64decode(url.removeprefix("data:image/png;base64,"))))
    assert (opened.size, opened.mode) == ((100, 60), "RGB")
    assert len(opened.getcolors()) == 6


def test_screenshots_need_messages(vocabulary: Vocabulary) -> None:
    with pytest.raises(ConfigError, match="--backend openai-chat"):
        sessions_of(vocabulary, "--dataset-name", "screenshots")


@pytest.mark.parametrize("text", ["1280", "0x720", "1280x720x3", "ax3", "-1x5", "99999x1"])
def test_sizes_of_screenshots_are_checked(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="1280x720"):
        picture_size(text)
    assert picture_size("1280x720") == (1280, 720)
