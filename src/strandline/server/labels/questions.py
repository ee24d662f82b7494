"""Questions whose answers are labels: their wording, and what the probabilities of the labels say.

A model reads a text and a question, and its next token is the answer. Only the probabilities of that token are read, so
a question costs no decoding: a letter for each choice, yes or no, or a digit for each level of a score.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp
from string import ascii_uppercase, digits
from typing import Final

from strandline.errors import RequestError

YES_OR_NO: Final = ("yes", "no")
SPELLINGS: Final = (YES_OR_NO, ("Yes", "No"), ("y", "n"), ("Y", "N"))
"""What yes and no may be called: the first pair is used whose words are single tokens."""
MAX_QUESTIONS: Final = 200
"""Most questions of a request, as in OpenAI's API."""


class Kind(StrEnum):
    """What a question asks for."""

    YES_NO = "yes_no"
    CHOICE = "choice"
    SCORE = "score"


LABELS: Final[Mapping[Kind, Sequence[str]]] = {
    Kind.YES_NO: YES_OR_NO,
    Kind.CHOICE: ascii_uppercase,
    Kind.SCORE: digits,
}
"""Labels of each kind, one token each, in the order of the options."""
REPLIES: Final[Mapping[Kind, str]] = {
    Kind.YES_NO: "Reply with {} or {} only.",
    Kind.CHOICE: "Reply with the letter of one option only.",
    Kind.SCORE: "Reply with the digit of one level only.",
}


@dataclass(frozen=True, slots=True)
class Option:
    """An answer that a question allows."""

    name: str
    description: str = ""

    def line(self, label: str) -> str:
        """Return the line of the prompt that offers it."""
        return f"{label}: {self.name} - {self.description}" if self.description else f"{label}: {self.name}"


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a text.

    Raises:
        RequestError: it has too few or too many options.
    """

    kind: Kind
    text: str
    options: Sequence[Option]
    """In the order of the labels. Those of yes and no are shown if they have descriptions."""
    param: str
    """The request's field, for messages."""
    yes_or_no: Sequence[str] = YES_OR_NO
    """What a model's tokens for yes and no are called."""

    def __post_init__(self) -> None:
        most = len(LABELS[self.kind])
        if not 2 <= len(self.options) <= most:
            raise RequestError(
                f"{self.param} has {len(self.options)} options; a question of this kind has 2 to {most}",
                param=self.param,
            )

    @property
    def labels(self) -> Sequence[str]:
        """The tokens that answer it."""
        return (self.yes_or_no if self.kind is Kind.YES_NO else LABELS[self.kind])[: len(self.options)]

    @property
    def prompt(self) -> str:
        """The question as the end of a prompt."""
        lines = [option.line(label) for label, option in zip(self.labels, self.options, strict=True)]
        is_plain = self.kind is Kind.YES_NO and not any(option.description for option in self.options)
        reply = REPLIES[self.kind].format(*self.labels)
        return "\n".join([f"Question: {self.text}", *([] if is_plain else lines), reply])


@dataclass(frozen=True, slots=True)
class Reading:
    """The probabilities of a question's labels.

    Args:
        logprobs: log-probabilities of the labels, in their order, among all tokens.
        is_label_likeliest: whether the most likely of all tokens is a label.
    """

    logprobs: Sequence[float]
    is_label_likeliest: bool

    @property
    def probabilities(self) -> list[float]:
        """Probabilities of the labels, given that the answer is one of them."""
        highest = max(self.logprobs)
        weights = [exp(logprob - highest) for logprob in self.logprobs]
        return [weight / sum(weights) for weight in weights]

    @property
    def label_mass(self) -> float:
        """Probability that the next token is a label at all."""
        return min(sum(map(exp, self.logprobs)), 1.0)

    @property
    def best(self) -> int:
        """The index of the most likely label."""
        return max(range(len(self.logprobs)), key=self.logprobs.__getitem__)

    @property
    def confidence(self) -> float:
        """Probability of the most likely label among all tokens."""
        return self.probabilities[self.best] * self.label_mass

    @property
    def score(self) -> float:
        """The expected index of the label."""
        return sum(index * probability for index, probability in enumerate(self.probabilities))
