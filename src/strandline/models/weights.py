"""Loading of published weights (safetensors, in one file or in shards), or drawing of random ones.

Every published tensor is accounted for: it is copied to its target, or recognised and skipped, or it is an error. A
tensor that the model needs and the files lack is an error, too, and so is a shape that differs.

Quantised tensors stay so (``fp8_storage.py``, ``four_bit_storage.py``), or are dequantised one by one, on the device
that they go to: beside the model there is never more than one of them.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from strandline.config_fields import DTYPES, Fields
from strandline.errors import ConfigError, WeightsError
from strandline.model_config import ModelConfig, read_model_config
from strandline.models.layers.parameters import Gain, matrices_without_memory
from strandline.models.layers.protocol import LoadableModel
from strandline.models.layers.shard import WHOLE, Shard
from strandline.models.layers.targets import Index, Read, Target
from strandline.models.registry import builder_for
from strandline.models.storage.four_bit import (
    Holders,
    PackedNames,
    companions,
    find_packed,
    is_empty_bias,
    open_packed,
)
from strandline.models.storage.four_bit_storage import (
    FourBitStorage,
    Scheme,
    can_keep_four_bit,
    find_keepable,
    scheme_of,
)
from strandline.models.storage.fp8_conversion import is_converted
from strandline.models.storage.fp8_storage import Fp8Storage, can_keep
from strandline.models.storage.published_names import find_skipped, skipped_prefixes, text_names
from strandline.models.storage.quantization import (
    QUANTIZED_DTYPE,
    check_activation_scale,
    dequantize,
    find_kv_scale,
    find_scales,
    read_kv_scale,
    scale_grid,
)
from strandline.models.storage.quantization_config import Block, FourBit, Quantization, read_quantization
from strandline.models.storage.weights_files import WeightsFile, list_unread, open_files

STORED_DTYPES: Final = ("F32", "BF16", "F16")

MAX_HOST_ELEMENTS = 2**22
"""The largest tensor of random weights that is drawn on the host for a GPU."""

MAX_NAMES = 5
"""Maximum number of tensors listed in an error; further ones are counted."""


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """Summary of the weights files."""

    num_tensors: int = 0
    num_quantized: int = 0
    """Weights that are published in FP8 or 4 bits, and used here; they were dequantised but for ``num_kept``."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of tensors that were recognised and skipped, by what they belong to (``published_names.py``)."""
    num_kept: int = 0
    """Quantised weights that stay so."""
    unread: tuple[str, ...] = ()
    """Names of safetensors files that are not the model's."""

    @property
    def is_mtp_present(self) -> bool:
        """Whether the weights hold draft layers (multi-token prediction)."""
        return bool(self.skipped.get("mtp."))


class LoadedModel(LoadableModel, Protocol):
    """A model with its weights."""

    weights_report: WeightsReport


def load_model(
    path: str | Path,
    *,
    config: ModelConfig | None = None,
    dtype: torch.dtype | Literal["auto"] = "auto",
    device: torch.device | str = "cpu",
    shard: Shard = WHOLE,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = False,
    rounded_to: torch.dtype | None = None,
    with_draft_layer: bool = False,
    kv_cache_dtype: str | None = None,
    keeps_quantized: bool = False,
) -> LoadedModel:
    """Build the model of a local directory and fill it with its weights, as parameters (``lay_out`` is not called).

    Args:
        config: the model's; None: read from the directory.
        dtype: of weights and activations; ``auto`` takes the configuration's, or bfloat16 where it has none.
        shard: what to load of a model that is divided among ranks.
        load_format: ``auto`` or ``safetensors`` reads files; ``dummy`` needs none and draws random weights.
        seed: of the random weights.
        progress: show a bar over the files.
        with_draft_layer: load the layer for multi-token prediction, too.
        rounded_to: a narrower dtype than ``dtype``, which dequantised weights are rounded to first; None: they are not.
        kv_cache_dtype: of keys and values, as specs name it; None: ``dtype``.
        keeps_quantized: leave weights that are published in FP8 or 4 bits so where kernels take them; else all are
            dequantised.

    Raises:
        ConfigError: the architecture or a setting is not supported.
        WeightsError: a file or tensor is missing, unreadable, unexpected or misshapen.
    """
    config = read_model_config(Path(path)) if config is None else config
    quantization = read_quantization(config)
    keeps_quantized = keeps_quantized and can_stay(quantization)
    with matrices_without_memory() if keeps_quantized else nullcontext():
        model: Any = builder_for(config)(config, published_dtype(config) if dtype == "auto" else dtype, device, shard)
        if with_draft_layer:
            model.add_draft_layer()
    if kv_cache_dtype is not None:
        model.use_kv_cache_dtype(kv_cache_dtype)
    if load_format == "dummy":
        if keeps_quantized:
            _fill_kept_randomly(model, quantization, published_dtype(config), seed, device)
        fill_with_random_weights(model, seed, published_dtype(config))
        model.weights_report = WeightsReport()
    elif load_format in ("auto", "safetensors"):
        model.weights_report = _fill_from_files(
            model, Path(path), quantization, rounded_to, device if keeps_quantized else None, progress=progress
        )
    else:
        raise ConfigError(f"--load-format {load_format!r} is unknown; known: auto, safetensors, dummy")
    filled: LoadedModel = model.eval()
    return filled


