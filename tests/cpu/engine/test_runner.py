"""What a step leaves behind in the process."""

import pytest
import torch

from strandline import SamplingParams
from strandline.engine import runner
from tests.cpu.engine.conftest import MakeLLM


def test_small_steps_run_on_one_thread_and_larger_ones_and_the_caller_keep_theirs(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    build = runner.build_host_batch

    def spy(sequences: list[runner.SequencePlan], *rest: object) -> object:
        seen.append((sum(s.end - s.start for s in sequences), torch.get_num_threads()))
        return build(sequences, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "build_host_batch", spy)
    llm = make_llm()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        llm.generate([[1] * 20], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        assert seen == [(20, 2), (1, 1), (1, 1)]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
