"""Engines on weights that stay in FP8, and on keys and values in FP8: the answers of a cold run, whatever happens.

With ``--deterministic`` these are the same bits. Without, sums are formed in another order, which moves an activation
to the next e4m3 number now and then, a sixteenth away: answers are judged by what a cold run prefers to them. A
likeliest token of a state that is wrong is some token to the cold run, several nats below the likeliest.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from strandline import LLM, SamplingParams
from strandline.bench.evaluate import make_suite
from strandline.device.hardware.dtypes import E4M3_CAPABILITY
from strandline.device.sizing import slabs_for
from strandline.models.storage.conversion import convert
from strandline.text.model_files import DEMO_DIRECTORY
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_bits import (
    MIXTURE,
    WIDE,
    test_forks_have_the_bits_of_a_cold_run,
    test_preempted_answers_have_the_same_bits,
    test_resuming_at_any_position_gives_the_same_bits,
    traces,
)
from tests.cpu.engine.test_deterministic import prompts_that_share
from tests.cpu.engine.test_exactness import answers, tokens
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.models import fp8
from tests.cpu.models.storage.test_conversion import SIZES
from tests.cpu.models.storage.test_quantization import block_config, blocks_of
from tests.cpu.models.test_weights import unfuse_experts
from tests.gpu.engine.conftest import MAX_NUM_SEQS
from tests.gpu.engine.regrets import MAX_REGRET, check_preferred, regrets

__all__ = [
    "test_forks_have_the_bits_of_a_cold_run",
    "test_preempted_answers_have_the_same_bits",
    "test_resuming_at_any_position_gives_the_same_bits",
]

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < E4M3_CAPABILITY,
    reason="no products in FP8 on this GPU",
)

DEVICE = "cuda"
MODELS = {"odd sizes": SIZES, "experts": {**WIDE, **MIXTURE}}
"""Partial blocks and a tied head; whole blocks and a mixture of experts."""

MAX_PROMPT_TOKENS = 1000
GREEDY = SamplingParams(temperature=0, max_tokens=24)
LONG = SamplingParams(temperature=0, max_tokens=150)
LONGEST = 230
PROMPTS = [tokens(count, seed=count) for count in (1, 5, 63, 64, 65, 129, 300)]

MAX_MEAN_REGRET_LONG = 0.1
MAX_SHARE_REGRETTED_LONG = 0.01
"""For answers of 150 tokens: in nats, and the share of tokens with a larger regret than ``MAX_REGRET``. Among 1,200
tokens some choose between experts that are as good: answers that nothing disturbed had regrets of 0.004 on average and
3.0 at most, preempted ones of 0.034 and 2.4. Bits decide with ``--deterministic``."""

MAX_ERROR = 0.5
"""``|log-probabilities - those with activations in float32|`` over the latter's deviations from their mean; those of
another text are off by 1.4. The models are random, with weights twenty times as large as published ones, and a token
may choose another expert: torch's kernels make 0.34 with experts."""

