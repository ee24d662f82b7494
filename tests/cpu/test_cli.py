"""The command line as a user meets it."""

import io
import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from strandline.bench import exam
from strandline.cli import build_parser, main
from strandline.demo.tasks import KINDS, Task, make_task
from strandline.engine import loading
from tests.cpu.server.process import TIMEOUT_S

DOCS = str(Path(__file__).parents[2] / "docs")
TINY = str(Path(DOCS).parent / "benchmarks" / "configs" / "tiny-qwen3.5")
WITHOUT_LIBRARIES = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from strandline.cli import main
sys.exit(main(sys.argv[1:]))
"""

INTERRUPTED_IMPORT = """
import runpy, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "strandline.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
runpy.run_module("strandline", run_name="__main__")
"""


def test_ctrl_c_while_the_command_is_imported_leaves_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")


def test_generate_prints_the_completion_and_what_the_cache_saved(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--max-tokens", "4", "--temperature", "0", "2 + 2 ="]) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert "prompt tokens, 0 from the cache; first token after" in err


def test_chat_remembers_the_conversation_and_resumes_from_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello! My name is Ada.\nWhat is my name?\n"))
    assert main(["chat", "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "Your name is Ada."
    reports = [line for line in err.splitlines() if "prompt tokens" in line]
    assert ", 0 from the cache" in reports[0]
    assert ", 0 from the cache" not in reports[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--temperture", "0", "hi"], "unknown argument --temperture; did you mean --temperature?"),
        (["chat", "--max-num-seq=4"], "unknown argument --max-num-seq=4; did you mean --max-num-seqs?"),
        (["generate", "--dtype", "float8", "hi"], "invalid choice: 'float8'"),
        (["serve", "--dtype", "half"], "'float16'); use float16\n"),
        (["serve", "--kv-cache-dtype", "bfloat16"], "; use auto: keys and values have the dtype of activations"),
        (["serve", "--speculative-config.method", "ngram"], "as JSON: --speculative-config '{\"method\": ...}'\n"),
        (["serve", "--compilation-config.level=3"], "--compilation-config: not needed"),
        (["serve", "--max-num-seqs.n", "3"], "unknown argument --max-num-seqs.n; did you mean --max-num-seqs?\n"),
        (["serve", "--log-level", "WARN"], "; did you mean 'warning'?\n"),
        (["nothing"], "invalid choice: 'nothing'"),
        (
            ["serve", "--pipeline-parallel-size", "2"],
            "--pipeline-parallel-size: pipeline parallelism is not supported yet\n",
        ),
        (
            ["generate", "--data-parallel-size", "2", "hi"],
            "--data-parallel-size: only 'strandline serve' runs several engines\n",
        ),
        (["serve", "--quantization=fp8"], "--quantization: quantised weights are detected"),
        (["serve", "--max-cpu-loras", "2"], "--max-cpu-loras: not needed: "),
        (["serve", "--tp", "2"], "--tp: use --tensor-parallel-size or -tp\n"),
        (["serv", "demo"], "; did you mean 'serve'?\n"),
        (["serve", "--tool-call-parser", "qwen3_code"], "; did you mean 'qwen3_coder'?\n"),
        (["serve", "--model", "demo"], "--model: the model is an argument without a flag: strandline serve MODEL\n"),
        (["demo", "--kv-transfer-config", "{}"], "unknown argument --kv-transfer-config\n"),
        (["serve", "--enable-log-deltas"], "unknown argument --enable-log-deltas\n"),
        (["serve", "-pp=2"], "-pp: pipeline parallelism is not supported"),
        (["serve", "-O2"], "-O2: not needed: CUDA graphs are captured for the sizes of steps\n"),
        (["serve", "-O", "2"], "-O: not needed: CUDA graphs are captured for the sizes of steps\n"),
        (["serve", "--logging-config.log_level", "info"], "--logging-config: use --log-level and --log-format\n"),
        (["serve", "--spec-tokens", "3"], "--spec-tokens: use --speculative-config\n"),
        (["serve", "-dpl", "1"], "-dpl: a server runs on one machine"),
        (["serve", "-cc.mode=3"], "-cc: not needed: use --enforce-eager to disable CUDA graphs\n"),
        (["serve", "--tool-call-parser", "qwen25"], "; use hermes\n"),
        (["serve", "--device", "cuda:1"], "; use cuda, and set CUDA_VISIBLE_DEVICES\n"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_names_what_was_probably_meant(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert re.fullmatch(r"(strandline.*): error: .*\nsee \1 --help\n", said)


def test_commands_are_listed_if_none_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr().err
    assert all(f"\n    {command} " in said for command in ("serve", "chat", "explain"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--model", "nowhere", "hi"], "model 'nowhere' is neither 'demo', nor a directory"),
        (["generate", "--memory", "1KiB", "hi"], "--memory of 1,024 bytes holds no request"),
        (["generate", "--temperature", "nan", "hi"], "--temperature must be a number between 0 and 1000000, got nan"),
    ],
    ids=["model", "memory", "temperature"],
)
def test_a_wrong_configuration_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("strandline: error: ")
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "there is no prompt"),
        (["generate", "fine", ""], "there is no prompt"),
        (["generate", TINY], "is a directory with a model, not a prompt; name the model by --model"),
        (["generate", "--model", "nowhere", "hi"], "model 'nowhere' is neither"),
        (["generate", "--top-p", "3", "hi"], "--top-p must be a number between 0 and 1"),
        (["generate", "--stop", "", "hi"], "--stop must hold non-empty strings"),
        (["generate", "--n", "0", "hi"], "--n must be a whole number"),
        (["chat", "--memory", "lots"], "--memory must be a size"),
        (["chat", "--max-tokens", "-1"], "--max-tokens must be a whole number"),
        (["chat", "--mamba-block-size", "65"], "--mamba-block-size must be a multiple of 64"),
        (["chat", "--long-prefill-token-threshold", "63"], "-prefill-token-threshold must be 0 or"),
        (["chat", "--tokenizer", "nowhere"], "--tokenizer 'nowhere' is neither a directory nor a hub name"),
        (["eval", "--model", DOCS], "docs has no config.json"),
        (["serve", DOCS, "--port", "0"], "docs has no config.json"),
        (["eval", "--per-kind", "0"], "--per-kind must be at least 1"),
        (["eval", "--audit-rate", "2"], "--audit-rate must be from 0 to 1"),
        (["demo", "--model", "nowhere"], "model 'nowhere' is neither"),
        (["serve", "nowhere", "--port", "0"], "model 'nowhere' is neither"),
        (["serve", "--port", "80000"], "--port must be between"),
        (["serve", "--data-parallel-size", "0"], "--data-parallel-size must be a whole number of at least 1"),
        (["bench", "replay", "nothing"], "no workload or file named 'nothing'"),
        (["bench", "replay", "chat", "--policy", "best"], "no policy named 'best'"),
        (["bench", "replay", "chat", "--speed", "0"], "--speed must be above 0"),
        (["bench", "replay", "chat", "--session-gap", "-1"], "--session-gap must be at least 0"),
        (["bench", "replay", "chat", "--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
        (["bench", "serve", "--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["bench", "report", "missing.json", "-o", "x.html"], "missing.json"),
        (["explain"], "name one thing to explain"),
        (["explain", "--trace", "chat", "--max-sessions", "0"], "--max-sessions must be at least 1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_wrong_values_are_found_before_libraries_are_imported(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-c", WITHOUT_LIBRARIES, *arguments]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("strandline: error: ")
    assert message in done.stderr


def test_generate_reads_its_prompt_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("2 + 2 ="))
    assert main(["generate", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.strip()


def test_eval_shows_progress_and_says_the_dtype_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def short_suite(*_: object, **__: object) -> list[Task]:
        return [make_task(kind, Random(0), num_tokens=100) for kind in KINDS]

    choose = loading.choose_dtype

    def choose_with_note(*given: Any) -> Any:
        return replace(choose(*given), note="dtype: as it is")

    monkeypatch.setattr(exam, "make_suite", short_suite)
    monkeypatch.setattr(loading, "choose_dtype", choose_with_note)
    assert main(["eval", "--memory", "64MiB"]) == 0
    out, err = capfd.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["cache", "off", "on", "resumed"]
    for mode in exam.MODES:
        assert f"cache {mode}: 100%" in err
    assert [record.message for record in caplog.records if "dtype" in record.message] == ["dtype: as it is"]
    assert not logging.getLogger("strandline.engine").filters


@pytest.mark.parametrize("flag", ["--max-model-len", "--max-num-batched-tokens"])
@pytest.mark.parametrize(("text", "count"), [("4096", 4096), ("4K", 4096), ("25.6k", 25600), ("1m", 10**6)])
def test_numbers_of_tokens_end_in_units(flag: str, text: str, count: int) -> None:
    options = build_parser().parse_args(["generate", flag, text])
    assert getattr(options, flag[2:].replace("-", "_")) == count


@pytest.mark.parametrize("text", ["1e3", "4kB", "0.3", "1.0001k", "", "K", "\u0661K"])
def test_what_is_no_number_of_tokens_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["generate", "--max-model-len", text])
    assert "--max-model-len: must be a whole number of tokens, such as 32768, 32K or" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve", ""], ["generate", "--model", " ", "hi"]])
def test_blank_model_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    assert "the model's name is empty or blank" in capsys.readouterr().err


def test_engine_flags_are_vllms_names() -> None:
    flags = build_parser().parse_args(["generate", "hi"]).parser._option_string_actions
    expected = {
        *("--model", "--tokenizer", "--dtype", "--device", "--load-format", "--max-model-len", "--max-num-seqs"),
        *("--max-num-batched-tokens", "--memory", "--enable-prefix-caching", "--no-enable-prefix-caching", "--seed"),
    }
    assert expected <= set(flags)


def test_ctrl_c_before_a_command_runs_leaves_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("strandline.cli.build_parser", interrupt)
    assert main(["generate"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"
