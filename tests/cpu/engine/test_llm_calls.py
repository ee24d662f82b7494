"""Calls of one ``LLM``: from several threads, inside each other, interrupted, and in another process."""

import copy
import gc
import multiprocessing
import pickle
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.engine.interrupts import uninterrupted
from strandline.engine.llm import _close
from strandline.errors import EngineError, RequestError
from tests.cpu.engine.conftest import MakeLLM

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[number, 5, 6] for number in range(1, 9)]


@pytest.fixture
def llm(make_llm: MakeLLM) -> LLM:
    return make_llm()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handler, which a test run in the background has not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def tokens(llm: LLM, prompt: list[int]) -> list[int]:
    [output] = llm.generate(prompt, PARAMS, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_threads_get_the_outputs_of_their_own_requests(llm: LLM) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: tokens(llm, prompt), PROMPTS))
    assert together == [tokens(llm, prompt) for prompt in PROMPTS]


def test_a_call_inside_a_stream_takes_no_output_of_it(llm: LLM) -> None:
    inner, outer = [], []
    for output in llm.stream(PROMPTS[0], PARAMS):
        outer = list(output.outputs[0].token_ids)
        inner.append(tokens(llm, PROMPTS[1]))
    assert outer == tokens(llm, PROMPTS[0])
    assert inner
    assert all(each == tokens(llm, PROMPTS[1]) for each in inner)


def test_streams_may_take_turns(llm: LLM) -> None:
    streams = {number: llm.stream(PROMPTS[number], PARAMS) for number in range(2)}
    found: dict[int, list[int]] = {}
    while streams:
        for number, stream in list(streams.items()):
            if (output := next(stream, None)) is None:
                del streams[number]
            else:
                found[number] = list(output.outputs[0].token_ids)
    assert found == {number: tokens(llm, PROMPTS[number]) for number in range(2)}


def test_a_stream_does_not_run_while_the_engine_sleeps(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], PARAMS)
    next(stream)
    llm.sleep()
    with pytest.raises(RequestError, match="asleep"):
        next(stream)
    llm.wake_up()
    assert len(tokens(llm, PROMPTS[0])) == 12


def test_a_closed_engine_ends_streams_with_an_error(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], PARAMS)
    next(stream)
    llm.close()
    with pytest.raises(EngineError, match="has been closed"):
        next(stream)


def test_a_stream_collected_during_a_step_ends_after_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, abort = llm.engine.step, llm.engine.abort
    done: list[str] = []

    def collecting() -> Any:
        gc.collect()
        found = step()
        done.append("step")
        return found

    def aborting(name: str) -> None:
        done.append("abort")
        abort(name)

    stream = llm.stream(PROMPTS[0], PARAMS)
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    monkeypatch.setattr(llm.engine, "step", collecting)
    monkeypatch.setattr(llm.engine, "abort", aborting)
    other = llm.stream(PROMPTS[1], PARAMS)
    del stream, cycle
    next(other)
    assert done == ["step", "abort"]
    assert len(llm.engine.frontend.requests) == 1


@pytest.mark.parametrize(
    "call",
    [lambda llm: tokens(llm, PROMPTS[0]), lambda llm: list(llm.stream(PROMPTS[0], PARAMS))],
    ids=["generate", "stream"],
)
def test_no_thread_extends_outputs_that_another_reads(llm: LLM, monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    step, lock = llm._shared.step, llm._shared._lock
    others = []

    def is_free() -> bool:
        if is_so := lock.acquire(blocking=False):
            lock.release()
        return is_so

    def noting(inbox: Any) -> Any:
        found = step(inbox)
        with ThreadPoolExecutor(1) as pool:
            others.append(pool.submit(is_free).result())
        return found

    monkeypatch.setattr(llm._shared, "step", noting)
    call(llm)
    assert others
    assert not any(others)


def test_ctrl_c_waits_for_the_end_of_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch, ctrl_c: None) -> None:
    step: Any = llm.engine.step
    done = []

    def interrupted() -> Any:
        signal.raise_signal(signal.SIGINT)
        found = step()
        done.append(True)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tokens(llm, PROMPTS[0])
    assert done == [True]
    assert len(tokens(llm, PROMPTS[0])) == 12


def test_a_second_ctrl_c_acts_at_once(ctrl_c: None) -> None:
    reached = []

    def interrupted_twice() -> None:
        with uninterrupted():
            for number in (1, 2):
                signal.raise_signal(signal.SIGINT)
                reached.append(number)

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _answer_of_child(llm: LLM, stream: Any, queue: Any) -> None:
    stream.close()  # as garbage collection does
    assert llm.engine.frontend.requests  # no device is here to end them
    try:
        tokens(llm, PROMPTS[0])
    except EngineError as error:
        queue.put(str(error))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_is_refused_with_the_reason(llm: LLM) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    stream = llm.stream(PROMPTS[1], PARAMS)
    next(stream)
    child = context.Process(target=_answer_of_child, args=(llm, stream, queue))
    child.start()
    assert "was forked: neither its threads nor the device are here; make an LLM in each process" in queue.get(
        timeout=60
    )
    child.join()
    assert tokens(llm, PROMPTS[0])
    assert list(stream)[-1].finished
    _close(llm.engine.core, process=child.pid or 0)  # what the end of such a process does
    assert tokens(llm, PROMPTS[0])


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_llm_is_not_pickled_or_copied(llm: LLM, take: Any) -> None:
    with pytest.raises(TypeError, match="make one in each process"):
        take(llm)