def can_stay(quantization: Quantization | FourBit | None) -> bool:
    """Return whether kernels multiply with weights as they are published."""
    match quantization:
        case Quantization():
            return can_keep(quantization)
        case FourBit():
            return can_keep_four_bit(quantization)
    return False


def fill_with_random_weights(model: LoadableModel, seed: int, dtype: torch.dtype) -> None:
    """Fill every parameter with values that keep activations and decays in a realistic range.

    All shards of a parameter get the same values.

    Args:
        dtype: matrices are rounded to it, as they would be published.
    """
    for name, tensor in model.named_parameters():
        # One generator per tensor gives the same weights on every device and in every order. Very large tensors are
        # drawn on their own device: a CPU takes minutes for the weights of a GPU.
        if tensor.is_cuda and tensor.numel() > MAX_HOST_ELEMENTS:
            drawn_on = torch.Generator(tensor.device).manual_seed(hash_name(name, seed))
            tensor.data.normal_(generator=drawn_on).mul_(_random_scale(name, tensor.shape))
            continue
        generator = torch.Generator().manual_seed(hash_name(name, seed))
        values = _random_values(name, tuple(tensor.shape), generator) + isinstance(tensor, Gain)
        tensor.data.copy_(values if values.ndim == 1 else values.to(dtype))


def hash_name(name: str, seed: int) -> int:
    """Return a number that depends on the name and the seed alone."""
    number = seed
    for byte in name.encode():
        number = (number * 257 + byte + 1) % (2**61 - 1)
    return number


def _random_values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    kind = name.rpartition(".")[2]
    if kind.startswith("A_log"):
        return torch.empty(shape).uniform_(1, 16, generator=generator).log_()
    if kind.startswith("dt_bias"):
        # The inverse of softplus, of time steps between 0.001 and 0.1 with even logarithms.
        step = torch.empty(shape).uniform_(math.log(0.001), math.log(0.1), generator=generator).exp_()
        return step + torch.log(-torch.expm1(-step))
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 0.1 * noise
    return noise * _random_scale(name, shape)


def _random_scale(name: str, shape: Sequence[int]) -> float:
    return 0.02 if name.rpartition(".")[2].startswith("embed") else float(shape[-1] ** -0.5)


def published_dtype(config: ModelConfig) -> torch.dtype:
    """Return the dtype that a configuration names, or bfloat16 where it has none.

    Raises:
        ConfigError: weights of that dtype are not supported.
    """
    named = config.dtype.removeprefix("torch.") if isinstance(config.dtype, str) else config.dtype
    dtype: torch.dtype = getattr(torch, Fields({"dtype": named}).choice("dtype", DTYPES, default="bfloat16"))
    return dtype


