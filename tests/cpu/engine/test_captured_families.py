"""Steps of families with attention or logs of their own need nothing of the host, and answer as transformers does.

CUDA graphs are replaced (``eager_graphs.py``).
"""

from pathlib import Path

import pytest

from strandline import SamplingParams
from strandline.device import runner, sizing
from strandline.device.uni_executor import UniExecutor, choose_kernels
from strandline.kernels import binding
from strandline.models.weights import load_model
from tests.cpu.engine.conftest import llm_maker
from tests.cpu.engine.eager_graphs import complete_on_device, replay_eagerly
from tests.cpu.engine.test_exactness import answers, tokens
from tests.cpu.engine.test_speculation import SPECULATION, force
from tests.cpu.models import families

NUM_DRAFTS, MAX_NUM_SEQS, MAX_MODEL_LEN = SPECULATION["num_speculative_tokens"], 4, 256
FAMILIES = ["inkling", "qwen4_exp", "qwen4_exp-vision", "glm5_next", "nemotron_h"]
PROMPTS = [tokens(count, seed=seed) for count, seed in ((1, 5), (63, 63), (65, 70), (130, 131))]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_operation_has_a_kernel_for_gpus(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(binding, "_why_no_triton", lambda device_type: None)
    kernels = choose_kernels(load_model(families.save(name, tmp_path)), "cuda")
    assert kernels.fallbacks == ()
    assert kernels.is_compiled_on_gpu


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_drafts", [0, NUM_DRAFTS])
def test_captured_steps_give_the_tokens_of_transformers(
    name: str, num_drafts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "LOGGED_FROM_CPU", sizing.LOGGED_FROM_GPU)
    make = llm_maker(families.save(name, tmp_path), monkeypatch, device="cpu", memory="32MiB")
    options = {"speculative_config": SPECULATION} if num_drafts else {}
    llm = make(
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=128, max_model_len=MAX_MODEL_LEN, dtype="float32",
        async_scheduling=True, **options,
    )  # fmt: skip
    executor = llm.engine.core.executor
    assert isinstance(executor, UniExecutor)
    graphs = replay_eagerly(executor.runner, num_drafts, MAX_NUM_SEQS, MAX_MODEL_LEN, replays_plain=True)
    if num_drafts:
        complete_on_device(llm.engine.scheduler.drafts)
    monkeypatch.setattr(runner, "to_device", None)
    found = answers(llm, PROMPTS, GREEDY)
    assert found == families.greedy_tokens(name, PROMPTS, found)
    assert all(graphs.num_replayed.values())
    if num_drafts:
        force(llm, {(tuple(x), 0): y for x, y in zip(PROMPTS, found, strict=True)}, [3, 1, 2, 0])
        assert answers(llm, PROMPTS, GREEDY) == found
        assert llm.engine.core.stats().speculation.num_accepted_tokens > 10
