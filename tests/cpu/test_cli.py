"""The command line as a user meets it."""

import io

import pytest

from strandline.cli import build_parser, main


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
        (["nothing"], "invalid choice: 'nothing'"),
    ],
    ids=["generate", "chat", "choice", "command"],
)
def test_wrong_usage_names_what_was_probably_meant(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--model", "nowhere", "hi"], "model 'nowhere' is neither 'demo', nor a directory"),
        (["generate", "--memory", "1KiB", "hi"], "raise memory"),
        (["generate", "--temperature", "nan", "hi"], "temperature must be a number at least 0 and finite, got nan"),
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


def test_engine_flags_are_vllms_names() -> None:
    flags = build_parser().parse_args(["generate", "hi"]).parser._option_string_actions
    expected = {
        *("--model", "--tokenizer", "--dtype", "--device", "--load-format", "--max-model-len", "--max-num-seqs"),
        *("--max-num-batched-tokens", "--memory", "--enable-prefix-caching", "--no-enable-prefix-caching", "--seed"),
    }
    assert expected <= set(flags)
