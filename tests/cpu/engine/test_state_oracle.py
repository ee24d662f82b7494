"""Every published slot holds the state that its position claims, after any history (the state oracle).

The bound: states are float32 sums of at most a few hundred terms of order one, formed in another order when a
prompt is computed whole rather than in pieces; differences stay a hundred times below it. Where decays are slow, states
grow beyond that order: the bound is relative to the largest value.
"""

import random

import pytest
import torch

from strandline import LLM, SamplingParams
from strandline.cache.inspection.published import published_snapshots
from strandline.ids import SlotId
from strandline.records.tokens import decode
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.tiny import VOCAB_SIZE

TOLERANCE = 1e-4

AT_ONCE = 8
"""Snapshots that are computed in one batch."""


def contents(llm: LLM, slot: SlotId) -> torch.Tensor:
    """Return all recurrent states, windows and the hidden state in a slot, flat."""
    arena = llm.engine.core.executor.runner.arena
    parts = [arena.hidden_SE[slot].flatten()]
    parts += [state[slot].flatten() for memory in arena.layers for state in memory.states.values()]
    return torch.cat(parts)


def live_through_much(llm: LLM, seed: int, num_requests: int = 40, max_tokens: int = 70) -> None:
    """Run prompts that share, diverge, fork, are aborted and preempt one another."""
    rng = random.Random(seed)
    seen: list[list[int]] = []
    for index in range(num_requests):
        head = list(rng.choice(seen))[: rng.randint(0, 200)] if seen else []
        prompt = head + rng.choices(range(VOCAB_SIZE), k=rng.choice([1, 5, 63, 64, 65, 130]))
        seen.append(prompt)
        forks = rng.choice([1, 1, 1, 3])
        params = SamplingParams(n=forks, seed=index, max_tokens=rng.randint(1, max_tokens))
        llm.engine.add_request(str(index), prompt, params)
        for _ in range(rng.randint(0, 6)):
            llm.engine.step()
        if rng.random() < 0.2:
            llm.engine.abort(str(rng.randint(0, index)))
    while llm.engine.has_unfinished:
        llm.engine.step()


def check_published_slots(llm: LLM, cold: LLM) -> None:
    """Compare every snapshot with that of a prompt of its tokens, computed whole by the second engine."""
    published = list(published_snapshots(llm.engine.cache))
    assert len(published) > 5
    params = SamplingParams(temperature=0, max_tokens=1)
    for start in range(0, len(published), AT_ONCE):
        batch = published[start : start + AT_ONCE]
        cold.generate([decode(key) for _, key, _ in batch], params, use_tqdm=False)
        slots = {key: snapshot.slot for _, key, snapshot in published_snapshots(cold.engine.cache)}
        for _, key, snapshot in batch:
            expected = contents(cold, slots[key])
            difference = (contents(llm, snapshot.slot) - expected).abs().max()
            bound = TOLERANCE * max(1.0, float(expected.abs().max()))
            assert difference < bound, f"snapshot at {snapshot.position} ({snapshot.kind}) differs by {difference}"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_published_slot_holds_the_state_of_its_tokens(make_llm: MakeLLM, seed: int) -> None:
    slab = make_llm().engine.core.spec.slab_bytes
    llm = make_llm(memory=24 * slab, max_model_len=512, max_num_batched_tokens=100)
    live_through_much(llm, seed)
    assert llm.engine.scheduler.num_preemptions > 0
    check_published_slots(llm, make_llm(memory="64MiB"))
