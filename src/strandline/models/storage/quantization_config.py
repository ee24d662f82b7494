"""How the weights of a model are quantised, as ``quantization_config`` in its ``config.json`` announces it.

It says what one scale covers, not which tensors have scales: lists of exceptions in configurations are written for
other loaders' module names, and are wrong for some published models.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from strandline.config_fields import Fields
from strandline.errors import ConfigError
from strandline.model_config import ModelConfig
from strandline.models.storage.layouts import AWQ, GPTQ, LAYOUTS, PACKED_COMPRESSED, Layout, Packing

ORDERED: Final = ("group", "dynamic")
"""What ``actorder`` says if the group of each input is published."""


@dataclass(frozen=True, slots=True)
class Block:
    """What one scale covers; None: all rows, or all columns."""

    rows: int | None
    columns: int | None

    def __str__(self) -> str:
        if self.rows is None:
            return "one scale per tensor"
        return "one scale per channel" if self.columns is None else f"blocks of {self.rows} × {self.columns}"

    def grid(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Return how many scales a matrix has downwards and across."""
        return -(-num_rows // (self.rows or num_rows)), -(-num_columns // (self.columns or num_columns))


TENSOR: Final = Block(None, None)
CHANNEL: Final = Block(1, None)

MODELOPT: Final[Mapping[str, Block | Layout]] = {
    "FP8": TENSOR,
    "FP8_PER_CHANNEL_PER_TOKEN": CHANNEL,
    "FP8_PB_WO": Block(128, 128),
    "FP8_BLOCK_SCALES": Block(128, 128),
    **{algorithm: layout for layout in LAYOUTS for algorithm in layout.algorithms},
}
"""What one scale covers in FP8, or the layout of another format, by ``quant_algo``. Where activations may be quantised,
too, that is not needed."""

METHODS: Final = {layout.quant_method: layout for layout in LAYOUTS if layout.quant_method is not None}
"""Layouts by ``quant_method``."""

COMPRESSED_LAYOUTS: Final = {layout.compressed: layout for layout in LAYOUTS if layout.compressed is not None}
COMPRESSED: Final = {
    "float-quantized": ("float", 8),
    "pack-quantized": ("int", 4),
    **{format: ("float", layout.format.bits) for format, layout in COMPRESSED_LAYOUTS.items()},
}
"""Formats of compressed-tensors: type and bits of weights."""

MODELOPT_FILES: Final = "quantization_config in config.json, or hf_quant_config.json"
"""Where the recipe may be."""

MIXED: Final = "MIXED_PRECISION"
"""``quant_algo`` of a recipe that names one for each layer."""

KINDS: Final = {"float": "floats", "int": "integers"}

SUPPORTED: Final = (
    'quant_method "fp8" (e4m3, one scale per block, channel or tensor); "compressed-tensors" in format '
    + ", ".join(f'"{format}" ({bits}-bit {KINDS[kind]})' for format, (kind, bits) in COMPRESSED.items())
    + '; "gptq" (checkpoint_format "gptq" or "gptq_v2") and "awq" (version "gemm"), both with 4 bits; '
    + f'"modelopt" with quant_algo {", ".join(MODELOPT)}, or {MIXED} of these; '
    + "; ".join(f'"{method}"' for method in METHODS)
)


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """How a model's FP8 weights are scaled: each in one of these ways."""

    blocks: tuple[Block, ...]

    def __str__(self) -> str:
        return f"FP8 ({', '.join(map(str, self.blocks))})"


@dataclass(frozen=True, slots=True)
class FourBitScheme:
    """How a model's 4-bit weights are published: integers from 0 to 15, with zero points and scales per group."""

    packing: Packing
    group_sizes: tuple[int | None, ...]
    """Inputs that share a scale, in one of these ways; None: all inputs."""
    zero_offset: int = 0
    """What is added to published zero points."""
    has_zeros: bool = True
    """Whether zero points must be published; else weights without are symmetric."""
    is_ordered: bool = False
    """Whether the group of each input must be published; else those of weights without follow one another."""

    def __str__(self) -> str:
        sizes = ("one scale per channel" if size is None else f"groups of {size}" for size in self.group_sizes)
        return f"4 bits ({self.packing.name}, {', '.join(sizes)})"


Scheme = Fp8Scheme | FourBitScheme | Layout
"""How some of a model's weights are quantised."""


def read_schemes(config: ModelConfig) -> tuple[Scheme, ...]:
    """Return how the weights of a model are quantised; the files say which of them are, and in which of these ways.

    Raises:
        ConfigError: they are, in a way that is not supported.
    """
    values = config.quantization
    if values is None:
        return ()
    if not isinstance(values, Mapping):
        _reject("is no JSON object")
    return _read_schemes(values)


def _read_schemes(values: Mapping[str, Any]) -> tuple[Scheme, ...]:
    fields = Fields(values, "config.json: quantization_config.")
    match values.get("quant_method"):
        case "fp8":
            return (_read_fp8(fields),)
        case "compressed-tensors":
            return _read_compressed_tensors(values)
        case str(method) if method in METHODS:
            layout = METHODS[method]
            if fields.value("weight_block_size") not in (None, [1, layout.group]):
                fields.reject("weight_block_size", f"1 and {layout.group}, as {method} has it")
            return (layout,)
        case "gptq":
            _require_four_bits(values)
            format = fields.choice("checkpoint_format", ["gptq", "gptq_v2"], default="gptq")
            offset, is_ordered = 1 if format == "gptq" else 0, fields.flag("desc_act", default=False)
            return (FourBitScheme(GPTQ, (_read_group_size(fields),), offset, is_ordered=is_ordered),)
        case "awq":
            _require_four_bits(values)
            fields.choice("version", ["gemm", "GEMM"], default="gemm")
            return (FourBitScheme(AWQ, (_read_group_size(fields),)),)
        case str(method) if method.startswith("modelopt"):
            return _read_modelopt(values)
        case None if "quant_algo" in values or "quantization" in values:
            return _read_modelopt(values)  # as older releases of ModelOpt write it
        case method:
            _reject(f"quant_method {method!r} is not supported")


def _reject(fault: str, where: str = "config.json: quantization_config") -> NoReturn:
    raise ConfigError(f"{where}: {fault}; supported: {SUPPORTED}")


def _require_four_bits(values: Mapping[str, Any]) -> None:
    if values.get("bits", values.get("w_bit")) != 4:
        _reject(f"{values['quant_method']} with {values.get('bits', values.get('w_bit'))} bits is not supported")


def _read_group_size(fields: Fields) -> int | None:
    return None if fields.value("group_size") == -1 else fields.size("group_size")


def _read_fp8(fields: Fields) -> Fp8Scheme:
    fields.choice("fmt", ["e4m3"], default="e4m3")
    fields.choice("activation_scheme", ["dynamic", "static"], default="dynamic")
    if fields.value("weight_block_size") is None:
        return Fp8Scheme((CHANNEL, TENSOR))
    return Fp8Scheme((_read_block(fields, "weight_block_size"),))


def _read_modelopt(values: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """Return the schemes of all layers; none if weights are not quantised, but at most keys and values."""
    recipe = values.get("quantization", values)
    if not isinstance(recipe, Mapping) or "quant_algo" not in recipe:
        _reject("modelopt without quant_algo is not supported", MODELOPT_FILES)
    layers = {"": recipe["quant_algo"]}
    if str(recipe["quant_algo"]).upper() == MIXED:
        listed = recipe.get("quantized_layers")
        if not isinstance(listed, Mapping) or not all(isinstance(layer, Mapping) for layer in listed.values()):
            fault = f"quantized_layers of {MIXED} must be an object of objects, got {reprlib.repr(listed)}"
            _reject(fault, MODELOPT_FILES)
        layers = {f" of {name}": layer.get("quant_algo") for name, layer in listed.items()}
    named = {layer: algorithm for layer, algorithm in layers.items() if algorithm is not None}
    for layer, algorithm in named.items():
        if str(algorithm).upper() not in MODELOPT:
            _reject(f"quant_algo {algorithm!r}{layer} is not supported", MODELOPT_FILES)
    found = dict.fromkeys(MODELOPT[str(algorithm).upper()] for algorithm in named.values())
    blocks = tuple(block for block in found if isinstance(block, Block))
    in_fp8 = (Fp8Scheme(blocks),) if blocks else ()
    return (*in_fp8, *(layout for layout in found if not isinstance(layout, Block)))


def _read_block(fields: Fields, name: str) -> Block:
    sizes = fields.list_of(name, lambda entries, entry: entries.size(entry))
    if len(sizes) != 2:
        fields.reject(name, "two sizes, rows and columns")
    return Block(*sizes)


def _read_compressed_tensors(values: Mapping[str, Any]) -> tuple[Scheme, ...]:
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        _reject("config_groups names no group of weights")
    by_format = dict[str, list[Fields]]()
    for name, group in groups.items():
        format, fields = _check_group(name, group, values)
        by_format.setdefault(format, []).append(fields)
    return tuple(_read_compressed(format, fields) for format, fields in by_format.items())


def _read_compressed(format: str, groups: list[Fields]) -> Scheme:
    """Return the scheme of those groups of weights that have a format."""
    match format:
        case "float-quantized":
            return Fp8Scheme(tuple(dict.fromkeys(map(_read_float_group, groups))))
        case "pack-quantized":
            has_zeros = not any(group.flag("symmetric", default=True) for group in groups)
            is_ordered = all(group.value("actorder") in (True, *ORDERED) for group in groups)
            sizes = tuple(dict.fromkeys(map(_read_group, groups)))
            return FourBitScheme(PACKED_COMPRESSED, sizes, has_zeros=has_zeros, is_ordered=is_ordered)
    layout = COMPRESSED_LAYOUTS[format]
    for group in groups:
        if group.size("group_size", default=layout.group) != layout.group:
            group.reject("group_size", f"{layout.group}, as {format} has it")
    return layout


def format_of_group(group: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """Return the format of a group of weights of ``compressed-tensors``: its own, or that of all."""
    return group.get("format") or values.get("format")


def _check_group(name: str, group: Any, values: Mapping[str, Any]) -> tuple[str, Fields]:
    """Return the format of a group of weights, and what it says of them."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        _reject(f"config_groups.{name} names no weights")
    format = format_of_group(group, values)
    kind = (weights.get("type"), weights.get("num_bits"))
    if not isinstance(format, str) or COMPRESSED.get(format) != kind:
        _reject(f"config_groups.{name} has format {format!r} and {kind[1]}-bit weights of type {kind[0]!r}")
    return format, Fields(weights, f"config.json: quantization_config.config_groups.{name}.weights.")


def _read_group(fields: Fields) -> int | None:
    strategy = fields.choice("strategy", ["group", "channel"], default="group")
    return None if strategy == "channel" else _read_group_size(fields)


def _read_float_group(fields: Fields) -> Block:
    strategy = fields.choice("strategy", ["block", "channel", "tensor"], default="tensor")
    if strategy == "block":
        return _read_block(fields, "block_structure")
    return CHANNEL if strategy == "channel" else TENSOR
