"""The core: sequences in, steps, token events out. It handles no text, no users and no ``n``.

An error inside a step is ours and ends the core: a doubtful state is never served.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Final

from strandline.cache.announcing.announcer import Announcer
from strandline.cache.inspection.invariants import check
from strandline.cache.policy import OnGrid, new_cache, placement
from strandline.cache.policy.resume_rules import resume_rule
from strandline.cache.tiers import Loads, LowerMemory
from strandline.clock import SYSTEM_CLOCK
from strandline.config import EngineConfig
from strandline.device.executor import Executor, ExecutorFacts, LaunchedStep
from strandline.device.sizing import choose_batched_tokens, choose_fixed_step_tokens, choose_logged_from
from strandline.engine.adapter_use import AdapterUse
from strandline.engine.caching.auditor import Auditor, Audits
from strandline.engine.caching.cache_watch import CacheWatch
from strandline.engine.caching.event_feed import EventFeed
from strandline.engine.caching.flushing import flush
from strandline.engine.caching.memory import bytes_by_use, cache_size, describe_tiers, lower_memories, on_each_rank
from strandline.engine.caching.object_catalog import CATCH_UP_S, open_discoveries
from strandline.engine.control import CoreControl
from strandline.engine.drafting.new_drafts import new_drafts
from strandline.engine.prefix_transfer.hand_over import HandOver
from strandline.engine.requests.admissions import Admissions
from strandline.engine.requests.request import Request
from strandline.engine.scheduling.scheduler import Scheduler
from strandline.engine.scheduling.step_limits import StepLimits
from strandline.engine.startup.model_identity import weights_digest
from strandline.engine.startup.start_report import describe_fallbacks, describe_sizes
from strandline.engine.startup.warm_up import WarmUp
from strandline.env import is_cache_debugged
from strandline.errors import EngineError
from strandline.ids import BLOCK_TOKENS, NO_TOKEN, RequestId
from strandline.records.account import Reason
from strandline.records.events import (
    CoreStats,
    FinishReason,
    KernelFallback,
    PromptLogprobs,
    SpeculationStats,
    StepEvents,
    Submission,
    TokenEvent,
)
from strandline.records.messages import EventEndpoints, FlushReport
from strandline.records.plan import NewRequest, StepPlan, StepResult

MAX_WAIT_S: Final = 0.01
"""How long a turn of the core waits for loads when there is nothing else to do."""


class EngineCore:
    """Runs sequences on one model. Synchronous; one step per call.

    Args:
        executor: runs the steps.
        config: limits and policies.
    """

    def __init__(self, executor: Executor, config: EngineConfig) -> None:
        facts = executor.facts
        self.executor = executor
        self.spec = facts.spec
        self.start_s = dict(facts.start_s)
        """How long each phase of the start took."""
        self.limits = facts.limits
        self._admissions = Admissions()
        self._auditor = Auditor(config.audit_rate, facts.max_model_len, seed=config.seed)
        is_followed = config.data_parallel_size > 1 and config.enable_prefix_caching
        emits_events = is_followed or config.kv_events is not None
        self.scheduler = new_scheduler(
            config,
            facts,
            self._auditor.introduce,
            emits_events=emits_events,
            lower=lower_memories(facts, config.snapshot_dtype),
        )
        self.cache, self.loads = self.scheduler.cache, self.scheduler.loading.loads
        self.discoveries = open_discoveries(facts, config.snapshot_dtype, self.loads)
        """Enters what other engines store; None: none is shared with them."""
        self.event_feed: EventFeed | None = None
        """Says what the cache can resume; None: neither publishing nor routing needs it."""
        if emits_events:
            rank = config.data_parallel_rank
            self.event_feed = EventFeed(self.cache, config.kv_events, rank, is_kept=is_followed)
        self.watch = CacheWatch(self.cache, self.scheduler, facts.spec, config.mamba_cache_mode)
        self._cache_mode, self._cache_block_tokens = config.mamba_cache_mode, config.mamba_block_size
        self._snapshot_dtype = config.snapshot_dtype
        self._shortest_auto = f"{BLOCK_TOKENS} tokens" if config.deterministic else "1 token"
        self._is_debugged = is_cache_debugged()
        if facts.needs_warm_up:
            with self._timed("kernels"):
                new_warm_up(config, executor).run()
            if not config.enforce_eager:
                with self._timed("graphs"):
                    executor.capture_graphs()
        self.adapters = AdapterUse(executor, self.scheduler)
        loaded = tuple(self.adapters.load(lora.name, lora.path) for lora in config.loras)
        hands_over = config.kv_transfer is not None
        self.limits = replace(self.limits, adapters=loaded, hands_over=hands_over)
        self.hand_over = _new_hand_over(config, executor, self.scheduler)
        """Gives prefixes to other engines and fetches them; None: that is not asked for."""
        is_cpu = facts.device_type == "cpu"
        self._is_overlapped = not is_cpu if config.async_scheduling is None else config.async_scheduling
        self._defers_drafts = self._is_overlapped and config.speculation is not None
        """Whether the events of steps with drafts are handled while the next one runs."""
        self._in_flight: tuple[StepPlan, LaunchedStep, float] | None = None
        """And when its planning began."""
        self._begun_s = self._settled_s = 0.0
        """When the device could begin the step in flight, and when the last one was settled."""
        self._late_events = StepEvents()
        """Events of a step that had to be settled between two calls."""
        self._aborted: set[RequestId] = set()
        """Those that a step in flight may still report, though their ids may be in use again."""
        self._is_closing = False
        """Whether nothing is added any more."""
        self.is_stalled = False
        """Whether the last step found nothing to do before pictures come."""
        parts = (executor, self.cache, self.loads, self.scheduler, self.settle, self.event_feed, self._auditor)
        self.control = CoreControl(*parts, hands_over=hands_over)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start_s = SYSTEM_CLOCK()
        yield
        self.start_s[phase] = SYSTEM_CLOCK() - start_s

    def add(self, submission: Submission, grammar: object = None) -> None:
        """Queue a sequence.

        Args:
            grammar: what ``Executor.compile_grammar`` returned for it; without that, the step that begins with the
                sequence may have to compile its grammar.

        Raises:
            RequestError: a sequence of that id is unfinished, or its LoRA adapter is not loaded.
            EngineError: the core has been flushed or closed.
        """
        self.require_open()
        self.adapters.require(submission.new.adapter)
        request = Request(submission)
        request.grammar = grammar
        if self.hand_over is None or not self.hand_over.add(request):
            self.scheduler.add(request)

    def finish(self, request_id: RequestId) -> None:
        """End a sequence between steps and free what it holds. Unknown ids are ignored."""
        if self._defers_drafts:
            # Where its states are depends on the drafts that agree.
            late = self._late_events
            self._settle(late)
            late.drop(request_id)
            self._drop_handed_over(late, request_id)
        if self._in_flight is not None:
            self._aborted.add(request_id)
        if self.hand_over is not None:
            self.hand_over.forget(request_id)
        self.scheduler.finish(request_id, FinishReason.ABORT)
        self._auditor.forget(request_id)
        self._admissions.forget(request_id)
        self._flush()

    def _drop_handed_over(self, events: StepEvents, request_id: RequestId) -> None:
        """Take out of events that a request has handed its prompt over, and keep that no longer."""
        if self.hand_over is None:
            return
        for handed_over in [each for each in events.handed_over if each.request_id == request_id]:
            events.handed_over.remove(handed_over)
            self.hand_over.drop(handed_over)

    def flush(self, is_stopped: Callable[[], bool] = lambda: False) -> FlushReport | None:
        """End all sequences and write entries only in memory to files, for a limited time; no step follows.

        Args:
            is_stopped: asked now and then whether to leave the rest.

        Returns:
            None: there are no files, or the core has been flushed or closed before.
        """
        if self._is_closing:
            return None
        self._is_closing = True
        self._settle(StepEvents())
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.scheduler.finish(request.request_id, FinishReason.ABORT)
        return flush(self.cache, self.loads, self.executor, self.scheduler.loading, is_stopped)

    def close(self) -> None:
        """Release the device, and stop publishing events and handing over; no step follows."""
        self._is_closing = True
        if self.hand_over is not None:
            self.hand_over.close()
        if self.discoveries is not None:
            self.discoveries.close()
        self.executor.close()
        if self.event_feed is not None:
            self.event_feed.close()

    def require_open(self) -> None:
        """Raise an EngineError if the core has been flushed or closed."""
        if self._is_closing:
            raise EngineError("the engine has been closed")

    @property
    def has_unfinished(self) -> bool:
        if self._is_closing or self.control.is_stopped:
            return False
        is_settled = self._in_flight is None and not self._late_events.tokens
        return len(self.scheduler) > 0 or not is_settled or self._auditor.is_due or len(self.loads) > 0

    def settle(self) -> None:
        """Wait for the step under way; ``step`` or ``take_late_events`` returns what it produced."""
        self._settle(self._late_events)

    def take_late_events(self) -> StepEvents:
        """Return what steps produced that were settled between two calls of ``step``."""
        events, self._late_events = self._late_events, StepEvents()
        return events

    @property
    def audits(self) -> Audits:
        """What audits have found so far."""
        return self._auditor.audits

    def step(self) -> StepEvents:
        """Launch a step and return what the last one that is done produced.

        Where steps overlap, the device runs the launched step while the caller handles the events of the one before.
        Otherwise, and where launching takes longer than running, the launched step's own events are returned too:
        its tokens should not wait for another launch; nor for a step of thousands of tokens, slow to launch.
        """
        events, start_s = self.take_late_events(), SYSTEM_CLOCK()
        if self.hand_over is not None:
            self.hand_over.turn()
        if self.discoveries is not None:
            self.discoveries.turn(0.0 if self.scheduler.running else CATCH_UP_S)
        if self.loads:
            # Not only with the step's result: what has been loaded by now can be in the next step.
            self.scheduler.loading.complete(self.executor.poll_transfers())
        is_overlapped = self._is_overlapped and self.scheduler.can_run_ahead
        if not is_overlapped:
            self._settle(events)
        elif self._in_flight is not None and self.scheduler.is_share_due:
            self._settle(events)
            return events
        if not self.scheduler.waiting and (replay := self._auditor.next()) is not None:
            self.scheduler.add(replay)
        plan = self.scheduler.plan()
        self.is_stalled = plan is None and self._in_flight is None and self.scheduler.pictures.is_waiting
        if plan is None:
            self._settle_or_load(events)
            return events
        self.watch.after_plan(plan)
        self._admissions.note(plan)
        if not self.scheduler.drafts.can_launch_ahead:
            # Prompts or drafts that could not be foreseen: they are sampled with the host's help.
            self._settle(events)
        launched_s = SYSTEM_CLOCK()
        launched = self.executor.launch(plan)
        self._settle(events)
        self.scheduler.advance(plan)
        self._in_flight, self._begun_s = (plan, launched, start_s), max(launched_s, self._settled_s)
        if launched.is_launch_bound or not (is_overlapped or self._defers_drafts):
            self._settle(events)
        return events

    def _settle_or_load(self, events: StepEvents) -> None:
        """Wait for the step under way or, if there is none, a short time for what the requests wait for.

        They wait for loads, for memory that is held for other engines, or for pictures, which the caller receives.
        """
        if self._in_flight is not None:
            self._settle(events)
            return
        is_full = len(self.scheduler) > 0 and not self.loads and not self.scheduler.pictures.is_waiting
        if is_full and self.hand_over is not None and self.hand_over.give_up():
            return
        if self.cache.holds_for_others:
            self.executor.carry_out(self.cache.take_actions())
            self.scheduler.loading.complete(self.executor.wait_for_transfers(MAX_WAIT_S))

    def _settle(self, events: StepEvents) -> None:
        """Wait for the step under way, if there is one, and add what it produced."""
        if self._in_flight is None:
            return
        plan, launched, start_s = self._in_flight
        self._in_flight = None
        result = launched.result()
        start_s, self._settled_s = max(start_s, self._settled_s), SYSTEM_CLOCK()
        num_prefilled, seconds = plan.num_prefilled_tokens, self._settled_s - self._begun_s
        self.loads.observe_prefill(num_prefilled, seconds)
        if self.hand_over is not None:
            self.hand_over.observe_prefill(num_prefilled, seconds)
        self.scheduler.loading.complete(result.completions)
        self.scheduler.drafts.observe(plan, self._settled_s - start_s)
        advanced = self.scheduler.settle(plan, result)
        for request_id in result.failures:
            self._auditor.forget(request_id)
        self._add_events(events, plan, result, advanced)
        events.admissions.extend(self._admissions.take(advanced))
        if self.hand_over is not None:
            events.handed_over.extend(filter(None, map(self.hand_over.keep, advanced)))
        self._aborted.clear()
        self._auditor.take(plan, result, advanced)
        self._flush()
        if self._is_debugged:
            check(self.cache)

    def _add_events(self, events: StepEvents, plan: StepPlan, result: StepResult, advanced: Sequence[Request]) -> None:
        """Add what happened, as far as senders asked for it.

        Args:
            advanced: the requests that got a token, in the order of the plan.
        """
        for index, entries in result.prompt_logprobs.items():
            sequence = plan.sequences[index]
            if not self._auditor.is_replay(sequence.request_id) and sequence.request_id not in self._aborted:
                events.prompts.append(PromptLogprobs(sequence.request_id, sequence.start, entries))
        index_of: dict[RequestId, int] = {}
        if result.logprobs or result.hidden_states or result.routed:
            index_of = {sequence.request_id: index for index, sequence in enumerate(plan.sequences)}
        for request_id, text in result.failures.items():
            if request_id in self._aborted:
                continue
            events.tokens.append(TokenEvent(request_id, NO_TOKEN, None, FinishReason.ERROR, text, None))
        for request in advanced:
            if request.is_audit or request.request_id in result.failures:
                continue
            output_ids, num_new = request.output_ids, request.num_new
            is_wanted = index_of and request.params.logprobs is not None
            logprobs = result.logprobs.get(index_of[request.request_id]) if is_wanted else None
            for index in range(num_new):
                is_last = index == num_new - 1
                events.tokens.append(
                    TokenEvent(
                        request.request_id,
                        output_ids[index - num_new],
                        logprobs[index] if logprobs else None,
                        request.finish_reason if is_last else None,
                        request.stop_reason if is_last else None,
                        request.account if index == 0 and len(output_ids) == num_new else None,
                        _drafts_of(request) if is_last else None,
                        result.hidden_states.get(index_of[request.request_id]) if index_of and index == 0 else None,
                        result.routed.get(index_of[request.request_id]) if index_of and index == 0 else None,
                    )
                )

    def exchange(self) -> None:
        """Do what other engines have asked for, and enter what they have stored, where no step follows at once."""
        parts = [each for each in (self.hand_over, self.discoveries) if each is not None]
        for each in parts:
            each.turn()
        if parts:
            self._flush()

    def _flush(self) -> None:
        """Publish events. When no request is left, apply pending cache actions, so that snapshots are valid."""
        if self.event_feed is not None:
            self.event_feed.flush()
        if not len(self.scheduler):
            self.executor.carry_out(self.cache.take_actions())
            self.watch.record_memory()

    # Reading

    @property
    def event_endpoints(self) -> EventEndpoints | None:
        """Where cache events are published; None: nowhere."""
        return None if self.event_feed is None else self.event_feed.endpoints

    def describe(self) -> list[str]:
        """Describe in a few lines what the cache has room for, and what slows the engine down."""
        spec = self.spec
        total = self.cache.memory_use().num_slabs * spec.slab_bytes
        return [
            *describe_fallbacks(self.executor.facts.fallbacks),
            f"cache: {total / 2**20:,.0f} MiB{on_each_rank(self.executor.facts)} for blocks and snapshots "
            "together, prefix caching " + ("on" if self.cache.is_enabled else "off"),
            *describe_tiers(self.executor.facts, self._snapshot_dtype, self.loads),
            *describe_sizes(spec),
            f"start: {', '.join(f'{phase} {seconds:.1f} s' for phase, seconds in self.start_s.items())}",
            f"longest request: {self.limits.max_model_len:,} tokens; {self._shortest_hit()}",
            *([] if self.event_feed is None else self.event_feed.describe()),
            *([] if self.hand_over is None else [self.hand_over.describe()]),
        ]

    def _shortest_hit(self) -> str:
        if not self.cache.is_enabled or (self._cache_mode == "none" and self.spec.needs_snapshots):
            return "nothing can hit"
        if not self.spec.needs_snapshots:
            return f"shortest prefix that can hit: {self._shortest_auto}"
        shortest = self._shortest_auto if self._cache_mode == "auto" else f"{self._cache_block_tokens} tokens"
        return f"snapshots placed by '{self._cache_mode}'; shortest prefix that can hit: {shortest}"

    def stats(self) -> CoreStats:
        """Return the counters and the use of memory."""
        stats = self.cache.stats()
        return CoreStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting) + (self.hand_over.num_waiting if self.hand_over else 0),
            num_preemptions=self.scheduler.num_preemptions,
            queried_tokens=stats.queried_tokens,
            hit_tokens=stats.hit_tokens,
            missed_tokens={
                reason.value: count for reason, count in stats.told_tokens.items() if reason is not Reason.OTHER_SALT
            },
            hits_by_kind={kind.value: count for kind, count in stats.hits_by_kind.items()},
            snapshots_taken={kind.value: count for kind, count in stats.snapshots_taken.items()},
            num_snapshots=stats.num_snapshots,
            num_snapshots_evicted=stats.num_snapshots_evicted,
            num_blocks_evicted=stats.num_blocks_evicted,
            bytes_by_use=bytes_by_use(stats.memory, self.spec),
            num_audited=self.audits.num_requests,
            num_audited_tokens=self.audits.num_tokens,
            largest_audit_difference=self.audits.largest_difference,
            speculation=self.scheduler.drafts.stats(),
            speculation_by_method=self.scheduler.drafts.stats_by_method(),
            num_events_published=self.event_feed.num_published if self.event_feed else 0,
            num_events_dropped=self.event_feed.num_dropped if self.event_feed else 0,
            tiers=list(self.loads.stats()),
            shared_directory=None if self.discoveries is None else self.discoveries.catalog.use,
            num_snapshots_loaded=stats.loads.num_snapshots,
            num_blocks_loaded=stats.loads.num_blocks,
            hand_over=None if self.hand_over is None else self.hand_over.stats(),
            kernel_fallbacks=[KernelFallback(x.operation, x.backend, x.reason) for x in self.executor.facts.fallbacks],
        )


def new_scheduler(
    config: EngineConfig,
    facts: ExecutorFacts,
    introduce: Callable[[Request], NewRequest] = attrgetter("new"),
    *,
    emits_events: bool = False,
    lower: Sequence[LowerMemory] = (),
    fills_steps: bool = False,
) -> Scheduler:
    """Return a scheduler over a cache that is empty on the device.

    Args:
        fills_steps: whether a step computes as many waiting prompts as it can, instead of groups of them.
    """
    chosen = placement(config.mamba_cache_mode, config.mamba_block_size)
    grid_tokens = BLOCK_TOKENS if config.deterministic else 1
    rule = resume_rule(facts.spec, grid_tokens=grid_tokens)
    announcer = Announcer(needs_snapshots=rule.needs_snapshots) if emits_events else None
    num_logs = config.max_num_seqs if facts.log_tokens or facts.draft_tokens else 0
    cache = new_cache(
        cache_size(facts, num_logs),
        rule=rule,
        placement=OnGrid(chosen) if config.deterministic else chosen,
        enabled=config.enable_prefix_caching,
        clock=SYSTEM_CLOCK,
        announcer=announcer,
    )
    max_num_batched_tokens = choose_batched_tokens(config, facts.device_type)
    threshold = config.long_prefill_token_threshold
    if threshold is None:
        threshold = max(max_num_batched_tokens // 4, BLOCK_TOKENS)
    fixed_step_tokens = 0 if fills_steps else choose_fixed_step_tokens(facts.device_type)
    sizes = (max_num_batched_tokens, threshold, fixed_step_tokens, choose_logged_from(facts.device_type))
    limits = StepLimits(config.max_num_seqs, *sizes, facts.encoder_tokens, config.max_loras)
    loads = Loads(cache, lower, announcer=announcer)
    drafts = new_drafts(cache, facts, config.speculation)
    return Scheduler(cache, loads, limits, drafts, deterministic=config.deterministic, introduce=introduce)


def new_warm_up(config: EngineConfig, executor: Executor) -> WarmUp:
    """Return requests that run in the engine's memory and leave nothing in the tiers below it."""
    facts = replace(executor.facts, corrects_lengths=False)  # Graphs would, and are not captured yet.
    scheduler = new_scheduler(config, facts, fills_steps=True)
    return WarmUp(executor, scheduler, facts.max_model_len, takes_adapters=config.enable_lora)


def _new_hand_over(config: EngineConfig, executor: Executor, scheduler: Scheduler) -> HandOver | None:
    """Return what hands prefixes over; None: nothing is to do so.

    Raises:
        ConfigError: the model's weights cannot be read, or the address is not there, or taken.
    """
    if config.kv_transfer is None:
        return None
    weights = weights_digest(config)
    return HandOver(config.kv_transfer, executor, scheduler, weights=weights, is_deterministic=config.deterministic)


def _drafts_of(request: Request) -> SpeculationStats | None:
    """Return the counts of a request's drafts; None if it has not ended, or had none."""
    if request.finish_reason is None or request.drafts.counters is None:
        return None
    return request.drafts.counters.stats()
