"""Suffix decoding: drafts from the request's own text and from earlier answers under its salt.

The longest match of the last tokens counts. It is followed by the tokens that followed its occurrences most often, as
many as the match is long and as far as they are likely. Source of the idea: Oliaro et al., "SuffixDecoding", 2024.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from strandline.engine.drafting.earlier_answers import EarlierAnswers
from strandline.engine.requests.request import Request
from strandline.engine.requests.suffix_index import MIN_MATCH_TOKENS, NO_MATCH, SuffixIndex
from strandline.records.events import FinishReason
from strandline.records.tokens import TOKEN_BYTES, VIRTUAL_BYTES

NO_TOKENS: Final[tuple[int, ...]] = ()


class SuffixDrafter:
    """Continues a request's last tokens as they were continued most often, in its own text or in earlier answers.

    Args:
        answers: earlier answers by salt.
        max_drafts: the most drafts of a request in a step.
        max_depth: the most tokens of a match and its drafts together.
        max_factor: drafts per token of the match, at most.
        min_probability: least probability of a draft and those before it, by how often they followed.
    """

    def __init__(
        self, answers: EarlierAnswers, *, max_drafts: int, max_depth: int, max_factor: float, min_probability: float
    ) -> None:
        self.answers = answers
        self._max_depth, self._max_factor, self._min_probability = max_depth, max_factor, min_probability
        matches = range(MIN_MATCH_TOKENS, max_depth)
        is_room = [x + max(int(min(max_factor * x, max_drafts)), 1) <= max_depth for x in matches]
        self._max_match = MIN_MATCH_TOKENS + max(sum(is_room) - 1, 0)
        """The longest match that leaves room for all of its drafts."""

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        """Return the likeliest tokens after the longest match; earlier answers come first where all else is equal."""
        suffixes = request.drafts.suffixes
        if suffixes is None:
            request.drafts.suffixes = suffixes = SuffixIndex(request.tokens)
        else:
            suffixes.update()
        num_tokens = len(request.tokens)
        last = request.tokens.slice(max(num_tokens - self._max_match, 0), num_tokens)
        answers = self.answers.index_of(request.salt)
        found = NO_MATCH if answers is None else answers.find(last, max_tokens)
        own = suffixes.find(last, max_tokens)
        num_match = max(found.num_tokens, own.num_tokens)
        most = int(min(max_tokens, self._max_factor * num_match, self._max_depth - num_match))
        if most < 1:
            return NO_TOKENS
        continuations = [
            text for match in (found, own) if match.num_tokens == num_match for text in match.continuations
        ]
        return likeliest(continuations, most, self._min_probability)

    def add_answer(self, request: Request) -> None:
        """Keep the answer of a request that has ended without an error, after the last tokens of its prompt."""
        if not request.is_audit and request.finish_reason is not FinishReason.ERROR:
            context = request.prompt_ids[-self._max_match :]
            self.answers.add(request.salt, [*context, *request.output_ids])


def likeliest(continuations: Sequence[bytes], max_tokens: int, min_probability: float) -> tuple[int, ...]:
    """Return the tokens with which most texts go on; the first such text's where several are as frequent.

    They end where the share of the texts that go on so, of those that go on at all, is below the least probability.
    Before a picture, and at the end of an earlier answer, a text does not go on.
    """
    tokens, probability = list[int](), 1.0
    for start in range(0, max_tokens * TOKEN_BYTES, TOKEN_BYTES):
        following = [text[start : start + TOKEN_BYTES] for text in continuations]
        counts = Counter(token for token in following if token and token[0] not in VIRTUAL_BYTES)
        if not counts:
            break
        [(token, count)] = counts.most_common(1)
        probability *= count / counts.total()
        if probability < min_probability:
            break
        tokens.append(int.from_bytes(token, "big"))
        continuations = [text for text, other in zip(continuations, following, strict=True) if other == token]
    return tuple(tokens)
