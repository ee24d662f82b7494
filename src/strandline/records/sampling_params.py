"""Sampling parameters of a request, with vLLM's names and meanings."""

import json
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Final, TypeVar

from strandline.errors import RequestError
from strandline.plain_values import plain

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this mean greedy decoding."""

MAX_TEMPERATURE: Final = 1e6
MAX_REPETITION_PENALTY: Final = 1e3
"""Beyond these float32 logits would overflow or all be equal."""
MAX_LOGPROBS: Final = 20
MAX_LOGPROB_TOKEN_IDS: Final = 128
"""Most tokens whose log-probabilities a request may name, as in vLLM."""
MAX_N: Final = 1024
MAX_COUNT: Final = 2**63 - 1
"""Largest count that fits into a message between processes."""
MAX_STRINGS: Final = 256
MAX_STRING_CHARACTERS: Final = 64 * 1024
"""Limit for stop strings and bad words: every token is compared with each."""
STRUCTURED_OUTPUTS: Final = "structured_outputs"
STRUCTURES: Final = ("json", "regex", "choice", "grammar", "json_object")


COLLECTIONS: Final[Sequence[tuple[str, tuple[type, ...], str]]] = (
    ("stop", (str, list, tuple, set, frozenset), "a string or a list of strings"),
    ("stop_token_ids", (list, tuple, set, frozenset), "a list of token ids"),
    ("allowed_token_ids", (list, tuple, set, frozenset), "a list of token ids"),
    ("logprob_token_ids", (list, tuple, set, frozenset), "a list of token ids"),
    ("bad_words", (list, tuple, set, frozenset), "a list of strings"),
    ("logit_bias", (Mapping,), "a mapping from token ids to numbers"),
)
"""Parameters that hold several values, the types that they may have, and a description."""

P = TypeVar("P", "SamplingParams", "StructuredOutputsParams")


def _with_own_containers(params: P) -> P:
    """Return a copy whose lists and dictionaries are its own, without checking it again."""
    copied = copy(params)
    for given in fields(params):
        value = getattr(params, given.name)
        if isinstance(value, list | dict):
            object.__setattr__(copied, given.name, value.copy())
    return copied


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A structure that an output must have. Exactly one of the first five is given.

    Raises:
        RequestError: none or several are given, or one is of the wrong kind.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """In Lark's syntax or GBNF."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without white space between tokens."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between tokens of JSON."""
    after: str | None = None
    """The output is unconstrained up to this text: the end of the model's reasoning."""
    calls: str | None = None
    """A grammar in Lark's syntax of calls and reasoning, whose rule ``@body`` stands for the structure: an output may
    call tools instead. None: it may not."""
    origin: str = field(default=STRUCTURED_OUTPUTS, compare=False)
    """The request's field, for messages."""

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise self.fault(f"{self.origin} needs exactly one of {', '.join(STRUCTURES)}; got {given or 'none'}")
        for name in ("regex", "grammar", "whitespace_pattern", "after"):
            if not isinstance(getattr(self, name), str | None):
                raise self.fault(f"{self.name_of(name)} must be a string, got {getattr(self, name)!r:.100}")
        if not isinstance(self.json, str | dict | None):
            raise self.fault(f"{self.name_of('json')} must be a JSON schema, got {self.json!r:.100}")
        choice: object = self.choice
        if choice is not None and not (
            isinstance(choice, list) and choice and all(text and isinstance(text, str) for text in choice)
        ):
            raise self.fault(f"{self.name_of('choice')} must hold non-empty strings, got {self.choice!r:.100}")

    def fault(self, message: str) -> RequestError:
        """Return the error of a structure that cannot be used."""
        return RequestError(message, param=self.origin)

    def name_of(self, field_name: str) -> str:
        """Return how the request calls a field: ``structured_outputs.json``, but ``guided_json``."""
        return f"{self.origin}.{field_name}" if self.origin == STRUCTURED_OUTPUTS else self.origin

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in STRUCTURES if getattr(self, name) not in (None, False))

    def owned(self) -> "StructuredOutputsParams":
        """Return a copy that shares no list or dictionary with this one; a JSON schema becomes text."""
        copied = _with_own_containers(self)
        if isinstance(self.json, dict):
            object.__setattr__(copied, "json", json.dumps(self.json))
        return copied

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], origin: str = STRUCTURED_OUTPUTS) -> "StructuredOutputsParams":
        """Build from a mapping. Raises a RequestError as the constructor, or when a name is unknown."""
        known = [f.name for f in fields(cls) if f.name not in ("calls", "origin")]
        _check_names("structured_outputs field", values, known, STRUCTURED_OUTPUTS)
        return cls(**values, origin=origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Raises:
        RequestError: a value is out of range; the message names it, what was given, and the limits.
    """

    n: int = 1
    """Number of outputs; output ``i`` of a seeded request is sampled with ``seed + i``."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    """Minimum probability relative to the most likely token's."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    bad_words: list[str] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    """Tokens that the output may consist of; None: all. One that ends the output must be among them to do so, except
    that of a completed grammar."""
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    """None: up to ``max_model_len``. 0: the prompt is computed, for the cache or its log-probabilities."""
    logprobs: int | None = None
    """Number of most likely tokens to report in addition to the sampled one; 0 reports only the sampled one."""
    logprob_token_ids: list[int] | None = None
    """Tokens to report at every position of the output instead of the most likely ones. Without ``logprobs``, that is
    0."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens; -1: all of a vocabulary of at most ``MAX_LOGPROBS`` tokens. Such a request
    computes its whole prompt and does not read the cache."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    """A structure that the output must have."""
    priority: int = 0
    """Requests of lower values are scheduled first; other values than 0 need ``scheduling_policy="priority"``."""
    thinking_token_budget: int | None = None
    """Maximum number of tokens of each section of reasoning; None or -1: no maximum."""
    returns_hidden_state: bool = False
    """Return the final hidden state of the prompt's last token, for embeddings."""
    returns_routed_experts: bool = False
    """Return the experts that tokens are routed to, if the engine records them."""
    stop_strings: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        for name in SETTABLE:
            given = getattr(self, name)
            if (value := plain(given)) is not given:
                object.__setattr__(self, name, value)
        self._check_kinds()
        self._check_token_ids()
        self._check_ranges()
        self._check_integers()
        self._check_stops()

    def owned(self) -> "SamplingParams":
        """Return a copy that shares no list or dictionary with this one, for plans, which own their data."""
        copied = _with_own_containers(self)
        if self.structured_outputs is not None:
            object.__setattr__(copied, "structured_outputs", self.structured_outputs.owned())
        return copied

    def clone(self) -> "SamplingParams":
        """Return an equal copy that shares no list or dictionary with this one."""
        return deepcopy(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Build from a mapping.

        Raises:
            RequestError: a name is unknown (the message gives the nearest) or a value is out of range.
        """
        _check_names("sampling parameter", values, [f.name for f in fields(cls) if f.init])
        return cls(**values)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def needs_host_tokens(self) -> bool:
        """Whether every token must reach the host before the next can be sampled."""
        return bool(self.bad_words) or self.structured_outputs is not None

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def _check_kinds(self) -> None:
        for name, kinds, expected in COLLECTIONS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise RequestError(f"{name} must be {expected}, got {value!r:.100}", param=name)

    def _check_token_ids(self) -> None:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids must not be empty: no token could be sampled", param="allowed_token_ids"
            )
        if self.logprob_token_ids is not None:
            if not 1 <= len(self.logprob_token_ids) <= MAX_LOGPROB_TOKEN_IDS:
                raise RequestError(
                    f"logprob_token_ids must hold between 1 and {MAX_LOGPROB_TOKEN_IDS} token ids, got "
                    f"{len(self.logprob_token_ids)}",
                    param="logprob_token_ids",
                )
            if self.logprobs is None:
                object.__setattr__(self, "logprobs", 0)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            for token in getattr(self, name) or ():
                _require_integer(name, token, 0, None)

    def _check_ranges(self) -> None:
        _require_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _require_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0 and at most 1, got 0", param="top_p")
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_number(
            "repetition_penalty", self.repetition_penalty, 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        )
        _require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)

    def _check_integers(self) -> None:
        _require_integer("n", self.n, 1, MAX_N)
        _require_integer("top_k", self.top_k, -1, MAX_COUNT)
        _require_integer("min_tokens", self.min_tokens, 0, MAX_COUNT)
        if self.max_tokens is not None:
            _require_integer("max_tokens", self.max_tokens, 0, MAX_COUNT)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", param="max_tokens"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _require_integer(name, getattr(self, name), -1 if name == "prompt_logprobs" else 0, MAX_LOGPROBS)
        if self.thinking_token_budget is not None:
            _require_integer("thinking_token_budget", self.thinking_token_budget, -1, MAX_COUNT)
        _require_integer("priority", self.priority, -(2**63), 2**63 - 1)
        if self.seed is not None:
            _require_integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.n > 1 and self.is_greedy:
            raise RequestError(
                f"n must be 1 with greedy sampling, got {self.n}: all outputs would be equal; temperature is "
                f"{self.temperature:g}, which is the model's default if the request sets none",
                param="n",
            )

    def _check_stops(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        if not all(s and isinstance(s, str) for s in stop):
            raise RequestError(f"stop must hold non-empty strings, got {self.stop!r:.100}", param="stop")
        _require_few("stop", stop)
        if stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True")
        object.__setattr__(self, "stop_strings", tuple(stop))
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise RequestError(
                f"structured_outputs must be StructuredOutputsParams, got {self.structured_outputs!r:.100}"
            )
        if not all(word and isinstance(word, str) for word in self.bad_words or ()):
            raise RequestError(f"bad_words must hold non-empty strings, got {self.bad_words!r:.100}", param="bad_words")
        _require_few("bad_words", self.bad_words or ())
        for token, bias in (self.logit_bias or {}).items():
            _require_integer("logit_bias token", token, 0, None)
            _require_number(f"logit_bias of token {token}", bias, -100.0, 100.0)


SETTABLE: Final = tuple(each.name for each in fields(SamplingParams) if each.init)
"""Parameters that callers set."""


def _check_names(what: str, values: Mapping[str, Any], known: list[str], param: str | None = None) -> None:
    for name in values:
        if name not in known:
            nearest = get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise RequestError(f"unknown {what} {name!r}{hint}", param=param or name)


def _require_few(name: str, strings: Sequence[str]) -> None:
    num_characters = sum(map(len, strings))
    if len(strings) > MAX_STRINGS or num_characters > MAX_STRING_CHARACTERS:
        raise RequestError(
            f"{name} has {len(strings)} strings of {num_characters} characters together; at most {MAX_STRINGS} and "
            f"{MAX_STRING_CHARACTERS} may be",
            param=name,
        )


def _require_number(name: str, value: object, low: float, high: float) -> None:
    """Raise a RequestError unless a value is in range. The field is the first word of the name."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator]
        raise RequestError(
            f"{name} must be a number between {low:.10g} and {high:.10g}, got {value!r:.100}", param=name.split()[0]
        )


def _require_integer(name: str, value: object, low: int, high: int | None) -> None:
    """Raise a RequestError unless a value is in range. The field is the first word of the name."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        is_too_large = isinstance(value, int) and high is not None and value > high
        has_limit = high not in (None, MAX_COUNT) or is_too_large
        limits = f"between {low} and {high}" if has_limit else f"of at least {low}"
        raise RequestError(f"{name} must be a whole number {limits}, got {value!r:.100}", param=name.split()[0])
