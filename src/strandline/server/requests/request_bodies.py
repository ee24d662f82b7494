"""Request bodies: OpenAI's fields, and vLLM's where OpenAI has none.

Types are strict: ``"5"`` is not a number, but ``5.0`` is a whole one. Unknown fields are ignored, as OpenAI's clients
expect of older servers, and logged once. Unsupported fields that would change the answer are rejected.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from strandline.errors import RequestError
from strandline.records.sampling_params import SamplingParams, StructuredOutputsParams
from strandline.server.http.request_log import warn_once
from strandline.server.requests.structured_fields import GUIDED, structure_of

NOT_SERVED: Final[Mapping[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "compaction": (),
    "conversation": ({},),
    "suffix": ("",),
    "tools": ([],),
    "mcp_servers": ([],),
    "functions": ([],),
    "use_beam_search": (False,),
    "audio": (),
    "modalities": ([], ["text"]),
    "moderation": (),
    "prompt_embeds": (),
    "previous_response_id": ("",),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "thread": (),
    "truncate_prompt_tokens": (),
    "documents": ([],),
    "chat_template": (),  # a template is a program: an endless loop would block tokenization for all clients
}
"""Unsupported fields that would change the answer, and the values (besides null) that do not."""

_WHOLE: Final = "send the whole conversation, or use /v1/responses with previous_response_id"
INSTEAD: Final[Mapping[str, str]] = {
    "best_of": "send n, and choose by the log-probabilities",
    "chat_template": "give the server --chat-template",
    "compaction": "ask for a summary in a message",
    "conversation": _WHOLE,
    "documents": "send them in chat_template_kwargs",
    "functions": "send tools",
    "previous_response_id": _WHOLE,
    "thread": _WHOLE,
    "mcp_servers": "send the servers' tools as tools",
    "tools": "send them to /v1/chat/completions",
}
"""What to do instead of sending some of these fields."""

WITHOUT_EFFECT: Final = frozenset(
    {"metadata", "parallel_tool_calls", "priority", "request_id", "safety_identifier"}
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
    | {"spaces_between_special_tokens"}
    | {"service_tier", "store", "tool_choice", "user"}
    | {"cache_control", "container", "context_management", "speed"}  # of Anthropic's API
)
"""Fields that are accepted and have no effect."""

EMPTY: Final[Sequence[Any]] = (None, "", [], {}, {"type": "text"})
"""Values of fields that ask for nothing."""

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of ``reasoning_effort``, as in vLLM."""

STRUCTURED: Final = "structured_outputs"
STRUCTURE_FIELDS: Final = ("response_format", STRUCTURED, *GUIDED, "guided_whitespace_pattern")


def whole(value: Any) -> Any:
    """Return a whole number that is written with a fraction, as some JSON libraries write all numbers, as one."""
    return int(value) if type(value) is float and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]
Count = Annotated[Whole, Field(ge=0)]


def _list_of(kind: type, what: str) -> Callable[[Any], Any]:
    """Return a validator of lists that runs in C and reports one error however many items are wrong."""

    def check(value: Any) -> Any:
        if type(value) is not list or not set(map(type, value)) <= {kind}:
            raise ValueError(f"must be a list of {what}")
        return value

    return check


def _check_prompt(value: Any) -> Any:
    kinds = {type(value)} if type(value) is not list else set(map(type, value)) or {int}
    if type(value) is list and kinds == {list}:
        kinds = {kind for tokens in value for kind in map(type, tokens)} or {int}
    if len(kinds) > 1 or kinds - {str, int} or type(value) is int:
        raise ValueError("must be a text, a list of token ids, or a list of texts or of lists of token ids")
    return value


_TEXT: Final = {"type": "string"}
_TEXTS: Final = {"type": "array", "items": _TEXT}
_IDS: Final = {"type": "array", "items": {"type": "integer"}}
_PROMPT: Final = {"anyOf": [_TEXT, _IDS, _TEXTS, {"type": "array", "items": _IDS}]}

