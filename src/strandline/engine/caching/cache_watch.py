"""The data behind the cache page: the tree, memory over time, the last lookups, and explanations of their misses.

Recording lookups, hits and memory costs about a microsecond per step; everything else is computed on request. The
results are plain data for another process. They hide what other salts cache: a salt appears as a label, and its tree
and its prompts are shown only to a caller that gives the salt.
"""

import secrets
from dataclasses import replace
from hashlib import blake2s
from typing import Final

from strandline.cache import PrefixCache
from strandline.cache.inspection.explanation import explain_lookup, explain_prompt
from strandline.cache.inspection.lookups import Lookup, LookupLog
from strandline.cache.inspection.view import view
from strandline.clock import SYSTEM_CLOCK, Clock
from strandline.engine.caching.memory import MemoryBytes, held_bytes
from strandline.engine.scheduling.scheduler import Scheduler
from strandline.records.account import Account
from strandline.records.cache_questions import (
    CacheAnswer,
    CacheQuestion,
    CacheState,
    LookupRow,
    MemorySample,
    RecentHits,
)
from strandline.records.events import CoreStats
from strandline.records.excerpts import excerpt
from strandline.records.explanation import Explanation
from strandline.records.plan import StepPlan
from strandline.records.tokens import TokenBuffer
from strandline.specs import ModelSpec

MAX_SAMPLES: Final = 240
SAMPLE_S: Final = 1.0
WINDOW_S: Final = 300.0
WINDOW_PARTS: Final = 60
SHORT_TOKENS: Final = 8
"""A prompt with fewer uncached tokens is shown by its last ``END_TOKENS``."""
END_TOKENS: Final = 16
KEY_BYTES: Final = 16
LABEL_BYTES: Final = 4


