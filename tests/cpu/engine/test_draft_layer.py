"""The draft layer of the demo model drafts what its training computed, also behind hits, and changes no token."""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import strandline
from strandline import LLM, SamplingParams
from strandline.device import runner
from strandline.device.batches.batch import DeviceBatch, HostBatch
from strandline.device.runner import Runner
from strandline.device.steps.step_in_flight import StepInFlight
from strandline.device.uni_executor import UniExecutor
from strandline.engine import loading
from strandline.engine.drafting.drafters import DraftLayerDrafter
from strandline.engine.requests.request import Request
from strandline.env import DEBUG_CACHE
from strandline.errors import ConfigError
from strandline.kernels.batch import StepBatch
from strandline.kernels.gemm.weights import ScaledWeight
from strandline.records.actions import FoldLog
from strandline.records.plan import SequencePlan, StepPlan, StepResult
from tests.cpu.engine.eager_graphs import replay_eagerly
from tests.cpu.engine.small_demo import small_demo
from tests.cpu.engine.tiny import save_tiny_model
from tools import demo_network

DEMO_FOLDER = Path(strandline.__file__).parent / "demo"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT = (
    "What is seven times eight? And who wrote the letter that the teacher read in the old archive last winter? " * 3
)

Drafts = dict[int, tuple[int, ...]]
"""What was drafted, by the number of tokens before."""


class Spy(DraftLayerDrafter):
    """Keeps what it hands on."""

    def __init__(self) -> None:
        self.seen: Drafts = {}

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        drafts = super().propose(request, max_tokens)
        self.seen[request.num_tokens] = drafts
        return drafts


