"""Available memory, and the limits derived from it."""

import os
from array import array
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from strandline.config import EngineConfig, parse_bytes
from strandline.device.batches.batch import build_host_batch, to_device
from strandline.device.batches.encoded_pictures import MAX_SHARED_TOKENS, encode_largest
from strandline.device.hardware.dtypes import count_matrix_weights, count_weights, machine_bytes
from strandline.device.sampling.divided_sampling import likeliest
from strandline.errors import ConfigError
from strandline.ids import BLOCK_TOKENS, NULL_LOG, NULL_SLOT, PendingToken, RequestId, SlotId
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.binding import Kernels
from strandline.kernels.gpu import kind_of
from strandline.model_config import ModelConfig
from strandline.models.layers.protocol import LanguageModel
from strandline.models.model_options import ModelOptions
from strandline.picture_config import PictureConfig
from strandline.records.plan import SequencePlan
from strandline.specs import ITEM_BYTES, ModelSpec

DEFAULT_BYTES = 4 * 2**30
BATCHED_TOKENS_CPU, BATCHED_TOKENS_GPU = 2048, 8192
LOGGED_FROM_CPU, LOGGED_FROM_GPU = 4, 1
"""Steps of fewer decodes keep no logs. On a CPU, to read one more thing takes longer than to write few states; on a GPU
the kernel with a log is no slower, since it overlaps with the launch before."""

FIXED_STEP_TOKENS_CPU, FIXED_STEP_TOKENS_GPU = 256, 1024
"""Tokens of prompts that take as long as what a step with prompts costs beside them. On a GPU that is reading the
weights: 15 ms for a mixture of 35B weights on an H200, which computes a token in 13 µs. On a CPU 256 was best
of 0, 64, 256 and 1,024 for the demo model (benchmarks/results/2026-11-24-h200-2.md)."""

META_BYTES = 288 * 2**30
"""Memory of a GPU that a device without memory stands for: room for every model that one GPU has room for."""

SLOTS_PER_REQUEST = 2
"""A running request of a model with states writes one slot and may read another."""


def choose_batched_tokens(config: EngineConfig, device_type: str) -> int:
    """Return the maximum number of tokens per step."""
    return config.max_num_batched_tokens or (BATCHED_TOKENS_CPU if device_type == "cpu" else BATCHED_TOKENS_GPU)


def largest_picture(config: EngineConfig, pictures: PictureConfig) -> int:
    """Return the maximum number of tokens of a picture."""
    return min(config.max_image_tokens, pictures.max_tokens)


def choose_encoder_tokens(config: EngineConfig, model: LanguageModel, device_type: str) -> int:
    """Return the rows of the memory of encoded pictures; 0: the model encodes none.

    A step may need the end of one picture and the beginning of another. Deterministic steps end on the 64-token grid,
    so they must have both, and what is between them.
    """
    if model.tower is None:
        return 0
    largest = largest_picture(config, model.tower.pictures)
    at_least = 3 * largest + 2 * BLOCK_TOKENS if config.deterministic else largest
    return max(choose_batched_tokens(config, device_type), at_least)


def choose_logged_from(device_type: str) -> int:
    """Return the minimum number of decodes in a step that keep logs."""
    return LOGGED_FROM_CPU if device_type == "cpu" else LOGGED_FROM_GPU


def choose_fixed_step_tokens(device_type: str) -> int:
    """Return how many tokens of prompts take as long as what a step with prompts costs beside."""
    return FIXED_STEP_TOKENS_CPU if device_type == "cpu" else FIXED_STEP_TOKENS_GPU


def choose_draft_tokens(config: EngineConfig, spec: ModelSpec, device_type: str) -> int:
    """Return the maximum number of drafts per sequence and step; 0: no drafts.

    Raises:
        ConfigError: the model's layers cannot compute drafts, or the device is not supported.
    """
    if config.speculation is None:
        return 0
    if not spec.can_log_drafts:
        raise ConfigError("--speculative-config: layers of this model keep states that cannot go past drafts")
    return config.speculation.num_speculative_tokens


