"""How much memory there is, and what fits into it."""

import os
from array import array

import torch

from strandline.config import EngineConfig, parse_bytes
from strandline.device.batch import build_host_batch, to_device
from strandline.device.dtypes import machine_bytes
from strandline.errors import ConfigError
from strandline.ids import BLOCK_TOKENS, NULL_LOG, NULL_SLOT, PendingToken, RequestId, SlotId
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.binding import Kernels
from strandline.kernels.sampling import greedy
from strandline.models.protocol import LanguageModel
from strandline.records.plan import SequencePlan
from strandline.specs import ModelSpec

DEFAULT_BYTES = 4 * 2**30
BATCHED_TOKENS_CPU, BATCHED_TOKENS_GPU = 2048, 8192
LOGGED_FROM_CPU, LOGGED_FROM_GPU = 4, 1
"""Steps of fewer decodes keep no logs. On a CPU, to read one more thing takes longer than to write few states; on a GPU
the kernel with a log is no slower, since it overlaps with the launch before."""

SLOTS_PER_REQUEST = 2
"""A running request writes one slot and may read another."""


def choose_batched_tokens(config: EngineConfig, device_type: str) -> int:
    """Return the most tokens of a step."""
    return config.max_num_batched_tokens or (BATCHED_TOKENS_CPU if device_type == "cpu" else BATCHED_TOKENS_GPU)


def choose_logged_from(device_type: str) -> int:
    """Return the fewest decodes of a step that keep logs."""
    return LOGGED_FROM_CPU if device_type == "cpu" else LOGGED_FROM_GPU


def require_determinism(spec: ModelSpec, kernels: Kernels) -> None:
    """Check that a model can run deterministically.

    Raises:
        ConfigError: a state is rounded where it is stored, or the GPU has no batch-invariant kernels.
    """
    for state in (state for layer in spec.layers for state in layer.states):
        if state.is_recurrent and state.dtype != "float32":
            raise ConfigError(
                f"deterministic needs states in float32, the model's are {state.dtype}: one that is stored and read "
                "again differs from one that stays in registers"
            )
    if kernels.workload.device_type == "cuda" and kernels.fallbacks:
        missing = "; ".join(f"{x.operation}: {x.reason}" for x in kernels.fallbacks)
        raise ConfigError(f"deterministic needs Triton kernels on a GPU: {missing}")


def choose_memory_bytes(
    config: EngineConfig, model: LanguageModel, kernels: Kernels, device: torch.device, num_logs: int
) -> int:
    """Return the budget of blocks and slots.

    What the user said; else, on a GPU its share of the memory less weights, logs and scratch memory, which is measured,
    and elsewhere 4 GiB, at most half of what is free, and of what a container allows.

    Raises:
        ConfigError: the GPU's share is used up already.
    """
    if config.memory is not None:
        return parse_bytes(config.memory)
    if device.type != "cuda":
        free_bytes = int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
        return min(DEFAULT_BYTES, free_bytes // 2, machine_bytes() // 2)
    num_tokens = min(choose_batched_tokens(config, device.type), config.max_model_len or model.max_position)
    scratch_bytes = measure_scratch_bytes(model, kernels, num_tokens, config.max_num_seqs, device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    share_bytes = int(config.gpu_memory_utilization * total_bytes)
    log_bytes = num_logs * model.spec.log_bytes
    budget = share_bytes - (total_bytes - free_bytes) - scratch_bytes - log_bytes
    if budget <= 0:
        raise ConfigError(
            f"nothing is left for the cache: of {total_bytes:,} bytes gpu_memory_utilization allows {share_bytes:,}, "
            f"{total_bytes - free_bytes:,} are in use, a step needs {scratch_bytes:,} and logs {log_bytes:,}; raise "
            "gpu_memory_utilization, or lower max_num_batched_tokens or max_num_seqs"
        )
    return budget


def measure_scratch_bytes(
    model: LanguageModel, kernels: Kernels, num_tokens: int, num_rows: int, device: torch.device
) -> int:
    """Run a step of one prompt of ``num_tokens`` on a GPU; return the most memory that it took beside the cache."""
    spec = model.spec
    num_blocks = -(-num_tokens // BLOCK_TOKENS)
    num_slabs = slabs_for(spec, num_tokens)
    arena = ArenaTensors(spec, num_slabs, device)
    slot = SlotId(num_slabs - 1)
    first_block = spec.blocks_per_slab
    sequence = SequencePlan(
        request_id=RequestId("scratch"),
        start=0,
        end=num_tokens,
        token_ids=(0,) * num_tokens,
        block_table=array("i", range(first_block, first_block + num_blocks)).tobytes(),
        kv_start=0,
        state_src=NULL_SLOT,
        state_dst=slot,
        cuts=(),
        is_sampled=True,
        pending=PendingToken.NONE,
        is_prefill=False,
        log=NULL_LOG,
        num_logged=0,
        num_folded=num_tokens,
    )
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        batch = to_device(build_host_batch([sequence], 0), device, kernels)
        hidden_TE = model.forward(batch.step, model.bind(arena))
        kernels[greedy](model.logits(hidden_TE[:1].expand(num_rows, -1).contiguous()))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del arena, batch, hidden_TE
    torch.cuda.empty_cache()
    return peak - before


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
