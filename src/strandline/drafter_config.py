"""The ``config.json`` of a drafter: a small model with its own directory, which drafts for another model.

Source: drafters as published: DFlash, DFlash2 and DSpark with Qwen3's fields and ``dflash_config``; EAGLE-3 with
Llama's or Qwen3's fields; all but DFlash2 also in the format of the library speculators, which has those fields in a
part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strandline.config_fields import MAX_LAYERS, MAX_SIZE, MAX_VOCAB, Fields, read_layer_types
from strandline.errors import ConfigError
from strandline.model_config import ModelConfig, parse_model_config, read_json_object

DFLASH: Final = "DFlashDraftModel"
DFLASH2: Final = "DFlash2DraftModel"
DSPARK: Final = ("DSparkDraftModel", "Qwen3DSparkModel")
EAGLE3_QWEN: Final = "Eagle3Qwen3ForCausalLM"
EAGLE3: Final = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", EAGLE3_QWEN)
METHODS: Final = {
    **dict.fromkeys((DFLASH, DFLASH2), "dflash"),
    **dict.fromkeys(DSPARK, "dspark"),
    **dict.fromkeys(EAGLE3, "eagle3"),
}
"""The method of ``--speculative-config`` for each supported architecture."""

SPECULATORS: Final = "speculators_model_type"
"""Field of the library speculators that names the method."""

SPECULATORS_METHODS: Final = ("dflash", "dspark", "eagle3")

UNSUPPORTED_SPECULATORS: Final = {"peagle": "it drafts all tokens in one pass"}
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

DFLASH2_FIELDS: Final = frozenset(
    {
        "conv_group_size",
        "conv_kernel_size",
        "final_logit_softcapping",
        "input_embedding_scale",
        "output_multiplier",
        "selector_rank",
        "selector_top_k",
    }
)

DSPARK_FIELDS: Final = frozenset(
    {
        "attention_mode",
        "confidence_head_alpha",
        "confidence_head_with_markov",
        "enable_confidence_head",
        "markov_head_type",
        "markov_rank",
        "num_target_layers",
        "projector_type",
    }
)
"""Those that may also be outside ``dflash_config``, as the others of DSpark."""

MAX_TAPS: Final = 16
MAX_CANDIDATES: Final = 1024

MASK_EMBEDDING: Final = "mask_embedding.pt"


@dataclass(frozen=True, slots=True)
class MarkovConfig:
    """A term of a draft's logits for each token that may be before it (DSpark)."""

    rank: int


@dataclass(frozen=True, slots=True)
class SelectorConfig:
    """A choice among a draft's likeliest tokens by the token before it (DFlash2)."""

    rank: int
    num_candidates: int
    multiplier: float
    """Scales logits."""
    soft_cap: float | None
    """Limit of the size of scaled logits, approached smoothly; None: they are not limited."""


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
    most_drafts: int
    """Drafts of a block in training."""
    first_draft_row: int
    """The row of a block that predicts its first draft. 1: each mask's predicts the token in its position; 0: each row
    predicts the next token."""
    chain: MarkovConfig | SelectorConfig | None
    """How a draft depends on the one before it; None: it does not."""
    convolution: tuple[int, int] | None
    """Taps, and channels of a group, of convolutions around the parts of its layers; None: it has none."""
    confidence_inputs: int
    """Features that the chance of acceptance is estimated from, if its files have this estimate, which is not used."""
    embedding_scale: float
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
        method: method of ``--speculative-config``.

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
    return _read_block_drafter(directory, outer, config, kinds, name)


