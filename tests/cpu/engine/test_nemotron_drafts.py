"""With the draft layer of Nemotron 3, tokens and hits are those without; drafts are those of the published layer."""

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.device.sizing import slabs_for
from strandline.engine.drafting.drafters import DraftLayerDrafter
from strandline.engine.requests.request import Request
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_draft_layer import Alternating
from tests.cpu.engine.test_exactness import answers, tokens
from tests.cpu.engine.test_ranks import making
from tests.cpu.models import nemotron_drafts

NAME = "nemotron_h"
MOST_DRAFTS = 3
SPECULATION = {"method": "mtp", "num_speculative_tokens": MOST_DRAFTS, "adaptive": False}
NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)

Drafts = dict[tuple[int, ...], tuple[int, ...]]
"""What the draft layer drafted, by the text before."""


class Spy(DraftLayerDrafter):
    """Keeps what the layer drafts.

    A random layer is seldom right: proposed are the tokens of known answers, of a request's drafts in turn as many of
    them as the pattern says, then wrong ones.
    """

    def __init__(self, known: list[list[int]], pattern: list[int]) -> None:
        self.known, self.pattern = known, pattern
        self.turns: dict[str, Iterator[int]] = {}
        self.seen: Drafts = {}

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        text = (*request.prompt_ids, *request.output_ids)
        drafts = super().propose(request, max_tokens)
        self.seen[text] = drafts
        rest = next((known[len(text) :] for known in self.known if tuple(known[: len(text)]) == text), [])
        num_right = next(self.turns.setdefault(request.request_id, cycle(self.pattern)))
        places = zip(drafts, rest, strict=False)
        return tuple(token if index < num_right else (token + 1) % 32 for index, (_, token) in enumerate(places))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nemotron_drafts.save(NAME, tmp_path_factory.mktemp("drafts"))


@pytest.fixture
def make(directory: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    return llm_maker(directory, monkeypatch, device="cpu", memory="64MiB", max_model_len=512)


@pytest.fixture
def make_drafting(make: MakeLLM) -> MakeLLM:
    return lambda **options: make(**{"speculative_config": SPECULATION, **options})


def spy_on(llm: LLM, known: list[list[int]], pattern: list[int]) -> Spy:
    spy = llm.engine.scheduler.drafts.drafter = Spy(known, pattern)
    return spy


def check_drafts(seen: Drafts) -> None:
    """Compare what was drafted to the published layer's drafts."""
    drafted = {text: drafts for text, drafts in seen.items() if drafts}
    assert len(drafted) > 4
    oracle = nemotron_drafts.oracle(NAME)
    assert drafted == {text: oracle.drafts(text, len(drafts)) for text, drafts in drafted.items()}


def known_answers(make: MakeLLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [prompt + answer for prompt, answer in zip(prompts, answers(make(), prompts, params), strict=True)]


@pytest.mark.parametrize("step_tokens", [7, 65, 512])
def test_tokens_and_drafts_are_those_of_model_and_layer(
    make: MakeLLM, make_drafting: MakeLLM, step_tokens: int
) -> None:
    prompts = [tokens(count, seed=count) for count in (2, 63, 64, 65)]
    known = known_answers(make, prompts)
    llm = make_drafting(max_num_batched_tokens=step_tokens)
    spy = spy_on(llm, known, [3, 1, 2, 0])
    assert answers(llm, prompts, GREEDY) == [text[-16:] for text in known]
    check_drafts(spy.seen)
    stats = llm.engine.core.stats().speculation
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_drafts_behind_a_hit_at_any_position_are_those_without(make: MakeLLM, make_drafting: MakeLLM) -> None:
    prompt = tokens(100)
    known = known_answers(make, [prompt])
    cold = make_drafting(enable_prefix_caching=False)
    expected = spy_on(cold, known, [1, 0, 2])
    assert answers(cold, [prompt], GREEDY) == [known[0][100:]]
    check_drafts(expected.seen)
    llm = make_drafting()
    for position in [1, 2, 31, 63, 65, 98, 99, 100]:
        salt: Any = {"cache_salt": str(position)}
        llm.generate({"prompt_token_ids": prompt[:position], **salt}, SamplingParams(max_tokens=1), use_tqdm=False)
        spy = spy_on(llm, known, [1, 0, 2])
        [output] = llm.generate({"prompt_token_ids": prompt, **salt}, GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == position
        assert (list(output.outputs[0].token_ids), spy.seen) == (known[0][100:], expected.seen), position
    # A whole hit, the last one, drafts behind the first token that it samples.
    assert spy.seen[tuple(known[0][:101])]


def test_forks_and_next_turns_are_those_of_plain_decoding(make: MakeLLM, make_drafting: MakeLLM) -> None:
    def serve(llm: LLM) -> list[Any]:
        params = SamplingParams(n=3, seed=5, max_tokens=30)
        [forked] = llm.generate([tokens(70)], params, use_tqdm=False)
        turns = [tokens(70) + list(output.token_ids) + tokens(9) for output in forked.outputs]
        later = [llm.generate([turn], GREEDY, use_tqdm=False)[0] for turn in turns]
        return [
            [output.token_ids for output in forked.outputs],
            [(output.num_cached_tokens, output.outputs[0].token_ids) for output in later],
        ]

    expected = serve(make())
    assert all(num_cached > 90 for num_cached, _ in expected[1])
    assert serve(make_drafting()) == expected


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_steps_without_drafts_keep_what_later_drafts_need(
    make: MakeLLM, make_drafting: MakeLLM, *, is_overlapped: bool
) -> None:
    # Short prompts: most of what the layer reads is of tokens that such steps have generated.
    prompts, params = [tokens(count, seed=count) for count in (1, 2, 3)], SamplingParams(temperature=0, max_tokens=40)
    known = known_answers(make, prompts, params)
    adaptive = {"method": "mtp", "num_speculative_tokens": 2}
    llm = make_drafting(speculative_config=adaptive, async_scheduling=is_overlapped)
    llm.engine.scheduler.drafts.chooser = Alternating((0, 0, 0, 2))
    spy = spy_on(llm, known, [2, 0])
    assert answers(llm, prompts, params) == [text[-40:] for text in known]
    check_drafts(spy.seen)


def test_preempted_requests_give_the_same_tokens(make: MakeLLM, make_drafting: MakeLLM) -> None:
    prompts, params = [tokens(60, seed=seed) for seed in range(4)], SamplingParams(temperature=0, max_tokens=100)
    expected = answers(make(), prompts, params)
    spec = make_drafting().engine.core.spec
    llm = make_drafting(memory=(slabs_for(spec, 170) + 1) * spec.slab_bytes, max_model_len=170)
    assert answers(llm, prompts, params) == expected
    assert llm.engine.scheduler.num_preemptions > 0


def test_two_ranks_draft_what_one_does(directory: Path) -> None:
    prompts, found = [tokens(count, seed=count) for count in (5, 64, 90)], []
    with making(directory, 2, memory="32MiB") as make:
        known = known_answers(lambda: make(divided=False), prompts)
        for divided in (False, True):
            llm = make(divided=divided, speculative_config=SPECULATION)
            spy = spy_on(llm, known, [2, 0, 3])
            found.append((answers(llm, prompts, GREEDY), spy.seen))
    assert found[0] == found[1]
    assert found[0][0] == [text[-16:] for text in known]
    check_drafts(found[0][1])
