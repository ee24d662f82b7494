"""An engine whose ranks are processes: the same tokens, and an end with a reason if a rank ends or hangs.

What layers compute on several ranks is tested in ``test_ranks.py``, without processes.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strandline import SamplingParams
from strandline.device.executor import Executor
from strandline.engine.engine import Engine
from strandline.engine.loading import load_executor
from strandline.engine.mp_executor import MpExecutor
from strandline.errors import EngineError, RequestError
from strandline.records.sampling_params import StructuredOutputsParams
from tests.cpu.engine.test_executors import chat_dir as chat_dir  # noqa: PLC0414 - a fixture
from tests.cpu.engine.test_executors import config_of, engine_around, is_running, serve

HANGS_AFTER_S = 5.0


@pytest.fixture(scope="module")
def ranks(chat_dir: Path) -> Iterator[MpExecutor]:
    """Two ranks, which one engine after the other uses."""
    meetings = set(Path(tempfile.gettempdir()).glob("strandline-ranks-*"))
    executor: Any = load_executor(config_of(chat_dir, tensor_parallel_size=2))
    process_ids = executor.process_ids
    assert len(process_ids) == 2
    yield executor
    executor.close()
    assert not any(map(is_running, process_ids))
    assert set(Path(tempfile.gettempdir()).glob("strandline-ranks-*")) <= meetings


def tokens_of(engine: Engine) -> dict[str, Any]:
    return {name: [list(output[0]) for output in answer[1:]] for name, answer in serve(engine).items()}


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["usual", "overlapped"])
def test_two_processes_give_the_tokens_of_one(ranks: MpExecutor, chat_dir: Path, options: dict[str, Any]) -> None:
    ranks.forget_requests()
    expected = tokens_of(engine_around(load_executor(config_of(chat_dir)), chat_dir, **options))
    assert tokens_of(engine_around(ranks, chat_dir, **options)) == expected


def test_ranks_share_what_one_engine_keeps(ranks: MpExecutor, chat_dir: Path) -> None:
    alone = load_executor(config_of(chat_dir)).facts
    state, own = (facts.spec.layers[0].states[0] for facts in (alone, ranks.facts))
    assert (own.shape[0] * 2, own.shape[1:]) == (state.shape[0], state.shape[1:])
    assert ranks.facts.num_slabs > alone.num_slabs
    assert ranks.facts.vocab_size == alone.vocab_size
    assert {"weights", "kernels", "memory"} <= ranks.facts.start_s.keys()


def test_grammars_are_compiled_on_all_ranks(ranks: MpExecutor) -> None:
    with pytest.raises(RequestError, match="regex"):
        ranks.compile_grammar(StructuredOutputsParams(regex="(["))
    assert ranks.compile_grammar(StructuredOutputsParams(regex="[ab]")) is not None


def run_to_the_end(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()


def break_rank_1(executor: Executor, chat_dir: Path, signal_number: int) -> str:
    """Send a signal to a rank between two steps; return how the engine ends."""
    assert isinstance(executor, MpExecutor)
    engine = engine_around(executor, chat_dir)
    engine.add_request("first", [1, 2, 3], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    engine.step()
    os.kill(executor.process_ids[1], signal_number)
    with pytest.raises(EngineError) as raised:
        run_to_the_end(engine)
    with pytest.raises(EngineError, match="rank 1 of 2"):
        executor.release_free_memory()
    executor.close()
    assert not any(map(is_running, executor.process_ids))
    return str(raised.value)


def test_a_rank_that_is_killed_ends_the_engine(chat_dir: Path) -> None:
    executor = load_executor(config_of(chat_dir, tensor_parallel_size=2, skip_tokenizer_init=True))
    assert "rank 1 of 2" in (text := break_rank_1(executor, chat_dir, signal.SIGKILL))
    assert "has ended by SIGKILL" in text


def test_a_rank_that_hangs_ends_the_engine(chat_dir: Path) -> None:
    config = config_of(chat_dir, tensor_parallel_size=2, skip_tokenizer_init=True)
    executor = MpExecutor(config, step_timeout_s=HANGS_AFTER_S)
    assert "rank 1 of 2" in (text := break_rank_1(executor, chat_dir, signal.SIGSTOP))
    assert "has not finished a step within 5 s" in text