def _fill_from_files(
    model: Any,
    directory: Path,
    quantization: Quantization | FourBit | None,
    rounded_to: torch.dtype | None,
    kept_device: torch.device | str | None,
    *,
    progress: bool,
) -> WeightsReport:
    """Fill a model; ``kept_device`` is where matrices without memory go, None where there are none."""
    with ExitStack() as stack:
        files = open_files(directory, stack)
        own_names = text_names(name for file in files for name in file.names())
        files = [file.renamed(own_names) for file in files]
        holders = {name: file for file in files for name in file.names()}
        packed = find_packed(holders, quantization.packing) if isinstance(quantization, FourBit) else {}
        names = frozenset(holders).difference(companions(packed)).union(packed)
        _check_packed(directory, packed, holders)
        targets = dict(model.targets(names))
        in_fp8 = isinstance(quantization, Quantization)
        quantized = [x for x in targets if x in holders and in_fp8 and holders[x].dtype(x) == QUANTIZED_DTYPE]
        scales = {name: find_scales(name, names) for name in quantized}
        prefixes = skipped_prefixes(*model.skipped_prefixes)
        kv_scales = _set_kv_scales(model, holders, prefixes)
        empty_biases = [name for name in names - targets.keys() if is_empty_bias(name, packed, holders)]
        known = {*targets, *kv_scales, *empty_biases, *(scale for found in scales.values() for scale in found)}
        unused = _find_unused(names - known, holders, prefixes)
        skipped, unread = dict(Counter(unused.values())), tuple(list_unread(directory))
        _check_names(directory, names.difference(unused), targets, known, own_names)
        storage: Fp8Storage | FourBitStorage | None = None
        if kept_device is not None:
            if isinstance(quantization, FourBit):
                keepable = frozenset(find_keepable(packed, holders, quantization, targets))
                scheme = scheme_of(packed, keepable, holders, quantization)
                storage = FourBitStorage(model, targets, keepable, scheme, kept_device)
            else:
                storage = Fp8Storage(model, targets, quantized, kept_device)
            targets = dict(model.targets(names))  # where memory now is
        held = {names["codes"]: name for name, names in packed.items()}
        for file in tqdm(files, desc="Loading weights", unit="file", disable=not progress):
            for name in filter(targets.__contains__, (held.get(published, published) for published in file.names())):
                if isinstance(quantization, FourBit) and name in packed:
                    parts = (name, targets[name], packed[name], holders)
                    assert not isinstance(storage, Fp8Storage)
                    _fill_packed(*parts, quantization, rounded_to, storage)
                    continue
                _check_tensor(file, name, targets[name], is_quantized=name in scales)
                if not targets[name].pieces:
                    continue  # its scales are another rank's, too
                read: Read = partial(file.get, name)
                found = {scale: holders[scale].get(scale) for scale in scales.get(name, ())}
                if isinstance(storage, FourBitStorage) and name in storage.names:
                    storage.fill(name, read)
                    continue
                if isinstance(storage, Fp8Storage) and name in storage.names:
                    assert isinstance(quantization, Quantization)
                    storage.fill(name, read, _read_scales(found, targets[name], quantization) if found else None)
                    continue
                if isinstance(quantization, Quantization) and name in scales:
                    read = _dequantized(read, found, targets[name], quantization, rounded_to)
                targets[name].copy_from(read)
        used = {name for name in (*scales, *packed) if name in targets and targets[name].pieces}
        if storage is None:
            return WeightsReport(len(targets), len(used), skipped, unread=unread)
        storage.finish()
        return WeightsReport(len(targets), len(used), skipped, len(storage.kept & used), unread)


def _fill_kept_randomly(
    model: Any, quantization: Quantization | FourBit | None, dtype: torch.dtype, seed: int, device: torch.device | str
) -> None:
    """Fill what published models have in FP8 or 4 bits; scales of the latter have a dtype."""
    targets = dict(model.targets(frozenset()))
    quantized = [name for name, target in targets.items() if is_converted(name, target.shape)]
    storage: Fp8Storage | FourBitStorage
    if isinstance(quantization, FourBit):
        scheme = Scheme.of(quantization, dtype, has_zeros=quantization.has_zeros)
        storage = FourBitStorage(model, targets, quantized, scheme, device)
    else:
        storage = Fp8Storage(model, targets, quantized, device)
    storage.fill_randomly(seed)
    storage.finish()


def _find_unused(names: Collection[str], holders: Holders, prefixes: Sequence[str]) -> dict[str, str]:
    """Return what published tensors that the model does not know belong to, as far as it can do without."""
    # A weight in 4 bits is published under other names than its own.
    shapes = {name: holders[name].shape(name) if name in holders else [] for name in names}
    found = {name: find_skipped(name, shape, prefixes) for name, shape in shapes.items()}
    return {name: what for name, what in found.items() if what is not None}


