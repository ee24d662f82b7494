"""Structured outputs: JSON schemas, regular expressions, lists of choices and grammars.

The text part compiles a grammar before a request is admitted, so that a wrong one is refused there. The core keeps one
matcher per output beside its sampling state; before a token is chosen, the matcher says which ones may come, and
all others are banned in that row. llguidance compiles and matches. It releases the GIL while it compiles, so that a
server compiles beside its steps and streams.
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
from strandline.text.prompts import check_text

MAX_GRAMMAR_CHARACTERS: Final = 512 * 1024
MAX_KEPT: Final = 64
"""Compiled grammars that are kept for the next request with the same one, though no request holds them."""

LIMITS: Final = LLParserLimits(max_items_in_row=50_000, precompute_large_lexemes=False, verbose_errors=False)
"""Precomputing large lexemes takes llguidance seconds and saves milliseconds. A row may have as many items as a step:
objects with thousands of optional properties need them."""
UNSATISFIABLE: Final = "NoExtensionBias"
"""llguidance's error for a grammar that no output satisfies."""

TERMINAL: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/')
"""A string, comment or regular expression in Lark's syntax."""
SET_OPERATION: Final = re.compile(r"&|~(?!\s*\d)")
"""Intersection and complement of terminals; a ``~`` before a number is a repetition count."""

Source = Callable[[], tuple[Any, frozenset[int]]]
"""Loads the tokenizer, and the tokens that end an answer."""


