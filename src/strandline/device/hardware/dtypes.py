"""The default dtype of weights and activations: the model's, or the one that this CPU multiplies fast.

A CPU without instructions for bfloat16 multiplies it many times as slowly as float32. Float32 represents all numbers of
the smaller dtypes, so answers are those of the model with less rounding; the price is memory: twice as much for keys
and values, and for weights while they are loaded. Afterwards, weights that float16 represents exactly are kept in it.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from strandline.config import EngineConfig
from strandline.errors import ConfigError
from strandline.kernels.binding import why_unavailable
from strandline.kernels.gemm.linear import has_fast_gemms
from strandline.kernels.gpu import gpu_of, kind_of
from strandline.model_config import ModelConfig
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.feed_forward.experts import Experts
from strandline.models.layers.parts.projection import Projection
from strandline.models.model_options import AS_PUBLISHED, ModelOptions, published_dtype
from strandline.models.registry import build_model
from strandline.models.storage.formats import WeightFormat, read_formats
from strandline.models.storage.published_names import DRAFT_PREFIXES
from strandline.models.weights import WeightsReport
from strandline.specs import E4M3

E4M3_CAPABILITY: Final = (8, 9)
"""The lowest compute capability with conversions from and to e4m3."""

FIRST_CAPABILITY: Final = (8, 0)
"""The lowest compute capability that kernels are compiled for: tensor cores multiply bfloat16."""

MAX_WEIGHTS_SHARE: Final = 0.75
"""The share of the machine's memory for weights that are wider than published."""

MEMORY_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Linux's files with the memory limit of a container; without a limit, not a number or a huge one."""


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """The dtype to load a model in, and a message for the user if one is needed."""

    dtype: torch.dtype
    note: str | None = None
    is_widened: bool = False
    """Whether the dtype is wider than the model's own without being requested."""


def choose_dtype(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> DtypeChoice:
    """Return the dtype of weights and activations: what the user said, or the model's if the device is fast in it.

    Raises:
        ConfigError: the model's architecture is not supported.
    """
    if config.dtype != "auto":
        return DtypeChoice(getattr(torch, config.dtype))
    own = published_dtype(model_config)
    if device.type != "cpu" or has_fast_gemms(own):
        return DtypeChoice(own)
    name = str(own).removeprefix("torch.")
    num_weights = count_weights(model_config)
    wide_bytes, own_bytes, have_bytes = num_weights * 4, num_weights * own.itemsize, machine_bytes()
    if wide_bytes > MAX_WEIGHTS_SHARE * have_bytes:
        return DtypeChoice(
            own,
            f"dtype: {name}, the model's, though this CPU is slow in it: in float32 weights would take "
            f"{_size(wide_bytes)} of {_size(have_bytes)} of memory (--dtype float32 takes them all the same)",
        )
    return DtypeChoice(
        torch.float32,
        f"dtype: float32, since this CPU has no fast products in the model's {name}; weights take {_size(wide_bytes)} "
        f"instead of {_size(own_bytes)} while they are loaded, and keys and values twice as much (--dtype {name} keeps "
        "the model's)",
        is_widened=True,
    )


def choose_kv_cache_dtype(config: EngineConfig, device: torch.device) -> str | None:
    """Return the dtype of keys and values; None: that of activations.

    Raises:
        ConfigError: the device cannot convert to it.
    """
    if config.kv_cache_dtype == "auto":
        return None
    gpu = gpu_of(device)
    if gpu.is_nvidia and gpu.capability < E4M3_CAPABILITY:
        found = ".".join(map(str, gpu.capability))
        needed = ".".join(map(str, E4M3_CAPABILITY))
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype} needs a GPU of compute capability {needed}, this one has {found}"
        )
    return E4M3


@dataclass(frozen=True, slots=True)
class StorageChoice:
    """Whether weights that are published quantised stay so, and a line for the user where there are any."""

    keeps_quantized: bool
    note: str | None = None
    bits: int | None = None
    """Size of the smallest weight that stays quantised: none takes less. None if none does."""


