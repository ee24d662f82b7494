"""ModelOpt's weights in FP8 stay in FP8 on a GPU, and the answers are those of other published layouts in FP8.

One scale for a tensor, a number without dimensions, with scales of activations beside it; and scales of blocks, with
ones in between.
"""

from pathlib import Path
from typing import Any, Final

import pytest

from tests.cpu.engine.test_bits import MIXTURE, WIDE
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.models import fp8
from tests.cpu.models.storage.test_conversion import SIZES
from tests.cpu.models.storage.test_quantization import SCHEMES, add_scales_of_activations
from tests.cpu.models.test_weights import unfuse_experts
from tests.gpu.engine.test_fp8 import (
    engine_of,
    pytestmark,
    test_graphs_prefer_what_eager_steps_do,
    test_log_probabilities_are_near_those_of_dequantised_weights,
    test_resumed_requests_prefer_what_a_cold_run_does,
    test_weights_stay_in_fp8,
)

__all__ = [
    "engine_of",
    "pytestmark",
    "test_graphs_prefer_what_eager_steps_do",
    "test_log_probabilities_are_near_those_of_dequantised_weights",
    "test_resumed_requests_prefer_what_a_cold_run_does",
    "test_weights_stay_in_fp8",
]

MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "tensors": ("modelopt", SIZES),
    "tensors, experts": ("modelopt", {**WIDE, **MIXTURE}),
    "blocks": ("modelopt blocks", SIZES),
    "blocks, experts": ("modelopt blocks", {**WIDE, **MIXTURE}),
}


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    scheme, sizes = MODELS[request.param]
    config, options = SCHEMES[scheme]
    directory = tmp_path_factory.mktemp("modelopt")
    source = fp8.change_tensors(save_tiny_model(directory / "source", **sizes), unfuse_experts)
    found = fp8.convert(source, directory, config, **options)[0]
    return fp8.change_tensors(found, add_scales_of_activations) if scheme == "modelopt" else found


@pytest.fixture(scope="module", params=["auto"])
def kv_cache_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)
