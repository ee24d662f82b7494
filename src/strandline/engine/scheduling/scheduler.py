"""Which requests run in the next step, and how many tokens of each.

Continuous batching with chunked prefill: running requests first, by priority and admission, then waiting ones in the
order of the ``WaitingQueue``, as token budget and memory allow. When memory runs out, the last running request is
preempted: its slot becomes a snapshot, so that nothing is recomputed. A step is never split or delayed for the cache.

While requests decode, long prefills get no more than a share of a few steps (``LongPrefills``). Prompts that come
together begin in groups (``PromptGroups``).

In deterministic mode a token's bits must not depend on how its sequence is split into steps: prompts are computed on
the 64-token grid and generated tokens one by one, also when a preempted request starts over (``exact_end``).

A step may be planned while the previous one runs. The token that the previous step samples is *pending* then: counted
in the request's tokens but not known yet. A step goes through ``plan``, ``advance`` and ``settle``; the next step may
be planned between its ``advance`` and its ``settle``.

Cost: ``plan`` and ``commit`` are plain Python for every running request and step; a decoding request that stays within
its last block takes a short path through both.
"""

from bisect import insort_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from strandline.cache import Lead, Lease, PrefixCache
from strandline.cache.admission_terms import AdmissionTerms
from strandline.cache.tiers import Loads
from strandline.engine.drafting.drafts import Drafts
from strandline.engine.drafting.step_drafts import StepDrafts
from strandline.engine.requests.request import Request, Status, introduce_all
from strandline.engine.requests.spans import NO_DRAFTS, Span, as_exact, exact_end, sequence_plan, with_next
from strandline.engine.scheduling.adapter_admission import AdapterAdmission
from strandline.engine.scheduling.fair_shares import FairShares
from strandline.engine.scheduling.host_tokens import HostTokens
from strandline.engine.scheduling.load_queue import LoadQueue, LoadState
from strandline.engine.scheduling.long_prefills import LongPrefills
from strandline.engine.scheduling.pictures import PictureSteps
from strandline.engine.scheduling.prompt_groups import PromptGroups
from strandline.engine.scheduling.step_limits import StepLimits
from strandline.engine.scheduling.stop_fallbacks import note_stop_tokens
from strandline.engine.scheduling.waiting import WaitingQueue
from strandline.errors import EngineError, RequestError
from strandline.ids import BLOCK_TOKENS, RequestId
from strandline.records.account import SnapshotKind
from strandline.records.events import FinishReason
from strandline.records.plan import NewRequest, StepPlan, StepResult

LOOK_AHEAD_REQUESTS = 32
"""Waiting requests for which a leader is searched although they cannot be admitted yet."""

_priority = attrgetter("params.priority")


