"""How much memory there is, and what fits into it."""

import os

import torch

from strandline.config import EngineConfig, parse_bytes
from strandline.errors import ConfigError
from strandline.ids import BLOCK_TOKENS
from strandline.specs import ModelSpec

DEFAULT_BYTES = 4 * 2**30
SLOTS_PER_REQUEST = 2
"""A running request writes one slot and may read another."""


def choose_memory_bytes(config: EngineConfig, device: torch.device) -> int:
    """Return the budget of blocks and slots: what the user said, or 4 GiB and at most half of what is free."""
    if config.memory is not None:
        return parse_bytes(config.memory)
    return min(DEFAULT_BYTES, _free_bytes(device) // 2)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))


def slabs_for(spec: ModelSpec, num_tokens: int) -> int:
    """Return how many slabs one request of ``num_tokens`` needs in an otherwise empty arena."""
    num_blocks = -(-num_tokens // BLOCK_TOKENS) + 1
    spare_blocks_of_null_slab = spec.blocks_per_slab - 1
    block_slabs = -(-max(num_blocks - spare_blocks_of_null_slab, 0) // spec.blocks_per_slab)
    return 1 + SLOTS_PER_REQUEST + block_slabs


def choose_max_model_len(config: EngineConfig, spec: ModelSpec, max_position: int, num_slabs: int) -> int:
    """Return the longest request to allow: as configured, or the model's limit if memory allows so much.

    Raises:
        ConfigError: the configured length is beyond the model's, or does not fit into memory.
    """
    fits = _longest_that_fits(spec, num_slabs)
    have = num_slabs * spec.slab_bytes
    if fits < 1:
        need = slabs_for(spec, BLOCK_TOKENS) * spec.slab_bytes
        raise ConfigError(f"memory of {have:,} bytes holds no request: at least {need:,} are needed; raise memory")
    if config.max_model_len is None:
        return min(max_position, fits)
    if config.max_model_len > max_position:
        raise ConfigError(f"max_model_len {config.max_model_len} is above the model's limit of {max_position} tokens")
    if config.max_model_len > fits:
        need = slabs_for(spec, config.max_model_len) * spec.slab_bytes
        raise ConfigError(
            f"one request of max_model_len {config.max_model_len} tokens needs {need:,} bytes, memory is {have:,}; "
            f"raise memory or lower max_model_len to {fits}"
        )
    return config.max_model_len


def _longest_that_fits(spec: ModelSpec, num_slabs: int) -> int:
    block_slabs = num_slabs - 1 - SLOTS_PER_REQUEST
    if block_slabs < 0:
        return 0
    return (block_slabs * spec.blocks_per_slab + spec.blocks_per_slab - 1 - 1) * BLOCK_TOKENS
