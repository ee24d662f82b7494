"""The HTTP process computes nothing and loads no library that computes."""

import subprocess
import sys
from pathlib import Path

import pytest

from strandline.text.model_files import DEMO_DIRECTORY
from strandline.text.vocabulary import load_tokenizer
from tests.cpu.server.process import TIMEOUT_S, ServerProcess
from tests.cpu.test_rooms import FILES

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is 2 + 3?\n\tÜber 中文"}]
ROOMS = ("records", "text", "server")
MODULES = [name for name in FILES if name.split(".")[1:2] and name.split(".")[1] in ROOMS]
HEAVY = {"torch", "triton", "numba", "safetensors", "transformers"}

IMPORT_ROOMS = f"import sys, {', '.join(MODULES)}; print(*sys.modules)"
LIKE_THE_HTTP_PROCESS = f"""
import sys
from strandline.server import launch
launch._keep_torch_out()
from strandline.text.vocabulary import load_tokenizer
tokenizer = load_tokenizer({str(DEMO_DIRECTORY)!r})
text = tokenizer.apply_chat_template({MESSAGES!r}, tokenize=False, add_generation_prompt=True)
print([type(tokenizer).__name__, text, tokenizer.encode(text), sys.modules["torch"]])
"""


def output_of(program: str) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_records_text_and_server_loads_nothing_that_computes() -> None:
    loaded = set(output_of(IMPORT_ROOMS).split())
    assert "strandline.server.launch" in loaded
    assert loaded & HEAVY == set()
    rooms = {name.split(".")[1] for name in loaded if name.startswith("strandline.")}
    assert rooms & {"models", "kernels", "device", "engine", "bench"} == set()


def test_served_model_loads_torch_in_the_engine_process_alone(server: ServerProcess) -> None:
    pids = {"http": server.process.pid, "engine": server.core_pid()}
    maps = {name: Path(f"/proc/{pid}/maps").read_text() for name, pid in pids.items()}
    assert "libtorch" in maps["engine"]
    assert [name for name in ("libtorch", "numba", "triton", "llvmlite") if name in maps["http"]] == []
    assert "tokenizers" in maps["http"]


def test_tokenizer_and_template_are_the_same_without_torch() -> None:
    tokenizer = load_tokenizer(str(DEMO_DIRECTORY))
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    expected = [type(tokenizer).__name__, text, tokenizer.encode(text), None]
    assert output_of(LIKE_THE_HTTP_PROCESS).strip() == str(expected)


@pytest.mark.parametrize("wrong", [("--port", "70000"), ("--max-num-seqs", "0")])
def test_wrong_flag_is_found_before_anything_is_loaded(wrong: tuple[str, str]) -> None:
    program = f"""
import sys
from strandline.cli import main
assert main(["serve", *{wrong!r}]) == 2
print(*sys.modules)
"""
    assert set(output_of(program).split()) & {*HEAVY, "fastapi", "tokenizers", "zmq"} == set()


def test_unknown_model_is_found_before_its_tokenizer_is_loaded() -> None:
    program = """
import sys
from strandline.cli import main
assert main(["serve", "no-such-model", "--port", "0"]) == 2
print(*sys.modules)
"""
    assert set(output_of(program).split()) & {"transformers", "huggingface_hub"} == set()
