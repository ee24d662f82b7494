"""Prometheus metrics: vLLM's names where vLLM has the metric, with the prefix ``strandline:``.

Latencies and finished requests are counted here, in the HTTP process; metrics of steps and the cache are read from the
engine on each scrape.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from strandline.records.events import CoreStats, HandOverStats, SpeculationStats
from strandline.text.output_streams import RequestStream

PREFIX: Final = "strandline:"
LABELS: Final = ("model_name", "engine")
TTFT_BUCKETS_S: Final = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
ITL_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
E2E_BUCKETS_S: Final = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

TOKEN_BUCKETS: Final = tuple(float(factor * 10**power) for power in range(7) for factor in (1, 2, 5))

RECOMPUTED: Final = frozenset(
    {
        "no_snapshot",
        "snapshot_evicted",
        "evicted",
        "repeated",
        "no_room",
        "computing",
        "loading",
        "load_failed",
        "demoted",
    }
)
"""Reasons of misses whose tokens had been computed before, or are being computed."""


class Metrics:
    """All metrics of one server. Each has a label with the number of the engine, as in vLLM.

    Args:
        num_engines: number of engines of the server.
    """

    def __init__(self, model_name: str, num_engines: int = 1) -> None:
        self._registry = CollectorRegistry()
        self._core = _CoreMetrics(model_name)
        self._model_name = model_name
        text = "1 for the version of an engine's weights."
        self._weights = Gauge(
            PREFIX + "weight_version_info", text, (*LABELS, "weight_version"), registry=self._registry
        )
        self._registry.register(self._core)
        families, gaps = _RequestFamilies(self._registry), _TokenGaps()
        self._registry.register(gaps)
        self._engines = [_RequestMetrics(families, gaps, model_name, engine) for engine in range(num_engines)]

    def show_weight_versions(self, versions: Sequence[str]) -> None:
        """Show what the weights of each engine are called."""
        self._weights.clear()
        for engine, version in enumerate(versions):
            self._weights.labels(self._model_name, str(engine), version).set(1)

    def observe(self, stream: RequestStream, now_s: float, engine: int = 0) -> None:
        """Count a step in which a request got a token, or up to one per output."""
        self._engines[engine].observe(stream, now_s)

    def forget(self, request_id: str, engine: int = 0) -> None:
        """Count an aborted request."""
        self._engines[engine].forget(request_id)

    def expose(self, stats: Sequence[CoreStats | None]) -> bytes:
        """Return the metrics in Prometheus' text format.

        Args:
            stats: stats of each engine; None: its own metrics are left out.
        """
        self._core.stats = stats
        return generate_latest(self._registry)


class _RequestFamilies:
    """Metrics of requests, of all engines."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.finished = self._counter("request_success", "Finished requests.", "finished_reason")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        text = "Earlier answers in prompts that were encoded as they were generated."
        self.remembered_answers = self._counter("remembered_answers", text)
        self.remembered_tokens = self._counter("remembered_answer_tokens", "Tokens of these answers.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS_S)
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "Per token after the first.", ITL_BUCKETS_S
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", E2E_BUCKETS_S)
        self.queue = self._histogram("request_queue_time_seconds", "Arrival to first step.", E2E_BUCKETS_S)
        self.prefill = self._histogram("request_prefill_time_seconds", "First step to first token.", E2E_BUCKETS_S)
        self.decode = self._histogram("request_decode_time_seconds", "First token to last token.", E2E_BUCKETS_S)
        self.prompt_lengths = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKEN_BUCKETS)
        self.output_lengths = self._histogram("request_generation_tokens", "Tokens of an output.", TOKEN_BUCKETS)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, (*LABELS, *labels), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, LABELS, buckets=buckets, registry=self._registry)


class _TokenGaps:
    """The histogram of times between tokens, of all engines.

    One is observed for every token, which takes a ``prometheus_client.Histogram`` several times as long.
    """

    def __init__(self) -> None:
        self._created_s = time.time()
        self._engines: list[tuple[tuple[str, ...], _EngineGaps]] = []

    def labels(self, *values: str) -> "_EngineGaps":
        """Add an engine."""
        gaps = _EngineGaps()
        self._engines.append((values, gaps))
        return gaps

    def collect(self) -> Iterator[Metric]:
        name = PREFIX + "inter_token_latency_seconds"
        family = HistogramMetricFamily(name, "Token to token.", labels=LABELS)
        for values, gaps in self._engines:
            counts = zip(map(floatToGoString, (*ITL_BUCKETS_S, float("inf"))), accumulate(gaps.counts), strict=True)
            family.add_metric(values, [*counts], gaps.sum_s)
            family.add_sample(name + "_created", dict(zip(LABELS, values, strict=True)), self._created_s)
        yield family

    def describe(self) -> Iterable[Metric]:
        return []


