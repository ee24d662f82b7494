"""Hand-over between engines on different numbers of ranks: the same tokens, on all ranks or on none, and no leaks.

Ranks are threads here, and processes in one test.
"""

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from strandline import SamplingParams
from strandline.config import EngineConfig
from strandline.device.stores.shared_copies import SharedCopies
from strandline.engine.core import EngineCore
from strandline.engine.loading import load_executor
from strandline.env import DEBUG_CACHE
from strandline.text.vocabulary import load_frontend, load_vocabulary
from tests.cpu.cache.driver import num_holds
from tests.cpu.engine.test_hand_over import NUM_TOKENS, Node, decode, hand_over_stats, prefill, prompt_of, run
from tests.cpu.engine.threaded_executor import ThreadedExecutor
from tests.cpu.models import families

pytestmark = pytest.mark.usefixtures("forked_workers")

FAMILIES = {
    "falcon_h1": [(2, 1)],
    "gemma3": [(1, 2), (2, 1)],
    "inkling": [(2, 4)],
    "kimi_linear": [(1, 2), (2, 1), (2, 2)],
    "nemotron_h": [(2, 4), (4, 1)],
    "qwen3_5": [(1, 2), (2, 1), (2, 2)],
}
"""Families, and the ranks of the engine that gives and of the one that fetches. Nemotron-H has fewer groups, and fewer
heads of keys and values, than four; Inkling has windows that are divided, and others that are not."""
CASES = [(family, *ranks) for family, cases in FAMILIES.items() for ranks in cases]
LENGTHS = (65, 300)
LONGEST = 400


