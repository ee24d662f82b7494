"""Sessions by the name of a dataset: random tokens, shared prefixes, texts, conversations, screenshots, traces."""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any, Final

from strandline.bench.serving.maker import Maker
from strandline.bench.serving.screenshots import screenshot_conversations
from strandline.bench.serving.session import Ask, Asks, Session, single
from strandline.bench.serving.turns import recorded_conversations, synthetic_conversations
from strandline.bench.traces import Lane, read_trace
from strandline.errors import ConfigError
from strandline.records.tokens import TOKEN_BYTES
from strandline.text_input import json_lines, read_text

MIN_SHAREGPT_TOKENS: Final = 4
MAX_SHAREGPT_PROMPT_TOKENS: Final = 1024
MAX_SHAREGPT_TOTAL_TOKENS: Final = 2048
"""The bounds that vLLM's benchmark keeps to, so that figures compare."""


def make_sessions(maker: Maker) -> list[Session]:
    """Return the sessions of the dataset that the options name.

    Raises:
        ConfigError: a length is out of range, or a file is missing or malformed.
    """
    name = maker.options.dataset_name
    path = maker.options.dataset_path
    if path is None and name in ("sharegpt", "trace", "custom"):
        raise ConfigError(f"--dataset-name {name} needs --dataset-path")
    if path is not None and name in ("random", "prefix_repetition", "screenshots"):
        raise ConfigError(f"--dataset-name {name} reads no file; name the kind of {path} with --dataset-name")
    if name == "multi-turn" and path is not None:
        rows = [_texts(row) for row in _shuffled(_read_json(path), maker.options)]
        return recorded_conversations(maker, [texts for texts in rows if len(texts) >= 2])
    sessions = MAKERS[name](maker)
    if not sessions:
        raise ConfigError(f"{path} holds no prompt that is neither too short nor too long")
    return sessions


# Tokens at random