class _EngineGaps:
    """Times between the tokens of one engine's requests."""

    def __init__(self) -> None:
        self.counts = [0] * (len(ITL_BUCKETS_S) + 1)
        """By bucket, the last without a bound."""
        self.sum_s = 0.0

    def observe(self, gap_s: float) -> None:
        self.counts[bisect_left(ITL_BUCKETS_S, gap_s)] += 1
        self.sum_s += gap_s


class _RequestMetrics:
    """Metrics of the requests that one engine runs."""

    def __init__(self, families: _RequestFamilies, gaps: _TokenGaps, model_name: str, engine: int) -> None:
        self._labels = labels = model_name, str(engine)
        self._last_token_s: dict[str, float] = {}
        self._finished = families.finished
        self._prompt_tokens = families.prompt_tokens.labels(*labels)
        self._remembered_answers = families.remembered_answers.labels(*labels)
        self._remembered_tokens = families.remembered_tokens.labels(*labels)
        self._generation_tokens = families.generation_tokens.labels(*labels)
        self._ttft = families.ttft.labels(*labels)
        self._tpot = families.tpot.labels(*labels)
        self._itl = gaps.labels(*labels)
        self._e2e = families.e2e.labels(*labels)
        self._queue = families.queue.labels(*labels)
        self._prefill = families.prefill.labels(*labels)
        self._decode = families.decode.labels(*labels)
        self._prompt_lengths = families.prompt_lengths.labels(*labels)
        self._output_lengths = families.output_lengths.labels(*labels)

    def observe(self, stream: RequestStream, now_s: float) -> None:
        name = stream.request_id
        last_s = self._last_token_s.get(name)
        self._last_token_s[name] = now_s
        if last_s is None:
            self._ttft.observe(now_s - stream.times.arrival_s)
        else:
            self._itl.observe(now_s - last_s)
        if stream.is_finished:
            self._finish(stream, now_s)

    def _finish(self, stream: RequestStream, now_s: float) -> None:
        times = stream.times
        self._e2e.observe(now_s - times.arrival_s)
        if times.queue_s is not None:
            self._queue.observe(times.queue_s)
        if times.prefill_s is not None:
            self._prefill.observe(times.prefill_s)
        if times.first_token_s is not None:
            self._decode.observe(now_s - times.first_token_s)
        lengths = [output.num_tokens for output in stream.outputs]
        self._prompt_tokens.inc(len(stream.prompt_ids))
        self._prompt_lengths.observe(len(stream.prompt_ids))
        if stream.recollection is not None:
            self._remembered_answers.inc(stream.recollection.num_answers)
            self._remembered_tokens.inc(stream.recollection.num_tokens)
        self._generation_tokens.inc(sum(lengths))
        for num_tokens in lengths:
            self._output_lengths.observe(num_tokens)
        if max(lengths) > 1 and times.first_token_s is not None:
            self._tpot.observe((now_s - times.first_token_s) / (max(lengths) - 1))
        self._finished.labels(*self._labels, stream.outputs[0].finish_reason).inc()
        del self._last_token_s[stream.request_id]

    def forget(self, request_id: str) -> None:
        self._last_token_s.pop(request_id, None)
        self._finished.labels(*self._labels, "abort").inc()


class _CoreMetrics:
    """Exposes the engines' counters as metrics."""

    def __init__(self, model_name: str) -> None:
        self.stats: Sequence[CoreStats | None] = ()
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for number, stats in enumerate(self.stats):
            for family in _EngineFamilies(self._model_name, number).collect(stats):
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()

    def describe(self) -> Iterable[Metric]:
        return []


