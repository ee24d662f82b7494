"""What every executor does alike: the same answers, the same errors, and an orderly end.

Engines are built around shared executors, one after the other: a worker process takes seconds to start.
"""

import gc
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strandline import SamplingParams, StructuredOutputsParams
from strandline.config import EngineConfig
from strandline.device.executor import Executor, LaunchedStep
from strandline.device.hardware.threads import NUM_THREADS
from strandline.device.ranks.rendezvous import Rendezvous
from strandline.engine.core import EngineCore
from strandline.engine.engine import Engine
from strandline.engine.loading import load_executor, load_uni_executor
from strandline.engine.mp_executor import MpExecutor
from strandline.engine.processes.worker import LEAVE_S
from strandline.engine.workers.worker_link import Call, Start, WorkerLink
from strandline.env import DEBUG_CACHE
from strandline.errors import CacheInvariantError, ConfigError, EngineError, RequestError
from strandline.ids import BlockId
from strandline.records.actions import CopyTokens
from strandline.records.plan import StepPlan
from strandline.text.vocabulary import load_frontend, load_vocabulary
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.engine.tokenizers import CALLS_IN_JSON, CHAT_VOCAB_SIZE, chat_template, chat_tokenizer

EXIT_TIMEOUT_S = 60.0
FEW_SLABS = 14

MakeExecutor = Callable[..., Executor]
Answers = dict[str, list[Any]]


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def chat_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny_model(tmp_path_factory.mktemp("chat"), vocab_size=CHAT_VOCAB_SIZE)
    chat_tokenizer(chat_template(CALLS_IN_JSON, thinks=False)).save_pretrained(directory)
    return directory


def config_of(directory: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        **{"model": str(directory), "memory": "16MiB", "device": "cpu", "max_model_len": 512, **options}
    )


@pytest.fixture(scope="module")
def executor_of(chat_dir: Path) -> Iterator[MakeExecutor]:
    """Return an executor by backend and mode; every one is started once, and poisons freed memory.

    Workers end when nothing refers to their executors any more.
    """
    made: dict[tuple[str, bool], Executor] = {}
    threads = torch.get_num_threads()

    def get(backend: str, *, deterministic: bool = False) -> Executor:
        if (backend, deterministic) not in made:
            config = config_of(chat_dir, deterministic=deterministic, distributed_executor_backend=backend)
            made[backend, deterministic] = load_executor(config)
        made[backend, deterministic].forget_requests()
        return made[backend, deterministic]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DEBUG_CACHE, "1")
        # The number of threads changes a sum's last bits: workers take as many as this process.
        patch.setenv(NUM_THREADS, str(threads))
        yield get
        workers = [pid for x in made.values() if isinstance(x, MpExecutor) for pid in x.process_ids]
        made.clear()
        gc.collect()
        assert not any(map(is_running, workers))
    torch.set_num_threads(threads)


def engine_around(executor: Executor, directory: Path, **options: Any) -> Engine:
    config = config_of(directory, **options)
    core = EngineCore(executor, config)
    return Engine(core, load_frontend(config, core.limits, load_vocabulary(config)))


def requests() -> dict[str, tuple[list[int], SamplingParams]]:
    """Return requests that share beginnings, of every kind."""
    rng = random.Random(7)
    base = rng.choices(range(97), k=200)
    plain: dict[str, Any] = {"max_tokens": 14, "ignore_eos": True}
    chosen = StructuredOutputsParams(regex="[a-z]{3,9}")
    kinds: dict[str, SamplingParams] = {
        "greedy": SamplingParams(temperature=0, **plain),
        "seeded": SamplingParams(seed=3, top_p=0.9, top_k=30, **plain),
        "several": SamplingParams(seed=4, n=3, **plain),
        "penalised": SamplingParams(seed=5, presence_penalty=0.5, repetition_penalty=1.1, **plain),
        "logprobs": SamplingParams(temperature=0, logprobs=3, **plain),
        "given logprobs": SamplingParams(seed=9, logprob_token_ids=[96, 3, 50], **plain),
        "prompt logprobs": SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=3),
        "allowed": SamplingParams(seed=7, allowed_token_ids=[3, 40, 41, 90], **plain),
        "structured": SamplingParams(seed=6, structured_outputs=chosen, max_tokens=14),
        "stopped": SamplingParams(temperature=0, max_tokens=40, stop_token_ids=list(range(0, 97, 6))),
        "aborted": SamplingParams(temperature=0, max_tokens=200, ignore_eos=True),
    }
    found = {}
    for index, (name, params) in enumerate(kinds.items()):
        found[name] = (base[: 30 * index + 5] + rng.choices(range(97), k=index), params)
        found[f"{name} again"] = (base[: 30 * index + 5] + rng.choices(range(97), k=2), params)
    return found


