"""Warm-up leaves no trace. It runs here on a CPU, where an engine itself loads Numba kernels instead."""

import subprocess
import sys
from pathlib import Path

import pytest

from strandline.cache.inspection.published import published_snapshots
from strandline.engine.core import new_warm_up
from strandline.engine.startup.warm_up import FEWEST_DECODED_TOKENS
from strandline.kernels.binding import why_unavailable
from strandline.kernels.recurrences import gdn_log, mamba1_log
from strandline.models.layers.distinct_layers import distinct_layers
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.test_exactness import answers, tokens


@pytest.mark.parametrize("deterministic", [False, True])
def test_warm_up_changes_no_answer_and_leaves_no_trace(make_llm: MakeLLM, deterministic: bool) -> None:
    prompts = [tokens(count, seed=count) for count in (5, 64, 129)]
    options = {"deterministic": deterministic, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    expected = answers(make_llm(**options), prompts)
    llm = make_llm(**options)
    core = llm.engine.core
    warm_up = new_warm_up(llm.config, core.executor)
    warm_up.run()
    assert not warm_up._scheduler.running
    assert not warm_up._scheduler.waiting
    assert not core.executor.runner._states
    assert not list(published_snapshots(core.cache))
    assert answers(llm, prompts) == expected


def test_what_is_evicted_during_warm_up_does_not_rest_below(make_llm: MakeLLM) -> None:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 512}
    slab_bytes = make_llm(**options).engine.core.spec.slab_bytes
    llm = make_llm(memory=14 * slab_bytes, host_memory="8MiB", **options)
    new_warm_up(llm.config, llm.engine.core.executor).run()
    prompts = [tokens(300, seed=seed) for seed in range(6)]
    expected = answers(make_llm(**options), prompts)
    for prompt, answer in zip(prompts * 2, expected * 2, strict=True):
        assert answers(llm, [prompt]) == [answer]
    [host] = llm.engine.core.loads.stats()
    assert host.num_snapshots_demoted > 0


def test_logs_are_filled_twice() -> None:
    """A log of n tokens is folded into the state with the next one."""
    assert 2 * (max(gdn_log.LOG_TOKENS, mamba1_log.LOG_TOKENS) + 1) <= FEWEST_DECODED_TOKENS


PRINT_LOADED_KERNELS = """
import sys
from strandline import LLM, SamplingParams

def loaded():
    return {name for name in sys.modules if name.endswith("_numba")}

llm = LLM(sys.argv[1], device="cpu", memory="8MiB", skip_tokenizer_init=True)
at_start = loaded()
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))

print(len(at_start), sorted(loaded() - at_start))
"""


@pytest.mark.skipif(why_unavailable("Numba", "cpu") is not None, reason="no Numba, or no GNU OpenMP threads")
def test_all_numba_kernels_are_loaded_at_start(model_dir: Path) -> None:
    command = [sys.executable, "-c", PRINT_LOADED_KERNELS, str(model_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    num_loaded, loaded_late = done.stdout.split(maxsplit=1)
    assert int(num_loaded) > 0
    assert loaded_late.strip() == "[]"


def test_warm_up_computes_distinct_layers_alone(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=8, max_num_batched_tokens=128)
    executor, computed = llm.engine.core.executor, set[int]()
    layers = executor.runner.model.decoder.layers
    for index, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, index=index: computed.add(index))
    new_warm_up(llm.config, executor).run()
    assert computed == set(distinct_layers(list(layers)))
    answers(llm, [tokens(5, seed=5)])
    assert computed == set(range(len(layers)))
