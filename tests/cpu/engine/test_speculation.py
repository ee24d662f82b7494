"""Speculative decoding never changes a token, a hit or a state (contracts 4 and 6)."""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.engine.requests.request import Request
from strandline.env import NUMBA
from strandline.errors import ConfigError
from strandline.records.events import SpeculationStats
from strandline.records.outputs import RequestOutput
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_exactness import answers, tokens
from tests.cpu.engine.test_state_oracle import check_published_slots, live_through_much

DRAFT_TOKENS = 3
SPECULATION = {"method": "ngram", "num_speculative_tokens": DRAFT_TOKENS, "adaptive": False}
GREEDY = SamplingParams(temperature=0, max_tokens=40)
MIXED = [[3, 1, 2, 0], [1, 0, 0, 2]]
PATTERNS = [[0], [1], [2], [3], [0, 3], *MIXED]

Answers = dict[tuple[tuple[int, ...], int], list[int]]
"""What requests generate, by prompt and seed."""


def key(request: Request) -> tuple[tuple[int, ...], int]:
    return request.prompt_ids, 0 if request.params.is_greedy else request.new.seed


class ForcedDrafter:
    """Drafts known answers; of each request's drafts, in turn, as many are right as the pattern says."""

    def __init__(self, known: Answers, pattern: list[int]) -> None:
        self.known = known
        self.pattern = pattern
        self.turns: dict[str, Any] = {}

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        turn = self.turns.setdefault(request.request_id, cycle(self.pattern))
        answer = self.known[key(request)][len(request.output_ids) :][:max_tokens]
        num_right = next(turn)
        return tuple(token if index < num_right else (token + 1) % 32 for index, token in enumerate(answer))


