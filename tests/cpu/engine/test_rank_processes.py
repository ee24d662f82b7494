"""An engine whose ranks are processes: the same tokens, and an end with a reason if a rank ends or hangs.

What layers compute on several ranks is tested in ``test_ranks.py``, without processes.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.engine.engine import Engine
from strandline.engine.loading import load_executor
from strandline.engine.mp_executor import STEP_TIMEOUT_S, MpExecutor
from strandline.engine.workers import worker_link, workers
from strandline.engine.workers.worker_link import WorkerLink
from strandline.errors import EngineError, RequestError
from strandline.events.resumable import PromptHashes
from strandline.events.subscriber import Subscriber
from strandline.ids import BlockId
from strandline.records.account import Reason
from strandline.records.actions import CopyTokens
from strandline.records.outputs import RequestOutput
from strandline.records.plan import StepPlan
from strandline.records.sampling_params import StructuredOutputsParams
from tests.cpu.engine import starved_worker
from tests.cpu.engine.test_exactness import answers, tokens
from tests.cpu.engine.test_executors import EXIT_TIMEOUT_S, config_of, engine_around, is_running, serve
from tests.cpu.engine.test_executors import chat_dir as chat_dir  # noqa: PLC0414 - a fixture
from tests.cpu.engine.test_host_memory import LENGTHS, PROMPTS, stats, tier_stats
from tests.cpu.engine.test_rank_tiers import loads_pay as loads_pay  # noqa: PLC0414 - a fixture
from tests.cpu.engine.test_rank_tiers import serve as serve_in_turn
from tests.cpu.engine.test_ranks import making

pytestmark = pytest.mark.usefixtures("forked_workers")

HANGS_AFTER_S = 0.5


class Pair:
    """Two ranks, which one engine after the other uses; new ones are started when they are taken away."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._executor: MpExecutor | None = None

    def use(self) -> MpExecutor:
        if self._executor is None:
            executor: Any = load_executor(config_of(self._model_dir, tensor_parallel_size=2))
            self._executor = executor
        self._executor.forget_requests()
        return self._executor

    def take(self) -> MpExecutor:
        """Return the ranks, which nothing else will use."""
        executor, self._executor = self.use(), None
        return executor

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()


@pytest.fixture(scope="module")
def pair(chat_dir: Path) -> Iterator[Pair]:
    pair = Pair(chat_dir)
    yield pair
    pair.close()


def tokens_of(engine: Engine) -> dict[str, Any]:
    return {name: [list(output[0]) for output in answer[1:]] for name, answer in serve(engine).items()}


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["usual", "overlapped"])
def test_two_processes_give_the_tokens_of_one(pair: Pair, chat_dir: Path, options: dict[str, Any]) -> None:
    expected = tokens_of(engine_around(load_executor(config_of(chat_dir)), chat_dir, **options))
    assert tokens_of(engine_around(pair.use(), chat_dir, **options)) == expected


def test_ranks_share_what_one_engine_keeps(pair: Pair, chat_dir: Path) -> None:
    alone, ranks = load_executor(config_of(chat_dir)), pair.use()
    state, own = (facts.spec.layers[0].states[0] for facts in (alone.facts, ranks.facts))
    assert (own.shape[0] * 2, own.shape[1:]) == (state.shape[0], state.shape[1:])
    assert ranks.facts.num_slabs > alone.facts.num_slabs
    assert ranks.facts.vocab_size == alone.facts.vocab_size
    assert {"weights", "kernels", "memory"} <= ranks.facts.start_s.keys()


def test_grammars_are_compiled_on_all_ranks(pair: Pair) -> None:
    ranks = pair.use()
    with pytest.raises(RequestError, match="regex"):
        ranks.compile_grammar(StructuredOutputsParams(regex="(["))
    assert ranks.compile_grammar(StructuredOutputsParams(regex="[ab]")) is not None


