"""Structured outputs: JSON schemas, regular expressions, lists of choices and grammars.

The text part compiles a grammar before a request is admitted, so that an invalid one is rejected there. The core keeps
one matcher per output with its sampling state; before a token is chosen, the matcher computes the allowed tokens, and
all others are banned in that row. llguidance compiles and matches. It releases the GIL while it compiles, so that steps
and streams continue.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from copy import copy
from threading import Lock, Thread
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from strandline.errors import RequestError
from strandline.records.sampling_params import StructuredOutputsParams
from strandline.text.closed_objects import close_objects
from strandline.text.prompts import check_text
from strandline.text.reasoning_grammar import after_reasoning
from strandline.text.schema_patterns import check_patterns

MAX_GRAMMAR_CHARACTERS: Final = 512 * 1024
MAX_KEPT_BYTES: Final = 64 * 2**20
"""Maximum size of the compiled grammars that are cached for later requests."""
BYTES_PER_GRAMMAR: Final = 100_000
BYTES_PER_CHARACTER: Final = 200
"""Estimated size of a compiled grammar: an object of 5,000 optional properties takes 25 MiB, other large ones less."""

LIMITS: Final = LLParserLimits(max_items_in_row=50_000, precompute_large_lexemes=False, verbose_errors=False)
"""Precomputing large lexemes takes llguidance seconds and saves milliseconds. A row may have as many items as a step:
objects with thousands of optional properties need them."""
NO_FORCING: Final = '%llguidance {"no_forcing": true}'
"""Lets the model tokenize text that only one text can follow. llguidance would walk through and tokenize all of it
at every token, which takes minutes and gigabytes for ``(a{1000}b){1000}``."""
UNSATISFIABLE: Final = "NoExtensionBias"
"""llguidance's error for a grammar that no output satisfies."""

WHITE_SPACE: Final = " "
"""White space between two tokens of JSON, at most, unless the request or the schema says otherwise. JSON allows any
amount, and small models fill the rest of an answer with it."""
WHITE_SPACE_OPTIONS: Final = frozenset({"whitespace_flexible", "whitespace_pattern"})
"""llguidance's, in a schema's ``x-guidance``; the pattern has precedence."""

TERMINAL: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/')
"""A string, comment or regular expression in Lark's syntax."""
SET_OPERATION: Final = re.compile(r"&|~(?!\s*\d)")
"""Intersection and complement of terminals; a ``~`` before a number starts a repetition count."""
INNER_SCHEMA: Final = re.compile(r"%json\s*")

Source = Callable[[], tuple[Any, frozenset[int]]]
"""Loads the tokenizer, and the tokens that end an answer."""


class Matcher:
    """The position of one output in its grammar."""

    def __init__(self, matcher: LLMatcher, eos_ids: Collection[int], stop_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._stop_ids = stop_ids
        self._foreign_ids = [token for token in eos_ids if token not in stop_ids]
        self._is_done = False

    @property
    def num_free_tokens(self) -> int:
        """As many next tokens may be any, whatever they are: none, as far as is known."""
        return 0

    def append(self, token: int) -> None:
        """Advance by the sampled token."""
        if self._may_end() and token in self._stop_ids:
            self._is_done = True
        elif not self._is_done:
            self._matcher.consume_token(token)

    def fill(self, words: NDArray[np.int32], row: int) -> None:
        """Set the bits of the tokens allowed next; clear all others. If the matcher has failed, none is allowed."""
        words[row] = 0
        if not self._is_done:
            if not self._matcher.is_error():
                fill_next_token_bitmask(self._matcher, words, row)
            if self._matcher.is_error():
                words[row] = 0
                return
        for token in self._foreign_ids:
            _set_bit(words[row], token, False)
        if self._may_end():
            for token in self._stop_ids:
                _set_bit(words[row], token, True)

    def _may_end(self) -> bool:
        """Return whether the output may end."""
        return self._is_done or (not self._matcher.is_error() and self._matcher.is_accepting())


class CompiledGrammar:
    """A compiled grammar."""

    def __init__(self, start: LLMatcher) -> None:
        self.start = start
        """A matcher at the beginning of the grammar, to be copied."""


class _Words:
    """The tokens of a tokenizer as bytes, in the form that llguidance requires.

    Text in a grammar never matches a special token, even if it is spelled like one.
    """

    bos_token_id: int | None = None

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        backend = copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        plain = LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=0, slices=[])
        self.eos_token_id = eos_ids[0]
        self.tokens = [plain.decode_bytes([token]) for token in range(vocab_size)]
        self.special_token_ids = [token for token in range(vocab_size) if plain.is_special_token(token)]


