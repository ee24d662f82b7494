"""Engines that find too little of a GPU's memory when they are to wake up: they stay asleep, and wake up later."""

import gc
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from strandline import LLM, SamplingParams
from strandline.errors import OutOfMemoryError, RequestError
from tests.cpu.engine.tiny import save_tiny_model

MIB: Final = 2**20
CACHE_BYTES: Final = 512 * MIB
SIZES: Final[dict[str, Any]] = {"hidden_size": 256, "intermediate_size": 384, "vocab_size": 32768}
"""The embedding and the output head are large enough to need segments of their own in torch's memory."""
LEFT_BYTES: Final = {"weights": 0, "cache": CACHE_BYTES // 2}
NAMES: Final = {"weights": "the weights", "cache": "blocks and slots of the cache", "graphs": "captured CUDA graphs"}
PROMPTS: Final = [list(range(90)), list(range(200, 235)), list(range(300, 500))]
GREEDY: Final = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


class Hog:
    """Tensors that take a GPU's free memory."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def take_all_but(self, num_bytes: int) -> None:
        """Take the memory that is free now, but for so much and less than 2 MiB."""
        for size in (1024 * MIB, 64 * MIB, 10 * MIB, MIB):  # torch allocates segments of just this size, or of 2 MiB
            try:
                while torch.cuda.mem_get_info()[0] >= num_bytes + size:
                    self._tensors.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                continue

    def free(self) -> None:
        self._tensors.clear()
        torch.cuda.empty_cache()


@pytest.fixture
def hog() -> Iterator[Hog]:
    hog = Hog()
    yield hog
    hog.free()


@pytest.fixture(scope="module")
def shared_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = save_tiny_model(tmp_path_factory.mktemp("model"), **SIZES)
    options: dict[str, Any] = {"device": "cuda", "skip_tokenizer_init": True, "max_num_seqs": 8}
    with LLM(str(directory), memory=f"{CACHE_BYTES // MIB}MiB", **options) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> LLM:
    """An engine that is awake, also after a test that has failed, and has cached nothing."""
    shared_llm.wake_up()
    assert shared_llm.reset_prefix_cache()
    return shared_llm


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def has_graphs(llm: LLM) -> bool:
    executor: Any = llm.engine.core.executor
    return executor.runner._graphs is not None


def check_stays_asleep(llm: LLM, needs: str, hog: Hog, asleep_bytes: int) -> None:
    with pytest.raises(OutOfMemoryError, match=needs + r" need \d+\.\d\d GiB, and \d+\.\d\d GiB of the"):
        llm.wake_up()
    gc.collect()
    assert torch.cuda.memory_allocated() - hog.num_bytes <= asleep_bytes
    assert not has_graphs(llm)
    with pytest.raises(RequestError, match="asleep"):
        answers(llm)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("lacking", ["weights", "cache", "graphs"])
def test_engine_wakes_once_memory_is_free_again(
    llm: LLM, hog: Hog, monkeypatch: pytest.MonkeyPatch, lacking: str, level: int
) -> None:
    expected = answers(llm)
    assert has_graphs(llm)
    awake_bytes = torch.cuda.memory_allocated()
    llm.sleep(level)
    asleep_bytes = torch.cuda.memory_allocated()
    assert awake_bytes - asleep_bytes > CACHE_BYTES
    with monkeypatch.context() as patch:
        if lacking == "graphs":
            patch.setattr(llm.engine.core.executor, "_graph_bytes", 2**50)
        else:
            hog.take_all_but(LEFT_BYTES[lacking])
        check_stays_asleep(llm, NAMES[lacking], hog, asleep_bytes)
        check_stays_asleep(llm, "", hog, asleep_bytes)
        hog.free()
    llm.wake_up()
    assert has_graphs(llm)
    assert answers(llm) == expected