def growing_requests() -> dict[str, tuple[list[int], SamplingParams]]:
    """Return requests that need more blocks than they begin with."""
    rng = random.Random(8)
    sampled = [SamplingParams(temperature=index % 2, seed=index, max_tokens=70, ignore_eos=True) for index in range(12)]
    return {str(index): (rng.choices(range(97), k=20 + 3 * index), params) for index, params in enumerate(sampled)}


def serve(engine: Engine, requests: Callable[[], dict[str, tuple[list[int], SamplingParams]]] = requests) -> Answers:
    """Run the requests, which come in while others run; return what came of each that was not aborted."""
    answers: Answers = {}

    def step() -> None:
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = [
                    output.prompt_logprobs,
                    *((list(o.token_ids), o.finish_reason, o.logprobs) for o in output.outputs),
                ]

    for name, (prompt, params) in requests().items():
        engine.add_request(name, prompt, params)
        step()
    for name in ("aborted", "aborted again"):
        engine.abort(name)
    while engine.core.has_unfinished or engine.has_unfinished:
        step()
    assert answers.keys() == {name for name in requests() if not name.startswith("aborted")}
    return answers


PROGRAMS: dict[str, dict[str, Any]] = {
    "usual": {},
    "overlapped": {"async_scheduling": True},
    "small steps": {"max_num_batched_tokens": 32},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=pytest.mark.long if name == "small steps" else []) for name in PROGRAMS]
)
def test_worker_gives_the_same_answers(executor_of: MakeExecutor, chat_dir: Path, program: str) -> None:
    options = PROGRAMS[program]
    deterministic = options.get("deterministic", False)
    expected, found = (
        serve(engine_around(executor_of(backend, deterministic=deterministic), chat_dir, **options))
        for backend in ("uni", "mp")
    )
    assert found == expected


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_worker_gives_the_same_answers_after_preemptions(
    executor_of: MakeExecutor, chat_dir: Path, is_overlapped: bool
) -> None:
    def run(backend: str) -> tuple[Answers, int]:
        executor = executor_of(backend)
        few: Any = _WithFewSlabs(executor)
        engine = engine_around(few, chat_dir, async_scheduling=is_overlapped)
        return serve(engine, growing_requests), engine.scheduler.num_preemptions

    expected, num_preemptions = run("uni")
    assert num_preemptions > 0
    assert run("mp") == (expected, num_preemptions)


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_plans_keep_their_content_and_run_from_their_bytes(
    executor_of: MakeExecutor, chat_dir: Path, is_overlapped: bool
) -> None:
    executor = _FromBytes(executor_of("uni"))
    pickled: Any = _WithFewSlabs(executor)
    plain: Any = _WithFewSlabs(executor_of("uni"))
    options = {"async_scheduling": is_overlapped, "mamba_cache_mode": "all", "mamba_block_size": 64}
    found = serve(engine_around(pickled, chat_dir, **options), growing_requests)
    assert executor.launched
    assert all(plan == pickle.loads(data) for plan, data in executor.launched)
    executor_of("uni")
    assert found == serve(engine_around(plain, chat_dir, **options), growing_requests)


