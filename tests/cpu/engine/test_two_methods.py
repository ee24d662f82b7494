"""A drafter and lookups in one engine: for each request, what is likely to have more drafts accepted is verified."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from strandline import LLM, SamplingParams
from strandline.device.drafters import draft_layer
from strandline.device.uni_executor import UniExecutor
from strandline.engine.drafting.drafters import ChoosingDrafter
from strandline.engine.drafting.drafts import MOST_STEPS_BETWEEN_LOOKUPS
from strandline.engine.requests.request import Request
from strandline.env import DEBUG_CACHE
from tests.cpu.engine.eager_graphs import complete_on_device, replay_eagerly, single_rows_on_the_host
from tests.cpu.engine.small_demo import small_demo
from tests.cpu.engine.test_draft_layer import Alternating
from tests.cpu.engine.test_drafts_ahead import Steps, serve

NUM_DRAFTS = 3
COPIED = "The red house is far away. The old boat is in the city. The quiet letter is far away. " * 3
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
MakeLLM = Callable[..., LLM]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    monkeypatch.setenv(DEBUG_CACHE, "1")

    def make(*methods: str, model: str = "demo", **options: Any) -> LLM:
        config = {"method": list(methods), "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
        if "dflash" in methods:
            config["model"] = "demo"
        settings = {"memory": "64MiB", "dtype": "float32", "device": "cpu", **options}
        return LLM(model, speculative_config=config if methods else None, **settings)

    return make


def generate(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    """Return answers, and how many tokens were cached, of prompts and of what follows them."""
    found = []
    for _ in range(2):
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        found += [(output.outputs[0].token_ids, output.num_cached_tokens) for output in outputs]
        prompts = [[*prompt, *output.outputs[0].token_ids, 5] for prompt, output in zip(prompts, outputs, strict=True)]
    return found


class Plain(NamedTuple):
    """Prompts, and what the demo model gives without drafts."""

    prompts: list[list[int]]
    found: list[tuple[list[int], int]]


@pytest.fixture(scope="module")
def plain() -> Plain:
    llm = LLM("demo", memory="64MiB", dtype="float32", device="cpu")
    encode = llm.get_tokenizer().encode
    prompts = [list(encode(text)) for text in (COPIED, "What is speculative decoding?", "Tell me about yourself.")]
    return Plain(prompts, generate(llm, prompts))


@pytest.mark.parametrize("methods", [("mtp", "ngram"), ("mtp", "suffix"), ("suffix", "dflash")])
def test_tokens_and_hits_are_those_without_drafts(make: MakeLLM, plain: Plain, methods: tuple[str, ...]) -> None:
    both = make(*methods)
    assert generate(both, plain.prompts) == plain.found
    by_method = both.engine.core.stats().speculation_by_method
    assert set(by_method) == set(methods)
    assert all(counts.num_accepted_tokens > 0 for counts in by_method.values())
    assert sum(each.num_drafts for each in by_method.values()) == both.engine.core.stats().speculation.num_drafts


class Lookups:
    """Finds the tokens of known answers, or others, by the prompt's first token."""

    def __init__(self, answers: dict[int, list[int]], is_right: Callable[[int], bool]) -> None:
        self.answers, self.is_right, self.num_lookups = answers, is_right, 0

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        self.num_lookups += 1
        first = request.prompt_ids[0]
        found = self.answers[first][len(request.output_ids) :][:max_tokens]
        return tuple(found) if self.is_right(first) else tuple((token + 1) % 90 for token in found)


def look_up(llm: LLM, lookups: object) -> ChoosingDrafter:
    """Let an engine look up drafts in another way."""
    drafter = llm.engine.scheduler.drafts.drafter
    assert isinstance(drafter, ChoosingDrafter)
    drafter.lookup = lookups  # type: ignore[assignment]
    return drafter


