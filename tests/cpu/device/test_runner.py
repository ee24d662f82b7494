"""Threads of small steps, when decodes keep logs, and the parts of sequences that are computed one by one."""

import pytest
import torch

from strandline import LLM, SamplingParams
from strandline.device.runner import split_by_blocks
from strandline.device.sizing import LOGGED_FROM_CPU
from strandline.device.steps import host_step
from strandline.ids import SlotId
from strandline.kernels.recurrences.gdn_log import LOG_TOKENS
from tests.cpu.device.test_padded_step import sequence
from tests.cpu.engine.conftest import MakeLLM


def test_small_steps_run_on_one_thread(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    build = host_step.build_host_batch

    def spy(sequences: list[host_step.SequencePlan], *rest: object) -> object:
        seen.append((sum(s.end - s.start for s in sequences), torch.get_num_threads()))
        return build(sequences, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(host_step, "build_host_batch", spy)
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
def test_decodes_are_logged_until_the_log_is_full(make_llm: MakeLLM, deterministic: bool) -> None:
    llm = make_llm(deterministic=deterministic)
    params = SamplingParams(temperature=0, max_tokens=2 * LOG_TOKENS + 3, ignore_eos=True)
    for index in range(LOGGED_FROM_CPU):
        llm.engine.add_request(str(index), [1 + index] * 20, params)
    llm.engine.step()
    request = llm.engine.scheduler.running[-1]
    assert request.lease is not None
    logged = []
    for _ in range(2 * LOG_TOKENS + 1):
        llm.engine.step()
        logged.append(request.lease.num_logged)
    # The first step moves the state out of the snapshot of the prompt.
    cycle = [0, *range(1, LOG_TOKENS + 1)]
    assert logged == ([0] * len(logged) if deterministic else [*cycle, *cycle][: len(logged)])


def test_logs_are_kept_only_while_enough_sequences_decode(make_llm: MakeLLM) -> None:
    def serve(llm: LLM) -> dict[str, list[int]]:
        answers: dict[str, list[int]] = {}
        for index in range(LOGGED_FROM_CPU):
            params = SamplingParams(temperature=0, max_tokens=(8, 12, 40, 40)[index], ignore_eos=True)
            llm.engine.add_request(f"early {index}", [1 + index] * 20, params)
        for step in range(120):
            if step == 20:
                for index in range(2):
                    llm.engine.add_request(f"late {index}", [9 + index] * 20, params)
            for output in llm.engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
            logged.append({r.lease.num_logged for r in llm.engine.scheduler.running if r.lease is not None})
        return answers

    logged: list[set[int]] = []
    found = serve(make_llm())
    assert {0} in logged[10:20]
    assert any(max(each, default=0) > 0 for each in logged[:8])
    assert any(max(each, default=0) > 0 for each in logged[22:])
    assert found == serve(make_llm(enable_prefix_caching=False, max_num_seqs=LOGGED_FROM_CPU - 1))


def test_parts_of_a_prompt_end_with_its_blocks() -> None:
    whole = sequence(1, 64, 200, cuts=(128, 192))
    parts = list(split_by_blocks(whole))
    assert [(part.start, part.end, part.num_folded) for part in parts] == [(64, 128, 64), (128, 192, 64), (192, 200, 8)]
    assert sum((part.token_ids for part in parts), ()) == whole.token_ids
    assert [part.cuts for part in parts] == [((128, SlotId(14)),), ((192, SlotId(14)),), ()]
    assert [part.state_src for part in parts] == [whole.state_src, whole.state_dst, whole.state_dst]


def test_a_sequence_within_one_block_is_its_own_only_part() -> None:
    for start, end in ((64, 64), (64, 65), (70, 128), (200, 201)):
        assert list(split_by_blocks(sequence(1, start, end))) == [sequence(1, start, end)]
