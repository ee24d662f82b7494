"""Models without memory have the layers and formats that they have on a GPU."""

import json
from pathlib import Path

import pytest
import torch

from strandline.device.meta_device import META, zeros_from_meta
from strandline.kernels.gemm.weights import DenseWeight
from strandline.models.layers.feed_forward.experts import Experts
from strandline.models.layers.parts.projection import Projection
from strandline.models.model_options import ModelOptions
from strandline.models.weights import FillOptions, load_model

CONFIGS = Path(__file__).parents[3] / "benchmarks" / "configs"


@pytest.mark.parametrize("is_inference", [False, True])
def test_host_reads_zeros(is_inference: bool) -> None:
    with zeros_from_meta(), torch.inference_mode(is_inference):
        tensor = torch.empty(2, dtype=torch.int64, device=META)
        assert tensor.tolist() == tensor.cpu().tolist() == [0, 0]
        assert int(tensor[0]) == 0


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "w4a16"])
def test_weights_stay_quantised_without_memory(name: str, tmp_path: Path) -> None:
    config = json.loads((CONFIGS / f"qwen3.5-35b-a3b-{name}" / "config.json").read_text())
    config.update(num_hidden_layers=4, layer_types=config["layer_types"][:4])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with zeros_from_meta():
        model = load_model(tmp_path, ModelOptions(device=META, keeps_quantized=True), FillOptions(load_format="dummy"))
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    assert len(experts) == 4
    for module in experts:
        (part,) = module.parts
        assert not isinstance(part.up, DenseWeight)
        assert not isinstance(part.down, DenseWeight)
    assert any(module.is_quantized for module in model.modules() if isinstance(module, Projection))