class Engines:
    """Engines on any number of ranks. Executors are made once, and poison freed memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._executors: dict[tuple[str, int, str], Any] = {}
        self._answers: dict[tuple[str, int], list[int]] = {}
        self._nodes: list[Node] = []

    def config(self, family: str, **options: Any) -> EngineConfig:
        directory = self._directory / family
        if not directory.exists():
            families.save(family, self._directory)
        values = {"memory": "4MiB", "device": "cpu", "skip_tokenizer_init": True, "max_model_len": LONGEST, **options}
        return EngineConfig(model=str(directory), **values)

    def executor(self, family: str, num_ranks: int, side: str) -> Any:
        key = (family, num_ranks, side)
        if key not in self._executors:
            transfer = None if side == "alone" else {"kv_connector": "SocketConnector", "kv_role": "kv_both"}
            config = self.config(family, tensor_parallel_size=num_ranks, kv_transfer_config=transfer)
            self._executors[key] = load_executor(config) if num_ranks == 1 else ThreadedExecutor(config)
        self._executors[key].forget_requests()
        return self._executors[key]

    def node(self, family: str, num_ranks: int, side: str, **options: Any) -> Node:
        return self.around(self.executor(family, num_ranks, side), family, **options)

    def around(self, executor: Any, family: str, **options: Any) -> Node:
        directory = Path(self.config(family).model)
        self._nodes.append(Node(executor, directory, max_model_len=LONGEST, **options))
        return self._nodes[-1]

    def alone(self, family: str, prompt: list[int]) -> list[int]:
        """Return what one rank generates without a cache."""
        key = (family, len(prompt))
        if key not in self._answers:
            config = self.config(family, enable_prefix_caching=False)
            core = EngineCore(self.executor(family, 1, "alone"), config)
            frontend = load_frontend(config, core.limits, load_vocabulary(config))
            params = frontend.check_params(SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
            for submission in frontend.open("alone", frontend.check(prompt, params)):
                core.add(submission)
            self._answers[key] = []
            while core.has_unfinished:
                self._answers[key] += [event.token_id for event in core.step().tokens]
        return self._answers[key]

    def end_nodes(self) -> None:
        for node in self._nodes:
            assert node.core.hand_over is not None
            node.core.hand_over.close()
        self._nodes.clear()

    def close(self) -> None:
        for executor in self._executors.values():
            executor.close()


@pytest.fixture(scope="module")
def all_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines, num_threads = Engines(tmp_path_factory.mktemp("ranks")), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DEBUG_CACHE, "1")
        yield engines
    engines.close()
    torch.set_num_threads(num_threads)


@pytest.fixture
def engines(all_engines: Engines) -> Iterator[Engines]:
    yield all_engines
    all_engines.end_nodes()


@pytest.mark.parametrize(("family", "giving", "fetching"), CASES)
def test_a_prompt_is_continued_on_another_number_of_ranks(
    engines: Engines, family: str, giving: int, fetching: int
) -> None:
    expected = {length: engines.alone(family, prompt_of(length)) for length in LENGTHS}
    producer, consumer = engines.node(family, giving, "p"), engines.node(family, fetching, "d")
    for length in LENGTHS:
        prompt = prompt_of(length)
        consumer.answers.clear()
        answer = decode(producer, consumer, prompt, prefill(producer, prompt))
        num_computed = int(not producer.core.spec.has_states)
        assert (answer.tokens, answer.hit) == (expected[length], length - num_computed)
    check_travelled(producer, consumer, num_pulls=len(LENGTHS))


def check_travelled(producer: Node, consumer: Node, num_pulls: int) -> None:
    """Check that something was pulled as the whole model has it, and that neither side keeps it."""
    for node in (producer, consumer):
        node.check_nothing_leaks()
    whole = consumer.core.spec.whole
    assert producer.core.spec.whole == whole
    fetched, loads = hand_over_stats(consumer), consumer.cache.stats().loads
    assert fetched.pulls == {"done": num_pulls}
    assert loads.num_snapshots > 0
    window_bytes = sum(size.block_bytes * sum(map(size.num_blocks_before, LENGTHS)) for size in whole.window_sizes)
    assert (
        hand_over_stats(producer).given_bytes
        == fetched.fetched_bytes
        == loads.num_blocks * whole.raw_block_bytes
        + loads.num_snapshots * whole.raw_slot_bytes * whole.has_states
        + window_bytes
    )


def test_processes_hand_over_in_both_directions(engines: Engines) -> None:
    family, prompts = "qwen3_5", [prompt_of(300), prompt_of(200, seed=2)]
    expected = [engines.alone(family, prompt) for prompt in prompts]
    executor: Any = load_executor(engines.config(family, tensor_parallel_size=2))
    try:
        divided, whole = engines.around(executor, family), engines.node(family, 1, "d")
        for prompt, tokens, (giving, fetching) in zip(
            prompts, expected, ((divided, whole), (whole, divided)), strict=True
        ):
            answer = decode(giving, fetching, prompt, prefill(giving, prompt))
            assert (answer.tokens, answer.hit) == (tokens, len(prompt))
            check_travelled(giving, fetching, num_pulls=1)
    finally:
        executor.close()


@pytest.mark.parametrize("method", ["_read", "_write"])
def test_a_prompt_is_computed_where_a_rank_cannot_copy(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    prompt = prompt_of(300)
    expected = engines.alone("qwen3_5", prompt)
    producer, consumer = engines.node("qwen3_5", 2, "p"), engines.node("qwen3_5", 2, "d")
    copy = getattr(SharedCopies, method)

    def copy_or_fail(copies: SharedCopies, *arguments: Any) -> None:
        if copies is last_rank(producer, consumer, method):
            raise MemoryError("no memory for it")
        copy(copies, *arguments)

    monkeypatch.setattr(SharedCopies, method, copy_or_fail)
    answer = decode(producer, consumer, prompt, prefill(producer, prompt))
    assert (answer.tokens, answer.hit, answer.lost) == (expected, 0, 300)
    assert hand_over_stats(consumer).pulls == {"no_room": 1}
    for node in (producer, consumer):
        run([node], lambda node=node: node.core.hand_over.give_up() or not num_holds(node.cache))
        node.check_nothing_leaks()


def last_rank(producer: Node, consumer: Node, method: str) -> SharedCopies:
    """Return what copies on the last rank of the engine that reads, or writes."""
    executor: Any = (producer if method == "_read" else consumer).core.executor
    shared: SharedCopies = executor.ranks[-1]._shared
    return shared


def test_a_prompt_is_continued_once_all_ranks_have_it(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(300)
    expected = engines.alone("qwen3_5", prompt)
    producer, consumer = engines.node("qwen3_5", 1, "p"), engines.node("qwen3_5", 2, "d")
    write, num_written, may_end = SharedCopies._write, [0], Event()

    def write_later(copies: SharedCopies, *arguments: Any) -> None:
        if copies is last_rank(producer, consumer, "_write"):
            may_end.wait()
        write(copies, *arguments)
        num_written[0] += 1

    monkeypatch.setattr(SharedCopies, "_write", write_later)
    params = prefill(producer, prompt)
    consumer.submit("decode", prompt, params)
    run([producer, consumer], lambda: num_written[0] > 0)
    assert len(consumer.core.loads) == 1
    assert consumer.cache.stats().loads.num_done == 0
    may_end.set()
    run([producer, consumer])
    answer = consumer.answers["decode"]
    assert (answer.tokens, answer.hit) == (expected, 300)


def test_an_aborted_pull_leaves_nothing_on_any_rank(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = engines.node("qwen3_5", 1, "p"), engines.node("qwen3_5", 2, "d")
    prompt, write, has_begun, may_end = prompt_of(300), SharedCopies._write, Event(), Event()

    def write_later(copies: SharedCopies, *arguments: Any) -> None:
        has_begun.set()
        may_end.wait()
        write(copies, *arguments)

    monkeypatch.setattr(SharedCopies, "_write", write_later)
    consumer.submit("decode", prompt, prefill(producer, prompt))
    run([producer, consumer], has_begun.is_set)
    [name] = consumer.answers
    consumer.core.finish(name)  # type: ignore[arg-type]
    may_end.set()
    run([producer, consumer])
    assert consumer.answers[name].tokens == []
    consumer.check_nothing_leaks()


def test_deterministic_engines_need_as_many_ranks(engines: Engines) -> None:
    prompt = prompt_of(300)
    expected = engines.alone("qwen3_5", prompt)
    options = {"deterministic": True}
    producer, consumer = (engines.node("qwen3_5", ranks, "p", **options) for ranks in (1, 2))
    answer = decode(producer, consumer, prompt, prefill(producer, prompt))
    assert (answer.tokens, answer.hit) == (expected, 0)
    assert hand_over_stats(consumer).pulls == {"refused": 1}
