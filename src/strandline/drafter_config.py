"""The ``config.json`` of a drafter: a small model with its own directory, which drafts for another model.

Source: drafters as published: DFlash (``DFlashDraftModel``) with Qwen3's fields and ``dflash_config``; EAGLE-3 with
Llama's or Qwen3's fields; both also in the format of the library speculators, which has those fields in a part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strandline.config_fields import MAX_LAYERS, MAX_SIZE, MAX_VOCAB, Fields, read_layer_types
from strandline.errors import ConfigError
from strandline.model_config import ModelConfig, parse_model_config, read_json_object

DFLASH: Final = "DFlashDraftModel"
EAGLE3_QWEN: Final = "Eagle3Qwen3ForCausalLM"
EAGLE3: Final = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", EAGLE3_QWEN)
METHODS: Final = {DFLASH: "dflash", **dict.fromkeys(EAGLE3, "eagle3")}
"""The method of ``--speculative-config`` for each supported architecture."""

UNSUPPORTED: Final = {
    "DFlash2DraftModel": "its layers have convolutions, and candidates are selected along a path",
    "DSparkDraftModel": "its drafts depend on the draft before them",
    "Qwen3DSparkModel": "its drafts depend on the draft before them",
}
"""Architectures of drafters that are known, and why they are not supported."""

SPECULATORS: Final = "speculators_model_type"
"""Field of the library speculators that names the method."""

UNSUPPORTED_SPECULATORS: Final = {
    "dflash2": "its layers have convolutions, and candidates are selected along a path",
    "dspark": "its drafts depend on the draft before them",
    "peagle": "it drafts all tokens in one pass",
}
"""Methods of the library speculators that are known, and why they are not supported."""

LAYER_TYPES: Final = ("full_attention", "sliding_attention")

DFLASH_FIELDS: Final = frozenset(
    {
        "attention_sink_bias",
        "attention_value_scale",
        "block_size",
        "causal",
        "mask_token_id",
        "sample_from_anchor",
        "swa_window_size",
        "target_layer_ids",
        "use_swa",
    }
)

MASK_EMBEDDING: Final = "mask_embedding.pt"


@dataclass(frozen=True, slots=True)
class BlockDrafterConfig:
    """What the configuration of a drafter of blocks says."""

    directory: Path
    text: Fields
    """All fields of its decoder, by Qwen3's names, with defaults."""
    dtype: Any
    """Dtype of the weights, as the file names it; None: it does not."""
    mask_token_id: int
    """Token in the position of each draft."""
    target_layers: tuple[int, ...]
    """Layers of the other model whose outputs it reads, in the order of the inputs of its first projection."""
    num_target_layers: int | None
    """Number of layers of that model; None: not given."""
    block_tokens: int
    """Tokens of a block in training, the last known token included."""
    windows: tuple[int | None, ...]
    """Per layer, the number of last tokens that a token attends to; None: all."""
    is_causal: tuple[bool, ...]
    """Per layer, whether a token of a block attends to no later ones."""
    draft_vocab_size: int | None
    """Number of tokens that it drafts; None: all."""
    may_copy_embedding: bool
    """Whether its files may have a copy of the model's embedding, which it was trained with."""


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """What the configuration of an EAGLE-3 drafter says."""

    directory: Path
    text: Fields
    """All fields of its layer, by Llama's names, with defaults."""
    dtype: Any
    """Dtype of the weights, as the file names it; None: it does not."""
    entered_layers: tuple[int, ...] | None
    """Layers of the other model whose inputs it reads, in the order of the inputs of its first projection; None: the
    third, the middle one and the third last."""
    draft_vocab_size: int | None
    """Number of tokens that it drafts; None: all."""
    has_norm_before_residual: bool
    """Whether the residual stream begins with the normalised hidden state."""
    has_head_norms: bool
    """Whether queries and keys are normalised, as Qwen3's are."""


DrafterConfig = BlockDrafterConfig | EagleConfig


