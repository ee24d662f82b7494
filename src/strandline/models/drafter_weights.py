"""Loading of a drafter from its own directory."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from strandline.drafter_config import BlockDrafterConfig
from strandline.errors import WeightsError
from strandline.models.block_drafter import BlockDrafter, check_target
from strandline.models.causal_lm import CausalLM
from strandline.models.layers.site import Site
from strandline.models.storage.published import PlainWeight
from strandline.models.storage.weights_files import open_files
from strandline.models.weights import fill_with_random_weights, first_names


def load_drafter(
    model: CausalLM,
    config: BlockDrafterConfig,
    device: torch.device | str,
    load_format: str = "auto",
    seed: int = 0,
    kv_cache_dtype: str | None = None,
) -> None:
    """Load a drafter and add it to the model that it drafts for, in that model's dtype. Arguments as of ``load_model``.

    Raises:
        ConfigError: a setting is not supported, or the drafter was made for another model.
        WeightsError: a file or tensor is missing, unreadable, unexpected or misshapen.
    """
    decoder = model.decoder
    check_target(config, len(decoder.layers), model.vocab_size)
    site = Site(decoder.dtype, device, decoder.shard)
    drafter = BlockDrafter(config, decoder.embed_ZE.shape[1], site)
    if load_format == "dummy":
        fill_with_random_weights(drafter, seed, decoder.dtype)
    else:
        _fill(drafter, config.directory, decoder.dtype)
    model.add_drafter(drafter.eval())
    if kv_cache_dtype is not None:
        model.use_kv_cache_dtype(kv_cache_dtype)


def _fill(drafter: BlockDrafter, directory: Path, dtype: torch.dtype) -> None:
    with ExitStack() as stack:
        holders = {name: file for file in open_files(directory, stack) for name in file.names()}
        targets = dict(drafter.targets(frozenset(holders)))
        missing, unexpected = sorted(targets.keys() - holders.keys()), sorted(holders.keys() - targets.keys())
        faults = [f"{first_names(missing)} missing"] if missing else []
        faults += [f"{first_names(unexpected)} not known to this drafter"] if unexpected else []
        if faults:
            raise WeightsError(f"{directory}: {'; '.join(faults)}")
        for name, target in targets.items():
            weight = PlainWeight(name, holders[name])
            weight.check(target)
            target.copy_from(partial(weight.read, dtype=dtype))