def maker(model: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """Build LLMs on a model; every step checks the cache."""
    monkeypatch.setenv(DEBUG_CACHE, "1")

    def make(num_drafts: int = 2, **options: object) -> LLM:
        speculation = None
        if num_drafts:
            speculation = {"method": "mtp", "num_speculative_tokens": num_drafts, "adaptive": False}
        settings = {"memory": "64MiB", "dtype": "float32", "device": "cpu", "speculative_config": speculation}
        return LLM(model, **{**settings, **options})

    return make


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """Build LLMs on the demo model."""
    return maker("demo", monkeypatch)


@pytest.fixture
def make_small(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """Build LLMs on a small model, for tests that compare engines with each other."""
    return maker(small_demo(), monkeypatch)


def ids(llm: LLM, text: str = PROMPT) -> list[int]:
    return list(llm.get_tokenizer().encode(text))


def run(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY, **fields: str) -> tuple[list[int], Drafts]:
    spy = llm.engine.scheduler.drafts.drafter = Spy()
    [output] = llm.generate({"prompt_token_ids": prompt, **fields}, params, use_tqdm=False)
    return list(output.outputs[0].token_ids), spy.seen


@pytest.fixture(scope="module")
def trained() -> demo_network.DemoModel:
    state: dict[str, torch.Tensor] = {}
    for file in DEMO_FOLDER.glob("*.safetensors"):
        state |= {name: tensor.float() for name, tensor in load_file(file).items()}
    model = demo_network.DemoModel(demo_network.Shape())
    model.load_state_dict(state)
    return model


@torch.no_grad()
def first_drafts(trained: demo_network.DemoModel, tokens: list[int], vocab_size: int | None = None) -> list[int]:
    """Return what the trained layer drafts behind each pair of tokens, of those with ids below ``vocab_size``."""
    padded = torch.tensor([tokens + [0] * (-len(tokens) % 64)])
    hidden_NE = trained.draft(trained(padded), padded.roll(-1, 1))
    return F.linear(hidden_NE, trained.model.embed_tokens.weight)[..., :vocab_size].argmax(-1).tolist()


@pytest.mark.parametrize("draft_vocab_size", [None, 2**40])
def test_first_drafts_are_those_of_the_trained_layer(
    make: Callable[..., LLM], trained: demo_network.DemoModel, draft_vocab_size: int | None
) -> None:
    speculation = {"method": "mtp", "num_speculative_tokens": 1, "adaptive": False}
    llm = make(speculative_config={**speculation, "draft_vocab_size": draft_vocab_size})
    prompt = ids(llm)
    answer, drafts = run(llm, prompt)
    expected = first_drafts(trained, prompt + answer)
    assert len(drafts) > 5
    found = {count: drafted[0] for count, drafted in drafts.items() if drafted}
    # The pair of the last two of ``count`` tokens lies at the first of them.
    assert found == {count: expected[count - 2] for count in found}


def test_drafts_of_a_reduced_vocabulary_change_no_token(
    make: Callable[..., LLM], trained: demo_network.DemoModel
) -> None:
    vocab_size = 700
    speculation = {"method": "mtp", "num_speculative_tokens": 1, "adaptive": False, "draft_vocab_size": vocab_size}
    llm, plain = make(speculative_config=speculation), make(0)
    prompt = ids(llm)
    answer, drafts = run(llm, prompt)
    assert answer == run(plain, prompt)[0]
    expected, unlimited = (first_drafts(trained, prompt + answer, size) for size in (vocab_size, None))
    found = {count: drafted[0] for count, drafted in drafts.items() if drafted}
    assert found == {count: expected[count - 2] for count in found}
    assert any(unlimited[count - 2] >= vocab_size for count in found)


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_tokens_are_those_of_plain_decoding_and_most_drafts_agree(make: Callable[..., LLM], num_drafts: int) -> None:
    plain, llm = make(0), make(num_drafts)
    questions = ["What is speculative decoding?", "Tell me about yourself.", "What is 7 times 8?"]
    messages = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0, max_tokens=40)
    expected, found = (
        [output.outputs[0].token_ids for output in x.chat(messages, params, use_tqdm=False)] for x in (plain, llm)
    )
    assert found == expected
    stats = llm.engine.core.stats().speculation
    assert stats.num_accepted_by_position[0] > 0.8 * stats.num_drafts


@pytest.mark.parametrize("step_tokens", [1, 7, 64, 65])
def test_steps_of_any_size_draft_the_same(make: Callable[..., LLM], step_tokens: int) -> None:
    llm = make(max_num_batched_tokens=4096)
    prompt = ids(llm)
    expected = run(llm, prompt)
    # A step of one token has no room for drafts: only what is drafted behind it is compared.
    found = run(make(max_num_batched_tokens=step_tokens), prompt)
    assert found[0] == expected[0]
    if step_tokens > 2:
        assert found[1] == expected[1]


def test_drafts_behind_a_hit_are_those_without(make: Callable[..., LLM]) -> None:
    llm = make()
    prompt = ids(llm)
    expected = run(make(enable_prefix_caching=False), prompt)
    assert len(prompt) > 64
    for position in [*range(1, len(prompt), 11), 63, 65]:
        salt = {"cache_salt": str(position)}
        llm.generate({"prompt_token_ids": prompt[:position], **salt}, SamplingParams(max_tokens=1), use_tqdm=False)
        assert run(llm, prompt, **salt) == expected, position
        assert llm.engine.core.stats().hit_tokens >= position


def test_a_whole_hit_drafts_at_once(make: Callable[..., LLM]) -> None:
    llm = make()
    prompt = ids(llm)
    expected = run(llm, prompt)
    llm.engine.scheduler.drafts.drafter = spy = Spy()
    [output] = llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == len(prompt)
    assert (list(output.outputs[0].token_ids), spy.seen) == expected
    assert spy.seen[len(prompt) + 1]


def keeping(llm: LLM) -> LLM:
    """Let steps with prompts keep what the draft layer needs, and draft nothing, as where CUDA graphs exist."""
    drafts = llm.engine.scheduler.drafts
    drafts.limits = drafts.limits._replace(corrects_lengths=True)
    return llm


def assert_drafts_behind_prompt(
    trained: demo_network.DemoModel, prompt: list[int], answer: list[int], drafts: Drafts
) -> None:
    expected = first_drafts(trained, prompt + answer)
    found = {count: drafted[0] for count, drafted in drafts.items() if drafted}
    assert min(found) == len(prompt) + 2
    assert found == {count: expected[count - 2] for count in found}


@pytest.mark.parametrize("step_tokens", [7, 64, 65, 4096])
def test_drafts_behind_kept_prompts_are_those_of_trained_layer(
    make: Callable[..., LLM], trained: demo_network.DemoModel, step_tokens: int
) -> None:
    llm = keeping(make(max_num_batched_tokens=step_tokens))
    prompt = ids(llm)
    assert_drafts_behind_prompt(trained, prompt, *run(llm, prompt))


def draft_states(llm: LLM) -> dict[int, torch.Tensor]:
    """Return what will hold the hidden states that first drafts are chosen from, by position."""
    executor = llm.engine.core.executor
    assert isinstance(executor, UniExecutor)
    model: Any = executor.runner.model
    states, draft = dict[int, torch.Tensor](), model.draft

    def noted(batch: StepBatch, *args: Any) -> torch.Tensor:
        hidden_NE: torch.Tensor = draft(batch, *args)
        if len(args) > 2:
            states.update(zip(batch.positions_T[args[2]].tolist(), hidden_NE.unbind(), strict=True))
        return hidden_NE

    model.draft = noted
    return states


@pytest.mark.parametrize("num_rest", [0, pytest.param(1, marks=pytest.mark.long), 9])
def test_hits_that_drafted_nothing_leave_what_drafts_attend_to(make: Callable[..., LLM], num_rest: int) -> None:
    cold, llm = make(enable_prefix_caching=False), keeping(make())
    whole = ids(llm)
    expected, found = draft_states(cold), draft_states(llm)
    for position in (1, 20, 63, 65, len(whole) - num_rest):
        prompt, salt = whole[: position + num_rest], {"cache_salt": str(position)}
        expected.clear()
        answer, _ = run(cold, prompt)
        # What followed the tokens that hit was another token.
        other = SamplingParams(max_tokens=2, logit_bias={(prompt + answer)[position]: -100.0}, ignore_eos=True)
        llm.generate({"prompt_token_ids": prompt[:position], **salt}, other, use_tqdm=False)
        num_hit = llm.engine.core.stats().hit_tokens
        found.clear()
        assert run(llm, prompt, **salt)[0] == answer
        assert llm.engine.core.stats().hit_tokens == num_hit + position
        compared = sorted(found.keys() & expected)
        assert compared[0] < len(prompt) + 3
        assert len(compared) > 10
        # Sums of floats in another order; a wrong key among a hundred changes more.
        torch.testing.assert_close(
            torch.stack([found[index] for index in compared]),
            torch.stack([expected[index] for index in compared]),
            atol=1e-4,
            rtol=1e-4,
        )


def test_drafts_behind_preempted_requests_are_those_of_the_trained_layer(
    make: Callable[..., LLM], trained: demo_network.DemoModel
) -> None:
    slab = make().engine.core.spec.slab_bytes
    llm = keeping(make(memory=5 * slab, max_model_len=128, max_num_seqs=6))
    seen: dict[tuple[int, ...], Drafts] = {}

    class SpyOfMany(DraftLayerDrafter):
        def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
            drafts = super().propose(request, max_tokens)
            seen.setdefault(request.prompt_ids, {})[request.num_tokens] = drafts
            return drafts

    llm.engine.scheduler.drafts.drafter = SpyOfMany()
    prompts = [ids(llm)[start : start + 20] for start in range(6)]
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert llm.engine.scheduler.num_preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = first_drafts(trained, prompt + output.outputs[0].token_ids)
        found = {count: drafted[0] for count, drafted in seen[tuple(prompt)].items() if drafted}
        assert len(found) > 10
        assert found == {count: expected[count - 2] for count in found}


def test_a_model_without_a_draft_layer_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = save_tiny_model(tmp_path_factory.mktemp("tiny"), mtp_num_hidden_layers=0)
    with pytest.raises(ConfigError, match="no layer for multi-token prediction"):
        LLM(
            str(directory),
            skip_tokenizer_init=True,
            device="cpu",
            speculative_config={"method": "mtp", "num_speculative_tokens": 1},
        )


def test_synthetic_acceptance_has_the_given_rates(make_small: Callable[..., LLM]) -> None:
    rates = [0.8, 0.6]
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    speculation = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False, **synthetic}
    llm = make_small(2, speculative_config=speculation)
    params = SamplingParams(temperature=1, max_tokens=200, ignore_eos=True, n=6, seed=1)
    llm.generate({"prompt_token_ids": ids(llm)}, params, use_tqdm=False)
    stats = llm.engine.core.stats().speculation
    assert stats.num_drafts > 400
    # Three standard deviations of 400 draws are 0.07.
    found = [count / stats.num_drafts for count in stats.num_accepted_by_position]
    assert found == pytest.approx(rates, abs=0.07)


