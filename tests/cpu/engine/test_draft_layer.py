"""The draft layer of the demo model drafts what its training computed, also behind hits, and changes no token."""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import strandline
from strandline import LLM, SamplingParams
from strandline.device.batch import HostBatch
from strandline.device.graphs import StepHidden
from strandline.device.runner import Runner
from strandline.device.uni_executor import UniExecutor
from strandline.engine.drafting import DraftLayerDrafter
from strandline.engine.request import Request
from strandline.env import DEBUG_CACHE
from strandline.errors import ConfigError
from strandline.records.plan import StepPlan
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


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    monkeypatch.setenv(DEBUG_CACHE, "1")

    def make(num_drafts: int = 2, **options: object) -> LLM:
        speculation = None
        if num_drafts:
            speculation = {"method": "mtp", "num_speculative_tokens": num_drafts, "adaptive": False}
        settings = {"memory": "64MiB", "dtype": "float32", "device": "cpu", "speculative_config": speculation}
        return LLM("demo", **{**settings, **options})

    return make


def ids(llm: LLM, text: str = PROMPT) -> list[int]:
    return list(llm.get_tokenizer().encode(text))


def run(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY, **fields: str) -> tuple[list[int], Drafts]:
    spy = llm.engine.scheduler._drafter = Spy()
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
def test_first_drafts_are_those_of_the_trained_layer(make: Callable[..., LLM], trained: demo_network.DemoModel) -> None:
    llm = make(1)
    prompt = ids(llm)
    answer, drafts = run(llm, prompt)
    tokens = prompt + answer
    padded = torch.tensor([tokens + [0] * (-len(tokens) % 64)])
    hidden_NE = trained.draft(trained(padded), padded.roll(-1, 1))
    expected = F.linear(hidden_NE, trained.model.embed_tokens.weight).argmax(-1).tolist()
    assert len(drafts) > 5
    found = {count: drafted[0] for count, drafted in drafts.items() if drafted}
    # The pair of the last two of ``count`` tokens lies at the first of them.
    assert found == {count: expected[count - 2] for count in found}


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
    assert stats.num_accepted_by_place[0] > 0.8 * stats.num_drafts


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
    for position in [*range(1, len(prompt), 7), 63, 65]:
        salt = {"cache_salt": str(position)}
        llm.generate({"prompt_token_ids": prompt[:position], **salt}, SamplingParams(max_tokens=1), use_tqdm=False)
        assert run(llm, prompt, **salt) == expected, position
        assert llm.engine.core.stats().hit_tokens >= position


def test_a_whole_hit_drafts_at_once(make: Callable[..., LLM]) -> None:
    llm = make()
    prompt = ids(llm)
    expected = run(llm, prompt)
    llm.engine.scheduler._drafter = spy = Spy()
    [output] = llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == len(prompt)
    assert (list(output.outputs[0].token_ids), spy.seen) == expected
    assert spy.seen[len(prompt) + 1]


def test_a_model_without_a_draft_layer_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = save_tiny_model(tmp_path_factory.mktemp("tiny"), mtp_num_hidden_layers=0)
    with pytest.raises(ConfigError, match="no layer for multi-token prediction"):
        LLM(
            str(directory),
            skip_tokenizer_init=True,
            device="cpu",
            speculative_config={"method": "mtp", "num_speculative_tokens": 1},
        )


def test_synthetic_acceptance_has_the_given_rates(make: Callable[..., LLM]) -> None:
    rates = [0.8, 0.6]
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    speculation = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False, **synthetic}
    llm = make(2, speculative_config=speculation)
    params = SamplingParams(temperature=1, max_tokens=200, ignore_eos=True, n=6, seed=1)
    llm.generate({"prompt_token_ids": ids(llm)}, params, use_tqdm=False)
    stats = llm.engine.core.stats().speculation
    assert stats.num_drafts > 400
    # Three standard deviations of 400 draws are 0.07.
    found = [count / stats.num_drafts for count in stats.num_accepted_by_place]
    assert found == pytest.approx(rates, abs=0.07)


class PaddedGraphs:
    """Stands for CUDA graphs of steps with prompts: their rows do not lie right behind those of decodes."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.num_padded = 0

    def decode(self, host: HostBatch) -> None:
        """Have room for no step of decodes."""

    def prefill(self, host: HostBatch) -> StepHidden | None:
        """Run a step, and put rows of NaN between its decodes and prompts."""
        if host.replay is not None or not 0 < host.num_decodes < host.num_sequences:
            return None
        self.num_padded += 1
        hidden = self._runner._run_eagerly(host)
        first = host.num_decode_rows
        gap = hidden.hidden_TE.new_full((5, hidden.hidden_TE.shape[1]), torch.nan)
        return StepHidden(
            torch.cat((hidden.hidden_TE[:first], gap, hidden.hidden_TE[first:])), hidden.last_NE, first + len(gap)
        )


def test_drafts_beside_prompts_in_padded_steps_are_those_without_padding(make: Callable[..., LLM]) -> None:
    def serve(llm: LLM) -> tuple[list[list[int]], int]:
        llm.engine.scheduler._draft_depth = Alternating()
        for index in range(5):
            llm.engine.add_request(f"{index}", ids(llm, f"{PROMPT} {index}"), GREEDY)
            for _ in range(4):
                llm.engine.step()
        outputs: dict[str, list[int]] = {}
        while llm.engine.has_unfinished:
            outputs |= {output.request_id: output.outputs[0].token_ids for output in llm.engine.step()}
        return [outputs[name] for name in sorted(outputs)], llm.engine.core.stats().speculation.num_accepted_tokens

    padded = make(2)
    executor = padded.engine.core.executor
    assert isinstance(executor, UniExecutor)
    graphs = executor.runner._graphs = PaddedGraphs(executor.runner)
    answers, num_accepted = serve(padded)
    assert (answers, num_accepted) == serve(make(2))
    assert num_accepted
    assert graphs.num_padded


class Alternating:
    """Drafts nothing in every second and third step."""

    def __init__(self) -> None:
        self._depths = cycle([0, 0, 2])

    def choose(self, num_decodes: int) -> int:
        del num_decodes
        return next(self._depths)

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Learn nothing."""

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn nothing."""