def run_to_the_end(engine: Engine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    return outputs


def break_rank_1(
    executor: MpExecutor, chat_dir: Path, signal_number: int, step_timeout_s: float = STEP_TIMEOUT_S
) -> str:
    """Send a signal to a rank between two steps; return how the engine ends."""
    engine = engine_around(executor, chat_dir, async_scheduling=False)
    directory = Path(str(executor._workers.directory))
    assert directory.exists()
    engine.add_request("first", [1, 2, 3], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    engine.step()
    executor._step_timeout_s = step_timeout_s  # not of a step that ends: a busy machine may take longer
    os.kill(executor.process_ids[1], signal_number)
    with pytest.raises(EngineError) as raised:
        run_to_the_end(engine)
    with pytest.raises(EngineError, match="rank 1 of 2"):
        executor.release_free_memory()
    executor.close()
    assert not any(map(is_running, executor.process_ids))
    assert not directory.exists()
    return str(raised.value)


def test_a_rank_that_is_killed_ends_the_engine(pair: Pair, chat_dir: Path) -> None:
    text = break_rank_1(pair.take(), chat_dir, signal.SIGKILL)
    assert "rank 1 of 2" in text
    assert "has ended by SIGKILL" in text


def test_a_rank_that_hangs_ends_the_engine(pair: Pair, chat_dir: Path) -> None:
    text = break_rank_1(pair.take(), chat_dir, signal.SIGSTOP, HANGS_AFTER_S)
    assert "rank 1 of 2" in text
    assert f"has not finished a step within {HANGS_AFTER_S:g} s" in text


def test_calls_between_steps_have_a_limit_too(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, limits_s = pair.use(), list[float]()
    monkeypatch.setattr(executor._workers, "results", lambda _, limit_s=0.0, what="": limits_s.append(limit_s) or [])
    executor.release_free_memory()
    executor.forget_requests()
    executor.carry_out([CopyTokens(BlockId(0), BlockId(1), 5)])
    assert limits_s == [STEP_TIMEOUT_S] * 3


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[WorkerLink]:
    """Collect the workers that are started; rank 1 runs out of memory, where ``STARVED_AT`` says."""
    links: list[WorkerLink] = []

    class NotedLink(WorkerLink):
        def __init__(self) -> None:
            super().__init__()
            links.append(self)

    monkeypatch.setattr(worker_link, "WORKER_MODULE", starved_worker.__name__)
    monkeypatch.setattr(workers, "WorkerLink", NotedLink)
    return links


def check_that_rank_1_was_starved(error: EngineError, started: list[WorkerLink]) -> None:
    assert "rank 1 of 2" in str(error)
    assert "memory" in str(error).partition("last words")[0]
    assert starved_worker.LAST_WORDS in str(error).partition("last words")[2]
    assert len(started) == 2
    assert not any(is_running(link.process.pid) for link in started)


def test_a_rank_without_memory_for_a_step_ends_the_engine(
    chat_dir: Path, started: list[WorkerLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(starved_worker.STARVED_AT, "step")
    executor: Any = load_executor(config_of(chat_dir, tensor_parallel_size=2, skip_tokenizer_init=True))
    engine, directory = engine_around(executor, chat_dir), Path(str(executor._workers.directory))
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.add_request("short", [1, 2, 3], greedy)
    run_to_the_end(engine)
    engine.add_request("long", list(range(starved_worker.FATAL_TOKENS)), greedy)
    with pytest.raises(EngineError) as raised:
        run_to_the_end(engine)
    executor.close()
    check_that_rank_1_was_starved(raised.value, started)
    assert not directory.exists()


def test_a_rank_without_memory_to_load_ends_the_start(
    chat_dir: Path, started: list[WorkerLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(starved_worker.STARVED_AT, "start")
    with pytest.raises(EngineError) as raised:
        load_executor(config_of(chat_dir, tensor_parallel_size=2, skip_tokenizer_init=True))
    check_that_rank_1_was_starved(raised.value, started)


def test_events_of_two_ranks_predict_their_hits(pair: Pair, chat_dir: Path, tmp_path: Path) -> None:
    endpoints = {"endpoint": f"ipc://{tmp_path}/live", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    engine = engine_around(
        pair.use(), chat_dir, kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq", **endpoints}
    )
    hits = {}
    with Subscriber(endpoints["endpoint"], endpoints["replay_endpoint"]) as subscriber:
        for turn in range(2):
            for index in range(4):
                prompt = tokens(40 + 30 * index, seed=index) + tokens(10 * turn, seed=turn)
                assert subscriber.catch_up()
                predicted = subscriber.index.hit_tokens(PromptHashes(prompt))
                engine.add_request(f"{turn} {index}", prompt, SamplingParams(temperature=0, max_tokens=4))
                last = run_to_the_end(engine)[-1]
                hits[last.request_id] = (last.num_cached_tokens, predicted)
    assert engine.core.event_feed is not None
    engine.core.event_feed.close()
    assert [hit for hit, _ in hits.values()] == [predicted for _, predicted in hits.values()]
    assert [hit for hit, _ in hits.values()] == [0] * 4 + [40, 70, 100, 130]


def test_ranks_that_missed_a_plan_end_the_engine(pair: Pair, chat_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strandline.engine.workers.workers.GRACE_S", 0.1)
    executor = pair.take()
    engine = engine_around(executor, chat_dir)
    engine.add_request("first", [1, 2, 3], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    engine.step()
    executor._packer.pack(StepPlan((), (), (), ()))
    # Both have missed it; named is the one whose error came first.
    with pytest.raises(EngineError, match=r"rank [01] of 2 .* has failed: a worker is out of step"):
        run_to_the_end(engine)
    executor.close()
    assert not any(map(is_running, executor.process_ids))


def files_of_ranks(directory: Path) -> list[list[Path]]:
    return [sorted(place.glob("*.snapshot")) for place in (directory, directory / "rank-1")]


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.usefixtures("loads_pay")
def test_processes_bring_back_what_left_their_devices(model_dir: Path, tmp_path: Path) -> None:
    """From files of an earlier engine and from host memory; where one rank's file is damaged, it is computed."""
    cache = tmp_path / "cache"
    with making(model_dir, 2, disk_cache=str(cache)) as make:
        expected = answers(make(divided=False, disk_cache=None, enable_prefix_caching=False), PROMPTS)
        with make() as threads:
            assert serve_in_turn(threads)[0] == expected
    options: dict[str, Any] = {"memory": "128KiB", "host_memory": "8MiB", "disk_cache": str(cache), "device": "cpu"}
    options |= {"skip_tokenizer_init": True, "max_model_len": 512, "tensor_parallel_size": 2}
    with LLM(str(model_dir), **options) as processes:
        assert serve_in_turn(processes, PROMPTS[:4]) == (expected[:4], list(LENGTHS[:4]))
        _, disk = tier_stats(processes)
        assert (disk.num_loads, disk.num_loaded_bytes > 0, disk.num_failed_loads) == (4, True, 0)
        before = files_of_ranks(cache)
        for path in before[1]:
            flip_last_bit(path)
        assert serve_in_turn(processes, PROMPTS[4:]) == (expected[4:], [0, 0, 0])
        assert stats(processes).missed_tokens[Reason.LOAD_FAILED] > 0
        assert tier_stats(processes)[1].num_failed_loads >= 3
        for path in filter(Path.exists, before[1]):
            flip_last_bit(path)
        assert serve_in_turn(processes) == (expected, list(LENGTHS))
        host, _ = tier_stats(processes)
        assert (host.num_loads > 0, host.num_loaded_bytes > 0, host.num_failed_loads) == (True, True, 0)
    for now, then in zip(files_of_ranks(cache), before, strict=True):
        assert set(now) - set(then), "an orderly end writes what memory alone had"


IS_KILLED = """
import os
import signal
import sys
from strandline.config import EngineConfig
from strandline.engine.loading import load_executor
options = {"device": "cpu", "memory": "8MiB", "skip_tokenizer_init": True, "tensor_parallel_size": 2}
executor = load_executor(EngineConfig(model=sys.argv[1], **options))
print(*executor.process_ids, executor._workers.directory, flush=True)
os.kill(executor.process_ids[1], signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGKILL)
"""


def wait_for_end(process_id: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while is_running(process_id) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(process_id)


def test_nothing_stays_behind_an_engine_that_is_killed(chat_dir: Path, tmp_path: Path) -> None:
    """Nor does the first rank remove the rendezvous that the second, which is late, may be about to open."""
    written = tmp_path / "written"
    with written.open("w") as file:
        subprocess.run([sys.executable, "-c", IS_KILLED, str(chat_dir)], stdout=file, check=False)
    first, second, directory = written.read_text().split()
    wait_for_end(int(first), EXIT_TIMEOUT_S)
    assert Path(directory).exists()
    os.kill(int(second), signal.SIGCONT)
    wait_for_end(int(second), EXIT_TIMEOUT_S)
    assert not Path(directory).exists()