class Matcher:
    """The position of one output in its grammar."""

    def __init__(self, matcher: LLMatcher, eos_ids: Collection[int], stop_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._stop_ids = stop_ids
        self._foreign_ids = [token for token in eos_ids if token not in stop_ids]
        self._is_done = False

    def append(self, token: int) -> None:
        """Advance by the sampled token."""
        if self._may_end() and token in self._stop_ids:
            self._is_done = True
        elif not self._is_done:
            self._matcher.consume_token(token)

    def fill(self, words: NDArray[np.int32], row: int) -> None:
        """Set the bits of the tokens allowed next; clear all others."""
        if self._is_done or self._matcher.is_error():
            words[row] = 0
        else:
            fill_next_token_bitmask(self._matcher, words, row)
        for token in self._foreign_ids:
            _set_bit(words[row], token, False)
        if self._may_end():
            for token in self._stop_ids:
                _set_bit(words[row], token, True)

    def _may_end(self) -> bool:
        """Return whether the output may end: the grammar is satisfied, or the matcher has failed."""
        return self._is_done or self._matcher.is_error() or self._matcher.is_accepting()


class CompiledGrammar:
    """A compiled grammar."""

    def __init__(self, start: LLMatcher) -> None:
        self.start = start
        """A matcher at the beginning of the grammar, to be copied."""


class _Words:
    """The tokens of a tokenizer as bytes, in the form that llguidance asks for.

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
        self._special_ids = frozenset(self.special_token_ids)
        self._backend = tokenizer.backend_tokenizer

    def __call__(self, text: bytes) -> list[int]:
        token_ids: list[int] = []
        for token in self._encode(text.decode()):
            if token in self._special_ids:
                tag = self.tokens[token].decode()
                token_ids += self._encode(tag[:1]) + self._encode(tag[1:])
            else:
                token_ids.append(token)
        return token_ids

    def _encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)


class Grammars:
    """Compiles grammars for one vocabulary. Any thread may call it.

    Args:
        source: called once, when the vocabulary is prepared.
        vocab_size: of the model; tokens beyond the tokenizer's vocabulary are never allowed.
    """

    def __init__(self, source: Source, vocab_size: int) -> None:
        self._source = source
        self._vocab_size = vocab_size
        self._lock = Lock()
        self._vocabulary: LLTokenizer | None = None
        self._tokenizer: Any = None
        self._recent: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._held: WeakValueDictionary[str, CompiledGrammar] = WeakValueDictionary()
        """All compiled grammars: the recent ones and those that callers of ``compile`` hold."""

    def begin(self) -> None:
        """Prepare the vocabulary in another thread. Grammars that are compiled before it is ready wait for it."""
        Thread(target=self._load_if_possible, name="vocabulary", daemon=True).start()

    def _load_if_possible(self) -> None:
        try:
            self.load()
        except RequestError:
            return  # every request that needs it gets the error

    def load(self) -> LLTokenizer:
        """Prepare the vocabulary, which takes seconds for the largest, unless that is done.

        Raises:
            RequestError: there is no tokenizer, or it is not a fast one.
        """
        with self._lock:
            if self._vocabulary is None:
                self._tokenizer, eos_ids = self._source()
                if self._tokenizer is None or not getattr(self._tokenizer, "is_fast", False):
                    raise RequestError("structured outputs need a tokenizer, and a fast one; the engine has none")
                # A model without an end token gets one that it cannot sample.
                end = sorted(eos_ids) or [self._vocab_size]
                words = _Words(self._tokenizer, self._vocab_size + 1, end)
                self._vocabulary = LLTokenizer(TokenizerWrapper(words), eos_token=end)
            return self._vocabulary

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
        grammar = self._source_text(params)
        vocabulary = self.load()
        with self._lock:
            found = self._held.get(grammar)
            if found is not None:
                self._keep(grammar, found)
                return found
        start = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
        begun = start.deep_copy()
        if not begun.is_error():
            begun.compute_bitmask()  # only now are some grammars found too large
        if begun.is_error():
            reason = _first_lines(begun.get_error())
            reason = "nothing can fulfil it" if reason.startswith(UNSATISFIABLE) else reason
            raise RequestError(f"the {params.kind} of structured_outputs cannot be used: {reason}")
        compiled = CompiledGrammar(start)
        with self._lock:
            self._held[grammar] = compiled
            self._keep(grammar, compiled)
        return compiled

    def _keep(self, grammar: str, compiled: CompiledGrammar) -> None:
        """Mark a grammar as used; release the least recently used one if there are too many."""
        self._recent[grammar] = compiled
        self._recent.move_to_end(grammar)
        if len(self._recent) > MAX_KEPT:
            self._recent.popitem(last=False)

    def _source_text(self, params: StructuredOutputsParams) -> str:
        """Return the grammar in llguidance's format."""
        for part in (params.regex, params.grammar, params.after):
            check_text(part or "")
        grammars = [_body(params)]
        if params.after is not None:
            grammars = [{"lark_grammar": self._preamble(params.after)}, {"name": "body", **grammars[0]}]
        text = json.dumps({"grammars": grammars})
        if len(text) > MAX_GRAMMAR_CHARACTERS:
            raise RequestError(
                f"structured_outputs has {len(text)} characters, at most {MAX_GRAMMAR_CHARACTERS} may be"
            )
        return text

    def tag(self, text: str) -> str:
        """Return a tag in Lark's syntax: as a special token if it is one, else as a string."""
        vocabulary = self.load()
        token = self._tokenizer.get_added_vocab().get(text)
        return text if token is not None and vocabulary.is_special_token(token) else json.dumps(text)

    def _preamble(self, end: str) -> str:
        """Return a grammar of any text up to ``end``, and then the body."""
        if self.tag(end) == end:
            return f"start: /(?s:.*)/ {end} SPACE @body\nSPACE: /[ \\n]{{0,4}}/"
        return f"start: free SPACE @body\nfree[suffix={json.dumps(end)}]: /(?s:.*)/\nSPACE: /[ \\n]{{0,4}}/"


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
    return {"lark_grammar": _lark(params.grammar or "")}


def _schema(params: StructuredOutputsParams) -> Any:
    schema: Any = {"type": "object"} if params.json is None else params.json
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise RequestError(f"the json of structured_outputs is no JSON schema: {error}") from error
    spaces: dict[str, Any] = {}
    if params.disable_any_whitespace:
        spaces = {"whitespace_flexible": False}
    elif params.whitespace_pattern is not None:
        spaces = {"whitespace_pattern": params.whitespace_pattern}
    return {**schema, "x-guidance": spaces} if spaces and isinstance(schema, dict) else schema


def _lark(grammar: str) -> str:
    """Return a grammar in Lark's syntax; GBNF is translated."""
    if "::=" not in grammar:
        if SET_OPERATION.search(TERMINAL.sub("", grammar)):
            raise RequestError(
                "the grammar of structured_outputs must not use & or ~ on terminals: a short one may take hours "
                "to compile"
            )
        return grammar
    try:
        lark: str = any_to_lark(grammar)
    except Exception as error:
        # The translator may raise anything on malformed input.
        raise RequestError(f"the grammar of structured_outputs is not GBNF: {error}") from error
    return lark


def _set_bit(words: NDArray[np.int32], token: int, value: bool) -> None:
    unsigned = words.view(np.uint32)
    bit = np.uint32(1 << token % 32)
    unsigned[token // 32] = unsigned[token // 32] | bit if value else unsigned[token // 32] & ~bit


def _first_lines(message: str) -> str:
    return " ".join(message.split())[:500]
