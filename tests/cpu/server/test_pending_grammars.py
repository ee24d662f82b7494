"""Slow grammars do not delay other requests."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from strandline.errors import RequestError
from strandline.ids import RequestId
from strandline.records.events import FinishReason, Limits
from strandline.records.messages import FROM_CORE, Finish, Stepped, UnloadAdapter
from strandline.records.sampling_params import SamplingParams, StructuredOutputsParams
from strandline.server.requests.service import Service
from strandline.text import structured
from strandline.text.frontend import Frontend
from strandline.text.structured import Grammars
from tests.cpu.engine.tokenizers import byte_tokenizer
from tests.cpu.models import adapters
from tests.cpu.server.conftest import VOCAB_SIZE
from tests.cpu.server.core_loop import TIMEOUT_S, MakeLoop

YES = StructuredOutputsParams(choice=["yes"])


class HeldTokenizer:
    """A source of a tokenizer that gives none until it is let."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.may_go = threading.Event()

    def __call__(self) -> tuple[Any, frozenset[int]]:
        self.is_asked.set()
        assert self.may_go.wait(TIMEOUT_S)
        return byte_tokenizer(), frozenset({0})


@pytest.fixture
def held() -> Iterator[HeldTokenizer]:
    source = HeldTokenizer()
    yield source
    source.may_go.set()


def test_grammar_without_vocabulary_does_not_delay_other_requests(held: HeldTokenizer, make_loop: MakeLoop) -> None:
    grammars = Grammars(held, VOCAB_SIZE)
    grammars.begin()
    loop = make_loop(grammars)
    loop.submit("bound", YES)
    for name in ("first", "second"):
        loop.submit(name)
        assert loop.finished() == name
    assert held.is_asked.is_set()
    assert loop.num_waiting() == 1
    held.may_go.set()
    assert loop.finished() == "bound"
    assert loop.num_waiting() == 0


def test_request_aborted_while_its_grammar_compiles_never_runs(held: HeldTokenizer, make_loop: MakeLoop) -> None:
    loop = make_loop(Grammars(held, VOCAB_SIZE))
    loop.submit("gone", YES)
    loop.submit("other", YES)
    assert loop.num_waiting() == 2
    loop.say(Finish([RequestId("gone")]))
    assert loop.num_waiting() == 1
    held.may_go.set()
    assert loop.finished() == "other"
    assert loop.num_waiting() == 0


def test_grammar_that_fails_in_engine_ends_its_request(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RequestError("too large here")

    monkeypatch.setattr(structured, "compile_source", refuse)
    loop = make_loop(Grammars(lambda: (byte_tokenizer(), frozenset({0})), VOCAB_SIZE))
    loop.submit("bound", YES)
    message = FROM_CORE.decode(loop.socket.recv())
    assert isinstance(message, Stepped)
    [event] = message.events.tokens
    assert (event.request_id, event.finish_reason) == ("bound", FinishReason.ERROR)
    loop.submit("other")
    assert loop.finished() == "other"


def test_loop_ends_while_a_grammar_compiles(held: HeldTokenizer, make_loop: MakeLoop) -> None:
    loop = make_loop(Grammars(held, VOCAB_SIZE))
    loop.submit("bound", YES)
    assert held.is_asked.wait(TIMEOUT_S)
    loop.end()
    assert not held.may_go.is_set()


def test_step_compiles_no_grammar(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    compile_source = structured.compile_source

    def watched(source: str, vocabulary: Any) -> Any:
        # What another test has left to compile is not counted.
        if "request " in source:
            threads.append(threading.current_thread().name)
        return compile_source(source, vocabulary)

    monkeypatch.setattr(structured, "compile_source", watched)
    monkeypatch.setattr(structured, "MAX_KEPT_BYTES", 0)
    loop = make_loop(Grammars(lambda: (byte_tokenizer(), frozenset({0})), VOCAB_SIZE))
    names = [f"request {index}" for index in range(6)]
    for name in names:
        loop.submit(name, StructuredOutputsParams(choice=[name]))
    loop.finish_all(names)
    assert len(threads) == len(names)
    assert all(name.startswith("grammars") for name in threads)


def test_adapter_of_a_request_without_its_grammar_stays_loaded(
    held: HeldTokenizer, bytes_dir: Path, tmp_path: Path, make_loop: MakeLoop
) -> None:
    tensors = load_file(bytes_dir / "model.safetensors")
    name = next(name for name in tensors if name.endswith("o_proj.weight"))
    path = adapters.write(
        tmp_path / "adapter", adapters.draw({name.removesuffix(".weight"): tuple(tensors[name].shape)})
    )
    grammars = Grammars(held, VOCAB_SIZE)
    grammars.begin()
    loop = make_loop(grammars, enable_lora=True, lora_modules=(f"a={path}",))
    (loaded,) = loop.core.limits.adapters
    loop.submit("bound", YES, adapter=loaded.digest)
    assert held.is_asked.wait(TIMEOUT_S)
    loop.say(UnloadAdapter(loaded.digest))
    assert loop.num_waiting() == 1
    held.may_go.set()
    message = FROM_CORE.decode(loop.socket.recv())
    assert isinstance(message, Stepped)
    assert [event.finish_reason for event in message.events.tokens] == [None]


def test_grammar_compilation_does_not_block_tokenization(held: HeldTokenizer) -> None:
    class Client:
        frontend = Frontend(Limits(VOCAB_SIZE, 100), tokenizer=byte_tokenizer(), grammars=Grammars(held, VOCAB_SIZE))

    service = Service(Client(), ["tiny"])  # type: ignore[arg-type]

    async def ask() -> list[int]:
        checking = asyncio.ensure_future(service.check(SamplingParams(structured_outputs=YES, stop_token_ids=[0])))
        prompt = await service.encode("abc")
        assert await asyncio.to_thread(held.is_asked.wait, TIMEOUT_S)
        assert not checking.done()
        held.may_go.set()
        await checking
        return prompt.token_ids

    assert asyncio.run(ask()) == byte_tokenizer().encode("abc")