def keeps_decoded(config: EngineConfig, spec: ModelSpec) -> bool:
    """Whether sequences keep logs of decoded tokens: not where every step drafts.

    Nor in a deterministic engine: a token's bits would depend on when the log was folded.
    """
    has_plain_steps = config.speculation is None or config.speculation.adaptive
    return spec.log_tokens > 0 and has_plain_steps and not config.deterministic


def require_determinism(spec: ModelSpec, kernels: Kernels) -> None:
    """Check that a model can run deterministically.

    Raises:
        ConfigError: a state is rounded where it is stored, or the GPU has no batch-invariant kernels.
    """
    for state in (state for layer in spec.layers for state in layer.states):
        if state.is_recurrent and state.dtype != "float32":
            raise ConfigError(
                f"--deterministic needs states in float32, the model's are {state.dtype}: one that is stored and read "
                "again differs from one that stays in registers"
            )
    if kernels.workload.device_type == "cuda" and kernels.fallbacks:
        missing = "; ".join(f"{x.operation}: {x.reason}" for x in kernels.fallbacks)
        raise ConfigError(f"--deterministic needs Triton kernels on a GPU: {missing}")


def choose_memory_bytes(
    config: EngineConfig, model: LanguageModel, kernels: Kernels, device: torch.device, num_logs: int
) -> int:
    """Return the budget of blocks and slots.

    What the user said; else, on a GPU its share of the memory less weights, logs, encoded pictures and scratch memory,
    which is measured, and elsewhere 4 GiB, at most half of what is free, and of what a container allows. On CPUs, ranks
    and engines share the memory.

    Raises:
        ConfigError: there is not so much memory, or the GPU's share is used up already.
    """
    log_bytes = num_logs * log_size(config, model.spec)
    row_bytes = model.embedding_size * ITEM_BYTES[model.spec.hidden_dtype]
    picture_bytes = choose_encoder_tokens(config, model, kind_of(device)) * row_bytes
    if config.memory is None and kind_of(device) == "cuda":
        return _choose_gpu_bytes(config, model, kernels, device, log_bytes + picture_bytes)
    free_bytes = int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    have = memory_bytes(device)
    num_sharing = 1 if kind_of(device) == "cuda" else kernels.ranks.size * config.data_parallel_size
    default = min(DEFAULT_BYTES, free_bytes // 2, have // 2) // num_sharing
    budget = default if config.memory is None else parse_bytes(config.memory)
    if (budget + log_bytes + picture_bytes) * num_sharing > have:
        kind = "ranks" if kernels.ranks.size > 1 else "engines"
        ranks = f" for each of {num_sharing} {kind}" if num_sharing > 1 else ""
        pictures = f", {picture_bytes:,} for encoded pictures" if picture_bytes else ""
        raise ConfigError(
            f"--memory of {budget:,} bytes{pictures} and {log_bytes:,} for logs of --max-num-seqs "
            f"{config.max_num_seqs}{ranks} are more than the {have:,} bytes of memory that there are; lower them"
        )
    return budget


def log_size(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the bytes of one running request's logs: of decoded tokens, and of drafts."""
    decoded_bytes = spec.log_bytes if keeps_decoded(config, spec) else 0
    drafts = 0 if config.speculation is None else config.speculation.num_speculative_tokens
    return decoded_bytes + drafts * spec.logged_draft_bytes


def memory_bytes(device: torch.device) -> int:
    """Return the memory of a device, in use or not."""
    return machine_bytes() if kind_of(device) != "cuda" else gpu_memory(device)[1]


def gpu_memory(device: torch.device) -> tuple[int, int]:
    """Return the free and the whole memory of a GPU, in bytes."""
    if device.type == "meta":
        return META_BYTES, META_BYTES
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return int(free_bytes), int(total_bytes)


def require_room_for_weights(model_config: ModelConfig, options: ModelOptions, bits: int | None = None) -> None:
    """Check that the memory of a device holds a model's weights, or those of a shard, before any is allocated.

    Shards on CPUs share one memory.

    Args:
        bits: fewest that the weight of a matrix takes; None: all have the dtype.

    Raises:
        ConfigError: it does not, or the configuration is not supported.
    """
    device, dtype = torch.device(options.device), options.dtype_of(model_config)
    num_shards = 1 if kind_of(device) == "cuda" else options.shard.count
    num_weights = count_weights(model_config, options) * num_shards
    have = memory_bytes(device)
    num_bytes, form = num_weights * dtype.itemsize, str(dtype).removeprefix("torch.")
    if bits is not None:
        num_matrix = count_matrix_weights(model_config, options) * num_shards
        num_bytes -= num_matrix * (8 * dtype.itemsize - bits) // 8
        form = f"{bits} bits, embeddings in {form}"
    if num_bytes > have:
        raise ConfigError(
            f"the {num_weights:,} weights that config.json describes take {num_bytes:,} bytes in {form}, more than the "
            f"{have:,} bytes of memory that there are"
        )


def _choose_gpu_bytes(
    config: EngineConfig, model: LanguageModel, kernels: Kernels, device: torch.device, other_bytes: int
) -> int:
    num_tokens = min(choose_batched_tokens(config, kind_of(device)), config.max_model_len or model.max_position)
    drafts = 0 if config.speculation is None else config.speculation.num_speculative_tokens
    scratch_bytes = measure_scratch_bytes(model, kernels, num_tokens, config.max_num_seqs * (1 + drafts), device)
    if model.tower is not None:
        largest = max(largest_picture(config, model.tower.pictures), MAX_SHARED_TOKENS)
        scratch_bytes = max(scratch_bytes, peak_bytes(partial(encode_largest, model.tower, largest, device), device))
    free_bytes, total_bytes = gpu_memory(device)
    share_bytes = int(config.gpu_memory_utilization * total_bytes)
    budget = share_bytes - (total_bytes - free_bytes) - scratch_bytes - other_bytes
    if budget <= 0:
        raise ConfigError(
            f"nothing is left for the cache: of {total_bytes:,} bytes --gpu-memory-utilization allows {share_bytes:,}, "
            f"{total_bytes - free_bytes:,} are in use, a step needs {scratch_bytes:,} and logs and encoded pictures "
            f"{other_bytes:,}; raise --gpu-memory-utilization, or lower --max-num-batched-tokens or --max-num-seqs"
        )
    return budget


def measure_scratch_bytes(
    model: LanguageModel, kernels: Kernels, num_tokens: int, num_rows: int, device: torch.device
) -> int:
    """Run a step of ``num_tokens`` of one prompt on a GPU; return the most memory that it took beside the cache.

    As many tokens stand before them, if the model allows. Their blocks are the same: what they hold does not matter.
    """
    spec = model.spec
    num_blocks = -(-num_tokens // BLOCK_TOKENS)
    num_blocks_before = min(num_tokens, model.max_position - num_tokens) // BLOCK_TOKENS
    num_slabs = slabs_for(spec, num_tokens)
    arena = ArenaTensors(spec, num_slabs, device)
    slot = SlotId(num_slabs - 1) if spec.has_states else NULL_SLOT
    first_block = spec.blocks_per_slab
    blocks = range(first_block, first_block + num_blocks)
    start = num_blocks_before * BLOCK_TOKENS
    windows = [range(first, first + num_blocks) for first in spec.window_blocks_per_slab]
    sequence = SequencePlan(
        request_id=RequestId("scratch"),
        start=start,
        end=start + num_tokens,
        token_ids=(0,) * num_tokens,
        block_table=array("i", [*blocks[:num_blocks_before], *blocks]).tobytes(),
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
        window_blocks=tuple(array("i", [0, *window[:num_blocks_before], *window]).tobytes() for window in windows),
    )

    def run() -> None:
        batch = to_device(build_host_batch([sequence], 0), device, kernels)
        hidden_TE = model.forward(batch.step, model.bind(arena))
        likeliest(model.logits(hidden_TE[:1].expand(num_rows, -1).contiguous()), kernels)

    return peak_bytes(run, device)


def peak_bytes(run: Callable[[], None], device: torch.device) -> int:
    """Return the most memory of a GPU that a function takes while it runs; of none on a device that has no memory."""
    if device.type == "meta":
        with torch.inference_mode():
            run()
        return 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return peak - before


def choose_window_blocks(model: LanguageModel) -> ModelSpec:
    """Return a model's spec, with window blocks where layers have windows. A drafter's layers do not use them."""
    return replace(model.spec, has_window_blocks=model.spec.has_windows)


def slabs_for(spec: ModelSpec, num_tokens: int, step_tokens: int | None = None) -> int:
    """Return how many slabs one request of ``num_tokens`` needs in an otherwise empty arena.

    Args:
        step_tokens: most tokens of a step; None: there is no limit.
    """
    num_blocks = -(-num_tokens // BLOCK_TOKENS) + 1
    spare_blocks_of_null_slab = spec.blocks_per_slab - spec.num_null_blocks
    block_slabs = -(-max(num_blocks - spare_blocks_of_null_slab, 0) // spec.blocks_per_slab)
    return 1 + _slots_per_request(spec) + block_slabs + _window_slabs(spec, num_tokens, step_tokens)


def _window_slabs(spec: ModelSpec, num_tokens: int, step_tokens: int | None) -> int:
    """Return how many slabs of window blocks a request needs: the window before a step, and its tokens."""
    num_slabs, all_blocks = 0, -(-num_tokens // BLOCK_TOKENS)
    for window, blocks_per_slab in zip(spec.window_sizes, spec.window_blocks_per_slab, strict=True):
        seen_tokens = window.num_tokens - 1 + (num_tokens if step_tokens is None else step_tokens)
        # These may begin and end inside blocks, and the snapshot that the request resumes from has a block of its own.
        num_blocks = min(all_blocks, -(-seen_tokens // BLOCK_TOKENS) + 1) + 1
        num_slabs += -(-num_blocks // blocks_per_slab)
    return num_slabs


def choose_max_model_len(
    config: EngineConfig, spec: ModelSpec, max_position: int, have_bytes: int, device_type: str
) -> int:
    """Return the longest request to allow: as configured, or the model's limit if memory allows so much.

    Args:
        have_bytes: the budget of blocks and slots.

    Raises:
        ConfigError: the configured length is beyond the model's, or does not fit into memory.
    """
    step_tokens = choose_batched_tokens(config, device_type)
    fits = _longest_that_fits(spec, have_bytes // spec.slab_bytes, step_tokens)
    if fits < 1:
        need = slabs_for(spec, BLOCK_TOKENS, step_tokens) * spec.slab_bytes
        raise ConfigError(f"--memory of {have_bytes:,} bytes holds no request: at least {need:,} are needed")
    if config.max_model_len is None:
        return min(max_position, fits)
    if config.max_model_len > max_position:
        raise ConfigError(f"--max-model-len {config.max_model_len} is above the model's limit of {max_position} tokens")
    if config.max_model_len > fits:
        need = slabs_for(spec, config.max_model_len, step_tokens) * spec.slab_bytes
        raise ConfigError(
            f"one request of --max-model-len {config.max_model_len} tokens needs {need:,} bytes, --memory is "
            f"{have_bytes:,}; raise --memory or lower --max-model-len to {fits}"
        )
    return config.max_model_len


def _longest_that_fits(spec: ModelSpec, num_slabs: int, step_tokens: int) -> int:
    blocks = range(num_slabs * spec.blocks_per_slab)
    num_fitting = bisect_right(blocks, num_slabs, key=lambda count: slabs_for(spec, count * BLOCK_TOKENS, step_tokens))
    return max(num_fitting - 1, 0) * BLOCK_TOKENS


def _slots_per_request(spec: ModelSpec) -> int:
    return SLOTS_PER_REQUEST if spec.has_states else 0
