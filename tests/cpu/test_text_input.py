"""Text from files, arguments and standard streams in any locale."""

import gzip
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from strandline.bench.serving.result import read_results
from strandline.bench.traces import read_trace
from strandline.cli import build_parser
from strandline.text_input import argument_text, json_lines, open_standard_streams, read_stdin, read_text

MARK = b"\xef\xbb\xbf"
PRINT_PROMPT = """
from strandline.text_input import argument_text, open_standard_streams
import sys
open_standard_streams()
print(ascii([argument_text(sys.argv[1]), sys.stdin.readline(), sys.stdin.read()]))
print(chr(0xE9) + chr(0x1F600))
"""


@pytest.mark.parametrize("beginning", [b"", MARK], ids=["plain", "mark"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["unix", "windows"])
def test_files_of_any_system_hold_the_same_text(tmp_path: Path, beginning: bytes, end: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(beginning + "é😀".encode() + end + b"b" + end)
    assert read_text(file) == "é😀\nb\n"


def test_json_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(MARK + '{"a": "\u2028\u0085\x7f"}\r\n\r\n{"a": 2}'.encode())
    assert list(json_lines(read_text(file).split("\n"))) == [{"a": "\u2028\u0085\x7f"}, {"a": 2}]


def test_appended_results_are_split_at_line_feeds_alone(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    row = '{"request_throughput": 1, "label": "\u2028"}'
    file.write_text(f"{row}\n{row}\n", encoding="utf-8")
    assert [result["label"] for result in read_results(str(file))] == ["\u2028"] * 2


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_traces_have_marks_and_windows_line_ends(tmp_path: Path, name: str) -> None:
    row = '{"timestamp": 0, "input_length": 4, "output_length": 2, "hash_ids": [1], "note": "\u2028"}'
    data = MARK + f"{row}\r\n\r\n{row}\r\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert len(read_trace(tmp_path / name)) == 2


SHOW_STREAMS = """
from strandline.text_input import open_standard_streams
import os, subprocess, sys
open_standard_streams()
assert sys.stdin.read() == "" and not sys.stdin.isatty()
print("written", chr(0xDC80), file=sys.stdout, flush=True)
print("written", chr(0xDC80), file=sys.stderr, flush=True)
names = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
shown = subprocess.run(["readlink", *(f"/proc/self/fd/{number}" for number in range(3))], stdout=subprocess.PIPE)
assert shown.stdout.decode().split()[::2] == names[::2], (shown, names)
sys.exit(8 + sum(2**number for number, name in enumerate(names) if name == os.devnull))
"""


@pytest.mark.parametrize(("closed", "code"), [("<&-", 9), (">&-", 10), ("2>&-", 12), ("<&- >&- 2>&-", 15)])
def test_closed_standard_streams_are_empty_and_stay_reserved(closed: str, code: int) -> None:
    given = "" if "<" in closed else "printf '' | "
    command = [*("sh", "-c"), f'{given}"$0" -c "$1" {closed}', sys.executable, SHOW_STREAMS]
    assert subprocess.run(command, capture_output=True, check=False).returncode == code


def test_generate_without_standard_input_has_no_prompt() -> None:
    command = ["sh", "-c", '"$0" -m strandline generate <&-', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("strandline: error: there is no prompt: pass one as an argument or on standard input\n")


@pytest.mark.parametrize(
    "locale",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C.UTF-8"},
    ],
    ids=["ascii", "ascii-streams", "utf-8"],
)
def test_prompts_are_utf_8_in_ascii_locales(locale: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRINT_PROMPT, "é😀".encode()],
        input=MARK + "ü\r\n\x00".encode(),
        capture_output=True,
        env={**os.environ, **locale},
        check=True,
    )
    given, printed = done.stdout.splitlines()
    assert given == ascii(["é😀", "ü\n", "\x00"]).encode()
    is_ascii = "PYTHONIOENCODING" in locale or "PYTHONUTF8" in locale
    assert printed == (b"\\xe9\\U0001f600" if is_ascii else "é😀".encode())


def test_bytes_that_are_no_text_are_refused_or_become_surrogates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xe9\ncaf\xe9"), "utf-8"))
    open_standard_streams()
    assert input() == "a\udce9"
    with pytest.raises(UnicodeDecodeError, match="byte 0xe9 in position 3"):
        read_stdin()
    assert argument_text("caf\udce9") == "caf\udce9"


def test_streams_of_which_a_part_was_read_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n"), "ascii"))
    assert input() == "a"
    open_standard_streams()
    assert input() == "b"


def test_texts_are_utf_8_and_names_of_files_stay() -> None:
    given = "caf\udcc3\udca9"  # what Python makes of UTF-8 in an ASCII locale
    options = build_parser().parse_args(["explain", "--prompt", given, "--prompt-file", given])
    assert (options.prompt, options.prompt_file) == ("café", given)
    options = build_parser().parse_args(["generate", given, "--stop", given, "--model", given])
    assert (options.prompts, options.stop, options.model) == (["café"], ["café"], given)
