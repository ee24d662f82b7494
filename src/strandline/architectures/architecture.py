"""What the ``config.json`` of an architecture may say: spellings of its fields, defaults, and what follows from others.

A field has one name here and in the builders. Published files may spell it otherwise, name kinds of layers otherwise,
give a pattern instead of a list, or leave fields out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from strandline.config_fields import MAX_LAYERS, MAX_SIZE, Fields

LAYER_KINDS: Final = {
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "mamba": "linear_attention",
    "qwen_sparse_attention": "indexed_attention",
}
"""Kinds of layers that files spell otherwise."""

NULL_IS_A_VALUE: Final = frozenset(
    {"eos_token_id", "linear_lower_bound", "mamba_d_ssm", "num_key_value_heads", "sliding_window", "time_step_limit"}
)
"""Fields whose null differs from their default; null elsewhere means that the field is not given."""

Values = Mapping[str, Any]
Read = Callable[[Fields], Values]


def nothing(fields: Fields) -> Values:
    """Return no values."""
    del fields
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionPart:
    """How to read the part of a ``config.json`` that is about pictures."""

    defaults: Values
    """Values of fields of ``vision_config`` that are not given."""
    outer_defaults: Values
    """Fields of the whole file that are about pictures, and their values where they are not given."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Other names of fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How to read the text part of an architecture's ``config.json``.

    Sizes that make a model what it is (hidden size, layers, heads, vocabulary) have no defaults.
    """

    model_types: tuple[str, ...]
    """Values of ``model_type``."""
    text_types: tuple[str, ...] = ()
    """Values of ``model_type`` of the text part, where that is another architecture's."""
    layer_types: Callable[[Fields], Sequence[str]]
    """Returns the kind of each layer, where the file does not list them."""
    defaults: Values
    """Values of fields that are not given. A model with ``rope_theta`` here embeds positions by rotation."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Other names of fields, as published or as saved by other releases; what they name replaces the field."""
    layer_kinds: Mapping[str, str] = field(default_factory=dict)
    """Kinds of layers that this architecture alone spells otherwise."""
    nulls: frozenset[str] = frozenset()
    """Fields whose null is a value in this architecture alone."""
    vision: VisionPart | None = None
    """How models with a vision tower describe it; None: theirs is not supported, or there are no such models."""
    unpack: Read = nothing
    """Returns values that replace those of the file, before defaults are filled in."""
    complete: Read = nothing
    """Returns values of fields that are not given, or ``auto``, from others; called when defaults are filled in."""

    def kind(self, spelled: Any) -> Any:
        """Return the one name of a kind of layer."""
        if not isinstance(spelled, str):
            return spelled
        return self.layer_kinds.get(spelled, LAYER_KINDS.get(spelled, spelled))


def num_layers(fields: Fields) -> int:
    """Return the number of layers, at most ``MAX_LAYERS``."""
    return fields.size("num_hidden_layers", at_most=MAX_LAYERS)


def all_layers(kind: str) -> Callable[[Fields], Sequence[str]]:
    """Return what gives all layers one kind."""
    return lambda fields: [kind] * num_layers(fields)


def every(period: int, kind: str, other: str, name: str | None = None) -> Callable[[Fields], Sequence[str]]:
    """Return what gives the last of every ``period`` layers one kind, and the others another.

    Args:
        name: the field that may give another period.
    """

    def layer_types(fields: Fields) -> list[str]:
        step = period if name is None else fields.size(name, at_most=MAX_LAYERS, default=period)
        return [other if (index + 1) % step else kind for index in range(num_layers(fields))]

    return layer_types


def listed(name: str, kind: str, other: str, *, default: str) -> Callable[[Fields], Sequence[str]]:
    """Return what gives the layers whose indices a field lists one kind, and the others another.

    Args:
        default: the kind of all layers where the field is not given.
    """

    def layer_types(fields: Fields) -> list[str]:
        if fields.value(name) is None:
            return [default] * num_layers(fields)
        chosen = set(indices(fields, name))
        return [kind if index in chosen else other for index in range(num_layers(fields))]

    return layer_types


def indices(fields: Fields, name: str) -> tuple[int, ...]:
    """Return a list of layers' indices."""
    return fields.list_of(name, lambda entries, entry: entries.size(entry, at_least=0, at_most=MAX_SIZE))


def first_layers_dense(num_dense: int, layers: int) -> list[str]:
    """Return the kind of each layer's feed-forward part: the first are dense, the others have experts."""
    return ["dense" if index < num_dense else "sparse" for index in range(layers)]


def spelled_by(fields: Fields, name: str, letters: Mapping[str, str]) -> list[str]:
    """Return the kinds that a pattern with a letter for each layer names."""
    pattern = fields.value(name)
    if not isinstance(pattern, str) or not set(pattern) <= set(letters):
        fields.reject(name, f"a text of the letters {', '.join(letters)}")
    return [letters[letter] for letter in pattern]


def mamba_head_dim(fields: Fields) -> Values:
    """Return the channels of a head of Mamba-2, as the other sizes give them."""
    heads = fields.size("mamba_n_heads")
    if fields.value("mamba_d_ssm") is not None:
        return {"mamba_d_head": fields.size("mamba_d_ssm") // heads}
    return {"mamba_d_head": fields.size("mamba_expand", at_most=MAX_SIZE) * fields.size("hidden_size") // heads}
