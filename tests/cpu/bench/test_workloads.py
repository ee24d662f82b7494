"""The workloads and the demo's table say what happened."""

from pathlib import Path

import pytest

from strandline import LLM
from strandline.bench.demo_command import table, write_script
from strandline.bench.exam import run_evaluation
from strandline.bench.workloads import Batch, MultiTurn, Report, SharedPrefix


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", dtype="float32", skip_tokenizer_init=True)


def test_chat_hits_all_but_new_tokens(llm: LLM) -> None:
    report = MultiTurn(num_conversations=2, num_turns=3, system_tokens=70, user_tokens=(20, 30), output_tokens=4).run(
        llm
    )
    assert report.output_tokens == 2 * 3 * 4
    assert report.hit_tokens >= report.prompt_tokens - 70 - 2 * 3 * (30 + 1) - 64
    assert 0 < report.mean_ttft_s < report.wall_s


def test_third_request_hits_the_shared_prefix(llm: LLM) -> None:
    report = SharedPrefix(num_requests=4, prefix_tokens=90, suffix_tokens=10, output_tokens=2, seed=5).run(llm)
    assert report.hit_tokens == 2 * 90


def test_burst_hits_its_shared_prefix_from_the_second_request(llm: LLM) -> None:
    workload = SharedPrefix(num_requests=4, prefix_tokens=90, suffix_tokens=10, output_tokens=2, concurrency=4, seed=6)
    assert workload.run(llm).hit_tokens == 3 * 90


def test_unrelated_prompts_hit_nothing(llm: LLM) -> None:
    assert Batch(num_requests=3, prompt_tokens=40, output_tokens=2, seed=7).run(llm).hit_share < 0.05


def test_the_demos_table_shows_a_difference_in_tokens() -> None:
    off = Report(1000, 0, 10, 2.0, 0.5, ((1, 2),))
    same, other = Report(1000, 900, 10, 1.0, 0.1, ((1, 2),)), Report(1000, 900, 10, 1.0, 0.1, ((1, 3),))
    assert table({"a": [off, same]})[-1].split() == ["on", "1,000", "900", "(90.0%)", "100", "ms", "1,010", "yes"]
    assert table({"a": [off, other]})[-1].split()[-1] == "NO"


def test_the_demo_says_the_same_every_time() -> None:
    script = write_script()
    assert script == write_script()
    assert len(set(script.questions)) == len(script.questions) == 12


def test_the_evaluation_scores_every_mode_alike(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # The mode without the cache drops what needs one.
    tiers = {"host_memory": "64MiB", "disk_cache": str(tmp_path), "disk_cache_size": "64MiB", "audit_rate": 0.01}
    assert run_evaluation({"model": "demo", "dtype": "float32", **tiers}, per_kind=1, seed=29) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["cache", "off", "on", "resumed"]
    assert rows[1][-1] == rows[3][-1] == "0"
