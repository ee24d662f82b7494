"""Loading of a drafter from its own directory."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from strandline.drafter_config import BlockDrafterConfig, DrafterConfig, EagleConfig
from strandline.errors import ConfigError, WeightsError
from strandline.models.drafters.block_drafter import BlockDrafter, check_target
from strandline.models.drafters.draft_head import DraftHead
from strandline.models.drafters.eagle_drafter import EagleDrafter
from strandline.models.families.causal_lm import CausalLM, OwnDrafter
from strandline.models.layers.parts.site import Site
from strandline.models.layers.parts.targets import Target
from strandline.models.model_options import AS_PUBLISHED, ModelOptions
from strandline.models.storage.finite_weights import LoadedWeight, find_non_finite
from strandline.models.storage.published import PlainWeight
from strandline.models.storage.random_weights import fill_with_random_weights, names_of_parameters
from strandline.models.storage.weights_files import WeightsFile, open_files
from strandline.models.weights import FROM_FILES, FillOptions, first_names

TOKEN_OFFSETS = "d2t"
"""Tensor of a token's id less its index among those that are drafted."""
COPIES = {"verifier_norm.weight", "verifier_lm_head.weight"}
"""Copies of the model's tensors that the library speculators may save."""


def load_drafter(
    model: CausalLM,
    config: DrafterConfig,
    options: ModelOptions = AS_PUBLISHED,
    filling: FillOptions = FROM_FILES,
) -> None:
    """Load a drafter and add it to the model that it drafts for, in that model's dtype and on its shard.

    Args:
        options: the model's; of these, the device and the dtype of keys and values hold for the drafter, too.
        filling: the model's; of these, the format, the seed and ``allows_non_finite`` do.

    Raises:
        ConfigError: a setting is not supported, or the drafter was made for another model.
        WeightsError: a file or tensor is missing, unreadable, unexpected or misshapen.
    """
    site = Site(model.decoder.dtype, options.device, model.decoder.shard)
    with ExitStack() as stack:
        is_dummy = filling.load_format == "dummy"
        files = [] if is_dummy else open_files(config.directory, stack)
        holders = {name: file for file in files for name in file.names()}
        names = _random_names(model, config) if is_dummy else frozenset(holders)
        drafter = _build(model, config, names, site)
        if is_dummy:
            fill_with_random_weights(drafter, names_of_parameters(drafter), filling.seed, site.dtype)
        else:
            targets = _fill(drafter, config.directory, holders, site.dtype)
            loaded = (LoadedWeight(holders[name].path, name, target) for name, target in targets.items())
            filling.report_non_finite(find_non_finite(drafter.parameters(), loaded))
    model.add_drafter(drafter.eval())
    if options.kv_cache_dtype is not None:
        model.use_kv_cache_dtype(options.kv_cache_dtype)


def _random_names(model: CausalLM, config: DrafterConfig) -> frozenset[str]:
    """Return the embedding and the output head of a drafter without files, unless it can share the model's."""
    is_own = isinstance(config, EagleConfig) and config.text.size("hidden_size") != model.embedding_size
    return frozenset(("embed_tokens.weight", "lm_head.weight") if is_own else ())


def _build(model: CausalLM, config: DrafterConfig, names: frozenset[str], site: Site) -> OwnDrafter:
    num_layers, vocab_size = len(model.decoder.layers), model.vocab_size
    shape = (vocab_size, model.embedding_size)
    has_head = "lm_head.weight" in names or config.draft_vocab_size not in (None, vocab_size)
    if isinstance(config, BlockDrafterConfig):
        check_target(config, num_layers, vocab_size)
        return BlockDrafter(config, shape, site, has_head=has_head)
    has_embedding = "embed_tokens.weight" in names
    layers = _layers_before(config, num_layers)
    return EagleDrafter(config, layers, shape, site, has_embedding=has_embedding, has_head=has_head)


def _layers_before(config: EagleConfig, num_layers: int) -> tuple[int, ...]:
    """Return the layers before those whose inputs are read."""
    entered = config.entered_layers or (2, num_layers // 2, num_layers - 3)
    if max(entered) > num_layers or min(entered) < 1 or len(set(entered)) != len(entered):
        raise ConfigError(
            f"{config.directory}: config.json: eagle_aux_hidden_state_layer_ids are {[*entered]}; the model has "
            f"{num_layers} layers"
        )
    return tuple(layer - 1 for layer in entered)


def _fill(
    drafter: OwnDrafter, directory: Path, holders: Mapping[str, WeightsFile], dtype: torch.dtype
) -> Mapping[str, Target]:
    """Copy the tensors in the files; return where each of them goes."""
    targets = dict(drafter.targets(frozenset(holders)))
    names = holders.keys() - COPIES
    if drafter.head is not None and TOKEN_OFFSETS in names:
        names.remove(TOKEN_OFFSETS)
        _read_draft_ids(drafter.head, holders[TOKEN_OFFSETS])
    missing, unexpected = sorted(targets.keys() - names), sorted(names - targets.keys())
    faults = [f"{first_names(missing)} missing"] if missing else []
    faults += [f"{first_names(unexpected)} not known to this drafter"] if unexpected else []
    if faults:
        raise WeightsError(f"{directory}: {'; '.join(faults)}")
    for name, target in targets.items():
        weight = PlainWeight(name, holders[name])
        weight.check(target)
        target.copy_from(partial(weight.read, dtype=dtype))
    return targets


def _read_draft_ids(head: DraftHead, file: WeightsFile) -> None:
    """Read which tokens are drafted."""
    offsets_V = file.get(TOKEN_OFFSETS)
    if offsets_V.shape != head.draft_ids_V.shape or offsets_V.is_floating_point():
        raise WeightsError(
            f"{file.path}: {TOKEN_OFFSETS} must be integers of shape {[*head.draft_ids_V.shape]}, got "
            f"{offsets_V.dtype} of shape {[*offsets_V.shape]}"
        )
    ids_V = torch.arange(len(offsets_V)) + offsets_V.long()
    if len(ids_V.unique()) != len(ids_V) or ids_V.min() < 0 or ids_V.max() >= head.vocab_size:
        raise WeightsError(f"{file.path}: {TOKEN_OFFSETS} must give different tokens below {head.vocab_size}")
    head.draft_ids_V.copy_(ids_V)
