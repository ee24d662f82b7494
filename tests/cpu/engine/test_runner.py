"""What a step leaves behind in the process."""

import pytest
import torch

from strandline import SamplingParams
from strandline.engine import runner
from strandline.kernels.gdn_log import LOG_TOKENS
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


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_decoded_is_logged_and_folded_when_the_log_is_full_unless_deterministic(
    make_llm: MakeLLM, deterministic: bool
) -> None:
    llm = make_llm(deterministic=deterministic)
    llm.engine.add_request(
        "one", [1] * 20, SamplingParams(temperature=0, max_tokens=2 * LOG_TOKENS + 3, ignore_eos=True)
    )
    llm.engine.step()
    [request] = llm.engine.scheduler.running
    assert request.lease is not None
    logged = []
    for _ in range(2 * LOG_TOKENS + 1):
        llm.engine.step()
        logged.append(request.lease.log_tokens)
    # The first step moves the state out of the snapshot of the prompt.
    cycle = [0, *range(1, LOG_TOKENS + 1)]
    assert logged == ([0] * len(logged) if deterministic else [*cycle, *cycle][: len(logged)])
