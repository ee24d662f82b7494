"""A model's sizes from its configuration alone: no weights are read or allocated."""

from dataclasses import dataclass
from pathlib import Path

import torch

from strandline.model_config import read_model_config
from strandline.models.layers.feed_forward.experts import Experts
from strandline.models.layers.parts.site import Site
from strandline.models.registry import builder_for
from strandline.specs import ModelSpec


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model's spec, and how many weights one token uses."""

    spec: ModelSpec
    num_active_weights: int
    """Active weights, without embeddings; only the experts that the router chooses count."""
    num_query_heads: int
    """0: no layer is attention."""


def read_model_size(path: str | Path) -> ModelSize:
    """Return the size of the model that a ``config.json``, or a directory with one, describes.

    Raises:
        ConfigError: there is none, or its architecture or a setting is not supported.
    """
    config = read_model_config(Path(path))
    model = builder_for(config)(config, Site(torch.bfloat16, "meta"))
    num_active = 0.0
    for module in model.modules():
        share = module.share if isinstance(module, Experts) else 1.0
        for name, weight in module.named_parameters(recurse=False):
            num_active += 0 if "embed" in name else weight.numel() * share
    return ModelSize(model.spec, int(num_active), config.text.size("num_attention_heads", at_least=0, default=0))