class MemoryHistory:
    """Samples of the memory use since the start, sparser the longer that was ago: the last one of every interval."""

    def __init__(self, max_samples: int = MAX_SAMPLES, interval_s: float = SAMPLE_S) -> None:
        self._max_samples = max_samples
        self._interval_s = interval_s
        self._first: tuple[float, MemoryBytes] | None = None
        self._last_of: dict[float, tuple[float, MemoryBytes]] = {}

    def record(self, now_s: float, held_bytes: MemoryBytes) -> None:
        """Record the present use."""
        sample = now_s, held_bytes
        self._first = self._first or sample
        self._last_of[now_s // self._interval_s] = sample
        if len(self._last_of) > self._max_samples:
            self._interval_s *= 2
            self._last_of = {sample[0] // self._interval_s: sample for sample in self._last_of.values()}

    def samples(self, now_s: float) -> list[MemorySample]:
        """Return the samples, oldest first."""
        first = [] if self._first is None else [self._first]
        later = [sample for sample in self._last_of.values() if sample is not self._first]
        return [MemorySample(now_s - at_s, *held) for at_s, held in (*first, *later)]


class HitWindow:
    """Sums of the hits of the last minutes, to one part of the window."""

    def __init__(self, window_s: float = WINDOW_S, num_parts: int = WINDOW_PARTS) -> None:
        self._window_s = window_s
        self._num_parts = num_parts
        self._sums: dict[int, tuple[int, int]] = {}

    def record(self, now_s: float, account: Account) -> None:
        """Add what a request found."""
        part = self._part(now_s)
        queried, hit = self._sums.get(part, (0, 0))
        self._sums[part] = queried + account.queried, hit + account.hit
        if len(self._sums) > self._num_parts:
            self._drop_older(part)

    def recent(self, now_s: float) -> RecentHits:
        """Return the sums of the window."""
        self._drop_older(self._part(now_s))
        sums = self._sums.values()
        return RecentHits(self._window_s, sum(queried for queried, _ in sums), sum(hit for _, hit in sums))

    def _part(self, at_s: float) -> int:
        return int(at_s * self._num_parts // self._window_s)

    def _drop_older(self, part: int) -> None:
        self._sums = {old: sums for old, sums in self._sums.items() if old > part - self._num_parts}


class CacheWatch:
    """Records lookups and memory of one core, and answers questions about its cache."""

    def __init__(
        self, cache: PrefixCache, scheduler: Scheduler, spec: ModelSpec, mode: str, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._spec = spec
        self._mode = mode
        self._clock = clock
        self._log = LookupLog()
        self._history = MemoryHistory()
        self._hits = HitWindow()
        self._key = secrets.token_bytes(KEY_BYTES)

    def after_plan(self, plan: StepPlan) -> None:
        """Record the lookups of the requests that a step starts, and the memory use."""
        self.record_memory()
        if not plan.new:
            return
        now_s = self._clock()
        names = {new.request_id for new in plan.new}
        for request in self._scheduler.running:
            if request.request_id in names and request.account is not None and not request.is_audit:
                prompt = request.tokens.slice(0, request.num_prompt_tokens)
                self._log.record(Lookup(request.request_id, request.salt, now_s, request.account), prompt)
                self._hits.record(now_s, request.account)

    def record_memory(self) -> None:
        """Record the memory use."""
        self._history.record(self._clock(), self._held_bytes())

    def state(self, salt: str, stats: CoreStats) -> CacheState:
        """Return the state of the cache page for a caller that gives this salt."""
        now_s = self._clock()
        return CacheState(
            is_enabled=self._cache.is_enabled,
            mode=self._mode,
            total_bytes=self._cache.memory_use().num_slabs * self._spec.slab_bytes,
            block_bytes=self._spec.block_bytes,
            snapshot_bytes=self._cache.snapshot_blocks * self._spec.block_bytes,
            stats=stats,
            recent=self._hits.recent(now_s),
            tree=view(self._cache, salt=salt, key=self._key),
            lookups=[
                self._row(lookup, now_s, prompt if lookup.salt in ("", salt) else None) for lookup, prompt in self._log
            ],
            memory=[*self._history.samples(now_s), MemorySample(0.0, *self._held_bytes())],
        )

    def answer(self, question: CacheQuestion) -> CacheAnswer:
        """Explain a past request, or what a prompt would hit now. Changes nothing."""
        if question.tokens is not None:
            explanation = explain_prompt(
                self._cache, TokenBuffer(question.tokens), question.salt, block_bytes=self._spec.block_bytes
            )
            account = explanation.account._replace(num_remembered=question.num_remembered)
            return CacheAnswer(explanation=_for_callers(replace(explanation, account=account)))
        name = question.request_id or ""
        found = self._log.find(name)
        if found is None:
            return CacheAnswer(problem=f"request {name[:100]!r} is not among the last {len(self._log)} lookups")
        lookup, prompt = found
        if lookup.salt not in ("", question.salt):
            return CacheAnswer(problem=f"request {name[:100]!r} was made under a salt; give that salt")
        if prompt is None:
            return CacheAnswer(problem=f"the prompt of request {name[:100]!r} is not kept any more; send the prompt")
        explanation = explain_lookup(self._cache, lookup, prompt, block_bytes=self._spec.block_bytes)
        tokens = TokenBuffer()
        tokens.data = bytearray(prompt)
        return CacheAnswer(
            lookup.request_id,
            self._clock() - lookup.at_s,
            _for_callers(explanation),
            self._cache.lookup(tokens, lookup.salt).for_callers(),
        )

    def _row(self, lookup: Lookup, now_s: float, prompt: bytes | None) -> LookupRow:
        account = lookup.account.for_callers()
        is_short = account.queried - account.kv_tokens < SHORT_TOKENS
        start = max(account.queried - END_TOKENS, 0) if is_short else account.kv_tokens
        head = None if prompt is None else excerpt(prompt, start)
        return LookupRow(lookup.request_id, self._label(lookup.salt), now_s - lookup.at_s, account, head)

    def _label(self, salt: str) -> str:
        """Return a label for a salt, which itself would give access to what it caches."""
        return blake2s(salt.encode(), digest_size=LABEL_BYTES, key=self._key).hexdigest() if salt else ""

    def _held_bytes(self) -> MemoryBytes:
        return held_bytes(self._cache.memory_use(), self._spec)


def _for_callers(explanation: Explanation) -> Explanation:
    return replace(explanation, account=explanation.account.for_callers())
