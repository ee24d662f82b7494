"""Loading of published weights (safetensors, in one file or in shards), or drawing of random ones.

Every published tensor is accounted for: it is copied to its target, or recognised and skipped, or it is an error. A
tensor that the model needs and the files lack is an error, too, and so is a shape that differs.

Quantised tensors stay so (``storage/quantized_storage.py``), or are dequantised one by one, on the device that they go
to: memory holds at most one of them besides the model.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from strandline.errors import ConfigError, WeightsError
from strandline.model_config import ModelConfig, read_model_config
from strandline.models.layers.parts.targets import Target, base_of
from strandline.models.layers.protocol import LoadableModel
from strandline.models.lora.adapter_files import AdapterFiles
from strandline.models.lora.adapter_names import place_adapter
from strandline.models.lora.low_rank import LowRank, MergedWeight
from strandline.models.model_options import AS_PUBLISHED, ModelOptions, published_dtype
from strandline.models.registry import build_model
from strandline.models.storage.conversion import quantized_like
from strandline.models.storage.finite_weights import LoadedWeight, find_non_finite
from strandline.models.storage.formats import WeightFormat, find_weights, read_formats
from strandline.models.storage.matrices import Matrices
from strandline.models.storage.published import STORED_DTYPES, Holders, PlainWeight, PublishedWeight
from strandline.models.storage.published_names import find_skipped, skipped_prefixes, text_names
from strandline.models.storage.quantized_storage import QuantizedStorage
from strandline.models.storage.quantizers import quantizer_of
from strandline.models.storage.random_weights import fill_with_random_weights, names_of_parameters
from strandline.models.storage.received_tensors import received_file
from strandline.models.storage.recipe import choose_schemes
from strandline.models.storage.scales import find_kv_scale, read_kv_scale
from strandline.models.storage.stored_rows import StoredFormat
from strandline.models.storage.weights_files import WeightsFile, list_unread, open_files
from strandline.models.vision.tower import VISUAL

QuantizedWeights = Mapping[str, tuple[int, PublishedWeight]]
"""Quantised weights in files, by their names as if they were not, each with the index of its format."""

SENT = "what was sent"
"""Where tensors come from that are in no file."""

LOGGER: Final = logging.getLogger("strandline.engine")

MAX_NAMES = 5
"""Maximum number of tensors listed in an error; further ones are counted."""


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """Summary of the weights files."""

    num_tensors: int = 0
    num_quantized: int = 0
    """Weights that are published quantised, and used here; they were dequantised but for those ``stored``."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of tensors that were recognised and skipped, by what they belong to (``published_names.py``)."""
    stored: Mapping[str, int] = field(default_factory=dict)
    """Quantised weights that stay so, each with the index of its format."""
    unread: tuple[str, ...] = ()
    """Names of safetensors files that are not the model's."""

    @property
    def is_mtp_present(self) -> bool:
        """Whether the weights hold draft layers (multi-token prediction)."""
        return bool(self.skipped.get("mtp."))


class LoadedModel(LoadableModel, Protocol):
    """A model with its weights."""

    weights_report: WeightsReport


@dataclass(frozen=True, slots=True, kw_only=True)
class FillOptions:
    """How the parameters of a model are filled."""

    load_format: str = "auto"
    """``auto`` or ``safetensors`` reads files; ``dummy`` needs none and draws random weights."""
    seed: int = 0
    """Seed of the random weights."""
    rounded_to: torch.dtype | None = None
    """A narrower dtype than the model's, which dequantised weights are rounded to first; None: they are not."""
    adapter: AdapterFiles | None = None
    """An adapter that is merged into the weights; those that it changes are dequantised."""
    quantized_as: Mapping[str, int] = field(default_factory=dict)
    """Weights to convert if they are not quantised, as ``WeightsReport.stored`` of another model names them; ignored
    if all are dequantised."""
    progress: bool = False
    """Whether a bar over the files is shown."""
    allows_non_finite: bool = False
    """Whether weights with NaN or infinity are loaded, with a warning."""

    def report_non_finite(self, faults: Iterator[str]) -> None:
        """Log the first weight that is not finite, and how many there are.

        Raises:
            WeightsError: there is one, and that is not allowed.
        """
        first = next(faults, None)
        if first is None:
            return
        if not self.allows_non_finite:
            hint = "--allow-non-finite-weights loads it, where no request reads these numbers"
            raise WeightsError(f"{first}; weights must be finite numbers. {hint}")
        text = "%s; requests that read such numbers fail (weights that are not finite: %d)"
        LOGGER.warning(text, first, 1 + sum(1 for _ in faults))


