"""Placeholders of pictures in texts, and the prompts that they lead to."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.errors import RequestError
from strandline.picture_config import PictureConfig
from strandline.records.pictures import Picture, PictureReference, PictureSpan, PlacedPicture, virtual_ids
from strandline.text.conversations import ChatRenderer
from strandline.text.picture_names import PictureNames
from strandline.text.picture_placeholders import PicturePlaceholders, pictures_in, with_parts
from tests.cpu.server.vision_model import END, PAD, SIDE, START, vision_tokenizer

TOKENIZER = vision_tokenizer()
CONFIG = PictureConfig(4, 2, 256, 10**6, (0.5,) * 3, (0.5,) * 3, PAD, START, END)
RENDERER = ChatRenderer(TOKENIZER, pictures=CONFIG)


def picture(name: str, num_tokens: int) -> Picture:
    return Picture(name.encode(), b"", SIDE, SIDE * num_tokens, (640, 480))


def part(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def test_placeholders_keep_pictures_between_the_same_words() -> None:
    placeholders = PicturePlaceholders()
    content = ["first", part("data:a"), "second\n", part("data:b", detail="low"), part("data:c"), "third"]
    text = "\n".join(each if isinstance(each, str) else placeholders.insert(each, "x")["text"] for each in content)
    assert placeholders.references == [
        PictureReference("data:a"),
        PictureReference("data:b", "low"),
        PictureReference("data:c"),
    ]
    [message] = with_parts([{"role": "user", "content": text}])
    shown = [each.get("text", each["type"]) for each in message["content"]]
    assert shown == ["first", "image", "second\n", "image", "image", "third"]


def test_placeholders_keep_their_order_wherever_texts_are_moved() -> None:
    placeholders = PicturePlaceholders()
    messages = placeholders.insert([{"role": "user", "content": [part(f"data:{name}")]} for name in "abc"], "messages")
    assert placeholders.paths == [f"messages.{index}.content.0" for index in range(3)]
    texts = [message["content"][0]["text"] for message in messages]
    assert pictures_in([{"content": texts[2]}, {"content": texts[0] + texts[1]}]) == [2, 0, 1]


def test_other_fields_of_messages_are_left_alone() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"type": "image_url", "image_url": "data:x"}}}
    message = {"role": "assistant", "content": "x", "tool_calls": [call]}
    placeholders = PicturePlaceholders()
    assert placeholders.insert([message], "messages") == [message]
    assert placeholders.references == []


@pytest.mark.parametrize(
    "source", [{}, {"type": "file", "file_id": "f"}, {"type": "base64"}, {"type": "url", "url": 1}]
)
def test_malformed_sources_are_refused_with_their_path(source: dict[str, Any]) -> None:
    result = {"type": "tool_result", "content": [{"type": "image", "source": source}]}
    with pytest.raises(
        RequestError, match=r"^messages\.0\.content\.0\.tool_result\.content\.0\.image: the source must"
    ):
        PicturePlaceholders().insert([{"role": "user", "content": [result]}], "messages")


words = st.text(alphabet="ab \n<|>", min_size=1, max_size=8)


@given(
    turns=st.lists(
        st.lists(st.tuples(st.one_of(words, st.integers(1, 9)), st.booleans()), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    )
)
def test_marks_of_caches_are_where_they_would_be_without_pictures(
    turns: list[list[tuple[str | int, bool]]],
) -> None:
    """A picture of ``n`` tokens moves what follows it by ``n - 1``, and nothing else."""
    placeholders, pictures, num_marks = PicturePlaceholders(), list[Picture](), 0
    messages = list[dict[str, Any]]()
    for turn in turns:
        parts = []
        for kind, wants_mark in turn:
            cached = {"cache_control": {"type": "ephemeral"}} if wants_mark and num_marks < 4 else {}
            num_marks += len(cached)
            if isinstance(kind, int):
                pictures.append(picture(str(len(pictures)), kind))
                parts.append(part("data:x", **cached))
            else:
                parts.append({"type": "text", "text": kind, **cached})
        messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": "ok"}]
    marked = placeholders.insert(messages[:-1], "messages")
    small = RENDERER.render(marked, pictures=[picture(str(index), 1) for index in range(len(pictures))])
    chat = RENDERER.render(marked, pictures=pictures)
    assert [span.num_tokens for span, _ in chat.pictures] == [each.width // SIDE for each in pictures]
    position = {0: 0}
    for index, token in enumerate(small.token_ids):
        size = pictures[small.token_ids[:index].count(PAD)].width // SIDE if token == PAD else 1
        position[index + 1] = position[index] + size
    assert chat.marks == tuple(position[mark] for mark in small.marks)
    for span, given_picture in chat.pictures:
        assert chat.token_ids[span.start : span.end] == [PAD] * span.num_tokens
        assert chat.token_ids[span.start - 1] == START
        assert chat.token_ids[span.end] == END
        assert span.digest == given_picture.digest
    assert chat.token_ids.count(PAD) == sum(span.num_tokens for span, _ in chat.pictures)


def test_names_of_pictures_are_shown_instead_of_their_ids() -> None:
    names, span = PictureNames(), PictureSpan(0, 3, 100, b"cat")
    names.note([PlacedPicture(span, picture("cat", 300))])
    ids = virtual_ids(b"cat", 3, 100)
    decode = TOKENIZER.decode
    text = TOKENIZER.encode("hi")
    assert names.text_of([*text, *ids[:20]], decode) == "hi[picture 640×480, 300 tokens]"
    assert names.text_of([*ids[-20:], *text], decode) == "[picture 640×480, 300 tokens]hi"
    assert names.text_of([*text, *ids[20:40], *text], decode) == "hi[picture]hi"
    assert names.text_of(text, decode) == "hi"
