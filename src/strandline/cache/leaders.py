"""Leaders: running requests that compute a prefix of a waiting request's prompt, and loads of one. Changes nothing."""

from collections.abc import Mapping

from strandline.cache.below import Below
from strandline.cache.index import PrefixIndex
from strandline.cache.lease import Lead, Lease
from strandline.cache.miss_reasons import MissReasons
from strandline.cache.placement import Placement
from strandline.cache.resume import ResumeRule
from strandline.ids import BLOCK_TOKENS, RequestId
from strandline.records.tokens import TokenBuffer, resumable_end


class Leaders:
    """Finds leaders."""

    def __init__(
        self,
        index: PrefixIndex,
        leases: Mapping[RequestId, Lease],
        placement: Placement,
        rule: ResumeRule,
    ) -> None:
        self._index = index
        self._leases = leases
        self.below: Below | None = None
        """Loads under way; None: nothing is loaded."""
        self._placement = placement
        self._rule = rule

    def find(self, tokens: TokenBuffer, salt: str, beyond: int, grid_tokens: int) -> Lead | None:
        """Find a leader for a prompt, as ``PrefixCache.find_leader`` says."""
        match = self._index.match(salt, tokens.data)
        known = match.position if match else 0
        if self.below is not None:
            lead = self.below.find(self._index.roots.get(salt), tokens, known)
            if lead is not None:
                return lead
        known = max(known, beyond)
        if self._rule.needs_snapshots and not self._placement.takes_branches():
            return None
        prefilling = [
            lease
            for lease in self._leases.values()
            if lease.computed + 1 < len(lease.tokens) and lease.transfer is None
        ]
        found = MissReasons(self._index, prefilling, self._rule).most_shared_lease(tokens, salt, known)
        if found is None:
            return None
        lease, position = found
        last = self._rule.last(len(tokens))
        position = resumable_end(tokens.data, min(position - position % grid_tokens, last), grid_tokens)
        is_short = position - known < BLOCK_TOKENS and position < last
        if lease.computed >= position or position <= known or is_short:
            return None
        return Lead(lease, position)
