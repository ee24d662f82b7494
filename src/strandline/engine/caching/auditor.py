"""Audits: does the answer change with the cache (contract 6)? A share of the hits is replayed cold, and compared.

Every token that an audited request samples comes to the host with its log-probability, whether or not its sender asked
for that. When the request has ended, its prompt and its output are computed once more from the first token on, as the
prompt of a request that reads nothing from the cache. The output's tokens then have two log-probabilities. Their
difference is what cache, batch and decode kernels have changed: if all is well, rounding in the model's dtype.

Audits run when no other request waits, one at a time; hits that end while one is due are not audited.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, isnan
from random import Random
from typing import Final

from strandline.engine.requests.request import Request
from strandline.ids import AUDIT_PREFIX, RequestId
from strandline.records.events import Submission
from strandline.records.plan import NewRequest, StepPlan, StepResult, TokenLogprobs
from strandline.records.sampling_params import SamplingParams

COLD: Final = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)


@dataclass(slots=True)
class Audits:
    """What audits have found since the start."""

    num_requests: int = 0
    num_tokens: int = 0
    """Tokens of outputs that were compared."""
    largest_difference: float = 0.0
    """Between the two log-probabilities of one token; infinite where one of them is not a number."""
    largest_of: RequestId | None = None
    """The request with that difference."""


@dataclass(slots=True)
class _Audited:
    """A request that is audited: while it runs, then while it is replayed."""

    request: Request
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of its output tokens, while it ran; none: the weights have changed, nothing is compared."""
    cold: dict[int, float] = field(default_factory=dict)
    """By index in the output, from the replay. A preempted replay repeats some."""


class Auditor:
    """Chooses requests, replays them, compares.

    Args:
        rate: share of the hits, 0 to 1.
        max_model_len: no request is longer, in tokens.
        seed: seed of the choice.
    """

    def __init__(self, rate: float, max_model_len: int, *, seed: int = 0) -> None:
        self.audits = Audits()
        self._rate = rate
        self._max_model_len = max_model_len
        self._rng = Random(seed)
        self._audited: dict[RequestId, _Audited] = {}
        """Requests that run."""
        self._due: _Audited | None = None
        """The one that has ended and is to be replayed, or is being replayed."""
        self._is_replayed = False

    def introduce(self, request: Request) -> NewRequest:
        """Return the request data that the executor gets when a request begins; choose whether to audit it.

        Log-probabilities of audited requests are computed, whether or not their senders asked for them.
        """
        new = request.new
        has_hit = request.account is not None and request.account.hit > 0
        if not self._rate or request.is_audit or not has_hit or self._rng.random() >= self._rate:
            return new
        self._audited[new.request_id] = _Audited(request)
        return new if new.params.logprobs is not None else replace(new, params=replace(new.params, logprobs=0))

    @property
    def is_due(self) -> bool:
        """Whether a request is to be replayed, or is being replayed."""
        return self._due is not None

    def next(self) -> Request | None:
        """Return the request that replays the one that is due, unless it is under way."""
        due = self._due
        if due is None or self._is_replayed:
            return None
        self._is_replayed = True
        request = due.request
        tokens = (*request.prompt_ids, *request.output_ids)[: self._max_model_len - 1]
        new = NewRequest(
            RequestId(AUDIT_PREFIX + request.request_id), tokens, COLD, 0, frozenset(), (), adapter=request.new.adapter
        )
        pictures = request.submission.pictures
        submission = Submission(new, len(tokens) + 1, request.salt, pictures=pictures, pixels=request.pixels)
        return Request(submission, is_audit=True)

    def is_replay(self, request_id: RequestId) -> bool:
        """Whether a request is the auditor's own, which has no sender."""
        return self._due is not None and request_id == AUDIT_PREFIX + self._due.request.request_id

    def take(self, plan: StepPlan, result: StepResult, advanced: Sequence[Request]) -> None:
        """Collect the log-probabilities of audited requests and of the replay from a step's result.

        Args:
            advanced: the requests that got a token, finished ones marked so.
        """
        if not self._audited and self._due is None:
            return
        for index, sequence in enumerate(plan.sequences):
            if self._due is not None and self.is_replay(sequence.request_id):
                self._compare(self._due, sequence.start, result.prompt_logprobs.get(index, ()))
            elif (audited := self._audited.get(sequence.request_id)) is not None and index in result.logprobs:
                audited.logprobs += [entry.logprob for entry in result.logprobs[index]]
        for request in advanced:
            if request.is_audit and request.is_finished:
                self._conclude()
            elif request.finish_reason is not None:
                self._end(request.request_id)

    def _end(self, request_id: RequestId) -> None:
        """Schedule the replay of a request that has ended, if it is audited and no other replay is due."""
        audited = self._audited.pop(request_id, None)
        if self._due is None:
            self._due = audited

    def forget(self, request_id: RequestId) -> None:
        """Drop a request that was aborted: it is not replayed."""
        self._audited.pop(request_id, None)

    def forget_all(self) -> None:
        """Audit nothing that was computed with the weights so far, as those are about to change."""
        self._audited.clear()
        if not self._is_replayed:
            self._due = None
        elif self._due is not None:
            self._due.logprobs.clear()

    def _compare(self, due: _Audited, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Collect log-probabilities of the replayed prompt's tokens from ``start + 1`` on."""
        first = due.request.num_prompt_tokens
        due.cold |= {at - first: entry.logprob for at, entry in enumerate(entries, start + 1) if at >= first}

    def _conclude(self) -> None:
        due, audits = self._due, self.audits
        self._due, self._is_replayed = None, False
        assert due is not None
        if not due.logprobs:
            return
        audits.num_requests += 1
        for index, cold in due.cold.items():
            audits.num_tokens += 1
            difference = abs(due.logprobs[index] - cold)
            if isnan(difference):
                difference = inf
            if difference > audits.largest_difference:
                audits.largest_difference, audits.largest_of = difference, due.request.request_id