def read_drafter_config(directory: Path, method: str) -> DrafterConfig:
    """Read the configuration of a drafter.

    Args:
        method: of ``--speculative-config``.

    Raises:
        ConfigError: it is missing, is of another method, or the drafter or a setting is not supported.
    """
    file = directory / "config.json"
    if not file.is_file():
        raise ConfigError(f"--speculative-config: {directory} has no config.json: is it the directory of a drafter?")
    values = read_json_object(file)
    if SPECULATORS in values:
        values = _as_plain(values, file)
    name = _find_architecture(values, file)
    if METHODS[name] != method:
        raise ConfigError(f"--speculative-config: {file} is of a drafter for method {METHODS[name]}, not {method}")
    outer = Fields(values, prefix=f"{file}: ")
    if values.get("quantization_config"):
        outer.reject("quantization_config", "null: drafters are supported with weights that are not quantised")
    family = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    if name in EAGLE3 and name != EAGLE3_QWEN:
        family = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    try:
        config = parse_model_config({**values, **family})
        kinds = read_layer_types(config.text, LAYER_TYPES)
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from error
    if name in EAGLE3:
        return _read_eagle(directory, outer, config, has_head_norms=name == EAGLE3_QWEN)
    return _read_block_drafter(directory, outer, config, kinds)


