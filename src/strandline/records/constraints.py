"""What the device needs of a model's vocabulary: it constrains outputs, and finds their stop strings."""

from typing import Protocol

from strandline.records.grammars import GrammarCompiler, TokenMatcher
from strandline.records.plan import NewRequest
from strandline.records.stop_strings import StopFinder


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
