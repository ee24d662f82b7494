"""Predict each request's hit from the cache's events alone while a trace is replayed, and compare.

``exact`` is the share of the requests whose prediction from both groups of events equals the hit. ``blocks`` counts
announced blocks alone, as a router does that knows no snapshots: how many tokens it over- and underestimates per
request. ``hashing`` is what hashing a prompt takes, ``lookup`` what a prediction takes then.
"""

import argparse
from dataclasses import dataclass, field
from statistics import fmean
from time import perf_counter
from typing import Any

from strandline.bench.known_models import cost_model, geometry
from strandline.bench.replay import Replay
from strandline.bench.replica import Machine
from strandline.bench.synthetic import SYNTHETIC, synthetic_lanes
from strandline.bench.traces import read_trace
from strandline.cache import Lease
from strandline.cache.announcing.announcer import take_events
from strandline.config import parse_bytes
from strandline.events.resumable import PromptHashes, ResumableIndex
from strandline.events.wire import decode_batch, encode_batch
from strandline.ids import BLOCK_TOKENS, RequestId
from strandline.records.account import Reason
from strandline.records.tokens import TokenBuffer


@dataclass(slots=True)
class Predictions:
    """What was predicted, request by request."""

    hits: list[tuple[int, int]] = field(default_factory=list)
    """Predicted from both groups, and true."""
    by_blocks: list[int] = field(default_factory=list)
    """Predicted from the blocks alone."""
    num_events: int = 0
    num_bytes: int = 0
    hashing_s: float = 0.0
    lookup_s: float = 0.0


class PredictedReplay(Replay):
    """A replay that predicts the hit of every admission, from events that have been encoded and decoded."""

    def __init__(self, machine: Machine, policy_name: str) -> None:
        super().__init__(machine, policy_name, emits_events=True)
        self.index = ResumableIndex()
        self.predictions = Predictions()
        self._admit_unobserved = self.cache.admit
        self.cache.admit = self._admit  # type: ignore[method-assign]

    def _admit(self, request_id: RequestId, tokens: TokenBuffer, **options: Any) -> Lease | None:
        """Admit a request; record what the events so far say that it hits, and what it did."""
        self._follow()
        start_s = perf_counter()
        prompt = PromptHashes(tokens.data, options["salt"])
        hashed_s = perf_counter()
        predicted = self.index.hit_tokens(prompt)
        by_blocks = self.index.matched_blocks(prompt) * BLOCK_TOKENS
        done_s = perf_counter()
        lease = self._admit_unobserved(request_id, tokens, **options)
        if lease is not None and not any(miss.reason is Reason.NO_ROOM for miss in lease.account.misses):
            self.predictions.hits.append((predicted, lease.account.hit))
            self.predictions.by_blocks.append(by_blocks)
            self.predictions.hashing_s += hashed_s - start_s
            self.predictions.lookup_s += done_s - hashed_s
        return lease

    def _follow(self) -> None:
        events = take_events(self.cache)
        payload = encode_batch(0.0, events)
        for event in decode_batch(payload).events:
            self.index.apply(event)
        self.predictions.num_events += len(events)
        self.predictions.num_bytes += len(payload) if events else 0


def summary(predictions: Predictions) -> str:
    """Return the figures as a line."""
    hits = predictions.hits
    exact = sum(predicted == true for predicted, true in hits) / len(hits)
    over = fmean(max(blocks - true, 0) for blocks, (_, true) in zip(predictions.by_blocks, hits, strict=True))
    under = fmean(max(true - blocks, 0) for blocks, (_, true) in zip(predictions.by_blocks, hits, strict=True))
    num_over = sum(blocks > true for blocks, (_, true) in zip(predictions.by_blocks, hits, strict=True))
    return (
        f"{len(hits):>7,} admitted, exact {exact:8.2%}; blocks: +{over:,.1f} tokens ({num_over / len(hits):.1%} of "
        f"requests) -{under:.1f}; {predictions.num_events / len(hits):.1f} events and "
        f"{predictions.num_bytes / len(hits):,.0f} bytes per request; hashing "
        f"{predictions.hashing_s / len(hits) * 1e6:,.0f} us, lookup {predictions.lookup_s / len(hits) * 1e6:,.0f} us"
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", help="files, or names of synthetic workloads")
    parser.add_argument("--geometry", default="Qwen3.5-35B-A3B")
    parser.add_argument("--memory", default="1GiB,10GiB", help="budgets, separated by commas")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--speed", type=float, default=1.0)
    options = parser.parse_args()
    for trace in options.traces:
        lanes = synthetic_lanes(trace) if trace in SYNTHETIC else read_trace(trace)
        for memory in options.memory.split(","):
            cost = cost_model(options.geometry).sped_up(options.speed)
            replay = PredictedReplay(Machine(geometry(options.geometry), cost, parse_bytes(memory)), options.policy)
            replay.run(lanes)
            print(f"{trace} {memory} {options.policy}: {summary(replay.predictions)}", flush=True)


if __name__ == "__main__":
    main()