def test_drafts_beside_prompts_in_padded_steps_are_those_without_padding(make_small: Callable[..., LLM]) -> None:
    def serve(llm: LLM) -> tuple[list[list[int]], int]:
        llm.engine.scheduler.drafts.chooser = Alternating()
        for index in range(5):
            llm.engine.add_request(f"{index}", ids(llm, f"{index} {PROMPT}"), GREEDY)
            for _ in range(4):
                llm.engine.step()
        outputs: dict[str, list[int]] = {}
        while llm.engine.has_unfinished:
            outputs |= {output.request_id: output.outputs[0].token_ids for output in llm.engine.step()}
        return [outputs[name] for name in sorted(outputs)], llm.engine.core.stats().speculation.num_accepted_tokens

    padded = make_small(2)
    executor = padded.engine.core.executor
    assert isinstance(executor, UniExecutor)
    graphs = replay_eagerly(executor.runner, 0, 5, padded.engine.core.limits.max_model_len, replays_plain=True)
    answers, num_accepted = serve(padded)
    assert (answers, num_accepted) == serve(make_small(2))
    assert num_accepted
    assert graphs.num_replayed[True]


class Alternating:
    """Drafts nothing in two of three steps, or as often as the depths say."""

    def __init__(self, depths: tuple[int, ...] = (0, 0, 2)) -> None:
        self._depths = cycle(depths)

    def choose(self, num_decodes: int, *, is_timed: bool = True) -> int:
        del num_decodes, is_timed
        return next(self._depths)

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Learn nothing."""

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn nothing."""


