"""What the device needs of structured outputs: a matcher per output, and something that compiles grammars."""

from collections.abc import Collection
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from strandline.records.sampling_params import StructuredOutputsParams


class TokenMatcher(Protocol):
    """The position of one output in its grammar."""

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

    def matcher(self, params: StructuredOutputsParams, stop_ids: Collection[int]) -> TokenMatcher:
        """Return a matcher at the start of the grammar.

        Args:
            stop_ids: tokens that end the output; allowed once the grammar is satisfied.

        Raises:
            RequestError: the grammar cannot be compiled.
        """