def _as_plain(values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return what a file of the library speculators says, in the fields that drafters have by themselves."""
    outer = Fields(values, prefix=f"{file}: ")
    kind, layer = values[SPECULATORS], outer.value("transformer_layer_config")
    if kind not in SPECULATORS_METHODS:
        reason = UNSUPPORTED_SPECULATORS.get(kind) if isinstance(kind, str) else None
        because = "" if reason is None else f": {reason}"
        names = ", ".join(SPECULATORS_METHODS)
        raise ConfigError(f"{file}: {SPECULATORS} {kind!r} is not supported{because}; supported: {names}")
    if not isinstance(layer, Mapping):
        outer.reject("transformer_layer_config", "an object")
    plain = {**layer, **{name: values[name] for name in ("dtype", "torch_dtype", SPECULATORS) if name in values}}
    if kind != "eagle3":
        return {**plain, **_plain_block(outer, is_dspark=kind == "dspark")}
    copied = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_fc", "fc_norm", "norm_output")
    family = layer.get("model_type", "llama")
    return {
        **plain,
        **{name: values[name] for name in copied if name in values},
        "architectures": [EAGLE3_QWEN if family == "qwen3" else EAGLE3[1] if family == "llama" else family],
        "norm_before_residual": outer.flag("norm_before_residual", default=True),
    }


def _plain_block(outer: Fields, *, is_dspark: bool) -> dict[str, Any]:
    layers = outer.list_of(
        "aux_hidden_state_layer_ids", lambda entries, name: entries.size(name, at_least=1, at_most=MAX_LAYERS)
    )
    # Layers are named by those after them.
    mask_token_id = outer.size("mask_token_id", at_least=0, at_most=MAX_VOCAB)
    block: dict[str, Any] = {"mask_token_id": mask_token_id, "target_layer_ids": [layer - 1 for layer in layers]}
    if outer.flag("sliding_window_non_causal", default=True):
        block["causal"] = False
    block["sample_from_anchor"] = outer.flag("sample_from_anchor", default=is_dspark)
    if is_dspark:
        block["markov_rank"] = outer.size("markov_rank", at_least=0, default=256)
        block["markov_head_type"] = outer.value("markov_head_type", "vanilla")
        block["confidence_head_with_markov"] = outer.flag("confidence_head_with_markov", default=True)
    return {
        "architectures": [DSPARK[0] if is_dspark else DFLASH],
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
    directory: Path, outer: Fields, config: ModelConfig, kinds: tuple[str, ...], name: str
) -> BlockDrafterConfig:
    if (directory / MASK_EMBEDDING).is_file():
        raise ConfigError(f"{directory / MASK_EMBEDDING} is not supported: drafts use the model's own embedding")
    block = _read_block(outer, name)
    window = None
    if "sliding_attention" in kinds:
        window = outer.size("sliding_window", at_most=MAX_SIZE)
    chain = _read_markov(block) if name in DSPARK else _read_selector(block) if name == DFLASH2 else None
    block_tokens = (outer if outer.value("block_size") is not None else block).size("block_size", at_least=2)
    first_draft_row = 0 if block.flag("sample_from_anchor", default=name in DSPARK) else 1
    size, joins_markov = outer.size("hidden_size"), block.flag("confidence_head_with_markov", default=False)
    return BlockDrafterConfig(
        directory=directory,
        text=config.text,
        dtype=config.dtype,
        mask_token_id=block.size("mask_token_id", at_least=0, at_most=MAX_VOCAB),
        target_layers=_read_target_layers(block),
        num_target_layers=_read_num_target_layers(block if block.value("num_target_layers") is not None else outer),
        most_drafts=block_tokens - first_draft_row,
        first_draft_row=first_draft_row,
        chain=chain,
        convolution=_read_convolution(block, size) if name == DFLASH2 else None,
        confidence_inputs=size + (chain.rank if chain is not None and joins_markov else 0),
        embedding_scale=block.number("input_embedding_scale", at_least=0, at_most=1e6, default=1.0),
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        is_causal=_read_causality(outer, block, kinds),
        draft_vocab_size=_read_draft_vocab_size(outer),
        may_copy_embedding=outer.value(SPECULATORS) is not None,
    )


def _read_markov(block: Fields) -> MarkovConfig | None:
    block.choice("markov_head_type", ["vanilla"], default="vanilla")
    block.choice("projector_type", ["dspark"], default="dspark")
    block.choice("attention_mode", ["gqa"], default="gqa")
    rank = block.size("markov_rank", at_least=0)
    return MarkovConfig(rank) if rank else None


def _read_selector(block: Fields) -> SelectorConfig:
    soft_cap = block.number("final_logit_softcapping", at_least=0, at_most=1e6, default=0.0)
    return SelectorConfig(
        block.size("selector_rank"),
        block.size("selector_top_k", at_most=MAX_CANDIDATES),
        block.number("output_multiplier", at_least=0, at_most=1e6, default=1.0),
        soft_cap or None,
    )


def _read_convolution(block: Fields, hidden_size: int) -> tuple[int, int]:
    taps, group_size = block.size("conv_kernel_size", at_most=MAX_TAPS), block.size("conv_group_size")
    if hidden_size % group_size:
        block.reject("conv_group_size", f"a divisor of hidden_size, {hidden_size}")
    return taps, group_size


def _find_architecture(values: Mapping[str, Any], file: Path) -> str:
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if isinstance(name, str) and name in METHODS:
        return name
    raise ConfigError(
        f"{file}: a drafter with architectures {names!r} is not supported; supported: {', '.join(METHODS)}"
    )


def _read_block(outer: Fields, name: str) -> Fields:
    """Return the fields of ``dflash_config``; those that change what is computed must have values that are known."""
    part, known = outer.value("dflash_config", {} if name in DSPARK else None), DFLASH_FIELDS
    if not isinstance(part, Mapping):
        outer.reject("dflash_config", "an object")
    prefix = f"{outer.prefix}dflash_config."
    if name == DFLASH2:
        known |= DFLASH2_FIELDS
    elif name in DSPARK:
        known |= DSPARK_FIELDS
        outside = {field: outer.value(field) for field in known if outer.value(field) is not None}
        part, prefix = {**outside, **part}, prefix if part else outer.prefix
    unknown = sorted(part.keys() - known)
    block = Fields(part, prefix=prefix)
    if unknown:
        block.reject(unknown[0], f"absent: known fields are {', '.join(sorted(known))}")
    for flag in ("attention_sink_bias", "use_swa"):
        if block.flag(flag, default=False):
            block.reject(flag, "false")
    if block.number("attention_value_scale", at_least=0, at_most=1e6, default=1.0) != 1.0:
        block.reject("attention_value_scale", "1")
    for flag in ("is_neox_style", "rope_is_neox_style"):
        if not outer.flag(flag, default=True):
            outer.reject(flag, "true")
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
