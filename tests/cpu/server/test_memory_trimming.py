"""An idle engine returns free memory once, after a delay."""

import threading

import pytest

from strandline.device import uni_executor
from strandline.engine.processes import core_loop
from strandline.text.structured import Grammars
from tests.cpu.engine.tokenizers import byte_tokenizer
from tests.cpu.server.conftest import VOCAB_SIZE
from tests.cpu.server.core_loop import TIMEOUT_S, MakeLoop


class Trims:
    """Counts how often memory was returned."""

    def __init__(self) -> None:
        self.count = 0
        self.is_new = threading.Event()

    def __call__(self) -> bool:
        self.count += 1
        self.is_new.set()
        return True


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> Trims:
    trims = Trims()
    monkeypatch.setattr(uni_executor, "release_free_memory", trims)
    return trims


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(lambda: (byte_tokenizer(), frozenset({0})), VOCAB_SIZE)


def test_memory_is_returned_once_after_the_last_request(
    trims: Trims, grammars: Grammars, make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_loop, "TRIM_AFTER_S", 0.05)
    loop = make_loop(grammars)
    for number in (1, 2):
        loop.submit(f"request {number}")
        assert loop.finished() == f"request {number}"
        assert trims.is_new.wait(TIMEOUT_S)
        trims.is_new.clear()
        for _ in range(3):
            assert loop.num_waiting() == 0
        assert not trims.is_new.wait(0.2)
        assert trims.count == number


def test_memory_is_kept_between_consecutive_requests(
    trims: Trims, grammars: Grammars, make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_loop, "TRIM_AFTER_S", TIMEOUT_S)
    loop = make_loop(grammars)
    for name in ("first", "second"):
        loop.submit(name)
        assert loop.finished() == name
        assert loop.num_waiting() == 0
    assert trims.count == 0