class Recorder:
    """Drafts nothing, and learns what requests generate."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        del max_tokens
        self.requests.append(request)
        return ()

    @property
    def known(self) -> Answers:
        return {key(request): request.output_ids for request in self.requests}


def record(llm: LLM) -> Recorder:
    recorder = llm.engine.scheduler.drafts.drafter = Recorder()
    return recorder


def force(llm: LLM, known: Answers, pattern: list[int]) -> LLM:
    llm.engine.scheduler.drafts.drafter = ForcedDrafter(known, pattern)
    return llm


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def parts(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.num_cached_tokens, [x.token_ids for x in output.outputs]) for output in outputs]


@pytest.fixture
def make(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    return llm_maker(model_dir, monkeypatch, device="cpu", memory="64MiB")


@pytest.fixture
def make_speculating(make: MakeLLM) -> MakeLLM:
    def speculating(**options: Any) -> LLM:
        return make(speculative_config=SPECULATION, **options)

    return speculating


@pytest.fixture(scope="module")
def recorded() -> dict[bool, tuple[list[list[int]], Answers]]:
    """Answers of plain decoding, and what a recorder knows of them, by whether kernels are compiled."""
    return {}


@pytest.mark.parametrize(
    ("is_compiled", "pattern"),
    [
        pytest.param(is_compiled, pattern, marks=[] if is_compiled or pattern in MIXED else pytest.mark.long)
        for is_compiled in (True, False)
        for pattern in PATTERNS
    ],
)
def test_any_pattern_of_acceptance_gives_the_tokens_of_plain_decoding(
    make: MakeLLM,
    make_speculating: MakeLLM,
    monkeypatch: pytest.MonkeyPatch,
    recorded: dict[bool, tuple[list[list[int]], Answers]],
    pattern: list[int],
    is_compiled: bool,
) -> None:
    monkeypatch.setenv(NUMBA, str(int(is_compiled)))
    prompts = [tokens(count, seed=count) for count in (1, 2, 40, 62, 63, 64, 65, 100)]
    if is_compiled not in recorded:
        expected = answers(make(), prompts, GREEDY)
        recording = make_speculating()
        recorder = record(recording)
        assert answers(recording, prompts, GREEDY) == expected
        recorded[is_compiled] = expected, recorder.known
    expected, known = recorded[is_compiled]
    llm = force(make_speculating(), known, pattern)
    assert answers(llm, prompts, GREEDY) == expected
    counts = llm.engine.core.stats().speculation
    accepted = [any(num_right > index for num_right in pattern) for index in range(DRAFT_TOKENS)]
    assert [count > 0 for count in counts.num_accepted_by_position] == accepted
    # All tokens but the first of each request came from steps with drafts or, at the end, without.
    assert counts.num_drafts < counts.num_draft_tokens


@pytest.mark.parametrize("num_steps", [2, 3, 4, 5, 6])
def test_aborted_request_with_drafts_in_flight_leaves_a_true_snapshot(
    make: MakeLLM, make_speculating: MakeLLM, num_steps: int
) -> None:
    prompt, params = tokens(30, seed=3), SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    recording = make_speculating()
    recorder = record(recording)
    [answer] = answers(recording, [prompt], params)
    llm = force(make_speculating(async_scheduling=True), recorder.known, [3, 1, 0, 2])
    engine = llm.engine
    engine.add_request("a", prompt, params, salt="x")
    engine.add_request("b", prompt, params, salt="y")
    for _ in range(num_steps):
        engine.step()
    engine.abort("a")
    finished = []
    while engine.has_unfinished:
        finished += [output for output in engine.step() if output.finished]
    assert [output.request_id for output in finished] == ["b"]
    assert finished[0].outputs[0].token_ids == answer
    assert engine.core.stats().speculation.num_accepted_tokens > 5
    # What it left is resumed from behind every token, and gives the same tokens.
    record(llm)
    for num_known in range(16):
        rest = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        engine.add_request("c", [*prompt, *answer[:num_known]], rest, salt="x")
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        assert outputs[-1].outputs[0].token_ids == answer[num_known : num_known + 4]


def test_acceptance_of_requests_adds_up_to_that_of_the_engine(make: MakeLLM, make_speculating: MakeLLM) -> None:
    prompts = [tokens(count, seed=count) for count in (1, 40, 63)]
    params = SamplingParams(temperature=1.0, seed=7, n=2, max_tokens=33)
    recording = make_speculating()
    recorder = record(recording)
    assert all(output.speculation == SpeculationStats() for output in run(recording, prompts, params))
    llm = force(make_speculating(), recorder.known, [1, 3, 0])
    found = run(llm, prompts, params)
    outputs = [output for request in found for output in request.outputs]
    for output in outputs:
        counts = output.speculation
        # After the prompt's step, 13 steps of 2, 4 and 1 tokens in turn; the last one has room for 2, so one draft.
        assert (counts.num_drafts, counts.num_draft_tokens) == (14, 3 * 13 + 1)
        assert counts.num_accepted_by_position == (5 + 4 + 1, 4, 4)
        assert counts.num_accepted_tokens + counts.num_rejected_tokens == counts.num_draft_tokens
    assert found[0].speculation == outputs[0].speculation + outputs[1].speculation
    total = sum((request.speculation for request in found), SpeculationStats())
    assert total == llm.engine.core.stats().speculation


SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}, "min_tokens": 10},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "n": 3, "logprobs": 0},
    {"temperature": 1.0, "logprobs": 0, "logprob_token_ids": [90, 3, 41]},
]


@pytest.mark.parametrize("options", SAMPLERS, ids=str)
def test_sampled_tokens_are_those_of_plain_decoding(
    make: MakeLLM, make_speculating: MakeLLM, options: dict[str, Any]
) -> None:
    prompts = [tokens(count, seed=count) for count in (1, 40, 63, 100)]
    params = SamplingParams(seed=7, max_tokens=40, **options)
    expected = run(make(), prompts, params)
    recording = make_speculating()
    recorder = record(recording)
    run(recording, prompts, params)
    found = run(force(make_speculating(), recorder.known, [3, 1, 2, 0]), prompts, params)
    assert parts(found) == parts(expected)
    for with_drafts, plain in zip(found, expected, strict=True):
        for left, right in zip(with_drafts.outputs, plain.outputs, strict=True):
            if options.get("logprobs") is not None:
                assert left.logprobs is not None
                assert right.logprobs is not None
                pairs = zip(left.logprobs, right.logprobs, strict=True)
                assert all(x.keys() == y.keys() for x, y in pairs)
                assert left.cumulative_logprob == pytest.approx(right.cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize(
    "pattern", [pytest.param(p, marks=[] if p in ([0], [3], [3, 1, 2, 0]) else pytest.mark.long) for p in PATTERNS]
)
def test_turns_of_a_chat_hit_as_many_tokens(make: MakeLLM, make_speculating: MakeLLM, pattern: list[int]) -> None:
    def chat(llm: LLM) -> list[Any]:
        history, found = tokens(50), []
        for turn in range(6):
            params = SamplingParams(temperature=0, max_tokens=21 + turn)
            [output] = run(llm, [history], params)
            found.append((output.num_cached_tokens, output.outputs[0].token_ids))
            history = history + output.outputs[0].token_ids + tokens(9, seed=turn)
        return found

    recording = make_speculating()
    recorder = record(recording)
    expected = chat(make())
    assert chat(recording) == expected
    assert chat(force(make_speculating(), recorder.known, pattern)) == expected
    assert all(hit > 0 for hit, _ in expected[1:])


def test_a_stop_token_among_drafts_ends_the_request_there(make: MakeLLM, make_speculating: MakeLLM) -> None:
    prompt = tokens(60)
    recording = make_speculating()
    recorder = record(recording)
    [expected] = answers(recording, [prompt], GREEDY)
    plain, llm = make(), make_speculating()
    for index, stop in enumerate(expected[: 4 * (1 + DRAFT_TOKENS)]):
        if stop in expected[:index]:
            continue
        params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[stop])
        # A salt of its own, so that nothing of another stop token's can be resumed.
        salt = {"cache_salt": str(index)}
        whole: Any = {"prompt_token_ids": prompt, **salt}
        longer: Any = {"prompt_token_ids": prompt + expected[: index + 1] + tokens(5, seed=1), **salt}
        force(llm, recorder.known, [3])
        [ended] = run(llm, [whole], params)
        assert parts([ended]) == parts(run(plain, [whole], params))
        assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", stop)
        assert ended.outputs[0].token_ids == expected[: index + 1]
        record(llm)
        few = SamplingParams(temperature=0, max_tokens=8)
        assert parts(run(llm, [longer], few)) == parts(run(plain, [longer], few))


def test_preempted_within_a_log_gives_the_same_tokens(make: MakeLLM, make_speculating: MakeLLM) -> None:
    prompts = [tokens(60, seed=seed) for seed in range(6)]
    params = SamplingParams(temperature=0, max_tokens=150)
    expected = answers(make(enable_prefix_caching=False), prompts, params)
    recording = make_speculating()
    recorder = record(recording)
    answers(recording, prompts, params)
    slab = recording.engine.core.spec.slab_bytes
    llm = force(make_speculating(memory=16 * slab, max_model_len=256), recorder.known, [3, 1, 2, 0])
    assert answers(llm, prompts, params) == expected
    assert llm.engine.scheduler.num_preemptions > 0


def test_resuming_at_every_position_gives_the_same_tokens(make: MakeLLM, make_speculating: MakeLLM) -> None:
    prompt = tokens(70)
    params = SamplingParams(temperature=0, max_tokens=12)
    recording = make_speculating(enable_prefix_caching=False)
    recorder = record(recording)
    [expected] = answers(recording, [prompt], params)
    llm = make_speculating()
    for position in range(1, len(prompt)):
        salt = {"cache_salt": str(position)}
        record(llm)
        llm.generate({"prompt_token_ids": prompt[:position], **salt}, SamplingParams(max_tokens=1), use_tqdm=False)
        force(llm, recorder.known, [position % 4, 3])
        [output] = llm.generate({"prompt_token_ids": prompt, **salt}, params, use_tqdm=False)
        assert (output.num_cached_tokens, output.outputs[0].token_ids) == (position, expected)


@pytest.mark.parametrize("pattern", [pytest.param([3], marks=pytest.mark.long), [3, 1, 2, 0]])
def test_a_published_slot_holds_the_state_of_its_tokens(make_speculating: MakeLLM, pattern: list[int]) -> None:
    recording = make_speculating(max_model_len=512)
    recorder = record(recording)
    live_through_much(recording, seed=1)
    slab = recording.engine.core.spec.slab_bytes
    steps = {"max_num_batched_tokens": 100, "long_prefill_token_threshold": 0}
    llm = make_speculating(memory=18 * slab, max_model_len=512, **steps)
    force(llm, recorder.known, pattern)
    live_through_much(llm, seed=1)
    assert llm.engine.scheduler.num_preemptions > 0
    record(cold := make_speculating())
    check_published_slots(llm, cold)


def test_rejected_drafts_are_never_read(make_speculating: MakeLLM) -> None:
    prompts = [tokens(count, seed=count) for count in (1, 63, 100)]
    recording = make_speculating()
    recorder = record(recording)
    expected = answers(recording, prompts, GREEDY)
    llm = force(make_speculating(), recorder.known, [1, 2, 0, 3])
    assert serve_with_poisoned_logs(llm, prompts, GREEDY) == expected


def serve_with_poisoned_logs(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Generate, and after every step fill the logs of drafts with NaN, but for what was accepted.

    Each step must be settled before the next one is planned.
    """
    for index, prompt in enumerate(prompts):
        llm.engine.add_request(str(index), prompt, params)
    found: dict[str, list[int]] = {}
    arena = llm.engine.core.executor.runner.arena
    logs = [log for memory in arena.layers for log in (memory.draft_log or {}).values()]
    num_kept = num_steps = 0
    while llm.engine.has_unfinished:
        found.update({x.request_id: x.outputs[0].token_ids for x in llm.engine.step() if x.finished})
        leases = [request.lease for request in llm.engine.scheduler.running if request.lease is not None]
        firsts = [lease.log * arena.draft_tokens for lease in leases]
        rows = [slice(first, first + lease.num_logged) for first, lease in zip(firsts, leases, strict=True)]
        for log in logs:
            kept = log.clone()
            log.fill_(float("nan"))
            for accepted in rows:
                log[accepted] = kept[accepted]
        num_kept, num_steps = num_kept + sum(lease.num_logged for lease in leases), num_steps + 1
    assert logs
    assert num_kept > num_steps / 2
    return [found[str(index)] for index in range(len(prompts))]


def test_a_log_is_all_that_drafts_take(make: MakeLLM, make_speculating: MakeLLM) -> None:
    plain, llm = make(), make_speculating()
    spec = llm.engine.core.spec
    assert plain.engine.core.spec == spec
    arena = llm.engine.core.executor.runner.arena
    logs = [log for memory in arena.layers for log in (memory.draft_log or {}).values()]
    assert arena.hidden_drafts_JE is not None
    per_request = sum(log.numel() * log.element_size() for log in [*logs, arena.hidden_drafts_JE]) // (1 + 256)
    assert per_request == DRAFT_TOKENS * spec.logged_draft_bytes
    assert all(memory.log is None for memory in arena.layers)
    assert spec.logged_draft_bytes < spec.raw_slot_bytes / 2


def test_deterministic_engines_refuse_drafts(make_speculating: MakeLLM) -> None:
    with pytest.raises(ConfigError, match="--deterministic cannot be combined with --speculative-config"):
        make_speculating(deterministic=True)
