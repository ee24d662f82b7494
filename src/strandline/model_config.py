"""A model's ``config.json``, as the description of its architecture reads it (``architectures/``).

No class of another library is involved: what a release of one calls its fields has no influence.
"""

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from strandline.architectures.architecture import NULL_IS_A_VALUE, Architecture, VisionPart
from strandline.architectures.supported import SUPPORTED
from strandline.config_fields import Fields
from strandline.errors import ConfigError
from strandline.file_forms import unread_weights, why_unreadable
from strandline.text_input import ENCODING

ARCHITECTURES: Final = tuple(SUPPORTED)
"""Supported architectures. ``models/registry.py`` has a builder for each; this list can be checked without torch."""

QUANTIZATION_CONFIG: Final = "hf_quant_config.json"
"""Where NVIDIA's ModelOpt says how weights are quantised, in older models instead of ``config.json``."""

NEAREST_BY_LAYERS: Final = {
    "BailingMoeV2_5": "KimiLinearForCausalLM",  # a linear attention beside latent attention
    "DeepseekV2": "KimiLinearForCausalLM",  # latent attention, experts
    "DeepseekV3": "KimiLinearForCausalLM",  # the same
    "Mistral": "LlamaForCausalLM",
}
"""Unsupported families whose layers resemble those of a family with another name."""

FLOAT_TAG: Final = "__float__"
FLOATS: Final = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
"""Numbers that JSON lacks, as objects with this one key: ``{"__float__": "Infinity"}``."""

TEXT_PARTS: Final = ("text_config", "llm_config")
"""What files call the part that is about text; the latter NVIDIA's."""

LAYER_LISTS: Final = ("layer_types", "mtp_layers_block_type")
NOT_GIVEN: Final = (None, "auto")