def _set_kv_scales(
    model: LoadableModel, holders: Mapping[str, WeightsFile], skipped_prefixes: tuple[str, ...]
) -> list[str]:
    """Give the model the published scales of keys and values; return their names.

    A model that keeps something else instead of keys and values has no use for them.
    """
    names = []
    for name, file in holders.items():
        found = None if name.startswith(skipped_prefixes) else find_kv_scale(name)
        if found is None or (model.kv_scales and found[0] not in model.kv_scales):
            continue
        layer, parts = found
        scale = read_kv_scale(name, file.get(name))
        for part in parts if model.kv_scales else ():
            setattr(model.kv_scales[layer], part, scale)
        names.append(name)
    return names


def _read_scales(scales: Mapping[str, Tensor], target: Target, quantization: Quantization) -> tuple[Block, Tensor]:
    """Return what one of a tensor's scales covers, and the scales, the first of ``scales``; all are checked."""
    (name, scale), *activation = scales.items()
    for extra, value in activation:
        check_activation_scale(extra, value, target.shape)
    return scale_grid(name, scale, target.shape, quantization)


def _dequantized(
    read: Read,
    scales: Mapping[str, Tensor],
    target: Target,
    quantization: Quantization,
    rounded_to: torch.dtype | None,
) -> Read:
    """Return what reads a quantised tensor times its scales, the first of ``scales``, on the device of its target."""
    block, scale_YX = _read_scales(scales, target, quantization)
    place = target.place
    if place is None:
        return read
    scale_YX, dtype = scale_YX.to(place.device), rounded_to or place.dtype

    def read_dequantized(index: Index) -> Tensor:
        return dequantize(read(index).to(place.device), block, scale_YX, dtype, target.shape, index)

    return read_dequantized


def _fill_packed(
    name: str,
    target: Target,
    names: PackedNames,
    holders: Holders,
    quantization: FourBit,
    rounded_to: torch.dtype | None,
    storage: FourBitStorage | None,
) -> None:
    """Keep or dequantise a weight in 4 bits, on the device of its target."""
    place = target.place
    if place is None:
        return
    is_stored = storage is not None and name in storage.names
    device = storage.device if storage is not None and is_stored else place.device
    matrix, dtype = open_packed(names, target.shape, quantization, holders, device), rounded_to or place.dtype
    if storage is not None and name in storage.kept:
        storage.fill_packed(name, matrix)
        return

    def read_dequantized(index: Index) -> Tensor:
        return matrix.part(index).dequantize(dtype)

    if storage is not None and is_stored:
        storage.fill(name, read_dequantized)
    else:
        target.copy_from(read_dequantized)


def _check_packed(directory: Path, packed: Mapping[str, PackedNames], holders: Collection[str]) -> None:
    for name, names in packed.items():
        if name in holders:
            raise WeightsError(f"{directory}: {name} is published twice, as it is and as {names['codes']}")


def _check_tensor(file: WeightsFile, name: str, target: Target, *, is_quantized: bool) -> None:
    shape, dtype = file.shape(name), file.dtype(name)
    if tuple(shape) != target.shape:
        wanted = list(target.shape)
        raise WeightsError(f"{file.path}: {name} has shape {shape}, the configuration asks for {wanted}")
    if target.pieces and not is_quantized and dtype not in STORED_DTYPES:
        stored = ", ".join(STORED_DTYPES)
        hint = f"; {QUANTIZED_DTYPE} with a quantization_config in config.json" if dtype.startswith("F8") else ""
        raise WeightsError(f"{file.path}: {name} is stored as {dtype}; supported: {stored}{hint}")


def _check_names(
    directory: Path,
    names: frozenset[str],
    targets: Mapping[str, Target],
    known: Collection[str],
    own_names: Mapping[str, str],
) -> None:
    missing = [name for name in targets if name not in names]
    unexpected = sorted(own_names.get(name, name) for name in names if name not in known)
    faults = []
    if missing:
        wanted = [f"{name} {list(targets[name].shape)}" for name in missing]
        faults.append(f"{_first(wanted)} missing")
    if unexpected:
        faults.append(f"{_first(unexpected)} not known to this architecture")
    if faults:
        raise WeightsError(f"{directory}: {'; '.join(faults)}")


def _first(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES])
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"