class _FromBytes:
    """Runs every step from a copy of its plan."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.launched: list[tuple[StepPlan, bytes]] = []

    def launch(self, plan: StepPlan) -> LaunchedStep:
        data = pickle.dumps(plan)
        self.launched.append((plan, data))
        return self._executor.launch(pickle.loads(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


class _WithFewSlabs:
    """An executor that says it has less memory than it has."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.facts = replace(executor.facts, num_slabs=FEW_SLABS, max_model_len=256)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def test_worker_audits_the_same_requests(executor_of: MakeExecutor, chat_dir: Path) -> None:
    def run(backend: str) -> tuple[Answers, Any]:
        engine = engine_around(executor_of(backend), chat_dir, audit_rate=1.0)
        return serve(engine), engine.core.audits

    expected, audits = run("uni")
    assert audits.num_requests > 0
    assert run("mp") == (expected, audits)


def test_facts_are_the_same_but_for_times(executor_of: MakeExecutor) -> None:
    uni, mp = (replace(executor_of(backend).facts, start_s={}) for backend in ("uni", "mp"))
    assert uni == mp


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_error_of_an_action_keeps_its_type(executor_of: MakeExecutor, backend: str) -> None:
    with pytest.raises(CacheInvariantError, match="asked to copy 5 tokens of block 0"):
        executor_of(backend).carry_out([CopyTokens(BlockId(0), BlockId(1), 5)])


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_wrong_grammar_is_a_request_error(executor_of: MakeExecutor, backend: str) -> None:
    executor = executor_of(backend)
    with pytest.raises(RequestError, match="regex"):
        executor.compile_grammar(StructuredOutputsParams(regex="(["))
    assert executor.compile_grammar(StructuredOutputsParams(regex="[ab]")) is not None


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_configuration_that_cannot_run_is_refused(chat_dir: Path, backend: str) -> None:
    config = config_of(chat_dir, memory=1, distributed_executor_backend=backend, skip_tokenizer_init=True)
    with pytest.raises(ConfigError):
        EngineCore(load_executor(config), config)


def test_calls_fail_when_the_worker_has_ended() -> None:
    link = WorkerLink()
    link.process.kill()
    for _ in range(2):
        with pytest.raises(EngineError, match=r"worker process \d+ has ended"):
            link.send(0, pickle.dumps(Call(0, "release_free_memory", (), ()))).result(EXIT_TIMEOUT_S)
    link.close()
    link.close()
    assert not is_running(link.process.pid)


def test_worker_that_is_loading_ends_at_once_and_cleans_up(chat_dir: Path, tmp_path: Path) -> None:
    """It waits for another rank, which never comes."""
    meeting, link = tmp_path / "ranks" / "meeting", WorkerLink()
    meeting.parent.mkdir()
    start = Start(0, config_of(chat_dir, tensor_parallel_size=2), False, Rendezvous(0, 2, str(meeting)))
    future = link.send(0, pickle.dumps(start))
    while not meeting.exists():
        time.sleep(0.02)
    link.hang_up()
    link.process.wait(LEAVE_S / 2)
    link.close()
    assert future.exception() is not None
    assert not meeting.parent.exists()


def test_workers_are_told_what_only_all_weights_say(
    chat_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest that a disk cache compares; a rank would have to read the other ranks' parts for it."""

    class NoWorkers:
        def __init__(self, _: int) -> None:
            self.close = self.kill = lambda: None

        def start(self, _: EngineConfig, weights: str, *, progress: bool) -> None:
            raise ConfigError(f"not started, with {weights}")

    options: dict[str, Any] = {"disk_cache": str(tmp_path / "cache"), "disk_cache_size": "1MiB"}
    config = config_of(chat_dir, tensor_parallel_size=2, **options)
    monkeypatch.setattr("strandline.engine.startup.model_identity.fingerprint", lambda _: "a digest")
    monkeypatch.setattr("strandline.engine.workers.workers.Workers", NoWorkers)
    with pytest.raises(ConfigError, match="not started, with a digest"):
        load_executor(config)
    monkeypatch.setattr("strandline.engine.startup.model_identity.fingerprint", lambda _: pytest.fail("all are read"))
    load_uni_executor(config_of(chat_dir, skip_tokenizer_init=True, **options), weights="a digest").close()


ENDS_AT_ONCE = """
import os
import pickle
from strandline.engine.workers.worker_link import WorkerLink
print(WorkerLink().process.pid, flush=True)
os._exit(0)
"""


def test_worker_ends_with_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], stdout=subprocess.PIPE, check=True)
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while is_running(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(done.stdout))
