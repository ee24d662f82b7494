"""The names of published tensors: prefixes of wrapped models, and tensors that no model here computes with.

What is recognised here may be in the files of any model. A family's own tensors, used or not, are its targets; whatever
neither knows is an error (``weights.py``).
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from strandline.errors import WeightsError

WRAPPERS: Final = re.compile(r"(model\.)?language_model\.")
"""What models with towers put before the names of their text part."""

DRAFT_PREFIXES: Final = ("mtp.", "model.mtp.")
"""Prefixes of draft layers, for models that are loaded without them."""

TOWERS: Final = (
    "visual",
    "vision_tower",
    "vision_model",
    "vision_encoder",
    "vision_projection",
    "vision_final_layernorm",
    "vision_projector",
    "multi_modal_projector",
    "mm_projector",
    "merger",
    "mlp1",
    "audio",
    "audio_tower",
    "audio_model",
    "audio_encoder",
    "embed_audio",
    "time_series",
    "sound_encoder",
    "sound_projection",
)
"""Parts of models that also read images or audio: towers, and what projects their outputs."""

BUFFERS: Final = {
    "rotary_emb.*": re.compile(
        r"(?:.*\.)?rotary(?:_pos)?_emb\.(?:(?:\w+_)?(?:original_)?inv_freq|_?(?:cos|sin)_cached)"
    ),
    "image_newline": re.compile(r"(?:model\.)?image_newline"),
    "position_ids": re.compile(r"(?:.*\.)?position_ids"),
    "attn.masked_bias": re.compile(r".*\.(?:self_)?att(?:n|ention)\.masked_bias"),
    "_extra_state": re.compile(r".*\._extra_state"),
}
"""Single tensors without use: buffers that older releases and trainers saved, which follow from the configuration."""

CAUSAL_MASK: Final = re.compile(r".*\.(?:self_)?att(?:n|ention)\.bias")
"""Name of a causal mask, ``[1, 1, N, N]``; with another shape a tensor of this name is a bias."""

ATTENTION_SCALES: Final = re.compile(r".*\.layers\.\d+\.(?:self_attn|mixer)\.(?:\w+\.)?(?:q|prob)_scale")
"""Scales of queries and of probabilities, for attention that is computed in FP8."""


EXPERTS_PART: Final = re.compile(r"(.*\.w(?:13|2)_)weight\.(\w+)")
"""A part of a quantised weight of experts in one tensor, published as if that tensor were a module (Inkling)."""

EXPERTS_PARTS: Final = {
    "scale": "weight_scale",
    "scale2": "weight_scale_2",
    "input_amax": "input_scale",
    "original_shape": "weight_shape",
    "weight_packed": "weight_packed",
    "weight_scale": "weight_scale",
    "weight_shape": "weight_shape",
    "weight_global_scale": "weight_global_scale",
    "input_global_scale": "input_global_scale",
}
"""What such a part is called where the tensor is the weight of a module."""


def text_name(name: str) -> str:
    """Return the name that a tensor has in a model of text alone, and its usual name if it is a part of experts."""
    found = WRAPPERS.match(name)
    name = name if found is None else (found[1] or "") + name[found.end() :]
    part = EXPERTS_PART.fullmatch(name)
    return name if part is None or part[2] not in EXPERTS_PARTS else part[1] + EXPERTS_PARTS[part[2]]


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Return published names by those in a model of text alone.

    Raises:
        WeightsError: two have the same.
    """
    found = dict[str, str]()
    for name in names:
        first = found.setdefault(text_name(name), name)
        if first != name:
            raise WeightsError(f"{first} and {name} are both published: which of them is the model's?")
    return found


def skipped_prefixes(*own: str) -> tuple[str, ...]:
    """Return prefixes of tensors that may be unused: those of all models and a family's own."""
    return (*DRAFT_PREFIXES, *(f"{outer}{tower}." for outer in ("model.", "") for tower in TOWERS), *own)


def find_skipped(name: str, shape: Sequence[int], prefixes: Sequence[str]) -> str | None:
    """Return a short name of what a tensor belongs to if a model that does not know it can do without; else None."""
    prefix = next(filter(name.startswith, prefixes), None)
    if prefix is not None:
        return prefix
    if CAUSAL_MASK.fullmatch(name) and len(shape) == 4 and shape[0] == shape[1] == 1 and shape[2] == shape[3]:
        return "attn.bias"
    if ATTENTION_SCALES.fullmatch(name):
        return "attention scales"
    return next((what for what, pattern in BUFFERS.items() if pattern.fullmatch(name)), None)