FROM_FILES: Final = FillOptions()
"""The weights in the model's files, unchanged."""


def load_model(
    path: str | Path,
    options: ModelOptions = AS_PUBLISHED,
    filling: FillOptions = FROM_FILES,
    *,
    config: ModelConfig | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> LoadedModel:
    """Build the model of a local directory and fill it with its weights, as parameters (``lay_out`` is not called).

    Args:
        path: the directory; not read if ``config`` is given, and random weights or ``tensors`` are loaded.
        config: the model's; None: read from the directory.
        tensors: published tensors by their names, to load instead of those in files.

    Raises:
        ConfigError: the architecture or a setting is not supported.
        WeightsError: a file or tensor is missing, unreadable, unexpected or misshapen.
    """
    config = read_model_config(Path(path)) if config is None else config
    formats = read_formats(config)
    options = replace(options, keeps_quantized=options.keeps_quantized and can_stay(formats))
    model = build_model(config, options)
    storage_device = options.device if options.keeps_quantized else None
    if filling.load_format == "dummy":
        names = names_of_parameters(model)
        if storage_device is not None:
            _fill_storage_randomly(model, config, formats, filling.seed, storage_device)
        if torch.device(options.device).type != "meta":
            fill_with_random_weights(model, names, filling.seed, published_dtype(config))
        model.weights_report = WeightsReport()
    elif filling.load_format in ("auto", "safetensors"):
        model.weights_report = _fill(
            model, Path(path) if tensors is None else tensors, formats, filling, storage_device
        )
    else:
        raise ConfigError(f"--load-format {filling.load_format!r} is unknown; known: auto, safetensors, dummy")
    filled: LoadedModel = model.eval()
    return filled


def can_stay(formats: Collection[WeightFormat]) -> bool:
    """Return whether kernels multiply with some of the quantised weights as they are published."""
    return any(format.can_stay for format in formats)


def _fill(
    model: Any,
    source: Path | Mapping[str, Tensor],
    formats: tuple[WeightFormat, ...],
    filling: FillOptions,
    storage_device: torch.device | str | None,
) -> WeightsReport:
    """Fill a model; ``storage_device`` is where matrices without memory go, None where there are none."""
    with ExitStack() as stack:
        files = open_files(source, stack) if isinstance(source, Path) else [received_file(source)]
        own_names = text_names(name for file in files for name in file.names())
        files = [file.renamed(own_names) for file in files]
        if storage_device is not None:
            files = _quantized(files, formats, filling.quantized_as)
        holders = {name: file for file in files for name in file.names()}
        quantized = find_weights(formats, holders)
        skipped = _account_for_names(
            model, str(source) if isinstance(source, Path) else SENT, holders, quantized, own_names
        )
        targets = dict(model.targets(_names(holders, quantized)))
        plain = {name: PlainWeight(name, holders[name]) for name in targets if name not in quantized}
        weights: dict[str, PublishedWeight] = {name: plain.get(name) or quantized[name][1] for name in targets}
        changes = {} if filling.adapter is None else _changes(filling.adapter, targets)
        weights |= {name: MergedWeight(weights[name], change) for name, change in changes.items()}
        storage = None
        if storage_device is not None:
            storable = {name: weight for name, weight in quantized.items() if name not in changes}
            storage = _new_storage(model, targets, formats, storable, storage_device)
            targets = dict(model.targets(_names(holders, quantized)))  # where memory now is
        by_tensor = {weight.tensors[0]: name for name, weight in weights.items()}
        for file in tqdm(files, desc="Loading weights", unit="file", disable=not filling.progress):
            for name in (by_tensor[tensor] for tensor in file.names() if tensor in by_tensor):
                _fill_one(name, weights[name], targets[name], storage, filling.rounded_to)
        stored_names = frozenset[str]() if storage is None else storage.names
        names = ((file.path, by_tensor[tensor]) for file in files for tensor in file.names() if tensor in by_tensor)
        loaded = (LoadedWeight(path, name, targets[name]) for path, name in names if name not in stored_names)
        filling.report_non_finite(find_non_finite(model.parameters(), loaded))
        if storage is not None:
            storage.finish()
    used = {name for name in quantized if name in targets and targets[name].pieces}
    stored = {} if storage is None else {name: quantized[name][0] for name in sorted(storage.stored & used)}
    unread = list_unread(source) if isinstance(source, Path) else []
    return WeightsReport(len(targets), len(used), skipped, stored, tuple(unread))


def _quantized(
    files: list[WeightsFile], formats: tuple[WeightFormat, ...], quantized_as: Mapping[str, int]
) -> list[WeightsFile]:
    """Return files in which weights are quantised as those of the same names in another model.

    Raises:
        WeightsError: nothing converts them to its format.
    """
    holders = {name: file for file in files for name in file.names()}
    quantizers = {name: quantizer_of(formats[index].scheme) for name, index in quantized_as.items()}
    for name, quantizer in quantizers.items():
        if quantizer is None and name in holders and holders[name].dtype(name) in STORED_DTYPES:
            scheme = formats[quantized_as[name]].scheme
            raise WeightsError(f"{name} is not quantised, and nothing converts it to the model's format: {scheme}")
    tensors, replaced = quantized_like(holders, {name: each for name, each in quantizers.items() if each is not None})
    return [received_file(tensors), *(file.without(replaced) for file in files)] if tensors else files


def _names(holders: Holders, quantized: QuantizedWeights) -> frozenset[str]:
    """Return the names of published weights, those of quantised ones as if they were not."""
    packed = {tensor for name, (_, weight) in quantized.items() if name not in holders for tensor in weight.tensors}
    return frozenset(holders.keys() - packed | quantized.keys())


def _account_for_names(
    model: Any, origin: str, holders: Holders, quantized: QuantizedWeights, own_names: Mapping[str, str]
) -> dict[str, int]:
    """Return how many tensors are skipped, by what they belong to; set the model's scales of keys and values.

    Raises:
        WeightsError: weights are missing, or not known.
    """
    names = _names(holders, quantized)
    targets, prefixes = dict(model.targets(names)), skipped_prefixes(*model.skipped_prefixes)
    parts = {tensor for name, (_, weight) in quantized.items() if name in targets for tensor in weight.tensors}
    empty_biases = {name for name in names - targets.keys() if _is_empty_bias(name, quantized, holders)}
    known = {*targets, *parts, *empty_biases, *_set_kv_scales(model, holders, prefixes)}
    unused = _find_unused(names - known, holders, prefixes)
    _check_names(origin, names.difference(unused), targets, known, own_names)
    return dict(Counter(unused.values()))


def _is_empty_bias(name: str, quantized: QuantizedWeights, holders: Holders) -> bool:
    """Return whether a tensor is a bias of zeros of a quantised weight: some files have it for layers without one."""
    module, _, kind = name.rpartition(".")
    return kind == "bias" and f"{module}.weight" in quantized and not bool(holders[name].get(name).any())


def _changes(adapter: AdapterFiles, targets: Mapping[str, Target]) -> dict[str, LowRank]:
    """Return what an adapter adds to published weights.

    Raises:
        WeightsError: as ``place_adapter``, or a weight's memory is that of another one, as a tied head's is.
    """
    changes = place_adapter(adapter, targets)
    owners = dict[tuple[int, int, int], str]()
    for name, target in targets.items():
        for part in (part for piece in target.pieces for part in piece.parts):
            other = owners.setdefault((id(base_of(part)), int(part.storage_offset()), part.numel()), name)
            if other != name and (name in changes or other in changes):
                raise WeightsError(f"{adapter.directory} changes {name} or {other}, which are one weight of this model")
    return changes


def _new_storage(
    model: Any,
    targets: Mapping[str, Target],
    formats: tuple[WeightFormat, ...],
    quantized: QuantizedWeights,
    device: torch.device | str,
) -> QuantizedStorage:
    """Return memory for what stays quantised of published weights, and allocate the other matrices."""
    format_of, found = dict[str, int](), list[StoredFormat]()
    for index, format in enumerate(formats):
        weights = {name: weight for name, (number, weight) in quantized.items() if number == index and name in targets}
        weights = {name: weight for name, weight in weights.items() if format.can_store(weight, targets[name])}
        if format.can_stay:
            format_of |= dict.fromkeys(weights, len(found))
            found.append(format.stored(weights))
    return QuantizedStorage(Matrices(model, targets, found, format_of, device))


def _fill_one(
    name: str,
    weight: PublishedWeight,
    target: Target,
    storage: QuantizedStorage | None,
    rounded_to: torch.dtype | None,
) -> None:
    """Copy what is used of a weight, quantised or dequantised."""
    weight.check(target)
    view = target.view
    if view is None:
        return
    is_stored = storage is not None and name in storage.names
    dtype = rounded_to or view.dtype
    opened = weight.open(target, storage.device if storage is not None and is_stored else view.device)
    if storage is not None and is_stored:
        storage.fill(name, opened, dtype)
    else:
        target.copy_from(lambda index: opened.read(index, dtype))


def _fill_storage_randomly(
    model: Any, config: ModelConfig, formats: tuple[WeightFormat, ...], seed: int, device: torch.device | str
) -> None:
    """Fill what the configuration says is quantised, and stays so."""
    targets, dtype = dict(model.targets(frozenset())), published_dtype(config)
    choose = choose_schemes(config.quantization, [format.scheme for format in formats])
    chosen = {name: choose(name, target.shape) for name, target in targets.items()}
    format_of, found = dict[str, int](), list[StoredFormat]()
    for index, format in enumerate(formats):
        if format.can_stay:
            format_of |= {name: len(found) for name, number in chosen.items() if number == index}
            found.append(format.stored_randomly(dtype))
    storage = QuantizedStorage(Matrices(model, targets, found, format_of, device))
    storage.fill_randomly(seed)
    storage.finish()


def _find_unused(names: Collection[str], holders: Holders, prefixes: Sequence[str]) -> dict[str, str]:
    """Return what published tensors that the model does not know belong to, as far as it can do without."""
    # A weight in 4 bits is published under other names than its own.
    shapes = {name: holders[name].shape(name) if name in holders else [] for name in names}
    found = {name: find_skipped(name, shape, prefixes) for name, shape in shapes.items()}
    return {name: what for name, what in found.items() if what is not None}


def _set_kv_scales(model: LoadableModel, holders: Holders, skipped_prefixes: tuple[str, ...]) -> list[str]:
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


def _check_names(
    origin: str,
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
        faults.append(f"{first_names(wanted)} missing")
        if all(name.startswith(VISUAL) for name in missing):
            faults.append("--language-model-only serves text without the vision tower")
    if unexpected:
        faults.append(f"{first_names(unexpected)} not known to this architecture")
    if faults:
        raise WeightsError(f"{origin}: {'; '.join(faults)}")


def first_names(names: Sequence[str]) -> str:
    """Return some names, and how many more there are."""
    shown = ", ".join(names[:MAX_NAMES])
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"
