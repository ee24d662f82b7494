"""Hand-over between two engines: the same tokens as alone, whatever happens to either side, and nothing leaks."""

import gc
import os
import random
import socket
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from threading import Event, Thread
from threading import enumerate as enumerate_threads
from time import monotonic
from typing import Any

import pytest
import torch

from strandline import LLM, SamplingParams
from strandline.cache.tiers import LoadCosts
from strandline.config import EngineConfig
from strandline.device.executor import Executor
from strandline.device.uni_executor import UniExecutor
from strandline.engine.core import EngineCore
from strandline.engine.loading import load_uni_executor
from strandline.engine.prefix_transfer.prefix_pulls import PrefixPulls
from strandline.env import DEBUG_CACHE
from strandline.errors import ConfigError
from strandline.ids import RequestId
from strandline.models.storage.weights_files import fingerprint
from strandline.records.account import Account, Reason
from strandline.records.events import HandOverStats
from strandline.records.pictures import PlacedPicture
from strandline.records.tokens import TokenBuffer
from strandline.records.transfer_params import TransferParams, read_transfer_params
from strandline.text.vocabulary import load_frontend, load_vocabulary
from strandline.transfer.connection import Connection
from strandline.transfer.layout import layout_of
from strandline.transfer.messages import Ask, Hello, Offer, Piece, Want
from tests.cpu.cache.driver import num_holds
from tests.cpu.engine.tiny import VOCAB_SIZE, save_tiny_model
from tests.cpu.transfer.killed_consumer import STAGES as CONSUMER_STAGES
from tests.cpu.transfer.killed_consumer import consumer_at

TIMEOUT_S = 120.0
NUM_TOKENS = 12
KEEP = TransferParams(is_remote_decode=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose slots take the room of several blocks."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), linear_key_head_dim=32, linear_value_head_dim=32)


def config_of(directory: Path, **options: Any) -> EngineConfig:
    options = {"memory": "4MiB", "device": "cpu", "skip_tokenizer_init": True, "max_model_len": 1100, **options}
    return EngineConfig(model=str(directory), **options)


MakeExecutor = Callable[[str, str], UniExecutor]


@pytest.fixture(scope="module")
def executor_of(model_dir: Path) -> Iterator[MakeExecutor]:
    """Return an executor by its engine's name and memory; every one is made once, and poisons freed memory."""
    made: dict[tuple[str, str], UniExecutor] = {}
    threads = torch.get_num_threads()

    def get(name: str, memory: str = "4MiB") -> UniExecutor:
        if (name, memory) not in made:
            max_model_len = 1100 if memory == "4MiB" else 400
            made[name, memory] = load_uni_executor(config_of(model_dir, memory=memory, max_model_len=max_model_len))
        made[name, memory].forget_requests()
        return made[name, memory]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DEBUG_CACHE, "1")
        yield get
    torch.set_num_threads(threads)


@dataclass
class Answer:
    """What came of one request."""

    tokens: list[int] = field(default_factory=list)
    account: Account | None = None
    params: dict[str, Any] | None = None
    is_finished: bool = False

    @property
    def hit(self) -> int:
        assert self.account is not None
        return self.account.hit

    @property
    def lost(self) -> int:
        """Tokens that a load should have brought."""
        assert self.account is not None
        return sum(miss.num_tokens for miss in self.account.misses if miss.reason is Reason.LOAD_FAILED)