class _EngineFamilies:
    """The metrics of one engine."""

    def __init__(self, model_name: str, engine: int) -> None:
        self._labels = model_name, str(engine)

    def collect(self, stats: CoreStats | None) -> Iterator[Metric]:
        text = "1 if the engine answers; 0 if its metrics are missing."
        yield self._gauge("engine_up", text, {"": stats is not None})
        if stats is not None:
            yield from self._families(stats)

    def _families(self, stats: CoreStats) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Sequences that run.", {"": stats.num_running})
        yield self._gauge("num_requests_waiting", "Sequences that wait.", {"": stats.num_waiting})
        yield self._counter("num_preemptions", "Preemptions.", {"": stats.num_preemptions})
        yield self._counter("prefix_cache_queries", "Tokens looked up in the cache.", {"": stats.queried_tokens})
        yield self._counter("prefix_cache_hits", "Tokens found in the cache.", {"": stats.hit_tokens})
        yield self._counter("prefix_cache_misses", "Tokens not found, by reason.", stats.missed_tokens, "reason")
        recomputed = sum(count for reason, count in stats.missed_tokens.items() if reason in RECOMPUTED)
        yield self._counter("recomputed_tokens", "Missed tokens that had been computed before.", {"": recomputed})
        yield self._counter("prefix_cache_hit_requests", "Hits, by kind of snapshot.", stats.hits_by_kind, "kind")
        yield self._counter("snapshots_taken", "Snapshots taken, by kind.", stats.snapshots_taken, "kind")
        yield self._gauge("snapshots_resident", "Snapshots that the cache holds.", {"": stats.num_snapshots})
        yield self._counter("snapshots_evicted", "Snapshots evicted.", {"": stats.num_snapshots_evicted})
        yield self._counter("blocks_evicted", "Blocks evicted.", {"": stats.num_blocks_evicted})
        yield self._counter("kv_events_published", "Cache events published.", {"": stats.num_events_published})
        yield self._counter(
            "kv_events_dropped", "Cache events dropped from a full queue.", {"": stats.num_events_dropped}
        )
        yield self._counter("audited_requests", "Requests that were replayed cold.", {"": stats.num_audited})
        yield self._counter("audited_tokens", "Tokens of their outputs.", {"": stats.num_audited_tokens})
        text = "Largest difference between a token's log-probability and that of its replay; 0 without --audit-rate."
        yield self._gauge("audit_largest_difference", text, {"": stats.largest_audit_difference})
        yield self._gauge("cache_memory_bytes", "Memory, by use.", stats.bytes_by_use, "use")
        yield from self._tiers(stats)
        yield from self._hand_over(stats.hand_over)
        yield from self._drafts(stats.speculation)
        by_method = stats.speculation_by_method
        drafted = {method: counts.num_draft_tokens for method, counts in by_method.items()}
        accepted = {method: counts.num_accepted_tokens for method, counts in by_method.items()}
        yield self._counter("spec_decode_draft_tokens_by_method", "Drafts, by what made them.", drafted, "method")
        yield self._counter(
            "spec_decode_accepted_tokens_by_method", "Accepted drafts, by what made them.", accepted, "method"
        )
        yield self._fallbacks(stats)
        in_use = stats.bytes_by_use["slots_in_use"] + stats.bytes_by_use["blocks_in_use"]
        share = in_use / max(sum(stats.bytes_by_use.values()), 1)
        yield self._gauge("kv_cache_usage_perc", "Share of memory used by running requests, 0 to 1.", {"": share})

    def _tiers(self, stats: CoreStats) -> Iterator[Metric]:
        """Yield metrics of the tiers below the device; without samples if they are not configured."""
        tiers = stats.tiers
        gauges = {
            "host": ("host_memory_bytes", "Host memory for evicted entries."),
            "disk": ("disk_cache_bytes", "Disk cache, content alone."),
            "objects": ("object_store_bytes", "Entries of the object store in the engine's index, content alone."),
        }
        for name, (gauge, text) in gauges.items():
            sizes = [(tier.num_used_bytes, tier.num_free_bytes) for tier in tiers if tier.name == name]
            used = dict(zip(("used", "free"), sizes[0], strict=True)) if sizes else {}
            yield self._gauge(gauge, text, used, "state")
        use = stats.shared_directory
        text = "Directory of the object store, over all models and engines that share it."
        of_directory = {} if use is None else {"used": use.num_used_bytes, "free": use.num_free_bytes}
        yield self._gauge("object_store_directory_bytes", text, of_directory, "state")
        text = "Files in the directory of the object store."
        yield self._gauge("object_store_directory_files", text, {} if use is None else {"": use.num_files})
        totals = {
            "snapshots_demoted": ("Snapshots evicted to a tier.", "num_snapshots_demoted"),
            "blocks_demoted": ("Blocks evicted to a tier.", "num_blocks_demoted"),
            "demoted_snapshots_evicted": ("Snapshots evicted from a tier.", "num_snapshots_evicted"),
            "demoted_snapshots_refused": (
                "Snapshots worth too little for a tier, or slower to load than to compute.",
                "num_snapshots_refused",
            ),
            "cache_loads": ("Loads from a tier.", "num_loads"),
            "cache_loads_failed": ("Loads from a tier that failed.", "num_failed_loads"),
            "cache_loaded_bytes": ("Bytes loaded from a tier.", "num_loaded_bytes"),
        }
        for name, (text, field) in totals.items():
            yield self._counter(name, text, {tier.name: getattr(tier, field) for tier in tiers}, "tier")
        loaded = {"snapshots_loaded": stats.num_snapshots_loaded, "blocks_loaded": stats.num_blocks_loaded}
        for name, value in loaded.items():
            text = f"{name.split('_')[0].title()} that loads brought."
            yield self._counter(name, text, {"": value} if tiers else {})

    def _hand_over(self, counts: HandOverStats | None) -> Iterator[Metric]:
        """Yield metrics of transfers between engines; without samples if they are not configured."""
        pulls, gives, ended = ({}, {}, {}) if counts is None else (counts.pulls, counts.gives, counts.leases_ended)
        yield self._counter("kv_transfer_pulls", "Prefixes requested from other engines, by outcome.", pulls, "outcome")
        yield self._counter("kv_transfer_gives", "Prefixes requested by other engines, by outcome.", gives, "outcome")
        sizes = {} if counts is None else {"fetched": counts.fetched_bytes, "given": counts.given_bytes}
        yield self._counter("kv_transfer_bytes", "Bytes of transferred prefixes, by direction.", sizes, "direction")
        times = {} if counts is None else {"fetched": counts.fetched_s, "given": counts.given_s}
        yield self._counter("kv_transfer_seconds", "Time of transfers, by direction.", times, "direction")
        leases = {} if counts is None else {"": counts.num_leases}
        yield self._gauge("kv_transfer_leases", "Prompts held for other engines.", leases)
        yield self._counter("kv_transfer_leases_ended", "Prompts released, by reason.", ended, "end")

    def _drafts(self, counts: SpeculationStats) -> Iterator[Metric]:
        """Yield the counts of drafts; without samples if speculative decoding is off."""
        by_position = counts.num_accepted_by_position
        totals = {
            ("spec_decode_num_drafts", "Steps of a sequence with drafts."): counts.num_drafts,
            ("spec_decode_num_draft_tokens", "Drafts."): counts.num_draft_tokens,
            ("spec_decode_num_accepted_tokens", "Accepted drafts."): counts.num_accepted_tokens,
        }
        for (name, text), value in totals.items():
            yield self._counter(name, text, {"": value} if by_position else {})
        accepted = {str(position): count for position, count in enumerate(by_position)}
        text = "Accepted drafts, by their position in the step, from 0."
        yield self._counter("spec_decode_num_accepted_tokens_per_pos", text, accepted, "position")

    def _fallbacks(self, stats: CoreStats) -> Metric:
        text = "Operations that run reference implementations instead of a backend; always 1."
        labels = [*LABELS, "operation", "backend", "reason"]
        family = GaugeMetricFamily(f"{PREFIX}kernel_fallback_info", text, labels=labels)
        for fallback in stats.kernel_fallbacks:
            family.add_metric([*self._labels, fallback.operation, fallback.backend, fallback.reason], 1)
        return family

    def _counter(self, name: str, text: str, values: Mapping[str, float], label: str | None = None) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=[*LABELS, *([label] if label else [])])
        return self._fill(family, values, label)

    def _gauge(self, name: str, text: str, values: Mapping[str, float], label: str | None = None) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=[*LABELS, *([label] if label else [])])
        return self._fill(family, values, label)

    def _fill(
        self, family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float], label: str | None
    ) -> Metric:
        for key, value in values.items():
            family.add_metric([*self._labels, *([key] if label else [])], value)
        return family
