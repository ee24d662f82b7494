"""The reasons for misses, from which accounts are made. Reads the index and the running leases; changes nothing."""

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Final

from strandline.cache.below import Below
from strandline.cache.index import PrefixIndex
from strandline.cache.lease import Lease
from strandline.cache.resume import Match, ResumeRule
from strandline.cache.walk import Walk, walk
from strandline.ids import BLOCK_TOKENS
from strandline.records.account import Account, Miss, Reason
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES, TokenBuffer, common_tokens

MAX_OTHER_SALTS: Final = 32
"""How many other salts, newest first, to search when nothing matches."""


class MissReasons:
    """Finds out why tokens of a prompt are not cached.

    Args:
        leases: leases of running requests.
        rule: where prompts resume.
    """

    def __init__(self, index: PrefixIndex, leases: Collection[Lease], rule: ResumeRule) -> None:
        self._index = index
        self._leases = leases
        self._rule = rule
        self.below: Below | None = None
        """The tiers; None: the cache has only the device."""

    def account(self, tokens: TokenBuffer, salt: str, match: Match | None) -> Account:
        """Return the account of a lookup; None: nothing is cached under its salt."""
        account = self._account(tokens, salt, match)
        end = 0 if self.below is None or match is None else self.below.resumable_tokens(tokens.data, match)
        return account.blaming(Reason.DEMOTED, end) if end else account

    def _account(self, tokens: TokenBuffer, salt: str, match: Match | None) -> Account:
        if match is None:
            return Account(len(tokens), 0, 0, None, tuple(self.beyond(tokens, salt, None)) if len(tokens) else ())
        queried, hit, kv_tokens, snapshot = len(tokens), match.position, match.end.kv_tokens, match.snapshot
        misses = list[Miss]()
        if hit < kv_tokens:
            misses.append(Miss(self._rule.why_not_deeper(match, tokens.data), hit, kv_tokens))
        if kv_tokens < queried:
            misses.extend(self.beyond(tokens, salt, match.end))
        return Account(queried, hit, kv_tokens, snapshot.kind if snapshot else None, tuple(misses))

    def beyond(self, tokens: TokenBuffer, salt: str, end: Walk | None) -> Iterator[Miss]:
        """Yield the reasons why the tokens after the end of the match are not cached."""
        start = end.kv_tokens if end else 0
        position, queried = start, len(tokens)
        evicted = _evicted_tokens(end, tokens.data) if end else 0
        if evicted:
            position = min(position + evicted, queried)
            yield Miss(Reason.EVICTED, start, position)
        elif (found := self.most_shared_lease(tokens, salt, position)) is not None:
            lease, position = found
            if lease.transfer is None:
                yield Miss(Reason.COMPUTING, start, position, lease.request_id)
            else:
                yield Miss(Reason.LOADING, start, position)
        elif start < BLOCK_TOKENS and (common := self._cached_for_others(tokens, salt)) > position:
            yield Miss(Reason.OTHER_SALT, position, common)
            position = common
        if position < queried:
            yield Miss(Reason.DIVERGED if position else Reason.FIRST_SEEN, position, queried)

    def most_shared_lease(self, tokens: TokenBuffer, salt: str, start: int) -> tuple[Lease, int] | None:
        """Return the running lease that shares the most tokens, if more than ``start``, and how many; else None."""
        if start >= len(tokens):
            return None
        leases = self._leases
        if not leases:
            return None
        root = self._index.roots.get(salt)
        offset, size = start * TOKEN_BYTES, (start + 1) * TOKEN_BYTES
        token = tokens.data[offset:size]
        alike = [lease for lease in leases if lease.root is root and lease.tokens.data[offset:size] == token]
        if not alike:
            return None
        head = tokens.data[:size]
        best: tuple[Lease, int] | None = None
        for lease in alike:
            if lease.tokens.data.startswith(head):
                common = common_tokens(lease.tokens.data, tokens.data)
                if best is None or common > best[1]:
                    best = lease, common
        return best

    def _cached_for_others(self, tokens: TokenBuffer, salt: str) -> int:
        """Return how many of the tokens are cached under another salt, among the newest ones."""
        others = (root for name, root in reversed(self._index.roots.items()) if name != salt)
        newest = islice(others, MAX_OTHER_SALTS)
        return max((walk(root, tokens.data).kv_tokens for root in newest), default=0)


def _evicted_tokens(end: Walk, data: bytearray) -> int:
    """Return an upper bound of the tokens after the end of the match that have been evicted; 0: none are known."""
    if end.num_blocks != end.run.end_block:
        return 0
    offset = end.num_blocks * BLOCK_KEY_BYTES
    cached = end.run.evicted_children.get(hash(bytes(data[offset : offset + BLOCK_KEY_BYTES])), 0)
    return max(cached - end.partial_tokens, 0)