EngineOf = Callable[..., LLM]


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in FP8, in blocks of 128."""
    directory = tmp_path_factory.mktemp("fp8")
    source = fp8.change_tensors(save_tiny_model(directory / "source", **MODELS[request.param]), unfuse_experts)
    return fp8.convert(source, directory, block_config(128, 128), block=blocks_of(128, 128))[0]


@pytest.fixture(scope="module", params=["auto", "fp8"])
def kv_cache_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine_of(model_dir: Path, kv_cache_dtype: str) -> Iterator[EngineOf]:
    """Return an engine by its options; the next test with these gets the same one."""
    made: dict[str, LLM] = {}
    settings = {"device": DEVICE, "dtype": "float32", "max_num_seqs": MAX_NUM_SEQS, "memory": "64MiB"}
    with pytest.MonkeyPatch.context() as patch:
        make = llm_maker(model_dir, patch, max_model_len=1024, kv_cache_dtype=kv_cache_dtype, **settings)

        def get(**options: Any) -> LLM:
            if str(options) not in made:
                made[str(options)] = make(**options)
            return made[str(options)]

        yield get


def cold(engine_of: EngineOf) -> LLM:
    return engine_of(enable_prefix_caching=False, enforce_eager=True)


def test_weights_stay_in_fp8(engine_of: EngineOf) -> None:
    llm = engine_of()
    report: Any = llm.engine.core.executor.runner.model.weights_report  # type: ignore[attr-defined]
    assert len(report.stored) == report.num_quantized > 10


def test_a_wrong_token_is_noticed(engine_of: EngineOf) -> None:
    found = answers(cold(engine_of), PROMPTS, GREEDY)
    check_preferred(cold(engine_of), PROMPTS, found)
    swapped = [PROMPTS[0], *PROMPTS[2:], PROMPTS[1]]
    with pytest.raises(AssertionError):
        check_preferred(cold(engine_of), swapped, found)


def test_graphs_prefer_what_eager_steps_do(engine_of: EngineOf) -> None:
    llm = engine_of()
    for _ in range(2):  # again from snapshots
        check_preferred(cold(engine_of), PROMPTS, answers(llm, PROMPTS, GREEDY))
    assert llm.engine.cache.stats().hit_tokens >= sum(map(len, PROMPTS))


def test_resumed_requests_prefer_what_a_cold_run_does(engine_of: EngineOf) -> None:
    llm, prompt = engine_of(), tokens(150)
    positions = [1, 37, 63, 64, 65, 100, 128, 149]
    salts = [{"cache_salt": str(position)} for position in positions]
    parts: Any = [{"prompt_token_ids": prompt[:end], **salt} for end, salt in zip(positions, salts, strict=True)]
    llm.generate(parts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    outputs = llm.generate([{"prompt_token_ids": prompt, **salt} for salt in salts], GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == positions
    check_preferred(cold(engine_of), [prompt] * len(outputs), [output.outputs[0].token_ids for output in outputs])


def test_forks_prefer_what_a_cold_run_does(engine_of: EngineOf) -> None:
    """Seeds choose among the two likeliest tokens, so that forks part."""
    llm, prompt = engine_of(), tokens(100, seed=2)
    [forked] = llm.generate([prompt], SamplingParams(n=4, seed=11, max_tokens=24, top_k=2), use_tqdm=False)
    found = [output.token_ids for output in forked.outputs]
    assert len({tuple(answer) for answer in found}) > 1
    missed = regrets(cold(engine_of), [prompt] * 4, found, rank=2)
    assert float(missed.max()) < MAX_REGRET


def test_preempted_requests_prefer_what_a_cold_run_does(engine_of: EngineOf) -> None:
    prompts = [tokens(60, seed=seed) for seed in range(8)]
    spec = engine_of().engine.core.spec
    for num_more in (3, 2, 1, 0):
        # Room for little more than one request of the longest kind: several begin, and cannot all end in it.
        memory = (slabs_for(spec, LONGEST) + num_more) * spec.slab_bytes
        llm = engine_of(memory=memory, max_model_len=LONGEST)
        found = answers(llm, prompts, LONG)
        if llm.engine.scheduler.num_preemptions:
            break
    else:
        pytest.fail("nothing was preempted")
    undisturbed = regrets(cold(engine_of), prompts, answers(engine_of(), prompts, LONG))
    missed = regrets(cold(engine_of), prompts, found)
    seen = [(float(regret.mean()), float((regret > MAX_REGRET).float().mean())) for regret in (missed, undisturbed)]
    for mean, share in seen:
        assert (mean < MAX_MEAN_REGRET_LONG, share < MAX_SHARE_REGRETTED_LONG) == (True, True), (
            f"preempted, not: {seen}"
        )
    swapped = [*found[1:], found[0]]
    # A wrong answer is regretted at its beginning; afterwards it continues its own text.
    of_swapped = regrets(cold(engine_of), prompts, swapped)
    assert float((of_swapped > MAX_REGRET).float().mean()) > 2 * MAX_SHARE_REGRETTED_LONG


def test_log_probabilities_are_near_those_of_dequantised_weights(engine_of: EngineOf) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = []
    for llm in (engine_of(), engine_of(dequantize=True)):
        [output] = llm.generate([tokens(300)], params, use_tqdm=False)
        entries = [next(iter(entry.values())) for entry in output.prompt_logprobs or () if entry]
        found.append([entry.logprob for entry in entries])
    quantized, dequantized = torch.tensor(found)
    assert 0 < float((quantized - dequantized).norm() / (dequantized - dequantized.mean()).norm()) < MAX_ERROR


@pytest.fixture
def make_exact(engine_of: EngineOf) -> MakeLLM:
    return lambda **options: engine_of(deterministic=True, dtype="bfloat16", **options)


def test_deterministic_eager_steps_give_the_bits_of_graphs(make_exact: MakeLLM) -> None:
    prompts = prompts_that_share(5, count=8)
    cold_graphs = make_exact(enable_prefix_caching=False)
    expected = [trace for prompt in prompts for trace in traces(cold_graphs, [prompt])]
    llm = make_exact(max_num_batched_tokens=100, enforce_eager=True)
    assert traces(llm, prompts) == expected
    assert traces(llm, prompts[::-1]) == expected[::-1]
    assert llm.engine.cache.stats().hit_tokens > 0


@pytest.fixture(scope="module")
def demo_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with its draft layer, in FP8."""
    directory = tmp_path_factory.mktemp("demo") / "fp8"
    convert(DEMO_DIRECTORY, directory)
    return directory


@pytest.mark.parametrize("is_eager", [False, True])
def test_drafts_of_a_layer_in_fp8_change_no_preferred_token(
    demo_dir: Path, kv_cache_dtype: str, *, is_eager: bool
) -> None:
    settings: dict[str, Any] = {"device": DEVICE, "dtype": "float32", "memory": "1GiB", "max_num_seqs": MAX_NUM_SEQS}
    settings |= {"kv_cache_dtype": kv_cache_dtype, "max_model_len": 1100}
    speculation = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    llm = LLM(str(demo_dir), speculative_config=speculation, enforce_eager=is_eager, **settings)
    chats: list[Any] = [llm.render(task.messages) for task in make_suite(1, 6)]
    prompts = [chat["prompt_token_ids"] for chat in chats if len(chat["prompt_token_ids"]) < MAX_PROMPT_TOKENS]
    plain = LLM(str(demo_dir), enable_prefix_caching=False, enforce_eager=True, **settings)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    hits = []
    for _ in range(2):  # again from snapshots: whole hits
        outputs = llm.generate(prompts, params, use_tqdm=False)
        check_preferred(plain, prompts, [output.outputs[0].token_ids for output in outputs])
        hits.append([output.num_cached_tokens for output in outputs])
    assert hits[1] == list(map(len, prompts))
    counts = llm.engine.core.stats().speculation
    assert counts.num_accepted_tokens > 0.5 * counts.num_draft_tokens > 100
