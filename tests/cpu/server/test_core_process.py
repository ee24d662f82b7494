"""The engine's process ends with its workers."""

import os
from collections.abc import Iterator

import pytest

from strandline.device.uni_executor import UniExecutor
from strandline.errors import EngineError
from strandline.text.structured import Grammars
from tests.cpu.engine.tokenizers import byte_tokenizer
from tests.cpu.server.conftest import VOCAB_SIZE
from tests.cpu.server.core_loop import MakeLoop


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Yield both ends of a pipe; the test closes the second."""
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


def test_an_idle_engine_ends_with_its_workers(
    pipe: tuple[int, int], make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, writer = pipe

    def fail(_: UniExecutor) -> None:
        raise EngineError("rank 1 of 2 has ended")

    monkeypatch.setattr(UniExecutor, "worker_fds", [fd])
    monkeypatch.setattr(UniExecutor, "check_workers", fail)
    loop = make_loop(Grammars(lambda: (byte_tokenizer(), frozenset({0})), VOCAB_SIZE))
    assert loop.num_waiting() == 0
    os.close(writer)
    assert str(loop.failure()) == "rank 1 of 2 has ended"
