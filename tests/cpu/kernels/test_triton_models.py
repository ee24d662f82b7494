"""Models bound to the Triton versions of all operations, interpreted, give the logits of the CPU's kernels."""

from pathlib import Path

import pytest
import torch

from strandline.device.uni_executor import choose_kernels
from strandline.kernels import binding
from strandline.kernels.weights import DenseWeight
from strandline.models.weights import load_model
from tests.cpu.models import families
from tests.cpu.models.driver import Driver, Part, Running
from tests.cpu.models.families import prompt

TOLERANCE = 2e-4
"""Four layers in float32, whose sums are in another order."""


@pytest.mark.parametrize(
    ("name", "is_deterministic"), [("qwen3_5", False), ("qwen3_5_moe", False), ("qwen3_5_moe", True), ("bamba", False)]
)
def test_triton_versions_fit_the_layers(
    name: str, is_deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = families.save(name, tmp_path)
    tokens = prompt(70)

    def logits(device_type: str) -> torch.Tensor:
        model = load_model(directory, dtype=torch.float32)
        model.lay_out(DenseWeight)
        driver = Driver(model, kernels=choose_kernels(model, device_type, is_deterministic=is_deterministic))
        sequence = Running()
        (prefilled,), _ = driver.step([Part(sequence, tokens[:69])])
        (decoded,), _ = driver.step([Part(sequence, tokens[69:])])
        return torch.cat((prefilled, decoded))

    expected = logits("cpu")
    monkeypatch.setattr(binding, "_why_no_triton", lambda device_type: None)
    torch.testing.assert_close(logits("cuda"), expected, rtol=TOLERANCE, atol=TOLERANCE)