def _random(maker: Maker) -> list[Session]:
    options, vocabulary = maker.options, maker.vocabulary
    ratio = options.random_range_ratio
    if not 0 <= ratio < 1:
        raise ConfigError(f"--random-range-ratio must be in [0, 1), got {ratio:g}")
    rng = Random(f"random {options.seed}")
    prefix = vocabulary.draw(rng, options.random_prefix_len)

    def around(length: int) -> int:
        return rng.randint(int(length * (1 - ratio)), int(-(-length * (1 + ratio) // 1)))

    sessions = []
    for _ in range(options.num_prompts):
        num_input = max(around(options.random_input_len), 0 if prefix else 1)
        ids = prefix + vocabulary.draw(rng, num_input)
        sessions.append(single(maker.of_tokens(ids, max(around(options.random_output_len), 1))))
    return sessions


def _prefix_repetition(maker: Maker) -> list[Session]:
    options, vocabulary = maker.options, maker.vocabulary
    num_prefixes = options.prefix_repetition_num_prefixes
    if not 1 <= num_prefixes <= options.num_prompts:
        raise ConfigError(
            f"--prefix-repetition-num-prefixes must be from 1 to --num-prompts ({options.num_prompts}), "
            f"got {num_prefixes}"
        )
    rng = Random(f"prefix_repetition {options.seed}")
    sessions = []
    for _ in range(num_prefixes):
        prefix = vocabulary.draw(rng, options.prefix_repetition_prefix_len)
        for _ in range(options.num_prompts // num_prefixes):
            ids = prefix + vocabulary.draw(rng, options.prefix_repetition_suffix_len)
            sessions.append(single(maker.of_tokens(ids, options.prefix_repetition_output_len)))
    if not options.disable_shuffle:
        rng.shuffle(sessions)
    return sessions


# Files of text


def _sharegpt(maker: Maker) -> list[Session]:
    rows = (_texts(row) for row in _shuffled(_read_json(maker.options.dataset_path), maker.options))
    asks = (_sharegpt_ask(maker, texts) for texts in rows if len(texts) >= 2)
    return _enough((single(ask) for ask in asks if ask is not None), maker.options)


def _sharegpt_ask(maker: Maker, texts: list[str]) -> Ask | None:
    """Return a conversation's first message as a request, None if it or the answer is too short or too long."""
    prompt, answer = (maker.vocabulary.encode(text) for text in texts[:2])
    if prompt is None or answer is None:
        raise ConfigError("sharegpt needs a --tokenizer, to know how long the recorded answers are")
    wanted = maker.options.sharegpt_output_len
    num_output = len(answer) if wanted is None else wanted
    is_long_enough = len(prompt) >= MIN_SHAREGPT_TOKENS and (wanted is not None or num_output >= MIN_SHAREGPT_TOKENS)
    is_short_enough = (
        len(prompt) <= MAX_SHAREGPT_PROMPT_TOKENS and len(prompt) + num_output <= MAX_SHAREGPT_TOTAL_TOKENS
    )
    return maker.of_text(texts[0], num_output) if is_long_enough and is_short_enough else None


def _texts(row: Any) -> list[str]:
    """Return a conversation's messages, from a person's first on."""
    try:
        said = [(turn["from"], turn["value"]) for turn in row["conversations"]]
    except (KeyError, TypeError) as error:
        raise ConfigError("a sharegpt file holds a list of {'conversations': [{'from', 'value'}, …]}") from error
    while said and said[0][0] not in ("human", "user"):
        said.pop(0)
    return [text for _, text in said]


def _custom(maker: Maker) -> list[Session]:
    options = maker.options
    sessions = []
    for row in _shuffled(_read_lines(options.dataset_path), options):
        if not isinstance(row, Mapping) or not isinstance(row.get("prompt"), str):
            raise ConfigError(f"{options.dataset_path}: each line must be {{'prompt': text}}, got {str(row)[:80]!r}")
        num_output = row.get("output_tokens") if options.custom_output_len == -1 else options.custom_output_len
        if not isinstance(num_output, int) or num_output < 1:
            raise ConfigError(f"{options.dataset_path}: --custom-output-len -1 needs 'output_tokens' in each line")
        sessions.append(single(_custom_ask(maker, row["prompt"], num_output)))
    return _enough(iter(sessions), options)


def _custom_ask(maker: Maker, text: str, max_tokens: int) -> Ask:
    """Render the text as one message of a chat, as vLLM does, unless the options say otherwise."""
    is_plain = maker.is_chat or maker.options.skip_chat_template
    rendered = None if is_plain else maker.vocabulary.render([{"role": "user", "content": text}])
    return maker.of_text(text, max_tokens) if rendered is None else maker.of_tokens(rendered, max_tokens)


def _read_json(path: str) -> list[Any]:
    try:
        rows = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset {path}: {error}") from error
    if not isinstance(rows, list):
        raise ConfigError(f"dataset {path} must hold a list, holds a {type(rows).__name__}")
    return rows


def _read_lines(path: str) -> list[Any]:
    try:
        return list(json_lines(read_text(path).split("\n")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset {path}: {error}") from error


def _shuffled(rows: list[Any], options: Namespace) -> list[Any]:
    if not options.disable_shuffle:
        Random(f"shuffle {options.seed}").shuffle(rows)
    return rows


def _enough(sessions: Iterator[Session], options: Namespace) -> list[Session]:
    """Take the requested number; repeat items if there are fewer, unless the options forbid it."""
    taken = [session for session, _ in zip(sessions, range(options.num_prompts), strict=False)]
    if options.no_oversample or not taken:
        return taken
    rng = Random(f"oversample {options.seed}")
    return taken + rng.choices(taken, k=options.num_prompts - len(taken))


# Traces


def _trace(maker: Maker) -> list[Session]:
    options = maker.options
    if maker.is_chat:
        raise ConfigError("a trace is token ids: replay it with --backend openai")
    maker.vocabulary.require("a trace")
    lanes = read_trace(options.dataset_path, max_sessions=options.max_sessions, session_gap_s=options.session_gap)
    return [_trace_session(maker, lane) for lane in sorted(lanes, key=lambda lane: lane.start_s)]


def _trace_session(maker: Maker, lane: Lane) -> Session:
    speed = maker.options.trace_speed

    def asks() -> Asks:
        for call in lane.calls():
            num_output = max(len(call.output) // TOKEN_BYTES, 1)
            num_total = len(call.prompt) // TOKEN_BYTES + num_output
            if maker.max_model_len is not None and num_total > maker.max_model_len:
                maker.num_skipped += 1
            else:
                ids = maker.vocabulary.fold(call.prompt)
                yield maker.of_tokens(ids, num_output, at_s=call.at_s / speed, think_s=call.think_s / speed)

    return Session(asks, lane.start_s / speed)


MAKERS: Final[Mapping[str, Callable[[Maker], list[Session]]]] = {
    "random": _random,
    "prefix_repetition": _prefix_repetition,
    "sharegpt": _sharegpt,
    "multi-turn": synthetic_conversations,
    "trace": _trace,
    "custom": _custom,
    "screenshots": screenshot_conversations,
}
