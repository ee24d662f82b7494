"""What CUDA graphs are captured with."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from strandline.device.steps import graphs


class FakeGraph:
    """Stands for a CUDA graph."""

    def capture_begin(self, pool: object, mode: str) -> None:
        """Check how it is captured."""
        assert (pool, mode) == ("pool", "global")

    def capture_end(self) -> None:
        """Do nothing."""


def test_graphs_that_are_captured_again_take_the_same_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, taken, ran = SimpleNamespace(ranks=SimpleNamespace(size=1)), list[object](), list[int]()

    def stream(taken_stream: object) -> AbstractContextManager[None]:
        taken.append(taken_stream)
        return nullcontext()

    for name, value in {
        "Stream": object,
        "CUDAGraph": FakeGraph,
        "synchronize": lambda: None,
        "stream": stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    graphs._capture_stream.cache_clear()
    try:
        for number in range(2):
            graphs.capture(partial(ran.append, number), "pool", kernels)  # type: ignore[arg-type]
    finally:
        graphs._capture_stream.cache_clear()
    assert (ran, taken[0] is taken[1]) == ([0, 1], True)