def _as_plain(values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return what a file of the library speculators says, in the fields that drafters have by themselves."""
    outer = Fields(values, prefix=f"{file}: ")
    kind, layer = values[SPECULATORS], outer.value("transformer_layer_config")
    if kind not in ("dflash", "eagle3"):
        reason = UNSUPPORTED_SPECULATORS.get(kind) if isinstance(kind, str) else None
        because = "" if reason is None else f": {reason}"
        raise ConfigError(f"{file}: {SPECULATORS} {kind!r} is not supported{because}; supported: dflash, eagle3")
    if not isinstance(layer, Mapping):
        outer.reject("transformer_layer_config", "an object")
    plain = {**layer, **{name: values[name] for name in ("dtype", "torch_dtype", SPECULATORS) if name in values}}
    if kind == "dflash":
        return {**plain, **_plain_block(outer)}
    copied = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_fc", "fc_norm", "norm_output")
    family = layer.get("model_type", "llama")
    return {
        **plain,
        **{name: values[name] for name in copied if name in values},
        "architectures": [EAGLE3_QWEN if family == "qwen3" else EAGLE3[1] if family == "llama" else family],
        "norm_before_residual": outer.flag("norm_before_residual", default=True),
    }


def _plain_block(outer: Fields) -> dict[str, Any]:
    layers = outer.list_of(
        "aux_hidden_state_layer_ids", lambda entries, name: entries.size(name, at_least=1, at_most=MAX_LAYERS)
    )
    # Layers are named by those after them.
    mask_token_id = outer.size("mask_token_id", at_least=0, at_most=MAX_VOCAB)
    block: dict[str, Any] = {"mask_token_id": mask_token_id, "target_layer_ids": [layer - 1 for layer in layers]}
    if outer.flag("sliding_window_non_causal", default=True):
        block["causal"] = False
    if outer.flag("sample_from_anchor", default=False):
        outer.reject("sample_from_anchor", "false")
    return {
        "architectures": [DFLASH],
        "block_size": outer.value("block_size"),
        "draft_vocab_size": outer.value("draft_vocab_size"),
        "dflash_config": block,
    }


def _read_eagle(directory: Path, outer: Fields, config: ModelConfig, *, has_head_norms: bool) -> EagleConfig:
    part = outer.value("eagle_config", {})
    if not isinstance(part, Mapping):
        outer.reject("eagle_config", "an object")
    eagle = Fields(part, prefix=f"{outer.prefix}eagle_config.")
    if not eagle.flag("use_aux_hidden_state", default=True):
        eagle.reject("use_aux_hidden_state", "true")
    for name in ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting"):
        if outer.value(name):
            outer.reject(name, "false")
    if outer.size("num_hidden_layers", at_most=MAX_LAYERS) != 1:
        outer.reject("num_hidden_layers", "1")
    name = "eagle_aux_hidden_state_layer_ids"
    holder = eagle if eagle.value(name) is not None else outer
    layers = None
    if holder.value(name) is not None:
        layers = holder.list_of(name, lambda entries, entry: entries.size(entry, at_most=MAX_LAYERS))
        if not layers or len(set(layers)) != len(layers):
            holder.reject(name, "one layer or more, each of them once")
    return EagleConfig(
        directory=directory,
        text=config.text,
        dtype=config.dtype,
        entered_layers=layers,
        draft_vocab_size=_read_draft_vocab_size(outer),
        has_norm_before_residual=outer.flag("norm_before_residual", default=False),
        has_head_norms=has_head_norms,
    )


def _read_draft_vocab_size(outer: Fields) -> int | None:
    return None if outer.value("draft_vocab_size") is None else outer.size("draft_vocab_size", at_most=MAX_VOCAB)


def _read_block_drafter(
    directory: Path, outer: Fields, config: ModelConfig, kinds: tuple[str, ...]
) -> BlockDrafterConfig:
    if (directory / MASK_EMBEDDING).is_file():
        raise ConfigError(f"{directory / MASK_EMBEDDING} is not supported: drafts use the model's own embedding")
    block = _read_block(outer)
    window = None
    if "sliding_attention" in kinds:
        window = outer.size("sliding_window", at_most=MAX_SIZE)
    return BlockDrafterConfig(
        directory=directory,
        text=config.text,
        dtype=config.dtype,
        mask_token_id=block.size("mask_token_id", at_least=0, at_most=MAX_VOCAB),
        target_layers=_read_target_layers(block),
        num_target_layers=_read_num_target_layers(outer),
        block_tokens=(outer if outer.value("block_size") is not None else block).size("block_size", at_least=2),
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        is_causal=_read_causality(outer, block, kinds),
        draft_vocab_size=_read_draft_vocab_size(outer),
        may_copy_embedding=outer.value(SPECULATORS) is not None,
    )


def _find_architecture(values: Mapping[str, Any], file: Path) -> str:
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if isinstance(name, str) and name in METHODS:
        return name
    reason = UNSUPPORTED.get(name) if isinstance(name, str) else None
    because = "" if reason is None else f": {reason}"
    raise ConfigError(
        f"{file}: a drafter with architectures {names!r} is not supported{because}; supported: {', '.join(METHODS)}"
    )


def _read_block(outer: Fields) -> Fields:
    """Return the fields of ``dflash_config``; those that change what is computed must have values that are known."""
    part = outer.value("dflash_config")
    if not isinstance(part, Mapping):
        outer.reject("dflash_config", "an object")
    unknown = sorted(part.keys() - DFLASH_FIELDS)
    block = Fields(part, prefix=f"{outer.prefix}dflash_config.")
    if unknown:
        block.reject(unknown[0], f"absent: known fields are {', '.join(sorted(DFLASH_FIELDS))}")
    for name in ("attention_sink_bias", "sample_from_anchor", "use_swa"):
        if block.flag(name, default=False):
            block.reject(name, "false")
    if block.number("attention_value_scale", at_least=0, at_most=1e6, default=1.0) != 1.0:
        block.reject("attention_value_scale", "1")
    if not outer.flag("is_neox_style", default=True):
        outer.reject("is_neox_style", "true")
    return block


def _read_target_layers(block: Fields) -> tuple[int, ...]:
    layers = block.list_of("target_layer_ids", lambda entries, name: entries.size(name, at_least=0, at_most=MAX_LAYERS))
    if not layers or len(set(layers)) != len(layers):
        block.reject("target_layer_ids", "one layer or more, each of them once")
    return layers


def _read_num_target_layers(outer: Fields) -> int | None:
    return None if outer.value("num_target_layers") is None else outer.size("num_target_layers", at_most=MAX_LAYERS)


def _read_causality(outer: Fields, block: Fields, kinds: tuple[str, ...]) -> tuple[bool, ...]:
    """Return each layer's causality: of all layers if the file says so; else sliding ones are causal."""
    for fields, name in ((outer, "is_causal"), (block, "causal")):
        if fields.value(name) is not None:
            return (fields.flag(name),) * len(kinds)
    return tuple(kind == "sliding_attention" for kind in kinds)
