"""Models bound to the Triton versions of all operations, interpreted, give the logits of the CPU's kernels."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from strandline.device.uni_executor import choose_kernels
from strandline.kernels import binding
from strandline.kernels.weights import DenseWeight
from strandline.models.weights import load_model
from tests.cpu.models import families, fp8
from tests.cpu.models.driver import Driver, Part, Running
from tests.cpu.models.families import prompt
from tests.cpu.models.test_quantization import block_config
from tests.cpu.models.test_weights import unfuse_experts
from tests.interpreter import convert_e4m3

convert_e4m3()

TOLERANCE = 2e-4
"""Four layers in float32, whose sums are in another order."""

FP8_TOLERANCE = 0.05
"""``|logits - expected| / |expected|``: an input that lies between two e4m3 numbers may be rounded to either."""


@pytest.mark.parametrize(
    ("name", "is_deterministic"),
    [
        # Its layers are those of the next but for the MLP, which is bamba's.
        pytest.param("qwen3_5", False, marks=pytest.mark.long),
        ("qwen3_5_moe", False),
        ("qwen3_5_moe", True),
        ("bamba", False),
        ("kimi_linear", True),
        ("nemotron_h", False),
    ],
)
def test_triton_versions_fit_the_layers(
    name: str, is_deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = partial(load_model, families.save(name, tmp_path), dtype=torch.float32)
    tokens = prompt(70)
    expected = logits(model(), tokens, "cpu")
    monkeypatch.setattr(binding, "_why_no_triton", lambda device_type: None)
    found = logits(model(), tokens, "cuda", is_deterministic=is_deterministic)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "is_deterministic"), [("qwen3_5_moe", False), ("qwen3_5", True)])
def test_triton_versions_fit_layers_in_fp8(
    name: str, is_deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = fp8.change_tensors(families.save(name, tmp_path), unfuse_experts)
    directory, _ = fp8.convert(source, tmp_path, block_config(128, 128), block=lambda _: (128, 128))
    model = partial(load_model, directory, dtype=torch.float32, keeps_fp8=True)
    tokens = prompt(6)
    expected = logits(model(), tokens, "cpu")
    monkeypatch.setattr(binding, "_why_no_triton", lambda device_type: None)
    found = logits(model(), tokens, "cuda", is_deterministic=is_deterministic)
    assert float((found - expected).norm() / expected.norm()) < FP8_TOLERANCE


def logits(model: Any, tokens: list[int], device_type: str, *, is_deterministic: bool = False) -> torch.Tensor:
    """Return those of a prompt and of a token after it, with the kernels of a type of device."""
    model.lay_out(DenseWeight)
    driver = Driver(model, kernels=choose_kernels(model, device_type, is_deterministic=is_deterministic))
    sequence = Running()
    (prefilled,), _ = driver.step([Part(sequence, tokens[:-1])])
    (decoded,), _ = driver.step([Part(sequence, tokens[-1:])])
    return torch.cat((prefilled, decoded))