def test_each_request_verifies_what_is_accepted_more_often(make: MakeLLM) -> None:
    prompts = [[first, 7, 8, 9] for first in (3, 4)]
    answers = [tokens for tokens, _ in generate(make(model=small_demo()), prompts)][:2]
    llm = make("mtp", "ngram", model=small_demo())
    lookups = Lookups({3: answers[0], 4: answers[1]}, lambda first: first == 3)
    drafter = look_up(llm, lookups)
    chosen: dict[int, list[bool]] = {3: [], 4: []}
    propose = drafter.propose

    def noted(request: Request, max_tokens: int) -> tuple[int, ...]:
        drafts = propose(request, max_tokens)
        chosen[request.prompt_ids[0]].append(request.drafts.is_looked_up)
        return drafts

    drafter.propose = noted  # type: ignore[method-assign]
    found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    assert found == answers
    assert all(chosen[3][2:])
    assert not any(chosen[4][2:])
    by_method = llm.engine.core.stats().speculation_by_method
    assert by_method["ngram"].num_accepted_tokens >= NUM_DRAFTS * 0.8 * PARAMS.max_tokens / (1 + NUM_DRAFTS)


@pytest.mark.parametrize("first", [48, 9])
def test_steps_run_ahead_until_lookups_gain(make: MakeLLM, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    prompt = [3, 7, 8, 9]
    [answer, _] = [tokens for tokens, _ in generate(make(model=small_demo()), [prompt])]
    monkeypatch.setattr(draft_layer, "single_rows", single_rows_on_the_host)
    llm = make("mtp", "ngram", model=small_demo(), async_scheduling=True)
    executor, drafts = llm.engine.core.executor, llm.engine.scheduler.drafts
    assert isinstance(executor, UniExecutor)
    replay_eagerly(executor.runner, NUM_DRAFTS, llm.config.max_num_seqs, llm.engine.core.limits.max_model_len)
    complete_on_device(drafts)
    drafts.chooser, drafts._may_suspend = Alternating((NUM_DRAFTS,)), True

    class FoundLate(Lookups):
        def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
            is_found = len(request.output_ids) >= first
            return super().propose(request, max_tokens) if is_found else ()

    choosing = look_up(llm, FoundLate({3: answer}, lambda _: True))
    choosing._rates = [0.1, 0.9]  # of earlier requests
    steps = Steps(monkeypatch)
    [output] = llm.generate([prompt], PARAMS, use_tqdm=False)
    assert output.outputs[0].token_ids == answer
    by_lookup = llm.engine.core.stats().speculation_by_method["ngram"].num_accepted_tokens
    num_rest = PARAMS.max_tokens - first
    if not num_rest:
        assert by_lookup == 0
        assert sum(steps.are_ahead) >= len(steps.are_ahead) - 5
    else:
        wait = 2 * MOST_STEPS_BETWEEN_LOOKUPS + 4
        assert by_lookup >= (num_rest - wait) * NUM_DRAFTS / (1 + NUM_DRAFTS) - NUM_DRAFTS


@pytest.mark.parametrize("depths", [(NUM_DRAFTS,), (0, 0, NUM_DRAFTS, 1, NUM_DRAFTS)])
def test_steps_ahead_and_lookups_in_turn_change_no_answer(
    make: MakeLLM, monkeypatch: pytest.MonkeyPatch, depths: tuple[int, ...]
) -> None:
    monkeypatch.setattr(draft_layer, "single_rows", single_rows_on_the_host)
    expected = serve(make(model=small_demo(), async_scheduling=True, max_num_seqs=6), 3)
    llm = make("mtp", "suffix", model=small_demo(), async_scheduling=True, max_num_seqs=6)
    executor, drafts = llm.engine.core.executor, llm.engine.scheduler.drafts
    assert isinstance(executor, UniExecutor)
    replay_eagerly(executor.runner, NUM_DRAFTS, llm.config.max_num_seqs, llm.engine.core.limits.max_model_len)
    complete_on_device(drafts)
    drafts.chooser, drafts._may_suspend = Alternating(depths), True
    steps = Steps(monkeypatch)
    found = serve(llm, 3)
    assert {name: answer[:2] for name, answer in found.items()} == {name: x[:2] for name, x in expected.items()}
    again = [name for name in expected if name.startswith("again")]
    assert [found[name][2] for name in again] == [expected[name][2] for name in again]
    assert steps.num_ahead > 5
    by_method = llm.engine.core.stats().speculation_by_method
    assert by_method["mtp"].num_drafts > 5
    assert by_method["suffix"].num_accepted_tokens > 5
