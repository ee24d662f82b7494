"""The default order of eviction hits no less than eviction by age, whatever the traffic and however little memory."""

from collections.abc import Callable, Iterable, Iterator
from random import Random

import pytest

from strandline.bench.known_models import cost_model, geometry
from strandline.bench.replay import Replay
from strandline.bench.replica import Machine
from strandline.bench.traces import Call, Lane, random_tokens

MODEL = "Qwen3.5-35B-A3B"
SEEDS = (0,)
MEMORY_GIB = (0.5, 1, 2, 4)
"""8, 16, 32 and 65 slots."""
FEW_SLOTS = (6, 7, 8, 9, 10, 12)
"""Slots in total; a running request holds two or three."""
NOISE = 0.003
"""The share of prompt tokens by which a single replay may differ."""

Turn = tuple[float, bytes, bytes]
"""Seconds since the turn before it, prompt, answer."""


def lane(start_s: float, turns: Iterable[Turn]) -> Lane:
    kept = list(turns)

    def calls() -> Iterator[Call]:
        for think_s, prompt, answer in kept:
            yield Call(0.0, think_s, bytearray(prompt), answer)

    return Lane(start_s, calls)


def singles(prompts: Iterable[tuple[str, int, int]], seed: int) -> Iterator[Lane]:
    """Yield requests a second apart: name and tokens of a prefix, and tokens after it."""
    for index, (name, prefix_tokens, own_tokens) in enumerate(prompts):
        prompt = random_tokens(f"{seed} {name}", prefix_tokens) + random_tokens(f"{seed} own {index}", own_tokens)
        yield lane(float(index), [(0.0, prompt, random_tokens(f"{seed} answer {index}", 20))])


def chats(
    seed: int,
    *,
    num_chats: int,
    max_turns: int,
    gap_s: float,
    think_s: tuple[float, float],
    said: tuple[int, int],
    answered: tuple[int, int],
    repeats_answers: float = 1.0,
    burst: int = 1,
) -> Iterator[Lane]:
    """Yield conversations under two system prompts; ``burst`` of them begin together."""
    choose = Random(seed)
    for chat in range(num_chats):
        history, turns = random_tokens(f"{seed} system {chat % 2}", 200), list[Turn]()
        for turn in range(choose.randint(1, max_turns)):
            history += random_tokens(f"{seed} user {chat} {turn}", choose.randint(*said))
            answer = random_tokens(f"{seed} answer {chat} {turn}", choose.randint(*answered))
            turns.append((choose.uniform(*think_s), history, answer))
            if choose.random() < repeats_answers:
                history += answer
        yield lane(chat // burst * burst * gap_s, turns)


def scan(seed: int) -> Iterator[Lane]:
    """Documents in a cycle that does not fit."""
    return singles(((f"document {index % 12}", 3000, 60) for index in range(96)), seed)


def zipf(seed: int) -> Iterator[Lane]:
    """Prefixes, few of them popular."""
    choose = Random(seed)
    sizes = [choose.randint(100, 5000) for _ in range(60)]
    picked = choose.choices(range(60), [1 / (index + 1) for index in range(60)], k=200)
    return singles(((f"prefix {index}", sizes[index], choose.randint(20, 300)) for index in picked), seed)


def drift(seed: int) -> Iterator[Lane]:
    """Prefixes that come into use and go out of it."""
    choose = Random(seed)
    picked = [int(index / 10 + choose.expovariate(0.3)) for index in range(200)]
    return singles(((f"prefix {position}", 500 + position * 977 % 4000, 100) for position in picked), seed)


def short_chats(seed: int) -> Iterator[Lane]:
    return chats(seed, num_chats=120, max_turns=4, gap_s=1.5, think_s=(1, 6), said=(5, 40), answered=(5, 40))


def bursts(seed: int) -> Iterator[Lane]:
    return chats(
        seed, num_chats=40, max_turns=8, gap_s=3, think_s=(2, 30), said=(10, 120), answered=(10, 200), burst=10
    )


def unrepeated_answers(seed: int) -> Iterator[Lane]:
    """Each turn leaves out, or repeats, what was answered before."""
    return chats(
        seed,
        num_chats=40,
        max_turns=8,
        gap_s=4,
        think_s=(2, 30),
        said=(10, 120),
        answered=(10, 200),
        repeats_answers=0.3,
    )


def agents_one_after_another(seed: int) -> Iterator[Lane]:
    """Long conversations at high speed that are over when the next begins, and short ones beside them."""
    yield from chats(
        seed,
        num_chats=12,
        max_turns=30,
        gap_s=12,
        think_s=(0.1, 1),
        said=(20, 150),
        answered=(20, 80),
        repeats_answers=0.5,
    )
    yield from chats(seed + 100, num_chats=40, max_turns=2, gap_s=4, think_s=(0.1, 2), said=(5, 60), answered=(5, 40))


def chats_beside_documents(seed: int) -> Iterator[Lane]:
    """Short conversations, and long documents that are not asked about again."""
    yield from chats(seed, num_chats=30, max_turns=8, gap_s=4, think_s=(2, 30), said=(10, 120), answered=(10, 200))
    yield from singles(((f"document {index}", 9000, 60) for index in range(60)), seed)


def two_agents(seed: int) -> Iterator[Lane]:
    """Conversations between two agents whose prompts leave out their answers.

    One is asked the same several times over, for calls of tools, before it says something; the other begins alike in
    all conversations.
    """
    choose = Random(seed)
    for chat in range(12):
        asked, said = random_tokens(f"{seed} task {chat}", choose.randint(20, 120)), random_tokens("greeting", 15)
        turns = list[Turn]()
        for turn in range(choose.randint(1, 10)):
            for _ in range(choose.randint(0, 3)):
                turns.append((0.0, asked, random_tokens("", 1)))
            turns.append((0.0, asked, random_tokens(f"{seed} answer {chat} {turn}", choose.randint(10, 90))))
            said += random_tokens(f"{seed} said {chat} {turn}", choose.randint(20, 130))
            turns.append((0.0, said, random_tokens(f"{seed} reply {chat} {turn}", choose.randint(20, 80))))
            asked += random_tokens(f"{seed} asked {chat} {turn}", choose.randint(40, 120))
        yield lane(20.0 * chat, turns)


def hit_share(lanes: list[Lane], memory_gib: float, name: str) -> float:
    spec = geometry(MODEL)
    machine = Machine(spec, cost_model(MODEL), int(memory_gib * 2**30))
    return Replay(machine, name).run(lanes).hit_share


@pytest.mark.parametrize(
    "traffic",
    [scan, zipf, drift, short_chats, bursts, unrepeated_answers, agents_one_after_another, chats_beside_documents],
)
def test_no_traffic_hits_less_than_lru(traffic: Callable[[int], Iterator[Lane]]) -> None:
    gains = []
    for seed in SEEDS:
        lanes = list(traffic(seed))
        for memory_gib in MEMORY_GIB:
            gains.append(hit_share(lanes, memory_gib, "auto") - hit_share(lanes, memory_gib, "auto-lru"))
    assert min(gains) >= -NOISE
    assert sum(gains) >= 0


def test_alternating_agents_hit_no_less_than_lru_in_few_slots() -> None:
    slot_gib = geometry(MODEL).slab_bytes / 2**30
    gains = []
    for seed in range(4):
        lanes = list(two_agents(seed))
        for num_slots in FEW_SLOTS:
            memory_gib = num_slots * slot_gib
            gains.append(hit_share(lanes, memory_gib, "auto") - hit_share(lanes, memory_gib, "auto-lru"))
    assert min(gains) >= 0
