"""Answers of earlier requests, from which drafts are made: each salt's by themselves, and in bounded memory.

What a salt finds depends on its own answers alone: they are in an index of their own, in which newer answers take the
place of older ones. Only the sum over all salts is shared. Where it is above its limit, the salt whose last answer is
the oldest loses all of its answers.
"""

from collections import OrderedDict, deque
from typing import Final

from strandline.engine.requests.suffix_index import SuffixIndex
from strandline.records.tokens import TokenBuffer

SEPARATOR: Final = 0xFFFFFFFF
"""Ends an answer; no token of a vocabulary. So no match reaches into another answer."""

MAX_TOKENS_PER_SALT: Final = 1 << 18
MAX_TOKENS: Final = 1 << 22
MAX_SALTS: Final = 1 << 10


class EarlierAnswers:
    """Keeps the latest answers of each salt.

    Args:
        max_requests: the most answers of a salt; 0: none is kept.
        max_salt_tokens: the most tokens of a salt's answers, with a separator each.
        max_tokens: the most tokens of all salts.
        max_salts: the most salts.
    """

    def __init__(
        self,
        max_requests: int,
        *,
        max_salt_tokens: int = MAX_TOKENS_PER_SALT,
        max_tokens: int = MAX_TOKENS,
        max_salts: int = MAX_SALTS,
    ) -> None:
        self._max_requests = max_requests
        self._max_salt_tokens, self._max_tokens, self._max_salts = max_salt_tokens, max_tokens, max_salts
        self._salts = OrderedDict[str, _Answers]()
        """The salt with the latest answer last."""
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """The tokens of all answers, with a separator each."""
        return self._num_tokens

    @property
    def num_bytes(self) -> int:
        return sum(answers.index.num_bytes for answers in self._salts.values())

    def index_of(self, salt: str) -> SuffixIndex | None:
        """Return the index of a salt's answers; None: there are none."""
        answers = self._salts.get(salt)
        return None if answers is None else answers.index

    def add(self, salt: str, token_ids: list[int]) -> None:
        """Add an answer; its first tokens are left out if it is too long. Drop the oldest ones over the limits."""
        if self._max_requests == 0:
            return
        answers = self._salts.setdefault(salt, _Answers())
        self._salts.move_to_end(salt)
        self._num_tokens -= len(answers.index)
        answers.add(token_ids[1 - self._max_salt_tokens :], self._max_requests, self._max_salt_tokens)
        self._num_tokens += len(answers.index)
        while len(self._salts) > self._max_salts or (self._num_tokens > self._max_tokens and len(self._salts) > 1):
            _, dropped = self._salts.popitem(last=False)
            self._num_tokens -= len(dropped.index)


class _Answers:
    """The answers of a salt."""

    __slots__ = ("_lengths", "_tokens", "index")

    def __init__(self) -> None:
        self._tokens = TokenBuffer()
        self._lengths = deque[int]()
        """The tokens of each answer, with its separator."""
        self.index = SuffixIndex(self._tokens)

    def add(self, token_ids: list[int], max_requests: int, max_tokens: int) -> None:
        self._lengths.append(len(token_ids) + 1)
        num_tokens, num_dropped = len(self.index) + self._lengths[-1], 0
        while len(self._lengths) > max_requests or num_tokens - num_dropped > max_tokens:
            num_dropped += self._lengths.popleft()
        self._tokens.extend([*token_ids, SEPARATOR])
        self.index.update()
        if num_dropped:
            self.index.drop_first(num_dropped)
