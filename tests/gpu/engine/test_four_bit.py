"""Engines on weights in 4 bits or FP4 answer as on dequantised ones, and with ``--deterministic`` always the same.

Activations are in float32: answers then differ by the order of sums alone, and few tokens are as likely as others.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from strandline import LLM, SamplingParams
from strandline.device.hardware.dtypes import FIRST_CAPABILITY
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_bits import (
    MIXTURE,
    WIDE,
    test_forks_have_the_bits_of_a_cold_run,
    test_preempted_answers_have_the_same_bits,
    test_resuming_at_any_position_gives_the_same_bits,
)
from tests.cpu.engine.test_exactness import answers, tokens
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.models import four_bit, fp8, microscaled
from tests.cpu.models.storage.test_conversion import SIZES
from tests.cpu.models.storage.test_four_bit_storage import KEPT
from tests.cpu.models.test_weights import unfuse_experts
from tests.gpu.engine.conftest import MAX_NUM_SEQS
from tests.gpu.engine.regrets import check_preferred

__all__ = [
    "test_forks_have_the_bits_of_a_cold_run",
    "test_preempted_answers_have_the_same_bits",
    "test_resuming_at_any_position_gives_the_same_bits",
]

pytestmark = pytest.mark.skipif(
    torch.cuda.get_device_capability() < FIRST_CAPABILITY, reason="no products in 4 bits on this GPU"
)

MODELS = {
    "odd sizes": (SIZES, "awq"),
    "experts": ({**WIDE, **MIXTURE}, "compressed"),
    "NVFP4": (WIDE, "modelopt"),
    "MXFP4 experts": ({**WIDE, **MIXTURE}, "mxfp4"),
}
"""Sizes, and how weights are published; in FP4 the head, too."""
GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = [tokens(count, seed=count) for count in (1, 5, 63, 64, 65, 129, 300)]

MAX_ERROR = 0.02
"""``|log-probabilities - those of dequantised weights|`` over the latter's deviations from their mean, in float32: few
rows are multiplied with an excess of 2,048 times an input; a token may choose another expert."""

EngineOf = Callable[..., LLM]


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes, scheme = MODELS[request.param]
    directory = tmp_path_factory.mktemp("four_bit")
    source = fp8.change_tensors(save_tiny_model(directory / "source", **sizes), unfuse_experts)
    if scheme in microscaled.WAYS:
        return microscaled.convert(source, directory, scheme, microscaled.is_projection_or_head)[0]
    return four_bit.convert(source, directory, KEPT[scheme])[0]


@pytest.fixture(scope="module")
def engine_of(model_dir: Path) -> Iterator[EngineOf]:
    """Return an engine by its options; the next test with these gets the same one."""
    made: dict[str, LLM] = {}
    settings = {"device": "cuda", "dtype": "float32", "max_num_seqs": MAX_NUM_SEQS, "memory": "64MiB"}
    with pytest.MonkeyPatch.context() as patch:
        make = llm_maker(model_dir, patch, max_model_len=1024, **settings)

        def get(**options: Any) -> LLM:
            if str(options) not in made:
                made[str(options)] = make(**options)
            return made[str(options)]

        yield get


@pytest.fixture
def make_exact(engine_of: EngineOf) -> MakeLLM:
    return lambda **options: engine_of(deterministic=True, dtype="bfloat16", **options)


def test_weights_stay_in_4_bits(engine_of: EngineOf) -> None:
    llm = engine_of()
    report: Any = llm.engine.core.executor.runner.model.weights_report  # type: ignore[attr-defined]
    assert len(report.stored) == report.num_quantized > 10


def test_graphs_prefer_what_dequantised_weights_do(engine_of: EngineOf) -> None:
    llm, judge = engine_of(), engine_of(dequantize=True, enable_prefix_caching=False, enforce_eager=True)
    for _ in range(2):  # again from snapshots
        check_preferred(judge, PROMPTS, answers(llm, PROMPTS, GREEDY))
    assert llm.engine.cache.stats().hit_tokens >= sum(map(len, PROMPTS))


def test_log_probabilities_are_those_of_dequantised_weights(engine_of: EngineOf) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = []
    for llm in (engine_of(), engine_of(dequantize=True, enable_prefix_caching=False, enforce_eager=True)):
        [output] = llm.generate([tokens(300)], params, use_tqdm=False)
        entries = [next(iter(entry.values())) for entry in output.prompt_logprobs or () if entry]
        found.append([entry.logprob for entry in entries])
    quantized, dequantized = torch.tensor(found)
    assert float((quantized - dequantized).norm() / (dequantized - dequantized.mean()).norm()) < MAX_ERROR
