"""How many slabs a request takes, and which length fits."""

from dataclasses import replace

import pytest

from strandline.config import EngineConfig
from strandline.device.sizing import choose_max_model_len, slabs_for
from strandline.errors import ConfigError
from strandline.specs import LayerSpec, ModelSpec, TensorSpec, kv_spec

ATTENTION = kv_spec(2, 16, "float32")
RECURRENT = LayerSpec(states=(TensorSpec("state", (4, 64, 64), "float32", is_recurrent=True),))
WITHOUT_STATES = ModelSpec((ATTENTION,), 32, "float32")
HYBRID = ModelSpec((ATTENTION, RECURRENT), 32, "float32")
WINDOWED = ModelSpec((ATTENTION, *[replace(ATTENTION, window_tokens=100)] * 3, RECURRENT), 32, "float32")


def test_requests_without_states_take_blocks_alone() -> None:
    assert slabs_for(WITHOUT_STATES, 64 * 10) == 1 + 10 + 1
    assert slabs_for(HYBRID, 1) == 1 + 2


@pytest.mark.parametrize(
    "spec",
    [WITHOUT_STATES, HYBRID, replace(WINDOWED, has_window_blocks=True)],
    ids=["attention", "hybrid", "windows"],
)
@pytest.mark.parametrize("num_slabs", [5, 6, 40])
def test_the_longest_request_fits_and_one_token_more_does_not(spec: ModelSpec, num_slabs: int) -> None:
    longest = choose_max_model_len(EngineConfig(model="any"), spec, 10**9, num_slabs * spec.slab_bytes, "cpu")
    assert slabs_for(spec, longest, 2048) <= num_slabs < slabs_for(spec, longest + 1, 2048)


def test_memory_for_no_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds no request"):
        choose_max_model_len(EngineConfig(model="any"), HYBRID, 1000, 2 * HYBRID.slab_bytes, "cpu")


def test_longest_request_counts_windows() -> None:
    """Three of four layers take the memory of a window and a step."""
    longest = [
        choose_max_model_len(EngineConfig(model="any", max_num_batched_tokens=256), spec, 10**9, 2**26, "cpu")
        for spec in (replace(WINDOWED, has_window_blocks=True), WINDOWED)
    ]
    assert longest[0] > 3.5 * longest[1]