Tokens = Annotated[list[int], PlainValidator(_list_of(int, "token ids")), WithJsonSchema(_IDS)]
Strings = Annotated[list[str], PlainValidator(_list_of(str, "strings")), WithJsonSchema(_TEXTS)]
Objects = Annotated[
    list[dict[str, Any]],
    PlainValidator(_list_of(dict, "objects")),
    WithJsonSchema({"type": "array", "items": {"type": "object"}}),
]
Prompts = Annotated[
    str | list[int] | list[str] | list[list[int]], PlainValidator(_check_prompt), WithJsonSchema(_PROMPT)
]


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a prompt that is too long is cut."""

    max_tokens: int
    from_left: bool
    """The last tokens are kept, not the first."""


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """With ``include_usage``: every chunk carries the usage so far."""


class SamplingFields(BaseModel):
    """How tokens are chosen, in OpenAI's requests for generation."""

    model_config = ConfigDict(strict=True, extra="allow")

    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Whole | None = None
    stop: str | Strings | None = None
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool = False
    bad_words: Strings | None = None
    logit_bias: dict[str, Any] | None = None
    allowed_token_ids: Tokens | None = None
    priority: Whole | None = None
    ignore_eos: bool = False
    min_tokens: Whole | None = None
    skip_special_tokens: bool = True
    thinking_token_budget: Whole | None = None
    thinking_budget_tokens: Whole | None = None
    """llama.cpp's name for the same."""

    def given(self) -> dict[str, Any]:
        """Return the sampling parameters that the body has. Raises ``RequestError``: a token id is not a number."""
        names = SamplingParams.__dataclass_fields__.keys() & self.__class__.model_fields.keys() - {STRUCTURED}
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.thinking_budget_tokens is not None:
            given.setdefault("thinking_token_budget", self.thinking_budget_tokens)
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        return given


class SamplingBody(SamplingFields):
    """Fields that requests for completions share, of texts and of chats."""

    foreign: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Fields of other APIs, and what this one has instead: as in ``check_foreign``."""

    model: str | None = None
    n: Whole | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    """In log-probabilities, tokens are ``token_id:ID`` instead of texts."""
    logprob_token_ids: Tokens | None = None
    """Tokens reported at every position of the output instead of the most likely ones."""
    prompt_logprobs: Whole | None = None
    truncate_prompt_tokens: Whole | None = None
    truncation_side: str | None = None
    cache_salt: str | None = None
    include_cache_account: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    def structure(self) -> StructuredOutputsParams | None:
        """Return the structure that the output must have. Raises as ``structure_of``."""
        return structure_of({name: getattr(self, name) for name in STRUCTURE_FIELDS})

    def sampling_params(self, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
        """Return the sampling parameters: the model's defaults, overridden by the body and ``more``.

        Raises:
            RequestError: a value is out of range, or the body asks for what is not supported.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs needs stream: false", param="prompt_logprobs")
        check_foreign(self, self.foreign)
        check_extra(self.model_extra)
        values = {STRUCTURED: self.structure(), **defaults, **self.given(), **more}
        if self.logprob_token_ids is not None and values.get("logprobs") is None:
            raise RequestError("logprob_token_ids needs logprobs, which is not set", param="logprob_token_ids")
        return SamplingParams(**values)

    def truncation(self, max_model_len: int) -> Truncation | None:
        """Return how the prompt is truncated; None: not at all.

        Raises:
            RequestError: a value is out of range.
        """
        return truncation_of(self.truncate_prompt_tokens, self.truncation_side, max_model_len)

    def wants_usage(self) -> bool:
        """Return whether a stream ends with the usage."""
        return self.include_cache_account or (self.stream_options is not None and self.stream_options.include_usage)

    def wants_continuous_usage(self) -> bool:
        """Return whether every chunk of a stream carries the usage so far."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats


class CompletionBody(SamplingBody):
    """Body of ``/v1/completions``."""

    foreign = {
        "max_completion_tokens": ["max_tokens"],
        "max_output_tokens": ["max_tokens"],
        "stop_sequences": ["stop"],
    }

    prompt: Prompts
    max_tokens: Whole | None = 16
    logprobs: Count | None = None
    echo: bool = False
    add_special_tokens: bool = True
    routed_experts_prompt_start: Count = 0


class ChatBody(SamplingBody):
    """Body of ``/v1/chat/completions``."""

    foreign = {
        "instructions": ["a message of the role system"],
        "max_output_tokens": ["max_completion_tokens", "max_tokens"],
        "stop_sequences": ["stop"],
        "system": ["a message of the role system"],
    }

    messages: Annotated[Objects, Field(min_length=1)]
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = False
    top_logprobs: Count | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = False
    """With a message that is continued: return its beginning too."""
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    routed_experts_prompt_start: Count = 0

    def continues(self) -> bool:
        """Return whether the output continues the last message. Raises as ``check_continuation``."""
        last = self.messages[-1]
        if last.get("role") == "assistant" and last.get("prefix") is True:  # as in DeepSeek's and Mistral's APIs
            return True
        return check_continuation(self.continue_final_message, self.add_generation_prompt)

    def template_options(self) -> dict[str, Any]:
        """Return the chat template's variables. Raises as ``effort_options``."""
        return chat_options(self.reasoning_effort, self.chat_template_kwargs)


class TokenizeBody(BaseModel):
    """Body of ``/tokenize``: a text or a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool | None = False
    cache_salt: str | None = None


class DetokenizeBody(BaseModel):
    """Body of ``/detokenize``."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    tokens: Tokens


