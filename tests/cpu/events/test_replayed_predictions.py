"""Conversations replayed under eviction: every request's hit is predicted from the events, to the token."""

from pathlib import Path

import pytest

from benchmarks.predicted_hits import PredictedReplay
from strandline.bench.cost import H200
from strandline.bench.known_models import geometry
from strandline.bench.replica import Machine
from strandline.bench.synthetic import Conversations, synthetic_lanes
from strandline.bench.traces import Lane, read_trace
from strandline.ids import BLOCK_TOKENS

MODEL = "Qwen3.5-35B-A3B"
TRACES = Path(__file__).parents[2] / "traces"
NUM_PROMPTS = {"taubench": 471, "magagent": 693}
"""Requests of the recorded traces, less those without a prompt."""


def replayed(lanes: list[Lane], gib: float, *, speed: float = 1.0, policy: str = "auto") -> PredictedReplay:
    cost = H200[MODEL].sped_up(speed)
    replay = PredictedReplay(Machine(geometry(MODEL), cost, int(gib * 2**30)), policy)
    replay.run(lanes)
    return replay


def long(*values: str | float) -> object:
    """Return a case that runs with ``--long`` alone."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize("gib", [0.5, 1.0, 3.0])
def test_hits_of_conversations_are_predicted_under_eviction(gib: float) -> None:
    replay = replayed([*Conversations(12, 6, 600, 150, 200).lanes()], gib)
    hits = replay.predictions.hits
    assert len(hits) >= 72
    assert [predicted for predicted, _ in hits] == [true for _, true in hits]
    assert replay.cache.stats().num_snapshots_evicted > 0
    assert sum(true for _, true in hits) > 0


@pytest.mark.parametrize(
    ("name", "gib", "speed", "policy"),
    [
        ("taubench", 0.375, 1.0, "auto"),
        ("taubench", 1.0, 1.0, "auto"),
        ("magagent", 1.0, 1.0, "auto"),
        ("magagent", 2.0, 16.0, "auto"),
        *(long("taubench", gib, 16.0, "auto") for gib in (0.5, 0.75, 1.5, 3.0)),
        *(long("magagent", gib, speed, "auto") for gib in (1.5, 3.0, 6.0) for speed in (1.0, 16.0, 64.0)),
        *(long("magagent", 1.5, 16.0, policy) for policy in ("auto-lru", "align", "all")),
    ],
)
def test_hits_of_recorded_agents_are_predicted_under_eviction(name: str, gib: float, speed: float, policy: str) -> None:
    replay = replayed(read_trace(TRACES / f"agent_text_{name}.jsonl.gz"), gib, speed=speed, policy=policy)
    hits, stats = replay.predictions.hits, replay.cache.stats()
    assert len(hits) == NUM_PROMPTS[name]
    assert [predicted for predicted, _ in hits] == [true for _, true in hits]
    assert sum(true > 0 for _, true in hits) > NUM_PROMPTS[name] / 2
    assert stats.num_snapshots_evicted > 0
    assert stats.num_blocks_evicted > 0


@pytest.mark.parametrize("name", ["prefix-240", "edit-last", "resend"])
def test_hits_of_shared_prefixes_are_predicted(name: str) -> None:
    hits = replayed(synthetic_lanes(name), 2.0).predictions.hits
    assert [predicted for predicted, _ in hits] == [true for _, true in hits]


def test_blocks_alone_are_right_for_prompts_that_go_on() -> None:
    replay = replayed([*Conversations(4, 6, 600, 150, 200).lanes()], 3.0)
    returns = [
        pair for pair in zip(replay.predictions.by_blocks, replay.predictions.hits, strict=True) if pair[1][1] > 700
    ]
    assert len(returns) >= 16
    assert all(blocks == true // BLOCK_TOKENS * BLOCK_TOKENS for blocks, (_, true) in returns)
