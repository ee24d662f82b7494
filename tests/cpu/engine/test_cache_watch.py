"""What a core tells of its cache: lookups as they were, memory over time, explanations; and never of other salts."""

from typing import Any

import msgspec
import pytest

from strandline import LLM, SamplingParams
from strandline.engine.caching.cache_watch import END_TOKENS, CacheWatch, HitWindow, MemoryHistory
from strandline.records.account import Account, Reason
from strandline.records.cache_questions import CacheAnswer, CacheQuestion, CacheState, RecentHits
from strandline.records.excerpts import EXCERPT_TOKENS
from strandline.records.tokens import encode
from tests.cpu.engine.conftest import MakeLLM

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def prompt(num_tokens: int, first: int = 3) -> list[int]:
    return [(first + 7 * index) % 61 for index in range(num_tokens)]


def ask(llm: LLM, tokens: list[int], salt: str = "", params: SamplingParams = GREEDY) -> Any:
    given: Any = {"prompt_token_ids": tokens, **({"cache_salt": salt} if salt else {})}
    [output] = llm.generate([given], params, use_tqdm=False)
    return output


def watch(llm: LLM) -> CacheWatch:
    return llm.engine.core.watch


def state(llm: LLM, salt: str = "") -> CacheState:
    return watch(llm).state(salt, llm.engine.core.stats())


def test_every_lookup_is_recorded_with_its_account(make_llm: MakeLLM) -> None:
    llm = make_llm()
    outputs = [ask(llm, tokens) for tokens in (prompt(100), prompt(100), prompt(80) + prompt(40, 9))]
    rows = state(llm).lookups
    assert [row.account for row in reversed(rows)] == [output.cache_account for output in outputs]
    assert [row.request_id for row in reversed(rows)] == [output.request_id for output in outputs]
    assert all(row.age_s >= 0 for row in rows)


def test_each_output_of_a_request_has_a_lookup(make_llm: MakeLLM) -> None:
    llm = make_llm()
    output = ask(llm, prompt(100), params=SamplingParams(n=3, temperature=1, seed=1, max_tokens=2))
    assert {row.request_id for row in state(llm).lookups} == {f"{output.request_id}#{index}" for index in range(3)}
    answer = watch(llm).answer(CacheQuestion(request_id=output.request_id))
    assert answer.explanation is not None


def test_memory_samples_equal_the_metrics(make_llm: MakeLLM) -> None:
    llm = make_llm()
    ask(llm, prompt(200))
    shown = state(llm)
    stats = llm.engine.core.stats()
    now = shown.memory[-1]._asdict()
    assert {name: now[name] for name in stats.bytes_by_use if name != "free"} | {
        "free": stats.bytes_by_use["free"]
    } == (stats.bytes_by_use)
    assert shown.total_bytes == sum(stats.bytes_by_use.values())
    assert shown.tree.num_snapshots * shown.snapshot_bytes == stats.bytes_by_use["slots_evictable"]


def test_past_request_is_explained_then_and_now(make_llm: MakeLLM) -> None:
    llm = make_llm()
    ask(llm, prompt(150))
    output = ask(llm, prompt(100) + prompt(30, 9))
    answer = watch(llm).answer(CacheQuestion(request_id=output.request_id))
    assert answer.problem is None
    assert answer.explanation is not None
    assert answer.explanation.account == output.cache_account
    assert [miss.reason for miss in output.cache_account.misses] == [Reason.NO_SNAPSHOT, Reason.DIVERGED]
    assert answer.now is not None
    assert answer.now.hit == 130


def test_explained_prompt_hits_as_predicted(make_llm: MakeLLM) -> None:
    llm = make_llm()
    ask(llm, prompt(150))
    for tokens in (prompt(150), prompt(170), prompt(90) + prompt(30, 9), prompt(50, 9)):
        before = state(llm)
        answer = watch(llm).answer(CacheQuestion(tokens=tokens))
        after = state(llm)
        assert (before.tree, before.stats, before.lookups[0].request_id) == (
            *(after.tree, after.stats),
            after.lookups[0].request_id,
        )
        assert answer.explanation is not None
        assert answer.explanation.account == ask(llm, tokens).cache_account


def test_contents_of_other_salts_are_hidden(make_llm: MakeLLM) -> None:
    llm = make_llm()
    secret = ask(llm, prompt(150), "theirs")
    for answer in (
        watch(llm).answer(CacheQuestion(tokens=prompt(170))),
        watch(llm).answer(CacheQuestion(tokens=prompt(170), salt="mine")),
        watch(llm).answer(CacheQuestion(request_id=ask(llm, prompt(170), "mine").request_id, salt="mine")),
    ):
        assert answer.explanation is not None
        assert [(m.reason, m.start, m.end) for m in answer.explanation.account.misses] == [(Reason.FIRST_SEEN, 0, 170)]
        assert answer.explanation.parting is None
    for salt in ("", "mine"):
        refused = watch(llm).answer(CacheQuestion(request_id=secret.request_id, salt=salt))
        assert refused.explanation is None
        assert "under a salt" in str(refused.problem)
    answer = watch(llm).answer(CacheQuestion(request_id=secret.request_id, salt="theirs"))
    assert answer.explanation is not None
    assert state(llm).tree.runs == ()
    assert state(llm, "theirs").tree.runs
    assert {row.head is None for row in state(llm).lookups if row.request_id == secret.request_id} == {True}
    assert {row.head is None for row in state(llm, "theirs").lookups if row.salt_label} == {True, False}
    labels = {row.salt_label for row in state(llm).lookups}
    assert len(labels) == 2
    assert not labels & {"theirs", "mine", ""}


