"""Warming up leaves no trace: it is run here on a CPU, where the engine itself does without."""

import pytest

from strandline.engine.core import new_scheduler
from strandline.engine.warm_up import WarmUp
from strandline.specs import ModelSpec
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.test_exactness import answers, tokens


@pytest.mark.parametrize("deterministic", [False, True])
def test_warming_up_changes_no_answer_and_leaves_nothing_behind(make_llm: MakeLLM, deterministic: bool) -> None:
    prompts = [tokens(count, seed=count) for count in (5, 64, 129)]
    options = {"deterministic": deterministic, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    expected = answers(make_llm(**options), prompts)
    llm = make_llm(**options)
    core = llm.engine.core
    spec: ModelSpec = core.runner.arena.spec
    made_up = new_scheduler(llm.config, spec, core.cache.arena.num_slabs, core.runner.device)
    WarmUp(core.runner, made_up, core.limits.max_model_len).run()
    assert not made_up.running
    assert not made_up.waiting
    assert not core.runner._states
    assert not list(core.cache.snapshots())
    assert answers(llm, prompts) == expected