class Node:
    """An engine that hands over; it goes on while ``run`` runs."""

    def __init__(
        self,
        executor: Executor,
        directory: Path,
        *,
        connector: str = "SocketConnector",
        extra: dict[str, Any] | None = None,
        engine: dict[str, Any] | None = None,
        **options: Any,
    ):
        transfer = {
            "kv_connector": connector,
            "kv_role": "kv_both",
            **(engine or {}),
            "kv_connector_extra_config": {"timeout_s": TIMEOUT_S, **(extra or {})},
        }
        config = config_of(directory, kv_transfer_config=transfer, **options)
        self.core = EngineCore(executor, config)
        self.cache = self.core.cache
        self._frontend = load_frontend(config, self.core.limits, load_vocabulary(config))
        self.answers: dict[str, Answer] = {}

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        transfer: TransferParams | None = None,
        pictures: Sequence[PlacedPicture] = (),
        **params: Any,
    ) -> None:
        values = {"temperature": 0, "max_tokens": 1 if transfer == KEEP else NUM_TOKENS, "ignore_eos": True, **params}
        request = self._frontend.check(prompt, self._frontend.check_params(SamplingParams(**values)), pictures)
        for submission in self._frontend.open(name, request, transfer=transfer):
            self.answers[submission.new.request_id] = Answer()
            self.core.add(submission)
        self._frontend.close(name)

    def go_on(self) -> None:
        """Do what there is to do, at most one step."""
        self.core.exchange()
        if not self.core.has_unfinished:
            return
        events = self.core.step()
        for name, params in events.handed_over:
            self.answers[name].params = params
        for event in events.tokens:
            answer = self.answers[event.request_id]
            answer.tokens.append(event.token_id)
            answer.account = event.account or answer.account
            answer.is_finished = event.finish_reason is not None

    @property
    def is_idle(self) -> bool:
        hand_over = self.core.hand_over
        assert hand_over is not None
        return not self.core.has_unfinished and hand_over.num_waiting == 0

    def check_nothing_leaks(self) -> None:
        """Check that requests and transfers keep nothing, once peers' connections have ended."""
        run([self], lambda: not num_holds(self.cache))
        assert not self.cache.holds_for_others
        memory = self.cache.memory_use()
        assert (memory.num_slots, memory.num_blocks) == (memory.num_evictable_slots, memory.num_evictable_blocks)


def run(nodes: list[Node], is_done: Callable[[], bool] | None = None) -> None:
    """Let engines go on until they are idle, or something is so."""
    deadline = monotonic() + TIMEOUT_S
    while not (is_done() if is_done is not None else all(node.is_idle for node in nodes)):
        assert monotonic() < deadline
        for node in nodes:
            node.go_on()


MakeNode = Callable[..., Node]


