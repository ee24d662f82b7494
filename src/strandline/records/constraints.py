"""Protocols by which the text part constrains outputs on the device: grammars, budgets of reasoning, stop strings."""

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from strandline.records.plan import NewRequest
from strandline.records.sampling_params import MAX_COUNT, StructuredOutputsParams


class StopFinder(Protocol):
    """The text of one output so far."""

    @property
    def num_stop_tokens(self) -> int:
        """The last tokens that belong to a stop string which the text leaves out, or may turn out to."""

    def append(self, token: int) -> str | None:
        """Append a token; return the stop string that it completes, if any."""


UNCONSTRAINED: Final = MAX_COUNT
"""As many free tokens as no output has."""


class TokenMatcher(Protocol):
    """The position of one output in its grammar."""

    @property
    def num_free_tokens(self) -> int:
        """As many next tokens may be any, whatever they are."""

    def append(self, token: int) -> None:
        """Advance by the sampled token."""

    def fill(self, words: NDArray[np.int32], row: int) -> None:
        """Set the bits of the tokens allowed next in ``words[row]``, 32 tokens a word; clear all others."""


class GrammarCompiler(Protocol):
    """Compiles the grammars of requests, and keeps those that were used last. Any thread may call it."""

    def compile(self, params: StructuredOutputsParams) -> object:
        """Compile a grammar.

        Returns:
            An object to hold on to: as long as it exists, a matcher is made without compiling the grammar again.

        Raises:
            RequestError: the grammar cannot be compiled.
        """


class OutputConstraints(Protocol):
    """Grammars, budgets of reasoning and stop strings of requests."""

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles the grammars of structured outputs."""

    def matcher(self, new: NewRequest) -> TokenMatcher:
        """Return the matcher of a request with a grammar or a budget of reasoning, before its first token.

        Raises:
            RequestError: the grammar cannot be compiled.
        """

    def stop_finder(self, new: NewRequest) -> StopFinder:
        """Return what finds a request's stop strings, before its first token."""
