"""Memory that cannot be taken again: all of it is, or none; what is asleep stays asleep, and wakes up later."""

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from strandline import LLM, SamplingParams
from strandline.device import uni_executor
from strandline.device.uni_executor import LACKS_MEMORY, UNREADABLE, UniExecutor
from strandline.device.weight_changes import WeightChanges
from strandline.device.weights import model_memory
from strandline.device.weights.model_memory import TensorMemory, tensors_of
from strandline.errors import ConfigError, OutOfMemoryError, RequestError, StrandlineError
from strandline.kernels.ranks import OneRank
from strandline.records.control import UseWeights
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.tiny import save_tiny_model

PROMPT = list(range(90))
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Memory:
    """Memory that is released as a GPU's is, is poisoned then, and lacks after some allocations."""

    def __init__(self) -> None:
        self.num_free: int | None = None
        """How many tensors it still has room for; None: for all."""
        self.released = set[int]()
        """Addresses of tensors that have none."""

    def allocate(self, tensor: torch.Tensor, num_bytes: int) -> None:
        assert num_bytes == tensor.untyped_storage().nbytes()
        address = tensor.untyped_storage().data_ptr()
        if address in self.released and self.num_free is not None:
            if self.num_free == 0:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            self.num_free -= 1
        self.released.discard(address)

    def release(self, tensor: torch.Tensor) -> None:
        self.released.add(tensor.untyped_storage().data_ptr())
        tensor.untyped_storage().fill_(0xFF)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(model_memory, "allocate", memory.allocate)
    monkeypatch.setattr(model_memory, "release", memory.release)
    monkeypatch.setattr(TensorMemory, "_is_freed_whole", True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return memory


@pytest.fixture
def llm(make_llm: MakeLLM) -> Iterator[LLM]:
    with make_llm(host_memory="16MiB") as llm:
        yield llm


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model with other weights."""
    return str(save_tiny_model(tmp_path_factory.mktemp("other"), seed=2))


def answer(llm: LLM) -> list[int]:
    [output] = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    return output.outputs[0].token_ids


def executor_of(llm: LLM) -> Any:
    return llm.engine.core.executor


def lent_by(llm: LLM) -> list[int]:
    """Return the addresses of what is given back: of the weights, and then of the cache's memory."""
    runner = executor_of(llm).runner
    return [tensor.untyped_storage().data_ptr() for tensor in (*tensors_of(runner.model), runner.arena.bytes)]


def check_asleep(llm: LLM, memory: Memory, lent: list[int]) -> None:
    assert memory.released == set(lent)
    with pytest.raises(RequestError, match="asleep"):
        answer(llm)


@pytest.mark.parametrize("lacks", ["weights", "half of the weights", "cache"])
@pytest.mark.parametrize("level", [1, 2])
def test_waking_takes_all_memory_or_none(llm: LLM, memory: Memory, level: int, lacks: str) -> None:
    expected, lent = answer(llm), lent_by(llm)
    num_weights = len(lent) - 1
    llm.sleep(level)
    check_asleep(llm, memory, lent)
    memory.num_free = {"weights": 0, "half of the weights": num_weights // 2, "cache": num_weights}.get(lacks)
    for _ in range(2):
        with pytest.raises(OutOfMemoryError, match=r"need 0\.\d+ GiB, and the host"):
            llm.wake_up()
        check_asleep(llm, memory, lent)
        assert executor_of(llm).weights._prepared is None
    memory.num_free = None
    llm.wake_up()
    assert answer(llm) == expected


def test_weights_that_cannot_be_used_are_freed_at_once(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, uni_executor.LOGGER.name)  # pytest would keep the error that is logged
    read = list[weakref.ref[torch.Tensor]]()

    def read_some(_: object) -> Any:
        tensor = torch.zeros(1)
        read.append(weakref.ref(tensor))
        raise ConfigError("a tensor is missing")

    llm.sleep(2)
    executor_of(llm).weights._read_model = read_some
    gc.disable()
    try:
        with suppress(ConfigError):
            llm.wake_up()
        assert read[0]() is None
    finally:
        gc.enable()


def test_what_was_taken_before_stays(llm: LLM, memory: Memory) -> None:
    expected, lent = answer(llm), lent_by(llm)
    llm.sleep(1)
    llm.wake_up(["weights"])
    memory.num_free = 0
    with pytest.raises(OutOfMemoryError, match="of the cache need"):
        llm.wake_up()
    assert memory.released == {lent[-1]}
    memory.num_free = None
    llm.wake_up()
    assert answer(llm) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_weights_that_find_no_memory_are_not_used(llm: LLM, memory: Memory, other_dir: str, level: int) -> None:
    expected, lent = answer(llm), lent_by(llm)
    llm.sleep(level)
    memory.num_free = len(lent) // 2
    with pytest.raises(OutOfMemoryError, match="the weights need"):
        llm.update_weights_from_disk(other_dir)
    check_asleep(llm, memory, lent)
    with pytest.raises(ConfigError, match="send them again"):  # what was read is not kept
        llm.engine.core.control.apply(UseWeights("next"))
    memory.num_free = None
    llm.wake_up()
    assert answer(llm) == expected
    llm.update_weights_from_disk(other_dir)
    changed = answer(llm)
    llm.sleep(2)
    llm.wake_up()
    assert answer(llm) == changed != expected


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")],
)
def test_weights_that_the_host_cannot_hold_change_nothing(llm: LLM, other_dir: str, error: Exception) -> None:
    expected = answer(llm)
    weights: WeightChanges = executor_of(llm).weights
    read = weights._read_model

    def fail(_: object) -> Any:
        raise error

    weights._read_model = fail
    with pytest.raises(OutOfMemoryError, match="the host has less; nothing was changed"):
        llm.update_weights_from_disk(other_dir)
    assert answer(llm) == expected
    llm.sleep(2)
    with pytest.raises(OutOfMemoryError):
        llm.wake_up()
    weights._read_model = read
    llm.wake_up()
    assert answer(llm) == expected


class OtherFails(OneRank):
    """A rank of an engine whose other rank fails."""

    size = 2

    def __init__(self, outcome: int) -> None:
        self._outcome = outcome

    def least(self, number: int) -> int:
        return min(number, self._outcome)


@pytest.mark.parametrize(("outcome", "kind"), [(LACKS_MEMORY, OutOfMemoryError), (UNREADABLE, ConfigError)])
@pytest.mark.parametrize("level", [1, 2])
def test_rank_gives_memory_back_if_another_fails(
    llm: LLM, memory: Memory, other_dir: str, level: int, outcome: int, kind: type[StrandlineError]
) -> None:
    expected, lent, executor = answer(llm), lent_by(llm), executor_of(llm)
    llm.sleep(level)
    ranks, executor._ranks = executor._ranks, OtherFails(outcome)
    for change in (llm.wake_up, lambda: llm.update_weights_from_disk(other_dir)):
        with pytest.raises(kind, match="another rank"):
            change()
        check_asleep(llm, memory, lent)
    executor._ranks = ranks
    llm.wake_up()
    assert answer(llm) == expected


def test_graphs_are_captured_where_there_is_room(llm: LLM, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, lent, executor = answer(llm), lent_by(llm), executor_of(llm)
    llm.sleep(1)
    executor._graph_bytes = 1000
    monkeypatch.setattr("strandline.device.uni_executor.free_bytes", lambda _: 999)
    monkeypatch.setattr(UniExecutor, "capture_graphs", lambda _: pytest.fail("it has no room"))
    with pytest.raises(OutOfMemoryError, match="captured CUDA graphs need"):
        llm.wake_up()
    check_asleep(llm, memory, lent)
    monkeypatch.setattr("strandline.device.uni_executor.free_bytes", lambda _: 1000)
    monkeypatch.setattr(UniExecutor, "capture_graphs", lambda _: None)
    llm.wake_up()
    assert answer(llm) == expected


def test_other_errors_of_allocations_are_raised_as_they_are(
    llm: LLM, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("an illegal address")

    llm.sleep(1)
    monkeypatch.setattr(UniExecutor, "capture_graphs", fail)
    with pytest.raises(RuntimeError, match="an illegal address"):
        llm.wake_up()
