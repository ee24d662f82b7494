"""What of a model is built, and in which form: chosen once from an engine's configuration, and passed whole."""

from dataclasses import dataclass
from typing import Final

import torch

from strandline.config_fields import DTYPES, Fields
from strandline.model_config import ModelConfig
from strandline.models.layers.parts.shard import WHOLE, Shard
from strandline.models.lora.adapter_slots import SlotSizes
from strandline.picture_config import PictureConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What of a model is built, and in which form."""

    dtype: torch.dtype | None = None
    """Dtype of weights and activations; None: the configuration's (``dtype_of``)."""
    device: torch.device | str = "cpu"
    shard: Shard = WHOLE
    """What is built of a model that is divided among ranks."""
    with_draft_layer: bool = False
    """Whether the layer for multi-token prediction is built, too."""
    pictures: PictureConfig | None = None
    """How pictures are prepared for the vision tower, which is built, too; None: the model serves text."""
    adapter_slots: SlotSizes | None = None
    """Memory for adapters that requests name; None: none."""
    kv_cache_dtype: str | None = None
    """Dtype of keys and values, as specs name it; None: that of activations."""
    keeps_quantized: bool = False
    """Whether weights that are published quantised stay so where kernels take them; else all are dequantised."""
    records_routing: bool = False
    """Whether the model stores the experts that tokens are routed to."""

    def dtype_of(self, config: ModelConfig) -> torch.dtype:
        """Return the dtype in which a model is built."""
        return published_dtype(config) if self.dtype is None else self.dtype


AS_PUBLISHED: Final = ModelOptions()
"""The whole model in its published dtype, for text, on a CPU; weights that are published quantised are dequantised."""


def published_dtype(config: ModelConfig) -> torch.dtype:
    """Return the dtype that a configuration names, or bfloat16 where it has none.

    Raises:
        ConfigError: weights of that dtype are not supported.
    """
    named = config.dtype.removeprefix("torch.") if isinstance(config.dtype, str) else config.dtype
    dtype: torch.dtype = getattr(torch, Fields({"dtype": named}).choice("dtype", DTYPES, default="bfloat16"))
    return dtype