SCALED_FROM: Final = "original_max_position_embeddings"
SCALED_ROPE: Final = ("llama3", "yarn")
"""Kinds of rotary embedding that need the context length of the original training."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a ``config.json`` says of the model."""

    architecture: str
    """One of ``ARCHITECTURES``."""
    text: Fields
    """All fields of the text part, by one name each, with the architecture's defaults."""
    dtype: Any
    """Dtype of the weights, as the file names it; None: it does not."""
    quantization: Any
    """The ``quantization_config``, as it is in the file, or what stands for it in another; None: neither has one."""
    vision: Fields | None = None
    """All fields about pictures, by one name each, with defaults; None: the model has no vision tower, or one that is
    not supported."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ConfigError: it cannot be read, or is not a JSON object.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    return parse_json_object(content, path)


def parse_json_object(content: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds; raises as ``read_json_object``."""
    try:
        values = json.loads(content.decode(ENCODING))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {why_unreadable(path, error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be a JSON object, got {reprlib.repr(values)}")
    return values


def decode_floats(value: Any) -> Any:
    """Return a JSON value with ``{"__float__": …}`` replaced by numbers, at any depth."""
    if isinstance(value, list):
        return [decode_floats(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    tag = value[FLOAT_TAG] if value.keys() == {FLOAT_TAG} else None
    if isinstance(tag, str) and tag in FLOATS:
        return FLOATS[tag]
    return {name: decode_floats(entry) for name, entry in value.items()}


def read_model_config(path: Path) -> ModelConfig:
    """Read a ``config.json``, given by its own path or that of its directory; raises as ``parse_model_config``.

    Raises:
        ConfigError: it is missing, or it or the recipe beside it is not a JSON object.
    """
    config, recipe = parse_model_config(_read_file(path)), read_recipe(path if path.is_dir() else path.parent)
    return config if config.quantization is not None else replace(config, quantization=recipe)


def read_recipe(directory: Path) -> dict[str, Any] | None:
    """Return ``hf_quant_config.json`` as the ``quantization_config`` that it stands for; None: there is no such file.

    Raises:
        ConfigError: it is not a JSON object.
    """
    file = directory / QUANTIZATION_CONFIG
    return {"quant_method": "modelopt", **read_json_object(file)} if file.is_file() else None


def parse_model_config(values: Mapping[str, Any]) -> ModelConfig:
    """Read the contents of a ``config.json``.

    Raises:
        ConfigError: the architecture is not supported, or a field that others are computed from is wrong.
    """
    values = decode_floats(values)
    name = find_architecture(values.get("architectures"), values.get("model_type"))
    architecture, outer = SUPPORTED[name], Fields(values)
    if outer.value("model_type") is not None:
        outer.choice("model_type", architecture.model_types)
    parts = [_text_part(architecture, outer, values), values]

    def first(*names: str) -> Any:
        return next((part[name] for part in parts for name in names if part.get(name) is not None), None)

    shared = {"eos_token_id": first("eos_token_id")}
    if values.get("tie_word_embeddings") is not None:
        shared["tie_word_embeddings"] = values["tie_word_embeddings"]
    text = _read_text(architecture, parts[0], {name: value for name, value in shared.items() if value is not None})
    quantization = values.get("quantization_config") or parts[0].get("quantization_config")
    vision = None if architecture.vision is None else _read_vision(architecture.vision, outer, values)
    return ModelConfig(name, text, first("dtype", "torch_dtype"), quantization or None, vision)


def _text_part(architecture: Architecture, outer: Fields, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a multimodal model's configuration that is about text, or all of another's."""
    name = next((name for name in TEXT_PARTS if outer.value(name) is not None), None)
    if name is None:
        return values
    part = outer.value(name)
    if not isinstance(part, Mapping):
        outer.reject(name, "an object")
    text = Fields(part, f"{outer.prefix}{name}.")
    if text.value("model_type") is not None:
        text.choice("model_type", [*architecture.text_types, *architecture.model_types])
    return part


def _read_vision(vision: VisionPart, outer: Fields, values: Mapping[str, Any]) -> Fields | None:
    """Return the fields about pictures, complete; None: there is no such part, or the file says that it is not used."""
    part = outer.value("vision_config")
    if part is None or outer.flag("language_model_only", default=False):
        return None
    if not isinstance(part, Mapping):
        outer.reject("vision_config", "an object")
    given = {name: value for name, value in part.items() if value is not None}
    spelled = {name: spelling for spelling, name in vision.spellings.items() if spelling in given}
    given |= {name: given[spelling] for name, spelling in spelled.items()}
    own = {**vision.defaults, **given}
    about_all = {name: outer.value(name, default) for name, default in vision.outer_defaults.items()}
    return Fields({**own, **about_all}, spelled={name: f"vision_config.{spelled.get(name, name)}" for name in own})


def _read_text(architecture: Architecture, part: Mapping[str, Any], shared: Mapping[str, Any]) -> Fields:
    """Return the fields of the text part, complete.

    Args:
        shared: values of the whole file that replace those of the part.
    """
    nulls = NULL_IS_A_VALUE | architecture.nulls
    given = {name: value for name, value in {**part, **shared}.items() if value is not None or name in nulls}
    spelled = {name: spelling for spelling, name in architecture.spellings.items() if spelling in given}
    values = {**given, **{name: given[spelling] for name, spelling in spelled.items()}}
    if values.get("rope_scaling"):
        values["rope_parameters"], spelled["rope_parameters"] = values["rope_scaling"], "rope_scaling"
    fields = Fields(values, spelled=spelled)
    if fields.value("per_layer_config"):
        fields.reject("per_layer_config", "null: layers of one kind have the same sizes")
    values.update(architecture.unpack(fields))
    for name, value in architecture.defaults.items():
        values.setdefault(name, value)
    if values.get("num_key_value_heads") is None and "num_attention_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if values.get("layer_types") is None:
        values["layer_types"] = list(architecture.layer_types(fields))
    completed = architecture.complete(fields)
    values.update({name: value for name, value in completed.items() if values.get(name) in NOT_GIVEN})
    for name in LAYER_LISTS:
        if isinstance(values.get(name), list | tuple):
            values[name] = [architecture.kind(kind) for kind in values[name]]
    if "rope_theta" in architecture.defaults:
        values["rope_parameters"] = _read_rope(fields)
    return fields


def _read_rope(fields: Fields) -> dict[str, Any]:
    """Return the parameters of the rotary embedding, where older files have them in several fields.

    Null as ``rope_theta`` among the parameters stays: it means that positions are not embedded.
    """
    parameters = {} if fields.value("rope_parameters") is None else fields.value("rope_parameters")
    if not isinstance(parameters, Mapping):
        fields.reject("rope_parameters", "an object")
    rope = {name: value for name, value in parameters.items() if value is not None or name == "rope_theta"}
    rope.setdefault("rope_theta", fields.value("rope_theta"))
    if fields.value("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", fields.value("partial_rotary_factor"))
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] in SCALED_ROPE:
        trained = fields.value(SCALED_FROM)
        rope[SCALED_FROM] = (
            rope.get(SCALED_FROM, fields.value("max_position_embeddings")) if trained is None else trained
        )
    return rope


def _read_file(path: Path) -> dict[str, Any]:
    file = path if path.is_file() else path / "config.json"
    if not file.is_file():
        instead = unread_weights(path) or "is it a model directory in Hugging Face layout?"
        raise ConfigError(f"{path} has no config.json: {instead}")
    return read_json_object(file)


def check_architecture(path: Path) -> None:
    """Check that a ``config.json`` names a supported architecture; reads nothing else.

    Raises:
        ConfigError: the architecture is unsupported, or the file is missing.
    """
    values = _read_file(path)
    find_architecture(values.get("architectures"), values.get("model_type"))


def find_architecture(names: Sequence[str] | None, model_type: Any = None) -> str:
    """Return the first of a model's ``architectures`` that is supported; without names the one of its ``model_type``.

    Raises:
        ConfigError: none is supported; the message lists the supported ones and the nearest: by its layers where they
            are known, else by name.
    """
    if not (names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names))):
        raise ConfigError(f"config.json: architectures is {names!r:.100}; it must be a list of names")
    if not names:
        names = [name for name, architecture in SUPPORTED.items() if model_type in architecture.model_types]
    for name in names:
        if name in ARCHITECTURES:
            return name
    asked = ", ".join(names) or "no architecture"
    nearest = f"; the nearest is {_find_nearest(names[0])}" if names else ""
    raise ConfigError(f"the model's configuration names {asked}; supported: {', '.join(ARCHITECTURES)}{nearest}")


def _find_nearest(name: str) -> str:
    """Return the supported architecture with similar layers, or else with the most similar name.

    The suffix that all names share is ignored.
    """
    family = name.partition("For")[0]
    if family in NEAREST_BY_LAYERS:
        return NEAREST_BY_LAYERS[family]
    families = {architecture.partition("For")[0]: architecture for architecture in reversed(ARCHITECTURES)}
    return families[get_close_matches(family, families, n=1, cutoff=0)[0]]
