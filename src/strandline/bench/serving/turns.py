"""Conversations whose next turn contains what the model really answered."""

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

from strandline.bench.serving.maker import Maker
from strandline.bench.serving.session import Answer, Ask, Asks, Session
from strandline.errors import ConfigError
from strandline.records.tokens import encode

RETURN_TOKEN_IDS = {"return_token_ids": True}
"""vLLM's field: then the next turn holds exactly what was generated. Servers that do not know it ignore it."""


def synthetic_conversations(maker: Maker) -> list[Session]:
    """Return conversations of random tokens that share a system prompt; enough for ``--num-prompts`` requests."""
    options = maker.options
    require_turns(options)
    rng = Random(f"multi-turn {options.seed}")
    system = maker.vocabulary.draw(rng, options.multi_turn_system_len)
    talk = _random_messages if maker.is_chat else _random_tokens
    num_conversations = -(-options.num_prompts // options.multi_turn_num_turns)
    return [
        Session(partial(talk, maker, system, rng.getrandbits(64)), holds_its_place=keeps_place(maker))
        for _ in range(num_conversations)
    ]


def require_turns(options: Namespace) -> None:
    """Check the lengths of conversations.

    Raises:
        ConfigError: one is below 1.
    """
    for name in ("num_turns", "user_len", "output_len"):
        value = getattr(options, f"multi_turn_{name}")
        if value < 1:
            raise ConfigError(f"--multi-turn-{name.replace('_', '-')} must be at least 1, got {value}")


def keeps_place(maker: Maker) -> bool:
    """Whether conversations count against the concurrency from their beginning to their end.

    Without pauses they do, so that a turn does not wait for those of other conversations.
    """
    options = maker.options
    return bool(options.multi_turn_keep_place or options.multi_turn_think_time[1] == 0)


def pauses(maker: Maker, seed: int) -> Iterator[float]:
    """Yield the pause before each message of a conversation, none before the first."""
    least, most = maker.options.multi_turn_think_time
    rng = Random(f"think {maker.options.seed} {seed}")
    yield 0.0
    while True:
        yield rng.uniform(least, most)


def _random_tokens(maker: Maker, system: list[int], seed: int) -> Asks:
    options, rng, history = maker.options, Random(seed), list(system)
    for _, think_s in zip(range(options.multi_turn_num_turns), pauses(maker, seed), strict=False):
        history += maker.vocabulary.draw(rng, options.multi_turn_user_len)
        answer = yield Ask(
            list(history),
            options.multi_turn_output_len,
            encode(history),
            think_s=think_s,
            body=RETURN_TOKEN_IDS,
        )
        if answer.error:
            return
        history += answered_tokens(maker, answer)


def answered_tokens(maker: Maker, answer: Answer) -> list[int]:
    """Return the tokens of an answer: those that the server reports, or else the tokenizer's.

    Raises:
        ConfigError: neither does.
    """
    ids = answer.token_ids or maker.vocabulary.encode(answer.text)
    if ids is None:
        raise ConfigError("the server does not return token ids: multi-turn needs a --tokenizer to read its answers")
    return ids


def _random_messages(maker: Maker, system: list[int], seed: int) -> Asks:
    options, rng, decode = maker.options, Random(seed), maker.vocabulary.decode
    texts = [
        decode(maker.vocabulary.draw(rng, options.multi_turn_user_len)) for _ in range(options.multi_turn_num_turns)
    ]
    lengths = [options.multi_turn_output_len] * len(texts)
    first = [{"role": "system", "content": decode(system)}] if system else []
    yield from _talk(maker, first, texts, lengths, pauses(maker, seed))


def recorded_conversations(maker: Maker, rows: list[list[str]]) -> list[Session]:
    """Return recorded conversations, the recorded answers replaced by the model's own.

    Args:
        rows: each conversation's messages, a person's first, then an answer, and so on.
    """
    sessions: list[Session] = []
    num_left = maker.options.num_prompts
    for texts in rows:
        if num_left <= 0:
            break
        lengths = [max(len(maker.vocabulary.encode(answer) or answer.split()), 1) for answer in texts[1::2]]
        wanted: Any = maker.options.sharegpt_output_len
        lengths = lengths if wanted is None else [wanted] * len(lengths)
        asked = texts[: 2 * len(lengths) : 2]
        talk = partial(_recorded, maker, asked, lengths, len(sessions))
        sessions.append(Session(talk, holds_its_place=keeps_place(maker)))
        num_left -= len(lengths)
    return sessions


def _recorded(maker: Maker, texts: list[str], lengths: list[int], seed: int) -> Asks:
    yield from _talk(maker, [], texts, lengths, pauses(maker, seed))


def _talk(
    maker: Maker, messages: list[dict[str, str]], texts: list[str], lengths: list[int], pauses: Iterator[float]
) -> Asks:
    """Say the texts one after another, each after the answer to the one before it and a pause."""
    messages = list(messages)
    for text, max_tokens in zip(texts, lengths, strict=True):
        think_s = next(pauses)
        messages.append({"role": "user", "content": text})
        answer = yield maker.of_messages(messages, max_tokens, think_s=think_s)
        if answer.error:
            return
        messages.append({"role": "assistant", "content": answer.text})