class Scheduler:
    """Owns the requests, plans steps, and reports to the cache what was computed."""

    def __init__(
        self,
        cache: PrefixCache,
        loads: Loads,
        limits: StepLimits,
        drafts: Drafts | None = None,
        *,
        deterministic: bool = False,
        introduce: Callable[[Request], NewRequest] = attrgetter("new"),
    ) -> None:
        """
        Args:
            loads: the cache's loads.
            drafts: makes drafts; None: there are no drafts.
            introduce: returns the data that the executor gets of a request when it first runs.
        """
        self.cache = cache
        self.max_num_seqs, self.max_num_batched_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        self._long_prefills = LongPrefills(limits.long_prefill_token_threshold, limits.max_num_batched_tokens)
        self._prompt_groups = PromptGroups(limits.fixed_step_tokens)
        self._shares = shares = FairShares()
        self.waiting = WaitingQueue(
            (lambda x: cache.hit_tokens(x.tokens, x.salt)) if cache.is_enabled else None,
            lambda tenants: shares.least_served(tenants, self.running),
        )
        self.loading = LoadQueue(cache, loads, self.waiting)
        self._adapters = AdapterAdmission(self.waiting, limits.max_loras)
        self.running: list[Request] = []  # in order of priority, then of admission
        self.num_preemptions = 0
        self._is_exact = deterministic
        self._grid_tokens = BLOCK_TOKENS if deterministic else 1
        """Prompt steps end, and snapshots lie, on multiples of this."""
        self._num_admissions = 0
        self._requests: dict[RequestId, Request] = {}
        self._ended: list[RequestId] = []
        self._planned: deque[tuple[StepPlan, list[Request]]] = deque()
        """Steps that are not settled yet, with the requests of their sequences."""
        self._introduce = introduce
        self._logged_from = limits.logged_from
        self.drafts = Drafts(cache) if drafts is None else drafts
        self._host_tokens = HostTokens(self.drafts.limits.draft_tokens)
        self.pictures = PictureSteps(limits.encoder_tokens, looks_ahead=self.drafts.has_layer)
        self._stopped: list[Request] = []
        """Requests that have ended at a stop string, to be ended when the step under way is advanced."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._requests

    # Adding and ending

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: a request of that id is unfinished.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use by an unfinished request")
        self._requests[request.request_id] = request
        for counted in (self._host_tokens, self.pictures, self._shares):
            counted.add(request)
        self.waiting.add(request)
        self.cache.expect(request.request_id, request.tokens, request.salt)

    def finish(self, request_id: RequestId, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request between steps, for a reason other than its tokens. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        self.loading.forget(request)
        self._end(request, reason, stop_reason)

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        if request.lease is not None:
            self._release(request, request.lease, SnapshotKind.GENERATION_END)
        else:
            self.cache.forget(request.request_id)
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self._requests[request.request_id]
        for counted in (self._host_tokens, self.pictures, self._shares):
            counted.remove(request)
        if request.is_introduced:
            self._ended.append(request.request_id)

    def append_known(self, request: Request, token_ids: Sequence[int]) -> None:
        """Append tokens to a decoding request as if they had been sampled; the next step computes them together.

        For replays, where the output of a request is known in advance. Between steps only.

        Raises:
            EngineError: a step is not settled yet, or the request has no room left for the token after these.
        """
        if self._planned or request.num_tokens + len(token_ids) >= request.max_total:
            raise EngineError(f"request {request.request_id} cannot take {len(token_ids)} known tokens now")
        request.append(token_ids)
        request.num_tokens += len(token_ids)

    # Planning

    @property
    def can_run_ahead(self) -> bool:
        """Whether the next step can be planned before the tokens of the previous one are known."""
        may_admit = len(self.running) < self.max_num_seqs and self.waiting.has_admissible
        return not self._host_tokens.are_needed and self.drafts.can_plan_ahead(self.running, may_admit=may_admit)

    def plan(self) -> StepPlan | None:
        """Plan the next step; None when no request can run before a step, a load or a hold ends, or pixels come.

        The cache's actions are in the plan. Without a plan they are still to be carried out.
        """
        if not self._requests:
            return None
        step = self.drafts.begin_step(self._planned[-1][0] if self._planned else None)
        spans: list[Span] = []
        num_preemptions = self.num_preemptions
        self._long_prefills.begin_step(self.running)
        self.pictures.begin_step()
        budget = self._plan_running(step, spans)
        if not spans and not step.follows_unsettled:
            # Those that decoded have been preempted: long prefills need not wait for them.
            self._long_prefills.begin_step_alone()
            budget = self._plan_running(step, spans)
        if self.num_preemptions == num_preemptions:
            self._plan_waiting(step, spans, budget)
        self._long_prefills.end_step()
        self._look_ahead()
        step.close(spans, self._logged_from)
        # All reservations come before the first record: one that needs a slot may move blocks of any sequence.
        reserve = self.cache.reserve_step
        grants = [reserve(span.lease, span.end, span.log_use) for span in spans]
        sequences = list(map(sequence_plan, spans, grants))
        if self.drafts.has_layer:
            sequences = list(map(with_next, sequences, spans))
        if self._is_exact:
            sequences = [as_exact(sequence, span.request) for sequence, span in zip(sequences, spans, strict=True)]
        sequences = self.pictures.complete(sequences)
        if not sequences:
            if self._planned or self.cache.holds_for_others or self.pictures.is_waiting:
                return None
            memory = self.cache.memory_use()
            raise EngineError(
                f"{len(self.waiting)} requests wait, none can run: the cache has "
                f"{memory.num_free_slabs} free slabs of {memory.num_slabs}"
            )
        planned = [span.request for span in spans]
        new = introduce_all(planned, self._introduce)
        gone, self._ended = self._ended, []
        actions, pictures = tuple(self.cache.take_actions()), self.pictures.take_new()
        plan = StepPlan(tuple(sequences), actions, tuple(new), tuple(gone), pictures)
        self._planned.append((plan, planned))
        self.drafts.end_step(step, sequences, len(self.running))
        return plan

    @property
    def is_share_due(self) -> bool:
        """Whether the next step computes a share of a long prompt beside decodes."""
        return self._long_prefills.is_due(self.running)

    def _plan_running(self, step: StepDrafts, spans: list[Span]) -> int:
        """Plan the running requests; return the rest of the token budget."""
        budget = self.max_num_batched_tokens
        running, is_ahead = self.running, step.follows_unsettled
        index, has_drafter = 0, self.drafts.drafter is not None
        while index < len(running) and budget > 0:
            request = running[index]
            if request.num_tokens >= request.max_total:
                # Its last token is pending.
                index += 1
                continue
            lease = request.held_lease
            start, end = lease.computed, request.num_tokens
            if is_ahead and self._long_prefills.is_held(end - start):
                index += 1
                continue
            if start < request.num_prompt_tokens or end - start > 1:
                end = self._prefill_end(request, start, end, budget)
                if end == start:
                    # It is long and others decode; or it ends on the grid and the rest of the budget is less.
                    index += 1
                    continue
            if not is_ahead and not lease.has_room(end) and not self._make_room(lease, end):
                continue
            # Without drafts, the call would cost as much as the rest of the loop.
            span = step.join(request, lease, end, budget) if has_drafter else Span(request, lease, start, end)
            if span is not None:
                spans.append(span)
                budget -= span.end - start
            index += 1
        return budget

    def _prefill_end(self, request: Request, start: int, end: int, budget: int) -> int:
        """Return up to which of the tokens ``[start, end)`` a step computes a prompt; ``start``: it computes none."""
        end = start + self._long_prefills.allow(end - start, budget)
        if request.submission.pictures:
            end = self.pictures.limit(request, start, end)
        return exact_end(request, start, end) if self._is_exact else end

    def _make_room(self, lease: Lease, end: int) -> bool:
        """Extend a lease, preempting the last running requests. False when its own request was preempted."""
        while not self.cache.extend(lease, end):
            victim = self.running.pop()
            is_self = victim.lease is lease
            self._preempt(victim)
            if is_self:
                return False
        return True

    def _release(self, request: Request, lease: Lease, kind: SnapshotKind) -> None:
        self.cache.release(lease, kind, request.shared_end)
        request.lease = None

    def _preempt(self, request: Request) -> None:
        self._release(request, request.held_lease, SnapshotKind.PREEMPTION)
        request.status = Status.WAITING
        self.num_preemptions += 1
        self.waiting.add_first(request)
        self.cache.expect(request.request_id, request.tokens, request.salt)

    def preempt_all(self) -> None:
        """Preempt all running requests, so that none holds memory. Between steps that are settled."""
        if self._planned:
            raise EngineError("requests were to be preempted while a step was in flight")
        while self.running:
            self._preempt(self.running.pop())

    def _plan_waiting(self, step: StepDrafts, spans: list[Span], budget: int) -> None:
        """Admit waiting requests, but for those that follow a leader or wait for a slot."""
        waiting = self.waiting
        waiting.requeue_unblocked()
        self._adapters.begin_step(self.running)
        groups = self._prompt_groups
        groups.begin_step(waiting.num_admissible)
        while waiting.has_admissible and budget >= self._grid_tokens and len(self.running) < self.max_num_seqs:
            if groups.is_full:
                break
            request = waiting.next()
            if self._adapters.try_hold(request):
                continue
            if not step.admits(request):
                break
            if self._try_follow(request):
                continue
            state = self.loading.try_load(request, budget)
            if state is LoadState.BEGUN:
                continue
            if self.loading.is_worth_waiting(state, self.running):
                break
            lease = self._admit(request, budget)
            if lease is None:
                break
            waiting.admit(request)
            self._adapters.note_admitted(request)
            start = lease.computed
            groups.add(request.num_tokens - start)
            end = self._prefill_end(request, start, request.num_tokens, budget)
            is_empty = end == start < request.num_tokens
            if not is_empty and (span := step.join(request, lease, end, budget)) is not None:
                spans.append(span)
                budget -= span.end - start

    def _find_leader(self, request: Request) -> Lead | None:
        """Find a running request that is about to compute a prefix of a waiting request. Changes nothing.

        A further leader must share more tokens than the last one, unless it is a load: a request waits a bounded number
        of times, and for no request of a higher priority value, whose steps may come later than its own.
        """
        if request.output_ids or request.params.prompt_logprobs is not None:
            return None
        last = request.wait.lead
        beyond = last.position if last else 0
        lead = self.cache.find_leader(request.tokens, request.salt, beyond=beyond, grid_tokens=self._grid_tokens)
        leader = self._requests.get(lead.lease.request_id) if lead is not None else None
        return None if leader is not None and _priority(leader) > _priority(request) else lead

    def _try_follow(self, request: Request) -> bool:
        """Block a waiting request until a leader has computed their shared prefix. False when there is no leader."""
        request.wait.num_admissions_seen = self._num_admissions
        request.wait.lead = lead = self._find_leader(request)
        if lead is None:
            return False
        self.cache.follow(lead)
        self.waiting.block(request)
        return True

    def _look_ahead(self) -> None:
        """Find leaders for the next waiting requests before those have computed past the shared prefix."""
        self.waiting.requeue_unblocked()
        for request in self.waiting.first(LOOK_AHEAD_REQUESTS):
            if request.wait.num_admissions_seen != self._num_admissions:
                self._try_follow(request)

    def _admit(self, request: Request, budget: int) -> Lease | None:
        terms = AdmissionTerms(
            may_read=self._may_read(request),
            marks=request.submission.marks,
            shared_end=request.num_prompt_tokens if self._is_exact else None,
            past_bin=request.interarrival_bin,
            is_counted=not request.is_audit,
            load_failed_end=request.loads.lacking_end,
        )
        lease = self.cache.admit(request.request_id, request.tokens, salt=request.salt, step_tokens=budget, terms=terms)
        if lease is None:
            return None
        request.interarrival_bin = lease.interarrival_bin
        if not self.cache.extend(lease, min(request.num_tokens, lease.computed + budget)):
            self.cache.release(lease, SnapshotKind.PREEMPTION)
            return None
        request.lease = lease
        request.status = Status.RUNNING
        if request.account is None:
            request.account = lease.account._replace(num_remembered=request.submission.num_remembered)
        insort_right(self.running, request, key=_priority)
        self._num_admissions += 1
        self._shares.serve(request, request.num_tokens - lease.computed)
        return lease

    def _may_read(self, request: Request) -> bool:
        """Whether a request may resume from what is cached."""
        if request.output_ids:
            # What it generated may be cached as part of another request's prompt, with other bits.
            return not self._is_exact
        return request.params.prompt_logprobs is None

    # Taking in results

    def advance(self, plan: StepPlan) -> None:
        """Commit to the cache what the last planned step computes, once it has been launched.

        Later work on the device sees the step done. The steps before it must be settled.
        """
        last, planned = self._planned[-1]
        if last is not plan or len(self._planned) > 1:
            raise EngineError("a step was advanced out of order")
        cache_commit, has_layer = self.cache.commit, self.drafts.has_layer
        for request, sequence in zip(planned, plan.sequences, strict=True):
            lease = request.lease
            if lease is None:
                # It ended while the step was in flight; the device has not changed its state.
                continue
            if has_layer and sequence.is_sampled:
                # They are after a token that is no longer the last.
                request.drafts.drafted = NO_DRAFTS
            if sequence.num_drafts or (sequence.pending and sequence.log and sequence.is_prefill):
                # One token is computed, and one sampled, whichever drafts agree, and did in the step before.
                cache_commit(lease, lease.computed + 1)
                request.num_tokens += 1
                continue
            end = sequence.end
            is_computing = end > sequence.start
            if is_computing:
                cache_commit(lease, end, sequence.num_folded)
            if sequence.is_sampled:
                request.num_tokens += 1
                is_prompt_end = end == request.num_prompt_tokens and end % self._grid_tokens == 0
                if is_prompt_end and is_computing and request.num_tokens < request.max_total:
                    self.cache.leave_snapshot(lease, SnapshotKind.PROMPT_END)
        if self._stopped:
            stopped, self._stopped = self._stopped, []
            self._sweep(stopped)

    def settle(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Append the tokens sampled by the oldest step in flight; end the requests that are finished.

        Returns:
            The requests that got a token, in the order of the plan, without those that had ended before.
        """
        first, planned = self._planned.popleft()
        if first is not plan:
            raise EngineError("a step was settled out of order")
        advanced, has_finished, under_way = list[Request](), False, self._planned[-1][1] if self._planned else []
        has_layer = self.drafts.has_layer
        for index, (request, sampled) in enumerate(zip(planned, result.token_ids, strict=True)):
            if not sampled or request.status is Status.FINISHED:
                continue
            sequence = plan.sequences[index]
            request.num_new = len(sampled)
            for token in sampled:
                request.append_sampled(token)
            if (stop_string := result.stop_strings.get(index)) is not None:
                if request.finish_reason is None and request in under_way:
                    # The device does not look for stop strings: the step under way changes the state.
                    self._stopped.append(request)
                request.finish_reason, request.stop_reason = FinishReason.STOP, stop_string
            if index in result.is_bound:
                self._host_tokens.update(request, result.is_bound[index])
            advanced.append(request)
            has_finished |= request.finish_reason is not None
            if has_layer:
                request.drafts.drafted = result.drafts.get(index, NO_DRAFTS)
            if sequence.num_drafts:
                num_accepted = len(sampled) - 1
                request.num_tokens += num_accepted
                self.drafts.count(request, sequence.num_drafts, num_accepted)
                if num_accepted and request.lease is not None:
                    # The log holds them.
                    self.cache.commit(request.lease, request.lease.computed + num_accepted, 0)
            if request.submission.comes_back and request.params.stop_strings:
                num_stop_tokens = result.num_stop_tokens.get(index, 0)
                note_stop_tokens(self.cache, request, num_stop_tokens, stop_string, under_way)
        if has_finished:
            self._sweep(advanced)
        self.drafts.look_up(advanced, len(self.running))
        return advanced

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Advance and settle a step before the next one is planned."""
        self.advance(plan)
        return self.settle(plan, result)

    def _sweep(self, advanced: Iterable[Request]) -> None:
        """End the requests that have a finish reason, but for those that a step under way still changes."""
        for request in advanced:
            if request.finish_reason is not None and request not in self._stopped:
                if request.status is Status.WAITING:
                    self.waiting.remove(request)
                self._end(request, request.finish_reason, request.stop_reason)
        self.running = [request for request in self.running if request.status is Status.RUNNING]
