"""The frequencies of rotary position embeddings, as configurations describe them.

Shape suffixes: F pairs of channels.
"""

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from strandline.errors import ConfigError
from strandline.kernels.rotary import default_frequencies
from strandline.model_config import Fields, read_head_dim

RotaryTable = tuple[Tensor, Tensor]
"""Cosines and signed sines of the step's positions, as :func:`strandline.kernels.rotary.rotary_table` returns them."""

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Kinds of rotary embedding whose angles depend on the prompt's length: cached keys would be wrong."""


KINDS: Final = ("default", *(kind for kind in ROPE_INIT_FUNCTIONS if kind not in LENGTH_DEPENDENT_ROPE))


class RotaryFrequencies(NamedTuple):
    """The angle per position of each pair of channels, and a factor of its cosine and sine."""

    inv_freq_F: Tensor
    attention_factor: float


def rotary_frequencies(
    config: Any, *, rotary_dim: int | None = None, layer_type: str | None = None
) -> RotaryFrequencies:
    """Return the frequencies of a text configuration.

    Args:
        rotary_dim: rotated channels of a head, where the configuration names them elsewhere.
        layer_type: whose frequencies to return, where layers of each type have their own; they must be default ones.

    Raises:
        ConfigError: its kind of rotary embedding is unknown or depends on the prompt's length, or a parameter is wrong.
    """
    parameters, prefix = config.rope_parameters, "config.json: rope_parameters."
    if layer_type is not None and isinstance(parameters, dict):
        parameters, prefix = parameters.get(layer_type), f"{prefix}{layer_type}."
    if not isinstance(parameters, dict):
        Fields(config).reject("rope_parameters", "an object" if layer_type is None else f"one with {layer_type!r}")
    rope, head_dim = Fields(parameters, prefix), read_head_dim(Fields(config))
    kind = rope.choice("rope_type", KINDS if layer_type is None else ["default"], default="default")
    theta = rope.number("rope_theta", at_least=1, at_most=1e15)
    if rotary_dim is None:
        rotary_dim = int(head_dim * rope.number("partial_rotary_factor", at_least=0, at_most=1, default=1.0))
    elif kind != "default":
        rope.reject("rope_type", "default beside a rotary_dim")
    if rotary_dim < 2 or rotary_dim % 2:
        rope.reject("partial_rotary_factor", f"such that an even number of a head's {head_dim} channels is rotated")
    if kind == "default":
        return RotaryFrequencies(default_frequencies(theta, rotary_dim), 1.0)
    try:
        inv_freq_F, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    except Exception as error:
        raise ConfigError(f"config.json: rope_parameters {config.rope_parameters}: {error!r}") from error
    if 2 * len(inv_freq_F) > head_dim or not inv_freq_F.isfinite().all() or not math.isfinite(attention_factor):
        Fields(config).reject("rope_parameters", f"such that at most {head_dim} channels have finite frequencies")
    return RotaryFrequencies(inv_freq_F.float(), attention_factor)
