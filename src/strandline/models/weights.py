"""Loads published weights (safetensors, in one file or in shards), or draws random ones.

Every published tensor is accounted for: it is copied to its target, or recognised and skipped, or it is an error. A
tensor that the model needs and the files lack is an error, too, and so is a shape that differs.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from strandline.errors import ConfigError, WeightsError
from strandline.model_config import DTYPES, Fields, read_model_config
from strandline.models.layers.parameters import Gain
from strandline.models.protocol import LoadableModel
from strandline.models.registry import builder_for
from strandline.models.targets import Target

INDEX_NAME: Final = "model.safetensors.index.json"

SKIPPED_PREFIXES: Final = ("mtp.", "model.visual.")
"""Parts that are published with the text model and not used: draft layers and the vision tower."""

STORED_DTYPES: Final = ("F32", "BF16", "F16")

MAX_HOST_ELEMENTS = 2**22
"""The largest tensor of random weights that is drawn on the host for a GPU."""

MAX_NAMES = 5
"""Tensors that an error lists; further ones are counted."""


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What was found in the weights files."""

    num_tensors: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """Prefix -> number of tensors that were recognised and skipped."""

    @property
    def is_mtp_present(self) -> bool:
        """Whether the weights hold draft layers (multi-token prediction)."""
        return bool(self.skipped.get("mtp."))


def load_model(
    path: str | Path,
    *,
    config: Any | None = None,
    dtype: torch.dtype | Literal["auto"] = "auto",
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = False,
) -> LoadableModel:
    """Build the model of a local directory and fill it with its weights, as parameters (``lay_out`` is not called).

    The model has an attribute ``weights_report``, a :class:`WeightsReport`.

    Args:
        config: the model's ``PretrainedConfig``; None: read from the directory.
        dtype: of weights and activations; ``auto`` takes the configuration's, or bfloat16 where it has none.
        load_format: ``auto`` or ``safetensors`` reads files; ``dummy`` needs none and draws random weights.
        seed: of the random weights.
        progress: show a bar over the files.

    Raises:
        ConfigError: the architecture or a setting is not supported.
        WeightsError: a file or tensor is missing, unreadable, unexpected or misshapen.
    """
    config = read_model_config(Path(path)) if config is None else config
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{path}: quantised weights are not supported; use a model published in bfloat16")
    model: Any = builder_for(config)(config, published_dtype(config) if dtype == "auto" else dtype, device)
    if load_format == "dummy":
        fill_with_random_weights(model, seed, published_dtype(config))
        model.weights_report = WeightsReport()
    elif load_format in ("auto", "safetensors"):
        model.weights_report = _fill_from_files(model, Path(path), progress=progress)
    else:
        raise ConfigError(f"--load-format {load_format!r} is unknown; known: auto, safetensors, dummy")
    filled: LoadableModel = model.eval()
    return filled


def fill_with_random_weights(model: LoadableModel, seed: int, dtype: torch.dtype) -> None:
    """Fill every parameter with values that keep activations and decays in a realistic range.

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


def published_dtype(config: Any) -> torch.dtype:
    """Return the dtype that a ``PretrainedConfig`` names, or bfloat16 where it has none.

    Raises:
        ConfigError: weights of that dtype are not supported.
    """
    named = next(
        (source.dtype for source in (config, config.get_text_config()) if source.dtype is not None), "bfloat16"
    )
    dtype: torch.dtype = getattr(torch, Fields({"dtype": str(named).removeprefix("torch.")}).choice("dtype", DTYPES))
    return dtype


def _fill_from_files(model: LoadableModel, directory: Path, *, progress: bool) -> WeightsReport:
    with ExitStack() as stack:
        files = [(path, stack.enter_context(_open(path))) for path in _find_files(directory)]
        names = frozenset(name for _, file in files for name in file.keys())  # noqa: SIM118 - not a dict
        skipped = Counter(prefix for name in names for prefix in SKIPPED_PREFIXES if name.startswith(prefix))
        targets = dict(model.targets(names))
        _check_names(directory, names, targets)
        for path, file in tqdm(files, desc="Loading weights", unit="file", disable=not progress):
            _fill_from_file(path, file, targets)
    return WeightsReport(len(targets), dict(skipped))


def _find_files(directory: Path) -> list[Path]:
    """Return the weights files of a directory: those its index names, else all."""
    index = directory / INDEX_NAME
    if not index.is_file():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"{directory} holds no *.safetensors; --load-format dummy runs on random weights")
        return files
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is not an index of weights files: {error!r}") from error
    for shard in shards:
        if not (directory / shard).is_file():
            raise WeightsError(f"{directory / shard} is missing: {INDEX_NAME} names it, one of {len(shards)} files")
    return [directory / shard for shard in shards]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is not a safetensors file, or is truncated: {error}") from error


def _check_names(directory: Path, names: frozenset[str], targets: dict[str, Target]) -> None:
    missing = [name for name in targets if name not in names]
    unexpected = sorted(name for name in names if name not in targets and not name.startswith(SKIPPED_PREFIXES))
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


def _fill_from_file(path: Path, file: Any, targets: dict[str, Target]) -> None:
    for name, target in _wanted(file, targets):
        view = file.get_slice(name)
        if tuple(view.get_shape()) != target.shape:
            raise WeightsError(
                f"{path}: {name} has shape {view.get_shape()}, the configuration asks for {list(target.shape)}"
            )
        if view.get_dtype() not in STORED_DTYPES:
            stored = ", ".join(STORED_DTYPES)
            raise WeightsError(f"{path}: {name} is stored as {view.get_dtype()}; supported: {stored}")
        target.copy_from(file.get_tensor(name))


def _wanted(file: Any, targets: dict[str, Target]) -> Iterator[tuple[str, Target]]:
    for name in file.keys():  # noqa: SIM118 - not a dict
        if name in targets:
            yield name, targets[name]