class Grammars:
    """Compiles grammars for one vocabulary. Any thread may call it.

    Args:
        source: called once, when the vocabulary is prepared.
        vocab_size: size of the model's vocabulary; tokens beyond the tokenizer's vocabulary are never allowed.
    """

    def __init__(self, source: Source, vocab_size: int) -> None:
        self._source = source
        self._vocab_size = vocab_size
        self._lock = Lock()
        self._vocabulary: LLTokenizer | None = None
        self._loaded: tuple[Any, frozenset[int]] | None = None
        self._recent: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._kept_bytes = 0
        self._held: WeakValueDictionary[str, CompiledGrammar] = WeakValueDictionary()
        """All compiled grammars: the recent ones and those that callers of ``compile`` hold."""

    def begin(self) -> None:
        """Prepare the vocabulary in another thread. Grammars that are compiled before it is ready wait for it."""
        Thread(target=self._load_if_possible, name="vocabulary", daemon=True).start()

    def _load_if_possible(self) -> None:
        try:
            self.load()
        except RequestError:
            return  # raised for every request that needs it

    def load(self) -> LLTokenizer:
        """Prepare the vocabulary, which takes seconds for the largest, unless that is done.

        Raises:
            RequestError: there is no tokenizer, it is not a fast one, or llguidance does not understand it.
        """
        tokenizer, eos_ids = self._load_tokenizer()
        with self._lock:
            if self._vocabulary is None:
                # A model without an end token gets one that it cannot sample.
                end = sorted(eos_ids) or [self._vocab_size]
                try:
                    words = _Words(tokenizer, self._vocab_size + 1, end)
                    self._vocabulary = LLTokenizer(TokenizerWrapper(words), eos_token=end)
                except ValueError as error:
                    raise RequestError(f"structured outputs cannot be used with this tokenizer: {error}") from error
            return self._vocabulary

    def _load_tokenizer(self) -> tuple[Any, frozenset[int]]:
        with self._lock:
            if self._loaded is None:
                self._loaded = self._source()
            tokenizer, eos_ids = self._loaded
        if tokenizer is None or not getattr(tokenizer, "is_fast", False):
            raise RequestError("structured outputs need a tokenizer, and a fast one; the engine has none")
        return tokenizer, eos_ids

    def check(self, params: StructuredOutputsParams) -> None:
        """Compile a grammar.

        Raises:
            RequestError: it is invalid; the message says why.
        """
        self.compile(params)

    def matcher(self, params: StructuredOutputsParams, stop_ids: Collection[int]) -> Matcher:
        """Return a matcher at the beginning of a grammar.

        Args:
            stop_ids: tokens that end the output; allowed where the grammar is satisfied.
        """
        return Matcher(self.compile(params).start.deep_copy(), self.load().eos_tokens, stop_ids)

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compile a grammar, unless it is compiled already. It stays compiled as long as the returned object exists.

        Raises:
            RequestError: it is invalid; the message says why.
        """
        source = self.source_text(params)
        vocabulary = self.load()
        with self._lock:
            found = self._held.get(source)
            if found is not None:
                self._keep(source, found)
                return found
        try:
            compiled = CompiledGrammar(compile_source(source, vocabulary))
        except RequestError as error:
            raise refusal(params, str(error)) from error
        with self._lock:
            self._held[source] = compiled
            self._keep(source, compiled)
        return compiled

    def _keep(self, grammar: str, compiled: CompiledGrammar) -> None:
        """Mark a grammar as used; release the least recently used ones beyond the size limit."""
        if grammar not in self._recent:
            self._kept_bytes += _estimate_bytes(grammar)
        self._recent[grammar] = compiled
        self._recent.move_to_end(grammar)
        while self._kept_bytes > MAX_KEPT_BYTES:
            released, _ = self._recent.popitem(last=False)
            self._kept_bytes -= _estimate_bytes(released)

    def source_text(self, params: StructuredOutputsParams) -> str:
        """Return the grammar in llguidance's format.

        Raises:
            RequestError: it is not a grammar, too long, or may take hours to compile.
        """
        for part in (params.regex, params.grammar, params.after, params.calls):
            check_text(part or "", params.origin)
        start = ["start: @body"] if params.after is None else after_reasoning(params.after, "@body", self.tag)
        if params.calls is not None:
            _check_schemas(params.calls)
            start = [params.calls]
        grammars = [{"lark_grammar": "\n".join([*start, NO_FORCING])}, {"name": "body", **_body(params)}]
        text = json.dumps({"grammars": grammars})
        if len(text) > MAX_GRAMMAR_CHARACTERS:
            raise params.fault(
                f"{params.origin} has {len(text)} characters as a grammar, at most {MAX_GRAMMAR_CHARACTERS} may be"
            )
        return text

    def tag(self, text: str) -> str:
        """Return a tag such as ``<tool_call>`` in Lark's syntax: as a special token if it is one, else as a string."""
        tokenizer, _ = self._load_tokenizer()
        is_tag = text.startswith("<") and text.endswith(">")  # llguidance then treats it as a special token
        return text if is_tag and text in tokenizer.get_added_vocab() else json.dumps(text)


