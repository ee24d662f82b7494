"""What CUDA graphs are captured with."""

from types import SimpleNamespace

import pytest
import torch

from strandline.device.steps import graphs


def test_graphs_that_are_captured_again_take_the_same_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made, kernels = list[object](), SimpleNamespace(ranks=SimpleNamespace(size=1))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: made.append(object()))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    graphs._capture_stream.cache_clear()
    try:
        for _ in range(2):
            graphs._Capturing(kernels)  # type: ignore[arg-type]
        assert len(made) == 1
    finally:
        graphs._capture_stream.cache_clear()