@pytest.fixture
def make_node(executor_of: MakeExecutor, model_dir: Path) -> Iterator[MakeNode]:
    nodes: list[Node] = []

    def make(name: str = "p", memory: str = "4MiB", **options: Any) -> Node:
        if memory != "4MiB":
            options["max_model_len"] = 400
        nodes.append(Node(executor_of(name, memory), model_dir, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        hand_over = node.core.hand_over
        assert hand_over is not None
        hand_over.close()


def prompt_of(num_tokens: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=num_tokens)


@pytest.fixture(scope="module")
def alone(executor_of: MakeExecutor, model_dir: Path) -> Callable[[list[int]], list[int]]:
    """Return what an engine without a cache generates."""
    known: dict[tuple[int, ...], list[int]] = {}

    def tokens(prompt: list[int]) -> list[int]:
        key = tuple(prompt)
        if key not in known:
            config = config_of(model_dir, enable_prefix_caching=False)
            core = EngineCore(executor_of("alone", "4MiB"), config)
            frontend = load_frontend(config, core.limits, load_vocabulary(config))
            params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
            for submission in frontend.open("alone", frontend.check(prompt, frontend.check_params(params))):
                core.add(submission)
            known[key] = []
            while core.has_unfinished:
                known[key] += [event.token_id for event in core.step().tokens]
        return known[key]

    return tokens


Alone = Callable[[list[int]], list[int]]


def prefill(node: Node, prompt: list[int]) -> TransferParams:
    """Compute a prompt that another engine is to continue; return what that one needs."""
    node.submit("prefill", prompt, KEEP)
    run([node])
    params = read_transfer_params(node.answers["prefill"].params)
    assert params is not None
    return params


def decode(producer: Node | None, consumer: Node, prompt: list[int], params: TransferParams, **more: Any) -> Answer:
    """Continue a prompt on another engine."""
    consumer.submit("decode", prompt, params, **more)
    run([node for node in (producer, consumer) if node is not None], lambda: consumer.is_idle)
    return consumer.answers["decode"]


MODES: dict[str, dict[str, Any]] = {
    "usual": {},
    "overlapped": {"async_scheduling": True},
    "small steps": {"max_num_batched_tokens": 70},
    "NIXL": {"connector": "NixlConnector"},
}
LENGTHS = {"usual": (1, 64, 65, 1000), "overlapped": (63, 300), "small steps": (300,), "NIXL": (1, 65, 1000)}
needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="needs strandline[nixl]")


@pytest.mark.parametrize(
    ("mode", "num_tokens"),
    [
        pytest.param(mode, length, marks=[needs_nixl] if mode == "NIXL" else [])
        for mode in MODES
        for length in LENGTHS[mode]
    ],
)
def test_a_prompt_is_continued_without_computing_any_token(
    make_node: MakeNode, alone: Alone, mode: str, num_tokens: int
) -> None:
    producer, consumer = make_node("p", **MODES[mode]), make_node("d", **MODES[mode])
    prompt = prompt_of(num_tokens)
    params = prefill(producer, prompt)
    assert params.num_tokens == num_tokens
    answer = decode(producer, consumer, prompt, params)
    assert (answer.tokens, answer.hit) == (alone(prompt), num_tokens)
    assert consumer.cache.stats().loads.num_done == 1
    for node in (producer, consumer):
        node.check_nothing_leaks()


def test_deterministic_engines_hand_over_what_lies_on_the_grid(executor_of: MakeExecutor, model_dir: Path) -> None:
    options = {"deterministic": True}
    executors = [load_uni_executor(config_of(model_dir, **options)) for _ in range(2)]
    producer, consumer = (Node(executor, model_dir, **options) for executor in executors)
    prompt = prompt_of(200)
    params = prefill(producer, prompt)
    answer = decode(producer, consumer, prompt, params)
    assert (params.num_tokens, answer.hit) == (192, 192)
    producer.submit("same", prompt)
    run([producer])
    assert producer.answers["same"].tokens == answer.tokens
    for node in (producer, consumer):
        node.check_nothing_leaks()
        node.core.close()


def test_only_what_is_missing_travels(make_node: MakeNode, alone: Alone) -> None:
    producer, consumer = make_node("p"), make_node("d")
    first, second = prompt_of(700), prompt_of(900)
    assert second[:700] == first
    decode(producer, consumer, first, prefill(producer, first))
    before = consumer.cache.stats().loads
    consumer.answers.clear()
    answer = decode(producer, consumer, second, prefill(producer, second))
    after = consumer.cache.stats().loads
    assert after.num_blocks - before.num_blocks == 15 - 10
    assert (answer.tokens, answer.hit) == (alone(second), 900)


def hand_over_stats(node: Node) -> HandOverStats:
    """Return what an engine has counted."""
    stats = node.core.stats().hand_over
    assert stats is not None
    return stats


def test_both_sides_count_what_travels(make_node: MakeNode) -> None:
    producer, consumer = make_node("p"), make_node("d")
    prompt, spec = prompt_of(300), producer.core.spec
    params = prefill(producer, prompt)
    assert hand_over_stats(producer).num_leases == 1
    decode(producer, consumer, prompt, params)
    producer.check_nothing_leaks()
    consumer.answers.clear()
    decode(producer, consumer, prompt, params)
    run([producer, consumer], lambda: hand_over_stats(consumer).pulls == {"done": 1, "not_needed": 1})
    fetched, given = hand_over_stats(consumer), hand_over_stats(producer)
    assert fetched.fetched_bytes == given.given_bytes == 5 * spec.raw_block_bytes + spec.raw_slot_bytes
    assert fetched.fetched_s > 0
    assert given.given_s > 0
    assert (given.num_leases, given.leases_ended) == (0, {"fetched": 1})
    run([producer], lambda: hand_over_stats(producer).gives == {"done": 1, "not_needed": 1})
    nothing = TransferParams(is_remote_prefill=True, host=params.host, port=params.port)
    consumer.answers.clear()
    decode(producer, consumer, prompt_of(100, seed=2), nothing)
    assert hand_over_stats(consumer).pulls["nothing"] == 1


def test_a_prompt_that_is_cached_here_is_not_fetched(make_node: MakeNode, alone: Alone) -> None:
    producer, consumer = make_node("p"), make_node("d")
    prompt = prompt_of(300)
    consumer.submit("before", prompt)
    run([consumer])
    answer = decode(producer, consumer, prompt, prefill(producer, prompt))
    assert (answer.tokens, answer.hit) == (alone(prompt), 300)
    assert consumer.cache.stats().loads.num_done == 0
    run([producer, consumer], lambda: not num_holds(producer.cache))


def test_a_shared_prefix_is_fetched_once(make_node: MakeNode, alone: Alone) -> None:
    producer, consumer = make_node("p"), make_node("d")
    shared = prompt_of(640)
    prompts = [shared + prompt_of(130, seed) for seed in (2, 3)]
    params = []
    for prompt in prompts:
        producer.answers.clear()
        params.append(prefill(producer, prompt))
    for index, prompt in enumerate(prompts):
        consumer.submit(f"decode {index}", prompt, params[index])
    run([producer, consumer], lambda: consumer.is_idle)
    assert [answer.hit for answer in consumer.answers.values()] == [770, 770]
    assert [answer.tokens for answer in consumer.answers.values()] == [alone(prompt) for prompt in prompts]
    assert consumer.cache.stats().loads.num_blocks == 10 + 3 + 3
    for node in (producer, consumer):
        node.check_nothing_leaks()


def test_outputs_of_one_request_share_one_pull(make_node: MakeNode) -> None:
    producer, consumer = make_node("p"), make_node("d")
    prompt = prompt_of(300)
    consumer.submit("several", prompt, prefill(producer, prompt), n=3, temperature=1.0, seed=1)
    run([producer, consumer], lambda: consumer.is_idle)
    assert [answer.hit for answer in consumer.answers.values()] == [300, 300, 300]
    assert consumer.cache.stats().loads.num_done == 1
    for node in (producer, consumer):
        node.check_nothing_leaks()


def test_engines_fetch_from_each_other_what_is_cached(make_node: MakeNode, alone: Alone) -> None:
    nodes = [make_node("p"), make_node("d")]
    prompt = prompt_of(500)
    for index in range(2):
        here, there = nodes[index], nodes[1 - index]
        there.submit("seen", prompt[: 400 + 50 * index])
        run([there])
        hand_over = there.core.hand_over
        assert hand_over is not None
        port = int(hand_over.describe().split(":")[2].split()[0])
        here.answers.clear()
        answer = decode(there, here, prompt, TransferParams(is_remote_prefill=True, host="127.0.0.1", port=port))
        assert (answer.tokens, answer.hit) == (alone(prompt), [400, 500][index])
    for node in nodes:
        node.check_nothing_leaks()


def pulls_of(node: Node) -> PrefixPulls:
    assert node.core.hand_over is not None
    return node.core.hand_over._pulls


def cached_there(producer: Node, prompt: list[int]) -> TransferParams:
    """Have a prompt cached on an engine; return what a request needs to fetch it without a lease."""
    params = prefill(producer, prompt)
    producer.answers.clear()
    return TransferParams(is_remote_prefill=True, host=params.host, port=params.port)


SLOW_BYTES_PER_S, FAST_BYTES_PER_S = 1e3, 1e12
TOKEN_S = 1e-3


@pytest.mark.parametrize("bytes_per_s", [SLOW_BYTES_PER_S, FAST_BYTES_PER_S])
@pytest.mark.parametrize("has_lease", [False, True])
def test_without_a_lease_a_slow_fetch_is_not_begun(
    make_node: MakeNode, alone: Alone, bytes_per_s: float, has_lease: bool
) -> None:
    producer, consumer = make_node("p"), make_node("d")
    prompt = prompt_of(300)
    params = prefill(producer, prompt) if has_lease else cached_there(producer, prompt)
    pulls_of(consumer).costs = LoadCosts(0.0, bytes_per_s, TOKEN_S)
    answer = decode(producer, consumer, prompt, params)
    is_fetched = has_lease or bytes_per_s == FAST_BYTES_PER_S
    assert (answer.tokens, answer.hit, answer.lost) == (alone(prompt), 300 if is_fetched else 0, 0)
    assert hand_over_stats(consumer).pulls == {"done" if is_fetched else "slower": 1}
    run([producer], lambda: hand_over_stats(producer).gives == {"done" if is_fetched else "not_needed": 1})
    consumer.check_nothing_leaks()


def test_what_is_cached_here_counts_when_fetching_is_weighed(make_node: MakeNode, alone: Alone) -> None:
    producer, consumer = make_node("p"), make_node("d")
    spec, prompt = producer.core.spec, prompt_of(1000)
    params = cached_there(producer, prompt)
    # A transfer of the whole prompt would pay, that of the last tokens does not: their state is as large.
    slot_s = 200 * TOKEN_S
    pulls_of(consumer).costs = LoadCosts(0.0, spec.raw_slot_bytes / slot_s, TOKEN_S)
    consumer.submit("before", prompt[:900])
    run([consumer])
    answer = decode(producer, consumer, prompt, params)
    assert (answer.tokens, answer.hit) == (alone(prompt), 900)
    assert hand_over_stats(consumer).pulls == {"slower": 1}
    other = prompt_of(1000, seed=2)
    cached_there(producer, other)
    consumer.answers.clear()
    pulls_of(consumer).costs = LoadCosts(0.0, 20 * spec.raw_slot_bytes / slot_s, TOKEN_S)
    assert decode(producer, consumer, other, params).hit == 1000


def test_the_rates_that_pulls_are_weighed_by_are_measured(make_node: MakeNode, alone: Alone) -> None:
    producer, consumer = make_node("p"), make_node("d")
    costs = pulls_of(consumer).costs
    prompts = [prompt_of(300, seed) for seed in (1, 2)]
    params = cached_there(producer, prompts[0])
    assert costs.bytes_per_s is costs.token_s is None
    decode(producer, consumer, prompts[0], params)
    consumer.submit("computed", prompt_of(500, seed=3))
    run([consumer])
    assert costs.token_s is not None
    assert costs.token_s > 0
    cached_there(producer, prompts[1])
    consumer.answers.clear()
    stats = hand_over_stats(consumer)
    assert decode(producer, consumer, prompts[1], params).tokens == alone(prompts[1])
    assert costs.bytes_per_s == pytest.approx(stats.fetched_bytes / stats.fetched_s)


def test_nothing_is_promised_where_nothing_is_cached(make_node: MakeNode, alone: Alone) -> None:
    producer, consumer = make_node("p"), make_node("d")
    params = prefill(producer, prompt_of(100))
    other = prompt_of(200, seed=2)
    nothing = TransferParams(is_remote_prefill=True, host=params.host, port=params.port)
    answer = decode(producer, consumer, other, nothing)
    assert (answer.tokens, answer.hit, answer.lost) == (alone(other), 0, 0)


def test_copies_of_a_lease_wait_for_no_later_step(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = make_node("p")
    assert producer.core.hand_over is not None
    source, fences = producer.core.hand_over._source, count()
    monkeypatch.setattr(source._copies, "fence", lambda: next(fences))
    prompt = prompt_of(300)
    params = prefill(producer, prompt)
    for seed in (2, 3):
        producer.submit(f"later {seed}", prompt_of(100, seed))
        run([producer])
    tokens = bytes(TokenBuffer(prompt).data)
    for lease_id, fence in ((params.lease_id, 0), ("", 1)):
        found = source.offer(Ask(lease_id, "", tokens))
        assert found is not None
        assert found[0].fence == fence
        source.end(found[0], is_done=True)


def test_another_prompt_gets_nothing_from_a_lease(make_node: MakeNode, alone: Alone) -> None:
    producer, consumer = make_node("p"), make_node("d")
    params = prefill(producer, prompt_of(100))
    other = prompt_of(200, seed=2)
    answer = decode(producer, consumer, other, params)
    assert (answer.tokens, answer.hit, answer.lost) == (alone(other), 0, 100)


# Faults

STAGES = range(4)
"""How many messages a producer answers before something goes wrong."""


class FalseProducer:
    """Answers as a producer does, with zeros for content, until something goes wrong."""

    def __init__(self, num_answers: int, end: str, layout: dict[str, str]) -> None:
        self._num_answers, self._end, self._layout = num_answers, end, layout
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._is_over = Event()
        self._thread = Thread(target=self._run)
        self._thread.start()

    @property
    def params(self) -> TransferParams:
        port = self._listener.getsockname()[1]
        return TransferParams(is_remote_prefill=True, host="127.0.0.1", port=port, lease_id="x", num_tokens=300)

    def _run(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return
        offer = Offer(300, [(300, "prompt_end")])
        with Connection(accepted, TIMEOUT_S) as connection:
            for answer in [Hello("false", self._layout), offer, Piece(0)][: self._num_answers]:
                connection.receive()
                connection.send(answer, bytes(100) if isinstance(answer, Piece) else b"")
            if self._end == "garbles":
                accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9)
            if self._end != "dies":
                self._is_over.wait(TIMEOUT_S)

    def close(self) -> None:
        self._is_over.set()
        self._listener.close()
        self._thread.join()


@pytest.mark.parametrize("end", ["dies", "stalls", "garbles"])
@pytest.mark.parametrize("num_answers", STAGES)
def test_a_producers_fault_costs_the_computation_alone(
    make_node: MakeNode, alone: Alone, model_dir: Path, end: str, num_answers: int
) -> None:
    # The piece that comes as the third answer is too short: the last fault, if the others do not stall.
    is_stalled = end == "stalls" and num_answers < 3
    consumer = make_node("d", extra={"timeout_s": 0.2 if is_stalled else TIMEOUT_S})
    layout = layout_of(consumer.core.spec, weights=fingerprint(model_dir), is_deterministic=False)
    producer = FalseProducer(num_answers, end, layout)
    prompt = prompt_of(300)
    answer = decode(None, consumer, prompt, producer.params)
    assert (answer.tokens, answer.hit, answer.lost) == (alone(prompt), 0, 300)
    failure = {"dies": "disconnected", "stalls": "stalled"}.get(end, "garbled") if num_answers < 3 else "garbled"
    assert hand_over_stats(consumer).pulls == {failure: 1}
    consumer.check_nothing_leaks()
    producer.close()


def test_an_engine_that_is_not_there_costs_the_computation_alone(make_node: MakeNode, alone: Alone) -> None:
    producer, consumer = make_node("p"), make_node("d")
    prompt = prompt_of(300)
    params = prefill(producer, prompt)
    assert producer.core.hand_over is not None
    producer.core.hand_over.close()
    answer = decode(None, consumer, prompt, params)
    assert (answer.tokens, answer.hit, answer.lost) == (alone(prompt), 0, 300)
    consumer.check_nothing_leaks()


@pytest.mark.parametrize("num_messages", range(1, 4))
def test_a_consumer_that_dies_leaves_the_lease(
    make_node: MakeNode, alone: Alone, model_dir: Path, num_messages: int
) -> None:
    producer, consumer = make_node("p", extra={"lease_s": 1.0}), make_node("d")
    prompt = prompt_of(300)
    params = prefill(producer, prompt)
    layout = layout_of(producer.core.spec, weights=fingerprint(model_dir), is_deterministic=False)
    ask = Ask(params.lease_id, "", bytes(TokenBuffer(prompt).data))
    with Connection.to(params.host, params.port, TIMEOUT_S) as connection:
        for message in [Hello("dies", layout), ask, Want(0, [300])][:num_messages]:
            connection.send(message)
        if num_messages > 1:
            run([producer], lambda: producer.cache.internals().leases != {} and _has_come(connection))
    answer = decode(producer, consumer, prompt, params)
    assert (answer.tokens, answer.hit) == (alone(prompt), 300)
    for node in (producer, consumer):
        node.check_nothing_leaks()


@pytest.mark.parametrize("stage", CONSUMER_STAGES)
def test_a_killed_consumer_leaves_nothing_behind(make_node: MakeNode, model_dir: Path, stage: str) -> None:
    producer = make_node("p")
    prompt = prompt_of(300)
    params = prefill(producer, prompt)
    layout = layout_of(producer.core.spec, weights=fingerprint(model_dir), is_deterministic=False)
    ask, want = Ask(params.lease_id, "", bytes(TokenBuffer(prompt).data)), Want(0, [300])

    def wait_until(is_done: Callable[[], bool]) -> None:
        run([producer], is_done)

    assert producer.core.hand_over is not None
    [kept] = producer.core.hand_over._source._kept.values()
    with consumer_at(stage, params.port, layout, producer.core.spec, ask, want, wait_until) as consumer:
        kept.expires_s = 0.0
        producer.core.exchange()
        # It has expired, but while it is read it is not released.
        assert hand_over_stats(producer).num_leases == kept.num_readers
        if stage != "done":
            assert kept.num_readers == 1
        consumer.kill()
        wait_until(lambda: hand_over_stats(producer).num_leases == 0)
    outcome, end = ("done", "fetched") if stage == "done" else ("disconnected", "expired")
    wait_until(lambda: hand_over_stats(producer).gives == {outcome: 1})
    assert hand_over_stats(producer).leases_ended == {end: 1}
    producer.check_nothing_leaks()


def test_a_producer_restarted_with_other_weights_is_refused(
    make_node: MakeNode, alone: Alone, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    consumer, producer = make_node("d"), make_node("p", engine={"engine_id": "same"})
    prompts = [prompt_of(300, seed) for seed in (1, 2)]
    params = prefill(producer, prompts[0])
    assert decode(producer, consumer, prompts[0], params).hit == 300
    producer.answers.clear()
    params = prefill(producer, prompts[1])
    assert producer.core.hand_over is not None
    producer.core.hand_over.close()
    other_dir = save_tiny_model(tmp_path, linear_key_head_dim=32, linear_value_head_dim=32, initializer_range=0.3)
    engine = {"engine_id": "same", "kv_port": params.port}
    restarted = Node(load_uni_executor(config_of(other_dir)), other_dir, engine=engine)
    consumer.answers.clear()
    answer = decode(restarted, consumer, prompts[1], params)
    assert (answer.tokens, answer.hit, answer.lost) == (alone(prompts[1]), 0, 300)
    assert "refused: weights: " in caplog.text
    assert hand_over_stats(consumer).pulls == {"done": 1, "refused": 1}
    consumer.check_nothing_leaks()
    restarted.core.close()


NUM_PULLS = 8
TRANSFER_FILES = ["transfer/*", "device/stores/peer_store.py", "device/stores/arena_copies.py", "engine/prefix_*.py"]


def test_many_pulls_leave_no_files_threads_or_memory(make_node: MakeNode) -> None:
    producer, consumer = make_node("p"), make_node("d")

    def hand_over(seeds: range) -> tuple[int, int]:
        """Hand prompts over; return how many files are open, and how many threads transfer."""
        for seed in seeds:
            prompt = prompt_of(300, seed)
            assert decode(producer, consumer, prompt, prefill(producer, prompt)).hit == 300
            for node in (producer, consumer):
                node.answers.clear()
        run([producer, consumer], lambda: len(threads_of_pulls()) == 2)
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(threads_of_pulls())

    before = hand_over(range(NUM_PULLS))
    bytes_before = hand_over_stats(consumer).fetched_bytes
    tracemalloc.start()
    try:
        after = hand_over(range(NUM_PULLS, 2 * NUM_PULLS))
        kept = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    assert after == before
    files = [tracemalloc.Filter(True, f"*/strandline/{name}") for name in TRANSFER_FILES]
    # Less than two of the pulls have brought.
    num_bytes = sum(trace.size for trace in kept.filter_traces(files).traces)
    assert num_bytes < (hand_over_stats(consumer).fetched_bytes - bytes_before) * 2 / NUM_PULLS
    assert hand_over_stats(consumer).pulls == {"done": 2 * NUM_PULLS}
    for node in (producer, consumer):
        node.check_nothing_leaks()


def threads_of_pulls() -> list[Thread]:
    """Return the threads of transfers. In each engine that gives, one waits for connections."""
    return [thread for thread in enumerate_threads() if thread.name.startswith("kv-transfer")]


def test_a_lease_pulled_twice_ends_when_one_pull_is_done(make_node: MakeNode, alone: Alone, model_dir: Path) -> None:
    producer, consumer = make_node("p"), make_node("d")
    prompt = prompt_of(300)
    params = prefill(producer, prompt)
    layout = layout_of(producer.core.spec, weights=fingerprint(model_dir), is_deterministic=False)
    with Connection.to(params.host, params.port, TIMEOUT_S) as other:
        other.send(Hello("other", layout))
        other.send(Ask(params.lease_id, "", bytes(TokenBuffer(prompt).data)))
        run([producer], lambda: _is_read(producer))
        answer = decode(producer, consumer, prompt, params)
        assert (answer.tokens, answer.hit) == (alone(prompt), 300)
        assert num_holds(producer.cache) == 1
    run([producer], lambda: not num_holds(producer.cache))
    assert hand_over_stats(producer).leases_ended == {"fetched": 1}
    for node in (producer, consumer):
        node.check_nothing_leaks()


def _is_read(producer: Node) -> bool:
    """Return whether a lease is being read."""
    assert producer.core.hand_over is not None
    return any(kept.num_readers for kept in producer.core.hand_over._source._kept.values())


def _has_come(connection: Connection) -> bool:
    """Wait for what a producer sends before it waits itself."""
    connection.expect(Hello)
    return True


def test_an_expired_lease_gives_what_is_still_cached(make_node: MakeNode, alone: Alone) -> None:
    producer, consumer = make_node("p", extra={"lease_s": 0.001}), make_node("d")
    prompt = prompt_of(300)
    params = prefill(producer, prompt)
    run([producer], lambda: not num_holds(producer.cache))
    answer = decode(producer, consumer, prompt, params)
    assert (answer.tokens, answer.hit) == (alone(prompt), 300)


def test_an_expired_lease_of_an_evicted_prompt_is_lost(make_node: MakeNode, alone: Alone) -> None:
    producer, consumer = make_node("small p", "1MiB", extra={"lease_s": 0.001}), make_node("d")
    prompt = prompt_of(300)
    params = prefill(producer, prompt)
    for seed in range(2, 12):
        producer.submit(f"other {seed}", prompt_of(350, seed))
        run([producer])
    answer = decode(producer, consumer, prompt, params)
    assert (answer.tokens, answer.hit, answer.lost) == (alone(prompt), 0, 300)
    producer.check_nothing_leaks()


def test_a_lease_outlives_other_requests(make_node: MakeNode, alone: Alone) -> None:
    producer, consumer = make_node("small p", "1MiB"), make_node("d")
    prompt = prompt_of(300)
    params = prefill(producer, prompt)
    for seed in range(2, 12):
        producer.submit(f"other {seed}", prompt_of(100, seed))
        run([producer])
    answer = decode(producer, consumer, prompt, params)
    assert (answer.tokens, answer.hit) == (alone(prompt), 300)


def test_leases_are_given_up_for_requests_that_could_not_run(make_node: MakeNode, alone: Alone) -> None:
    producer = make_node("small p", "512KiB")
    for seed in range(5):
        producer.submit(f"kept {seed}", prompt_of(300, seed), KEEP)
        run([producer])
    assert num_holds(producer.cache) > 0
    prompt = prompt_of(380, seed=9)
    producer.submit("long", prompt)
    run([producer])
    assert producer.answers["long"].tokens == alone(prompt)


def test_a_full_consumer_computes_the_prompt(make_node: MakeNode, alone: Alone) -> None:
    producer, consumer = make_node("p"), make_node("small d", "512KiB")
    prompt, other = prompt_of(300), prompt_of(380, seed=2)
    params = prefill(producer, prompt)
    consumer.submit("other", other, max_tokens=10)
    consumer.go_on()
    answer = decode(producer, consumer, prompt, params)
    assert consumer.answers["other"].tokens == alone(other)[:10]
    assert answer.tokens == alone(prompt)
    assert answer.hit + answer.lost == 300
    for node in (producer, consumer):
        node.check_nothing_leaks()


def test_a_lease_of_other_weights_is_refused(
    make_node: MakeNode, alone: Alone, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other_dir = save_tiny_model(tmp_path, linear_key_head_dim=32, linear_value_head_dim=32, initializer_range=0.3)
    producer, consumer = Node(load_uni_executor(config_of(other_dir)), other_dir), make_node("d")
    prompt = prompt_of(300)
    answer = decode(producer, consumer, prompt, prefill(producer, prompt))
    assert (answer.tokens, answer.hit, answer.lost) == (alone(prompt), 0, 300)
    assert "refused: weights: " in caplog.text
    producer.core.close()


@needs_nixl
def test_engines_with_other_connectors_refuse_each_other(
    make_node: MakeNode, alone: Alone, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = make_node("p", connector="NixlConnector"), make_node("d")
    prompt = prompt_of(300)
    answer = decode(producer, consumer, prompt, prefill(producer, prompt))
    assert (answer.tokens, answer.hit, answer.lost) == (alone(prompt), 0, 300)
    assert "refused: connector: SocketConnector here, NixlConnector there" in caplog.text


@pytest.mark.parametrize("num_turns", [0, 1, 3, 8])
def test_aborted_requests_leave_nothing_behind(make_node: MakeNode, alone: Alone, num_turns: int) -> None:
    producer, consumer = make_node("p"), make_node("d")
    prompt = prompt_of(1000)
    params = prefill(producer, prompt)
    consumer.submit("aborted", prompt, params)
    for _ in range(num_turns):
        producer.go_on()
        consumer.go_on()
    consumer.core.finish(RequestId("aborted"))
    run([producer, consumer])
    consumer.check_nothing_leaks()
    assert decode(producer, consumer, prompt, params).tokens == alone(prompt)


def test_nothing_is_kept_for_an_aborted_request(model_dir: Path) -> None:
    options: dict[str, Any] = {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
        "async_scheduling": True,
    }
    node = Node(load_uni_executor(config_of(model_dir, **options)), model_dir, **options)
    node.submit("aborted", prompt_of(100), KEEP)
    while hand_over_stats(node).num_leases == 0:
        node.core.finish(RequestId("another"))  # settles the step in flight
        events = node.core.step() if hand_over_stats(node).num_leases == 0 else None
    assert events is None
    node.core.finish(RequestId("aborted"))
    assert hand_over_stats(node).num_leases == 0
    assert node.core.step().handed_over == []
    node.check_nothing_leaks()
    node.core.close()


@pytest.mark.parametrize("changed", ["config.json", "model.safetensors"])
def test_fingerprints_tell_models_apart(model_dir: Path, tmp_path: Path, changed: str) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    assert fingerprint(tmp_path) == fingerprint(model_dir)
    data = bytearray((tmp_path / changed).read_bytes())
    data[-10 if changed == "config.json" else -100] ^= 1
    (tmp_path / changed).write_bytes(data)
    assert fingerprint(tmp_path) != fingerprint(model_dir)


def test_hand_over_is_for_servers(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="is for servers"):
        LLM(str(model_dir), kv_transfer_config={"kv_connector": "SocketConnector", "kv_role": "kv_both"})
