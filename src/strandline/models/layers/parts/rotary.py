"""The frequencies of rotary position embeddings, as configurations describe them.

Shape suffixes: F pairs of channels.

Source: Su et al., "RoFormer"; Peng et al., "YaRN", section 3; the Llama 3.1 release for ``llama3``; Gemma for
``proportional``.
"""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from strandline.config_fields import MAX_POSITION, Fields, read_head_dim, read_max_position
from strandline.kernels.rowwise.rotary import default_frequencies
from strandline.model_config import SCALED_FROM

RotaryTable = tuple[Tensor, Tensor]
"""Cosines and signed sines of the step's positions, as ``rotary.rotary_table`` returns them."""

MAX_THETA: Final = 1e15
MAX_FACTOR: Final = 1e6
BETA_FAST, BETA_SLOW = 32.0, 1.0
RAMP_EPS: Final = 1e-3
"""Width of a ramp whose ends coincide."""


class RotaryFrequencies(NamedTuple):
    """The angle per position of each pair of channels, and a factor of its cosine and sine."""

    inv_freq_F: Tensor
    attention_factor: float
    sections: tuple[int, int, int] = (11, 11, 10)
    """Pairs of time, height and width, in models of pictures."""


def rotary_frequencies(
    fields: Fields, *, rotary_dim: int | None = None, layer_type: str | None = None
) -> RotaryFrequencies:
    """Return the frequencies of a text configuration.

    Kinds whose angles depend on the prompt's length (``dynamic``, ``longrope``) are not supported: cached keys would be
    wrong.

    Args:
        rotary_dim: rotated channels of a head, where the configuration names them elsewhere.
        layer_type: whose frequencies to return, where layers of each type have their own.

    Raises:
        ConfigError: the kind of rotary embedding is not supported, or a parameter is wrong.
    """
    name = fields.name_in_file("rope_parameters")
    parameters, prefix = fields.value("rope_parameters"), f"config.json: {name}."
    if layer_type is not None and isinstance(parameters, dict):
        parameters, prefix = parameters.get(layer_type), f"{prefix}{layer_type}."
    if not isinstance(parameters, dict):
        fields.reject("rope_parameters", "an object" if layer_type is None else f"one with {layer_type!r}")
    rope, head_dim = Fields(parameters, prefix), read_head_dim(fields)
    kind = rope.choice("rope_type", list(SCALED), default="default")
    theta = rope.number("rope_theta", at_least=1, at_most=MAX_THETA)
    if rotary_dim is None:
        rotary_dim = int(head_dim * rope.number("partial_rotary_factor", at_least=0, at_most=1, default=1.0))
    elif kind != "default":
        rope.reject("rope_type", "default beside a rotary_dim")
    if rotary_dim < 2 or rotary_dim % 2:
        rope.reject("partial_rotary_factor", f"such that an even number of a head's {head_dim} channels is rotated")
    scaled = SCALED[kind](rope, fields, theta, rotary_dim)
    if not scaled.inv_freq_F.isfinite().all() or not math.isfinite(scaled.attention_factor):
        fields.reject("rope_parameters", f"such that at most {head_dim} channels have finite frequencies")
    return scaled if rope.value("mrope_section") is None else scaled._replace(sections=_read_sections(rope))


def _read_sections(rope: Fields) -> tuple[int, int, int]:
    sections = rope.list_of("mrope_section", lambda entries, entry: entries.size(entry, at_least=0))
    if len(sections) != 3 or not rope.flag("mrope_interleaved", default=True):
        rope.reject("mrope_section", "three numbers of pairs, with mrope_interleaved true")
    return sections


def _default(rope: Fields, fields: Fields, theta: float, rotary_dim: int) -> RotaryFrequencies:
    del rope, fields
    return RotaryFrequencies(default_frequencies(theta, rotary_dim), 1.0)


def _linear(rope: Fields, fields: Fields, theta: float, rotary_dim: int) -> RotaryFrequencies:
    """Return lower frequencies, as if positions were closer together."""
    del fields
    return RotaryFrequencies(default_frequencies(theta, rotary_dim) / _read_factor(rope), 1.0)


def _proportional(rope: Fields, fields: Fields, theta: float, rotary_dim: int) -> RotaryFrequencies:
    """Return the first of the frequencies of whole heads; the other channels are not rotated."""
    head_dim = read_head_dim(fields)
    inv_freq_F = default_frequencies(theta, head_dim) / _read_factor(rope, default=1.0)
    inv_freq_F[rotary_dim // 2 :] = 0
    return RotaryFrequencies(inv_freq_F, 1.0)


def _llama3(rope: Fields, fields: Fields, theta: float, rotary_dim: int) -> RotaryFrequencies:
    """Return lower frequencies for wavelengths near the original context's length, with a smooth transition."""
    del fields
    factor, trained = _read_factor(rope), rope.size(SCALED_FROM, at_most=MAX_POSITION)
    low = rope.number("low_freq_factor", at_least=1e-3, at_most=MAX_FACTOR)
    high = rope.number("high_freq_factor", at_least=1e-3, at_most=MAX_FACTOR)
    if high <= low:
        rope.reject("high_freq_factor", f"greater than low_freq_factor, {low:g}")
    inv_freq_F = default_frequencies(theta, rotary_dim)
    num_turns_F = trained * inv_freq_F / (2 * math.pi)
    share_F = ((num_turns_F - low) / (high - low)).clamp(0, 1)
    return RotaryFrequencies((1 - share_F) * inv_freq_F / factor + share_F * inv_freq_F, 1.0)


def _yarn(rope: Fields, fields: Fields, theta: float, rotary_dim: int) -> RotaryFrequencies:
    """Return lower frequencies for channels that turn rarely within the original context, with a linear transition."""
    if theta <= 1:
        rope.reject("rope_theta", f"a number above 1, at most {MAX_THETA:g}")
    trained = rope.size(SCALED_FROM, at_most=MAX_POSITION)
    factor = _read_factor(rope, default=read_max_position(fields) / trained)

    def channel(num_turns: float) -> float:
        return rotary_dim * math.log(trained / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = channel(_read_beta(rope, "beta_fast", BETA_FAST)), channel(_read_beta(rope, "beta_slow", BETA_SLOW))
    if rope.flag("truncate", default=True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first if last != first else RAMP_EPS
    share_F = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    inv_freq_F = default_frequencies(theta, rotary_dim)
    return RotaryFrequencies(
        inv_freq_F / factor * share_F + inv_freq_F * (1 - share_F), _read_attention_factor(rope, factor)
    )


def _read_attention_factor(rope: Fields, factor: float) -> float:
    if rope.value("attention_factor") is not None:
        return rope.number("attention_factor", at_least=0, at_most=MAX_FACTOR)

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    of_heads, of_all = (rope.number(x, at_least=0, at_most=100, default=0) for x in ("mscale", "mscale_all_dim"))
    return scale(of_heads) / scale(of_all) if of_heads and of_all else scale(1.0)


def _read_beta(rope: Fields, name: str, default: float) -> float:
    return rope.number(name, at_least=0, at_most=MAX_FACTOR, default=default) or default


def _read_factor(rope: Fields, default: float | None = None) -> float:
    return rope.number("factor", at_least=1e-3, at_most=MAX_FACTOR, default=default)


SCALED: Final[dict[str, Callable[[Fields, Fields, float, int], RotaryFrequencies]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "proportional": _proportional,
    "yarn": _yarn,
}
"""Returns the frequencies of each kind, given its parameters, the text configuration, theta and rotated channels."""
