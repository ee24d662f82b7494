"""Fixtures of the server's tests: a tiny model of bytes, servers of it, and the same model offline."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import zmq

from strandline import LLM
from strandline.config import EngineConfig
from strandline.engine.loading import load_core
from strandline.text.structured import Grammars
from strandline.text.vocabulary import Vocabulary
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.engine.tokenizers import (
    CALLS_IN_JSON,
    CALLS_IN_XML,
    CHAT_VOCAB_SIZE,
    TEMPLATE,
    byte_tokenizer,
    chat_template,
    chat_tokenizer,
)
from tests.cpu.server.core_loop import LoopInThread, MakeLoop
from tests.cpu.server.process import TIMEOUT_S, ServerProcess, execute_server, running_server

VOCAB_SIZE = 256


@pytest.fixture(scope="session")
def bytes_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose tokens are bytes."""
    directory = save_tiny_model(tmp_path_factory.mktemp("bytes"), vocab_size=VOCAB_SIZE)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def server(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with the usual limits, shared by all tests that do it no harm, started by the command that users run."""
    with running_server(bytes_dir, tmp_path_factory.mktemp("server") / "log", start=execute_server) as server:
        yield server


@pytest.fixture(scope="session")
def impatient_server(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that waits a second for clients that stop, and has no cache page."""
    log = tmp_path_factory.mktemp("impatient") / "log"
    with running_server(bytes_dir, log, "--client-timeout-s", "1", "--cache-page", "off") as server:
        yield server


@pytest.fixture(scope="session")
def offline_llm(bytes_dir: Path) -> LLM:
    """The same model, offline."""
    return LLM(str(bytes_dir), memory="16MiB", device="cpu")


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of the shared server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def save_chat_model(directory: Path, template: str) -> Path:
    """Write a tiny random model of bytes and the special tokens of conversations."""
    save_tiny_model(directory, vocab_size=CHAT_VOCAB_SIZE)
    chat_tokenizer(template).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def json_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a model that writes calls in JSON and opens its reasoning itself."""
    model = save_chat_model(tmp_path_factory.mktemp("json"), chat_template(CALLS_IN_JSON, thinks=False))
    with running_server(model, tmp_path_factory.mktemp("server") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def tag_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a model that writes calls in tags and whose prompts open its reasoning."""
    model = save_chat_model(tmp_path_factory.mktemp("tags"), chat_template(CALLS_IN_XML, thinks=True))
    with running_server(model, tmp_path_factory.mktemp("server") / "log") as server:
        yield server


@pytest.fixture
def make_loop(bytes_dir: Path) -> Iterator[MakeLoop]:
    """Run a core of the tiny model in a thread."""
    loops = []
    threads = torch.get_num_threads()
    config = EngineConfig(model=str(bytes_dir), memory="16MiB", device="cpu")
    with zmq.Context() as context:

        def make(grammars: Grammars, **options: Any) -> LoopInThread:
            vocabulary = Vocabulary(byte_tokenizer(), frozenset(), grammars)
            loops.append(LoopInThread(load_core(replace(config, **options), vocabulary), context))
            return loops[-1]

        yield make
        for loop in loops:
            loop.close()
    torch.set_num_threads(threads)
