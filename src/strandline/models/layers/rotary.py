"""The frequencies of rotary position embeddings, as configurations describe them.

Shape suffixes: F pairs of channels.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from strandline.errors import ConfigError
from strandline.kernels.rotary import default_frequencies

RotaryTable = tuple[Tensor, Tensor]
"""Cosines and signed sines of the step's positions, as :func:`strandline.kernels.rotary.rotary_table` returns them."""

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Kinds of rotary embedding whose angles depend on the prompt's length: cached keys would be wrong."""


class RotaryFrequencies(NamedTuple):
    """The angle per position of each pair of channels, and a factor of its cosine and sine."""

    inv_freq_F: Tensor
    attention_factor: float


def rotary_frequencies(config: Any) -> RotaryFrequencies:
    """Return the frequencies of a text configuration.

    Raises:
        ConfigError: its kind of rotary embedding is unknown, or depends on the prompt's length.
    """
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        rotary_dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        return RotaryFrequencies(default_frequencies(rope["rope_theta"], rotary_dim), 1.0)
    if kind not in ROPE_INIT_FUNCTIONS or kind in LENGTH_DEPENDENT_ROPE:
        supported = ["default", *(k for k in ROPE_INIT_FUNCTIONS if k not in LENGTH_DEPENDENT_ROPE)]
        raise ConfigError(f"rope_type {kind!r} is not supported; supported: {', '.join(supported)}")
    inv_freq_F, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return RotaryFrequencies(inv_freq_F.float(), attention_factor)