ADAPTIVE = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize(
    "depths", [(0, 2), pytest.param((0,) * 9 + (1, 2, 2), marks=pytest.mark.long), (0,) * 20 + (2,)], ids=str
)
def test_drafts_behind_plain_steps_are_those_of_the_trained_layer(
    make: Callable[..., LLM], trained: demo_network.DemoModel, depths: tuple[int, ...], is_overlapped: bool
) -> None:
    llm = make(2, async_scheduling=is_overlapped, **ADAPTIVE)
    llm.engine.scheduler.drafts.chooser = Alternating(depths)
    prompt, params = ids(llm), SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    answer, drafts = run(llm, prompt, params)
    expected = first_drafts(trained, prompt + answer)
    found = {count: drafted[0] for count, drafted in drafts.items() if drafted}
    assert len(found) > 2
    assert found == {count: expected[count - 2] for count in found}
    # Nor does a snapshot that such steps have left behind, or a block, miss what the layer keeps.
    llm.engine.scheduler.drafts.chooser = Alternating((2,))
    for num_known in (1, 20, 50, 79):
        longer = prompt + answer[:num_known]
        _, drafts = run(llm, longer, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        found = {count: drafted[0] for count, drafted in drafts.items() if drafted}
        assert found == {count: expected[count - 2] for count in found}
    assert llm.engine.core.stats().hit_tokens > 3 * len(prompt)


def test_plain_steps_upload_their_batch_once(make_small: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    uploads, to_device = list[int](), runner.to_device

    def counted(host: HostBatch, *args: Any) -> DeviceBatch:
        uploads.append(host.num_decodes)
        return to_device(host, *args)

    llm = make_small(1, **ADAPTIVE)
    llm.engine.scheduler.drafts.chooser = Alternating((0,))
    monkeypatch.setattr(runner, "to_device", counted)
    run(llm, ids(llm), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert uploads == [0] + [1] * 8


def is_plain_decode(sequence: SequencePlan) -> bool:
    """Return whether it decodes as if there were no drafts."""
    return sequence.is_decode and sequence.is_sampled and not sequence.next_drafts


@pytest.mark.parametrize("num_plain", [pytest.param(4, marks=pytest.mark.long), 14])
def test_steps_without_drafts_overlap_and_keep_logs_of_decoded_tokens(
    make_small: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, num_plain: int
) -> None:
    plans, num_results, num_ahead = list[StepPlan](), 0, 0
    launch, result = Runner.launch, StepInFlight.result

    def noted_launch(runner: Runner, plan: StepPlan) -> StepInFlight:
        nonlocal num_ahead
        num_ahead += num_results < len(plans)
        plans.append(plan)
        return launch(runner, plan)

    def noted_result(step: StepInFlight) -> StepResult:
        nonlocal num_results
        num_results += 1
        return result(step)

    def serve(llm: LLM) -> list[list[int]]:
        prompts = [ids(llm, f"{PROMPT} {index}") for index in range(5)]
        params = [
            SamplingParams(temperature=index % 2, seed=index, max_tokens=90, ignore_eos=True) for index in range(5)
        ]
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    expected = serve(make_small(0))
    llm = make_small(2, async_scheduling=True, **ADAPTIVE)
    # One step drafts, the next one verifies, and one more folds what was accepted.
    llm.engine.scheduler.drafts.chooser = Alternating((0,) * (num_plain + 2) + (2,))
    monkeypatch.setattr(Runner, "launch", noted_launch)
    monkeypatch.setattr(StepInFlight, "result", noted_result)
    assert serve(llm) == expected
    plain = [plan for plan in plans if all(is_plain_decode(x) for x in plan.sequences)]
    # The first plain step of a row of them waits for the one before it.
    assert num_ahead > 0.8 * (num_plain - 1) / (num_plain + 3) * len(plans)
    assert num_ahead < len(plain)
    appended = [x for plan in plain for x in plan.sequences if x.num_folded == 0]
    assert len(appended) > 0.3 * sum(len(plan.sequences) for plan in plain)
    assert all(x.log for x in appended)
    assert any(isinstance(action, FoldLog) and not action.holds_drafts for plan in plans for action in plan.actions)
    assert llm.engine.core.stats().speculation.num_accepted_tokens


def test_an_output_head_in_fp8_drafts_nearly_as_well(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make(0)
    monkeypatch.setattr(loading, "drafts_in_fp8", lambda *_: True)
    llm = make(speculative_config={"method": "mtp", "num_speculative_tokens": 1, "adaptive": False})
    model: Any = llm.engine.core.executor.runner.model  # type: ignore[attr-defined]
    assert isinstance(model.decoder.embedding.draft_weight, ScaledWeight)
    prompt = ids(llm)
    answer, drafts = run(llm, prompt)
    assert answer == run(plain, prompt)[0]
    hidden_NE = torch.randn(200, model.embedding_size)
    rounded, exact = model.draft_logits(hidden_NE).argmax(-1), model.logits(hidden_NE).argmax(-1)
    assert (rounded == exact).float().mean() > 0.9
    assert sum(len(drafted) > 0 for drafted in drafts.values()) > 5