def choose_storage(
    config: EngineConfig, model_config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> StorageChoice:
    """Decide whether quantised weights stay so: on GPUs that multiply all of them, if the user has not said otherwise.

    Args:
        dtype: dtype of activations, and of weights that are dequantised.

    Raises:
        ConfigError: the weights are quantised in a way that is not supported.
    """
    formats = read_formats(model_config)
    if not formats:
        return StorageChoice(False)
    scheme = _schemes(formats)
    name = str(dtype).removeprefix("torch.")
    obstacle = "--dequantize" if config.dequantize else why_dequantized(formats, device)
    if obstacle is None:
        stored = [format for format in formats if format.can_stay]
        note = f"weights: {scheme}, kept in {_kinds(stored)}; those that are not published so are in {name}"
        return StorageChoice(True, note, min(format.bits for format in stored))
    num_bytes = count_weights(model_config) * dtype.itemsize
    note = f"weights: {scheme}, dequantised to {name} one by one as they load ({obstacle}); they take"
    return StorageChoice(False, f"{note} {_size(num_bytes)}")


def why_dequantized(formats: Sequence[WeightFormat], device: torch.device) -> str | None:
    """Return why weights cannot stay quantised on a device; None: they can."""
    kind = _kinds(formats)
    if kind_of(device) != "cuda":
        return f"no GEMMs in {kind} on {device.type}"
    if not any(format.can_stay for format in formats):
        return f"no GEMMs with {_schemes(formats)}"
    needed = max(E4M3_CAPABILITY if format.has_e4m3 else FIRST_CAPABILITY for format in formats)
    if gpu_of(device).capability < needed:
        return f"GEMMs in {kind} need a GPU of compute capability {'.'.join(map(str, needed))}"
    return why_unavailable("Triton", kind_of(device))


def drafts_in_fp8(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the output head is best kept in FP8 for drafts as well: it is most of what a draft reads.

    Args:
        dtype: dtype of activations.
    """
    if config.dequantize or dtype == torch.float32 or kind_of(device) != "cuda":
        return False
    return gpu_of(device).capability >= E4M3_CAPABILITY and why_unavailable("Triton", kind_of(device)) is None


def _schemes(formats: Sequence[WeightFormat]) -> str:
    return " and ".join(str(format.scheme) for format in formats)


def _kinds(formats: Sequence[WeightFormat]) -> str:
    return " and ".join(format.kind for format in formats)


def dequantized_note(report: WeightsReport) -> str | None:
    """Return a line about published weights that were dequantised although others stay quantised; None: there are none.

    Which weights these are is in docs/quantization.md.
    """
    num_dequantized = report.num_quantized - len(report.stored)
    if not num_dequantized:
        return None
    return (
        f"weights: {num_dequantized:,} of {report.num_quantized:,} quantised ones were dequantised: no kernels for "
        "their layers, groups, order of inputs or shards"
    )


def unused_note(report: WeightsReport) -> str | None:
    """Return a line about what is published and not used, but for draft layers; None: there is nothing of the kind."""
    parts = {name: number for name, number in report.skipped.items() if name not in DRAFT_PREFIXES}
    tensors = [f"{name} ({number:,} tensor{'s' * (number > 1)})" for name, number in sorted(parts.items())]
    unused = ", ".join([*tensors, *report.unread])
    return f"weights: not used: {unused}" if unused else None


def peak_note(device: torch.device) -> str:
    """Return a line about the memory of a GPU that loading a model took."""
    loaded, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return f"weights: {_size(loaded)}; at most {_size(peak)} while they loaded"


def count_weights(model_config: ModelConfig, options: ModelOptions = AS_PUBLISHED) -> int:
    """Return how many weights a model, or a shard of it, has; none are made.

    Raises:
        ConfigError: its architecture is not supported, or has no draft layer.
    """
    # A tied head is the embedding once more, and comes once.
    return sum(weight.numel() for weight in _on_meta(model_config, options).parameters())


def count_matrix_weights(model_config: ModelConfig, options: ModelOptions = AS_PUBLISHED) -> int:
    """Return how many of the weights that ``count_weights`` counts may stay quantised: not embeddings, nor a tower."""
    modules = _on_meta(model_config, replace(options, pictures=None)).modules()
    owners = [module for module in modules if isinstance(module, Projection | Experts)]
    return sum(weight.numel() for owner in owners for weight in owner.parameters(recurse=False) if weight.ndim > 1)


def _on_meta(model_config: ModelConfig, options: ModelOptions) -> CausalLM:
    """Build what has published weights, without memory."""
    parts = replace(AS_PUBLISHED, shard=options.shard, with_draft_layer=options.with_draft_layer)
    parts = replace(parts, pictures=options.pictures, dtype=torch.float32, device="meta")
    model: CausalLM = build_model(model_config, parts)
    return model


def machine_bytes() -> int:
    """Return the memory that this process may have: the machine's, or less where a container sets a limit."""
    physical = int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    return min(physical, *_limits())


def _limits() -> Iterator[int]:
    for path in MEMORY_LIMITS:
        text = path.read_text().strip() if path.is_file() else ""
        yield int(text) if text.isdigit() else 2**63


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.0f} MiB"
