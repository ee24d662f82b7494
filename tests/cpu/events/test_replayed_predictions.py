"""Conversations replayed under eviction: every request's hit is predicted from the events, to the token."""

import pytest

from benchmarks.predicted_hits import PredictedReplay
from strandline.bench.cost import H200
from strandline.bench.known_models import geometry
from strandline.bench.replica import Machine
from strandline.bench.synthetic import Conversations, synthetic_lanes
from strandline.bench.traces import Lane
from strandline.ids import BLOCK_TOKENS

MODEL = "Qwen3.5-35B-A3B"


def replayed(lanes: list[Lane], gib: float) -> PredictedReplay:
    replay = PredictedReplay(Machine(geometry(MODEL), H200[MODEL], int(gib * 2**30)), "auto")
    replay.run(lanes)
    return replay


@pytest.mark.parametrize("gib", [0.5, 1.0, 3.0])
def test_hits_of_conversations_are_predicted_under_eviction(gib: float) -> None:
    replay = replayed([*Conversations(12, 6, 600, 150, 200).lanes()], gib)
    hits = replay.predictions.hits
    assert len(hits) >= 72
    assert [predicted for predicted, _ in hits] == [true for _, true in hits]
    assert replay.cache.stats().num_snapshots_evicted > 0
    assert sum(true for _, true in hits) > 0


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
