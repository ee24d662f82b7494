"""Acceptance of drafts in the load generator, from metrics of any server with vLLM's names."""

import json
from pathlib import Path

import pytest

from strandline.bench.serving.acceptance import acceptance_figures, read_draft_counts
from strandline.bench.serving.figures import figures_of
from strandline.bench.serving.load import Run
from strandline.bench.serving.options import Wanted, pace_of
from strandline.bench.serving.result import table
from strandline.cli import main
from strandline.text.model_files import DEMO_DIRECTORY
from tests.cpu.bench.conftest import serve_options
from tests.cpu.server.process import running_server


def exposed(drafts: int, drafted: int, accepted: list[int], *, labels: str = 'engine="0",model_name="m"') -> str:
    head = "other:spec_decode_num_"
    lines = [
        "# TYPE other:spec_decode_num_drafts_total counter",
        f"{head}drafts_total{{{labels}}} {drafts}.0",
        f"{head}drafts_created{{{labels}}} 1.7e+09",
        f"{head}draft_tokens_total{{{labels}}} {drafted}.0",
        f"{head}accepted_tokens_total{{{labels}}} {sum(accepted)}.0",
    ]
    lines += [
        f'{head}accepted_tokens_per_pos_total{{{labels},position="{position}"}} {count}.0'
        for position, count in enumerate(accepted)
    ]
    return "\n".join([*lines, ""])


BEFORE, AFTER = exposed(5, 10, [4, 1]), exposed(25, 50, [20, 9])


def test_acceptance_is_what_the_metrics_gained() -> None:
    figures = acceptance_figures(read_draft_counts(BEFORE), read_draft_counts(AFTER))
    assert figures == {
        "spec_decode_acceptance_rate": pytest.approx(60.0),
        "spec_decode_acceptance_length": pytest.approx(2.2),
        "spec_decode_num_drafts": 20,
        "spec_decode_draft_tokens": 40,
        "spec_decode_accepted_tokens": 24,
        "spec_decode_per_position_acceptance_rates": pytest.approx([0.8, 0.4]),
    }


def test_engines_add_up() -> None:
    both = AFTER + exposed(25, 50, [20, 9], labels='engine="1",model_name="m"')
    assert acceptance_figures({}, read_draft_counts(both))["spec_decode_num_drafts"] == 50


@pytest.mark.parametrize("after", ["", BEFORE, "other:requests_total 3.0\n"])
def test_without_drafts_there_are_no_figures(after: str) -> None:
    assert acceptance_figures(read_draft_counts(BEFORE), read_draft_counts(after)) == {}


def test_the_table_has_the_lines_of_vllm() -> None:
    run = figures_of(Run([], duration_s=1.0), Wanted())
    figures = run | acceptance_figures(read_draft_counts(BEFORE), read_draft_counts(AFTER))
    lines = table(figures, pace_of(serve_options()), Wanted())
    start = lines.index("---------------Speculative Decoding---------------")
    assert [line.split() for line in lines[start + 1 : start + 9]] == [
        ["Acceptance", "rate", "(%):", "60.00"],
        ["Acceptance", "length:", "2.20"],
        ["Drafts:", "20"],
        ["Draft", "tokens:", "40"],
        ["Accepted", "tokens:", "24"],
        ["Per-position", "acceptance", "(%):"],
        ["Position", "0:", "80.00"],
        ["Position", "1:", "40.00"],
    ]
    assert not any("Speculative" in line for line in table(run, pace_of(serve_options()), Wanted()))


def test_bench_serve_shows_the_acceptance_of_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.dumps({"method": "mtp", "num_speculative_tokens": 2, "adaptive": False})
    with running_server(
        DEMO_DIRECTORY, tmp_path / "log", "--memory", "64MiB", "--speculative-config", config
    ) as server:
        command = ["bench", "serve", "--base-url", server.url, "--model", "tiny", "--tokenizer", "demo"]
        command += ["--num-prompts", "3", "--num-warmups", "1", "--random-input-len", "20", "--random-output-len", "12"]
        command += ["--ignore-eos", "--disable-tqdm", "--save-result", "--result-dir", str(tmp_path)]
        assert main([*command, "--result-filename", "r.json"]) == 0
        total = server.metric("spec_decode_num_drafts_total")
    figures = json.loads((tmp_path / "r.json").read_text())
    assert 0 < figures["spec_decode_num_drafts"] < total, "the warm-up is not part of the run"
    assert figures["spec_decode_acceptance_length"] >= 1
    assert len(figures["spec_decode_per_position_acceptance_rates"]) == 2
    assert f"Drafts:                                  {figures['spec_decode_num_drafts']}" in capsys.readouterr().out
