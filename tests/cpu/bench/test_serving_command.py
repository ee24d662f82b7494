"""``strandline bench serve`` against a real server: exact lengths, honest warm-up, hits near the ideal, Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from strandline.cli import main
from tests.cpu.server.process import TIMEOUT_S, ServerProcess

TINY = ("--random-input-len", "100", "--random-output-len", "5", "--ignore-eos")


def bench(server: ServerProcess, folder: Path, *flags: str) -> dict[str, Any]:
    """Run a benchmark that has to succeed; return its file."""
    command = [
        "bench",
        "serve",
        "--base-url",
        server.url,
        "--model",
        "demo",
        "--disable-tqdm",
        "--cache-salt",
        "random",
    ]
    command += ["--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "r.json", *flags]
    assert main(command) == 0
    data: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return data


def test_lengths_are_exact_and_warm_up_caches_nothing_useful(demo_server: ServerProcess, tmp_path: Path) -> None:
    data = bench(demo_server, tmp_path, *TINY, "--num-prompts", "6", "--num-warmups", "2", "--max-concurrency", "3")
    assert (data["completed"], data["failed"]) == (6, 0)
    assert (data["input_lens"], data["output_lens"]) == ([100] * 6, [5] * 6)
    assert (data["total_cached_tokens"], data["max_concurrency"]) == (0, 3)
    assert all(len(gaps) <= 4 for gaps in data["itls"])
    assert 0 < data["mean_ttft_ms"] <= data["p99_ttft_ms"]


def test_repeated_prefixes_are_hit_up_to_the_ideal(demo_server: ServerProcess, tmp_path: Path) -> None:
    flags = ["--dataset-name", "prefix_repetition", "--num-prompts", "8", "--prefix-repetition-num-prefixes", "2"]
    flags += ["--prefix-repetition-prefix-len", "150", "--prefix-repetition-output-len", "2", "--max-concurrency", "1"]
    data = bench(demo_server, tmp_path, *flags)
    # The first two of each prefix compute: the second shows where they part. Two suffixes may begin alike by chance.
    assert 4 * 150 <= data["total_cached_tokens"] <= data["total_ideal_cached_tokens"] < 6 * 150 + 10


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_next_turn_hits_the_whole_previous_turn(demo_server: ServerProcess, tmp_path: Path, backend: str) -> None:
    flags = ["--dataset-name", "multi-turn", "--num-prompts", "4", "--multi-turn-num-turns", "4", "--backend", backend]
    lengths = ["--multi-turn-system-len", "60", "--multi-turn-user-len", "30", "--multi-turn-output-len", "12"]
    data = bench(demo_server, tmp_path, *flags, *lengths)
    assert data["input_lens"] == sorted(data["input_lens"])
    ideals, hits = data["ideal_lens"], data["cached_lens"]
    assert ideals[1:] > data["input_lens"][:-1], "a turn holds all of the one before it, and its answer"
    # The last generated token was never computed; a re-split answer may end the hit at the last prompt.
    assert all(hit >= before for before, hit in zip(data["input_lens"][:-1], hits[1:], strict=True))
    assert all(hit <= ideal for ideal, hit in zip(ideals, hits, strict=True))


def test_trace_replay_leaves_out_requests_that_do_not_fit(
    demo_server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [{"prompt": list(range(1, 50 + index)), "output": 2, "t": 0.0} for index in (0, 10)]
    rows.append({"prompt": list(range(9000)), "output": 1, "t": 0.0})
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    data = bench(
        demo_server, tmp_path, "--dataset-name", "trace", "--dataset-path", str(path), "--max-concurrency", "1"
    )
    assert data["input_lens"] == [49, 59]
    assert data["ideal_lens"] == [0, 49]
    assert "1 requests of the trace were left out" in capsys.readouterr().err


def test_refused_requests_are_counted_and_end_in_exit_code_1(
    demo_server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--base-url", demo_server.url, "--model", "demo", "--disable-tqdm", "--num-prompts", "2", *TINY]
    assert main(["bench", "serve", *flags, "--extra-body", '{"temperature": -1}']) == 1
    out, err = capsys.readouterr()
    assert "Failed requests:                         2" in out
    assert "HTTP 400" in err


def test_the_servers_first_model_is_taken_when_none_is_named(
    demo_server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--base-url", demo_server.url, "--tokenizer", "demo", "--disable-tqdm", "--num-prompts", "1", *TINY]
    assert main(["bench", "serve", *flags]) == 0
    assert "Successful requests:                     1" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--model", "--served-model-name"])
def test_a_model_that_is_not_served_is_refused(
    demo_server: ServerProcess, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--base-url", demo_server.url, "--tokenizer", "demo", flag, "someone/else", "--num-prompts", "1", *TINY]
    assert main(["bench", "serve", *flags]) == 2
    error = capsys.readouterr().err
    assert f"{demo_server.url} serves " in error
    assert "demo, not someone/else; name one of these" in error


def test_an_absent_server_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--port", "1", "--num-prompts", "1"]) == 2
    assert "is the server running?" in capsys.readouterr().err


def test_ctrl_c_prints_what_there_is(demo_server: ServerProcess) -> None:
    command = [sys.executable, "-m", "strandline", "bench", "serve", "--base-url", demo_server.url, "--model", "demo"]
    command += ["--num-prompts", "5000", "--max-concurrency", "2", "--random-input-len", "20", *TINY[2:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        shown = ""
        while not re.search(r" [1-9]\d*/5000 ", shown):
            piece = process.stderr.read(1)
            assert piece, shown
            shown += piece
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    completed = re.search(r"Successful requests: +(\d+)", out)
    assert completed
    assert 0 < int(completed[1]) < 5000
    interrupted = re.search(r"Interrupted requests: +(\d+)\n", out)
    # None where both had just ended.
    assert interrupted is None or interrupted[1] in ("1", "2")