def test_unknown_requests_and_dropped_prompts_are_reported(make_llm: MakeLLM) -> None:
    llm = make_llm()
    assert "not among the last 0" in str(watch(llm).answer(CacheQuestion(request_id="x")).problem)
    output = ask(llm, prompt(10))
    watch(llm)._log._max_prompt_bytes = 100
    ask(llm, prompt(20))
    assert "not kept any more" in str(watch(llm).answer(CacheQuestion(request_id=output.request_id)).problem)


def test_states_and_answers_survive_serialisation(make_llm: MakeLLM) -> None:
    llm = make_llm()
    ask(llm, prompt(150))
    output = ask(llm, prompt(100) + prompt(30, 9))
    for value, kind in (
        (state(llm), CacheState),
        (watch(llm).answer(CacheQuestion(request_id=output.request_id)), CacheAnswer),
    ):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind) == value


@pytest.mark.parametrize("num_changes", [1, 100, 5000])
def test_memory_samples_are_bounded_and_reach_back_to_the_start(num_changes: int) -> None:
    history = MemoryHistory(max_samples=50, interval_s=1.0)
    for index in range(num_changes):
        history.record(index * 0.5, (index, 0, 0, 0))
    samples = history.samples(num_changes * 0.5)
    assert len(samples) <= 52
    assert (samples[0].slots_in_use, samples[-1].slots_in_use) == (0, num_changes - 1)
    ages = [sample.age_s for sample in samples]
    assert ages == sorted(ages, reverse=True)
    assert all(sample.age_s == 0.5 * (num_changes - sample.slots_in_use) for sample in samples)


def test_memory_sample_before_a_pause_is_kept() -> None:
    history = MemoryHistory()
    for at_s, held in ((0.0, 1), (0.2, 2), (0.4, 3), (100.0, 4)):
        history.record(at_s, (held, 0, 0, 0))
    assert [(sample.age_s, sample.slots_in_use) for sample in history.samples(100.0)] == [
        (100.0, 1),
        (99.6, 3),
        (0.0, 4),
    ]


def test_sparser_memory_samples_keep_when_use_ended() -> None:
    history = MemoryHistory(max_samples=8, interval_s=1.0)
    for at_s in range(0, 4000, 100):
        for later_s, held in ((0.0, 5), (0.9, 6), (1.1, 0)):
            history.record(at_s + later_s, (held, 0, 0, 0))
    samples = history.samples(4000.0)
    assert samples[0].slots_in_use == 5
    assert {sample.slots_in_use for sample in samples[1:]} == {0}


def test_no_memory_is_in_use_after_the_last_request(make_llm: MakeLLM) -> None:
    llm = make_llm()
    ask(llm, prompt(150))
    llm.engine.add_request("aborted", prompt(90), GREEDY)
    llm.engine.step()
    llm.engine.abort("aborted")
    *_, recorded, now = state(llm).memory
    assert (recorded.slots_in_use, recorded.blocks_in_use) == (now.slots_in_use, now.blocks_in_use) == (0, 0)


def test_lookups_show_the_beginning_of_what_is_new(make_llm: MakeLLM) -> None:
    llm = make_llm()
    first, other, short = prompt(150), prompt(100) + prompt(60, 9), prompt(150) + prompt(3, 9)
    for tokens in (first, other, first, short, prompt(5, 20)):
        ask(llm, tokens)
    heads = [row.head for row in reversed(state(llm).lookups)]
    shown = [head.tokens for head in heads if head is not None]
    ends = [tuple(tokens[-END_TOKENS:]) for tokens in (first, short)]
    beginnings = [tuple(tokens[:EXCERPT_TOKENS]) for tokens in (first, other[100:])]
    assert shown == [*beginnings, *ends, tuple(prompt(5, 20))]
    assert heads[1] is not None
    assert heads[1].before == tuple(first[84:100])


def test_recent_hits_are_those_of_the_last_minutes() -> None:
    window = HitWindow(window_s=300.0, num_parts=60)
    for second in range(2000):
        window.record(float(second), Account(10, second % 10, 0, None, ()))
        assert len(window._sums) <= 60
    assert window.recent(1999.0) == RecentHits(300.0, 3000, 1350)
    assert window.recent(2099.0) == RecentHits(300.0, 2000, 900)
    assert window.recent(2400.0) == RecentHits(300.0, 0, 0)


def test_recent_hits_begin_as_those_since_the_start(make_llm: MakeLLM) -> None:
    llm = make_llm()
    for _ in range(3):
        ask(llm, prompt(100))
    stats = llm.engine.core.stats()
    assert state(llm).recent == RecentHits(300.0, stats.queried_tokens, stats.hit_tokens)
    assert stats.hit_tokens == 200


def test_logged_prompts_equal_the_requests_prompts(make_llm: MakeLLM) -> None:
    llm = make_llm()
    output = ask(llm, prompt(77))
    found = watch(llm)._log.find(output.request_id)
    assert found is not None
    assert found[1] == encode(prompt(77))
