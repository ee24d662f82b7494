"""The layer specs and step costs of known models, by name, for replays that load no model.

Source: the models' published configurations.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from strandline.bench.cost import H200, CostModel, estimated
from strandline.errors import ConfigError
from strandline.specs import LayerSpec, ModelSpec, TensorSpec, kv_spec

if TYPE_CHECKING:
    from strandline.models.geometry import ModelSize

GDN_KEY_HEADS: Final = 16
GDN_VALUE_HEADS: Final = 32
GDN_HEAD_DIM: Final = 128
CONV_WIDTH: Final = 4


def hybrid_spec(num_layers: int, num_attention: int, num_kv_heads: int, head_dim: int, hidden_size: int) -> ModelSpec:
    """Return the spec of a model of Gated DeltaNet layers with attention in every n-th layer."""
    channels = GDN_KEY_HEADS * GDN_HEAD_DIM * 2 + GDN_VALUE_HEADS * GDN_HEAD_DIM
    state = TensorSpec("state", (GDN_VALUE_HEADS, GDN_HEAD_DIM, GDN_HEAD_DIM), "float32", is_recurrent=True)
    recurrent = LayerSpec(states=(state, TensorSpec("window", (CONV_WIDTH - 1, channels), "bfloat16")))
    attention = kv_spec(num_kv_heads, head_dim, "bfloat16")
    every = num_layers // num_attention
    layers = [attention if (i + 1) % every == 0 else recurrent for i in range(num_layers)]
    return ModelSpec(tuple(layers), hidden_size, "bfloat16")


GEOMETRIES: Final[Mapping[str, ModelSpec]] = {
    "Qwen3.5-35B-A3B": hybrid_spec(40, 10, 2, 256, 2048),
    "Qwen3.5-9B": hybrid_spec(32, 8, 4, 256, 4096),
    "Qwen3.5-4B": hybrid_spec(32, 8, 4, 256, 2560),
}
DEFAULT_GEOMETRY: Final = "Qwen3.5-35B-A3B"


def geometry(name: str) -> ModelSpec:
    """Return a model's spec by name, or as its ``config.json`` (or a directory with one) has it.

    Raises:
        ConfigError: no such model is known here, and there is no such file.
    """
    if name in GEOMETRIES:
        return GEOMETRIES[name]
    return _model_size(name).spec


def cost_model(name: str) -> CostModel:
    """Return what a model's steps take on one H200: measured, or estimated from its ``config.json``.

    Raises:
        ConfigError: as ``geometry``.
    """
    if name in H200:
        return H200[name]
    size = _model_size(name)
    return estimated(size.spec, size.num_active_weights, size.num_query_heads)


def _model_size(path: str) -> "ModelSize":
    if not Path(path).exists():
        raise ConfigError(f"no geometry or file named {path!r}; known are {', '.join(GEOMETRIES)}")
    from strandline.models.geometry import read_model_size

    return read_model_size(path)