def compile_source(source: str, vocabulary: LLTokenizer) -> LLMatcher:
    """Compile a grammar in llguidance's format; return a matcher at its beginning.

    Raises:
        RequestError: it is invalid; the message is the reason alone.
    """
    start = LLMatcher(vocabulary, source, log_level=0, limits=LIMITS)
    begun = start.deep_copy()
    if not begun.is_error():
        begun.compute_bitmask()  # some grammars are found too large only here
    if begun.is_error():
        reason = _first_lines(begun.get_error())
        raise RequestError("nothing can fulfil it" if reason.startswith(UNSATISFIABLE) else reason)
    return start


def refusal(params: StructuredOutputsParams, reason: str) -> RequestError:
    """Return the error of a grammar that cannot be compiled."""
    return params.fault(f"{params.name_of(params.kind)} cannot be used: {reason}")


def _estimate_bytes(grammar: str) -> int:
    """Return the estimated size of a compiled grammar."""
    return BYTES_PER_GRAMMAR + BYTES_PER_CHARACTER * len(grammar)


def _body(params: StructuredOutputsParams) -> dict[str, Any]:
    """Return one grammar in llguidance's format."""
    if params.json is not None or params.json_object:
        return {"json_schema": _schema(params)}
    if params.regex is not None:
        regex: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(params.regex))["grammars"][0]
        return {"lark_grammar": regex["lark_grammar"]}
    if params.choice is not None:
        # One terminal: a rule per choice would soon exceed the parser's limits.
        return {"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in params.choice)}
    return {"lark_grammar": _lark(params)}


def _schema(params: StructuredOutputsParams) -> Any:
    schema: Any = {"type": "object"} if params.json is None else params.json
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise params.fault(f"{params.name_of('json')} is not a JSON schema: {error}") from error
    try:
        check_patterns(schema)
    except RequestError as error:
        raise params.fault(str(error)) from error
    schema = {} if schema is True else close_objects(schema)
    own = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    if not isinstance(own, dict):
        return schema  # llguidance reports the fault
    if params.disable_any_whitespace:
        own = {**own, "whitespace_flexible": False, "whitespace_pattern": None}
    elif params.whitespace_pattern is not None:
        own = {**own, "whitespace_pattern": params.whitespace_pattern}
    elif WHITE_SPACE_OPTIONS.isdisjoint(own):
        own = {**own, "whitespace_pattern": WHITE_SPACE}
    return {**schema, "x-guidance": own}


def _lark(params: StructuredOutputsParams) -> str:
    """Return a grammar in Lark's syntax; GBNF is translated."""
    grammar, name = params.grammar or "", params.name_of("grammar")
    if "::=" not in grammar:
        if SET_OPERATION.search(TERMINAL.sub("", grammar)):
            raise params.fault(f"{name} must not use & or ~ on terminals: a short grammar may take hours to compile")
        _check_schemas(grammar)
        return grammar
    try:
        lark: str = any_to_lark(grammar)
    except Exception as error:
        # The translator may raise anything on malformed input.
        raise params.fault(f"{name} is not GBNF: {error}") from error
    return lark


def _check_schemas(grammar: str) -> None:
    """Check the JSON schemas inside a grammar in Lark's syntax."""
    for found in INNER_SCHEMA.finditer(grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError) as error:
            raise RequestError(f"what follows %json in the grammar is not a JSON schema: {error}") from error
        check_patterns(schema)


def _set_bit(words: NDArray[np.int32], token: int, value: bool) -> None:
    unsigned = words.view(np.uint32)
    bit = np.uint32(1 << token % 32)
    unsigned[token // 32] = unsigned[token // 32] | bit if value else unsigned[token // 32] & ~bit


def _first_lines(message: str) -> str:
    return " ".join(message.split())[:500]
