"""What the device needs of outputs that are constrained: a matcher for each, and something that compiles grammars."""

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from strandline.records.sampling_params import MAX_COUNT, StructuredOutputsParams

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