def check_extra(
    fields: Mapping[str, Any] | None,
    not_served: Mapping[str, tuple[Any, ...]] = NOT_SERVED,
    without_effect: Collection[str] = WITHOUT_EFFECT,
) -> None:
    """Reject unsupported fields that would change the answer; log unknown ones.

    Args:
        not_served: unsupported fields, and the values (besides null) that do not change the answer.
        without_effect: fields that are accepted and have no effect.

    Raises:
        RequestError: such a field is set.
    """
    for name, value in (fields or {}).items():
        if name in not_served and value is not None and value not in not_served[name]:
            instead = f"; {INSTEAD[name]}" if name in INSTEAD else ""
            raise RequestError(f"{name} is not supported, got {value!r:.100}{instead}", param=name)
        if name not in not_served and name not in without_effect:
            warn_once("request field %s is unknown and ignored", name)


def check_foreign(body: BaseModel, foreign: Mapping[str, Sequence[str]]) -> None:
    """Reject fields of other APIs, unless they are empty or the body sets this API's own as well.

    Clients that use several APIs send a field under all of its names; this API's own counts.

    Args:
        foreign: fields of other APIs, and the paths of what this one has instead, or what to send in words.

    Raises:
        RequestError: such a field is set.
    """
    for name, instead in foreign.items():
        value = (body.model_extra or {}).get(name)
        if value not in EMPTY and not any(_has(body, path) for path in instead):
            raise RequestError(f"this API has no {name}; send {' or '.join(instead)}", param=name)


def _has(body: BaseModel, path: str) -> bool:
    """Return whether a body sets a field: ``text.format`` is ``format`` in the object ``text``."""
    name, *inside = path.split(".")
    value = getattr(body, name) if name in body.model_fields_set else None
    for each in inside:
        value = value.get(each) if isinstance(value, Mapping) else None
    return value is not None


def truncation_of(limit: int | None, side: str | None, max_model_len: int) -> Truncation | None:
    """Return how a prompt is truncated; None: not at all.

    Args:
        limit: most tokens; -1: as many as the context allows.
        side: ``left`` or ``right``, where tokens are dropped; None: left.

    Raises:
        RequestError: a value is out of range.
    """
    side = side or "left"
    if side not in ("left", "right"):
        raise RequestError(f"truncation_side must be left or right, got {side!r:.100}", param="truncation_side")
    if limit is None:
        return None
    if limit == -1:
        limit = max_model_len - 1  # at least one token of output needs room
    if not 1 <= limit <= max_model_len:
        raise RequestError(
            f"truncate_prompt_tokens must be -1 or between 1 and {max_model_len}, the maximum context length, got "
            f"{limit}",
            param="truncate_prompt_tokens",
        )
    return Truncation(limit, from_left=side == "left")


def check_unicode(fields: Mapping[str, Any]) -> None:
    """Raise a RequestError unless all texts in fields that a response repeats are valid Unicode."""
    for name, value in fields.items():
        try:
            msgspec.json.encode(value)
        except UnicodeEncodeError as error:
            raise RequestError(f"{name} is not valid Unicode: {error.reason}", param=name) from error


def check_continuation(continues: bool, adds_generation_prompt: bool) -> bool:
    """Return whether the output continues the last message.

    Raises:
        RequestError: it is to begin a message too.
    """
    if continues and adds_generation_prompt:
        raise RequestError(
            "continue_final_message needs add_generation_prompt: false; the output cannot also begin a message",
            param="continue_final_message",
        )
    return continues


def effort_options(effort: Any, param: str) -> dict[str, Any]:
    """Return the chat template's variables for an effort of reasoning; None: its defaults.

    Args:
        param: the request's field.

    Raises:
        RequestError: the effort is unknown.
    """
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise RequestError(f"{param} must be one of {', '.join(EFFORTS)}; got {effort!r:.100}", param=param)
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def chat_options(effort: str | None, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the chat template's variables: those of an effort, unless they are given. Raises as ``effort_options``."""
    return effort_options(effort, "reasoning_effort") | dict(given or {})


@contextmanager
def sent_as(names: Mapping[str, str]) -> Iterator[None]:
    """Name the field of a RequestError as the client did.

    Args:
        names: sampling parameters, each with the request's field, where that has another name.
    """
    try:
        yield
    except RequestError as error:
        param, sent = error.param, names.get(error.param or "")
        if param is None or sent is None:
            raise
        raise RequestError(re.sub(rf"\b{param}\b", sent, str(error), count=1), param=sent) from error


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 20):
        raise RequestError(f"logit_bias must map token ids to numbers, got the key {key[:50]!r}", param="logit_bias")
    return int(key)
