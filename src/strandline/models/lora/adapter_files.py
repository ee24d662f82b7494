"""Adapters as PEFT writes them: ``adapter_config.json`` and one file of tensors, each module's by its name.

The names in the weights file say which modules are changed; ``target_modules`` and its relatives only say what was
asked for. Whatever is not a plain LoRA adapter is refused.

Source: ``peft`` 0.21 (``tuners/lora``) for the format.

Shape suffixes: O outputs, I inputs, R ranks.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import regex
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from strandline.config_fields import Fields
from strandline.errors import ConfigError, WeightsError
from strandline.file_forms import why_unreadable
from strandline.model_config import parse_json_object

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
PICKLES: Final = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

MAX_RANK: Final = 2**12
MAX_ALPHA: Final = 1e6
MAX_CONFIG_BYTES: Final = 2**24
MAX_NAME: Final = 512
"""Maximum length of a tensor's name."""
MATCHING_S: Final = 2.0
"""Maximum time for the regular expressions of ``rank_pattern`` and ``alpha_pattern``: some would take for ever."""

UNSUPPORTED: Final = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "layer_replication",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
    "megatron_config",
    "ensure_weight_tying",
)
"""Fields of ``adapter_config.json`` that change what an adapter computes, unless they are false or empty."""

CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Kinds of ``init_lora_weights`` that change the weights of the model, too."""

TENSOR: Final = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])(?:\.\w+)?\.weight")
STORED_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """The two tensors of a module, as they are in the file."""

    down_RI: Tensor
    up_OR: Tensor


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What decides by which factor each change is multiplied."""

    rank: int
    alpha: float
    rank_pattern: "Patterns"
    alpha_pattern: "Patterns"
    is_rank_stabilised: bool

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of a module's change.

        Raises:
            WeightsError: its tensors have another rank than the configuration says.
            ConfigError: to match the patterns takes too long.
        """
        expected = self.rank_pattern.of(module, self.rank)
        if rank != expected:
            raise WeightsError(f"{module} has rank {rank} in {WEIGHTS_NAME}, but {expected:g} in {CONFIG_NAME}")
        return self.alpha_pattern.of(module, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilised else rank)


class Patterns:
    """Values by regular expressions of modules' names.

    Args:
        field: field of the configuration, for messages.

    Raises:
        ConfigError: a key is no regular expression, or there are too many.
    """

    def __init__(self, field: str, values: Mapping[str, float]) -> None:
        self._field, self._left_s = field, MATCHING_S
        self._values = list[tuple[regex.Pattern[str], float]]()
        with self._timed():
            end = perf_counter() + MATCHING_S
            for pattern, value in values.items():
                self._values.append((_compiled(field, pattern), value))
                if perf_counter() > end:
                    raise TimeoutError

    @property
    def largest(self) -> float:
        """The largest value; 0: there are none."""
        return max((value for _, value in self._values), default=0)

    def of(self, module: str, default: float) -> float:
        """Return the value of the first pattern that a module's name ends with.

        Raises:
            ConfigError: this and the calls before took too long.
        """
        with self._timed():
            end = perf_counter() + self._left_s
            for pattern, value in self._values:
                if pattern.match(module, timeout=max(0.0, end - perf_counter())):
                    return value
        return default

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the time of a block."""
        start = perf_counter()
        try:
            yield
        except TimeoutError:
            raise ConfigError(f"{CONFIG_NAME}: {self._field} takes longer than {MATCHING_S:g} s to match") from None
        finally:
            self._left_s -= perf_counter() - start


def _compiled(field: str, pattern: str) -> "regex.Pattern[str]":
    try:
        return regex.compile(rf"(.*\.)?({pattern})$")
    except (regex.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{CONFIG_NAME}: {field} has {pattern!r:.200}, no regular expression: {error}") from None


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that has been read; nothing says yet which weights its modules are."""

    directory: Path
    config: AdapterConfig
    modules: Mapping[str, Factors]
    """By the modules' names in the model that was trained."""
    digest: str
    """Identifies the configuration and all tensors."""

    @property
    def rank(self) -> int:
        """The largest rank that the configuration names."""
        return int(max(self.config.rank, self.config.rank_pattern.largest))


def read_adapter(directory: Path) -> AdapterFiles:
    """Read the adapter in a directory.

    Raises:
        ConfigError: a file is missing or unreadable, or the adapter is of a kind that is not supported.
        WeightsError: a tensor is unknown, misshapen, of another dtype, or has no counterpart.
    """
    config_path, weights_path = directory / CONFIG_NAME, directory / WEIGHTS_NAME
    if not config_path.is_file():
        raise ConfigError(f"{directory} holds no adapter: {CONFIG_NAME} is missing")
    content = _read(config_path, MAX_CONFIG_BYTES)
    config = read_adapter_config(parse_json_object(content, config_path), str(config_path))
    if not weights_path.is_file():
        pickle = next((name for name in PICKLES if (directory / name).is_file()), None)
        hint = "" if pickle is None else f"; {pickle} could run code when it is read: save it as safetensors"
        raise WeightsError(f"{weights_path} is missing{hint}")
    digest = blake2b(content, digest_size=16)
    tensors = _read_tensors(weights_path)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return AdapterFiles(directory, config, _pair(tensors, weights_path), digest.hexdigest())


def read_adapter_config(values: Mapping[str, Any], path: str) -> AdapterConfig:
    """Read the fields of an ``adapter_config.json``.

    Raises:
        ConfigError: the adapter is of a kind that is not supported, or a field has another type or is out of range.
    """
    fields = Fields(values, f"{path}: ")
    fields.choice("peft_type", ["LORA"])
    for name in UNSUPPORTED:
        if fields.value(name):
            raise ConfigError(f"{path}: {name} is not supported; train without it, or merge the adapter into the model")
    fields.choice("bias", ["none"], default="none")
    kind = fields.value("init_lora_weights")
    if isinstance(kind, str) and kind.lower().startswith(CHANGES_BASE):
        raise ConfigError(
            f"{path}: init_lora_weights {kind!r} also changes the model's own weights; convert the adapter "
            "(PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )
    read_rank = partial(Fields.size, at_most=MAX_RANK)
    read_alpha = partial(Fields.number, at_least=-MAX_ALPHA, at_most=MAX_ALPHA)
    return AdapterConfig(
        rank=fields.size("r", at_most=MAX_RANK, default=8),
        alpha=read_alpha(fields, "lora_alpha", default=8),
        rank_pattern=_read_pattern(fields, "rank_pattern", read_rank),
        alpha_pattern=_read_pattern(fields, "alpha_pattern", read_alpha),
        is_rank_stabilised=fields.flag("use_rslora", default=False),
    )


def _read_pattern(fields: Fields, name: str, read: Any) -> Patterns:
    """Return what the modules whose names match have."""
    values = fields.value(name, {})
    if not isinstance(values, dict):
        fields.reject(name, "an object")
    entries = Fields(values, f"{CONFIG_NAME}: {name}: ")
    return Patterns(name, {pattern: read(entries, pattern) for pattern in values})


def _read(path: Path, max_bytes: int | None = None) -> bytes:
    """Return what is in a file: a mapped one that is rewritten while it is read would end the process."""
    try:
        if max_bytes is not None and path.stat().st_size > max_bytes:
            raise ConfigError(f"{path} has {path.stat().st_size:,} bytes; at most {max_bytes:,} are read")
        return path.read_bytes()
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load(_read(path))
    except (SafetensorError, KeyError, ValueError) as error:
        reason = why_unreadable(path, error)
        raise WeightsError(f"{path} is not a safetensors file, or is truncated: {reason}") from error


def _pair(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Factors]:
    """Return the two tensors of every module."""
    parts = dict[str, dict[str, Tensor]]()
    for name, tensor in tensors.items():
        found = TENSOR.fullmatch(name) if len(name) <= MAX_NAME else None
        if found is None:
            raise WeightsError(f"{path}: {name[:MAX_NAME]} is no part of a LoRA adapter's linear layer")
        if tensor.ndim != 2 or tensor.dtype not in STORED_DTYPES:
            shape = list(tensor.shape)
            raise WeightsError(f"{path}: {name} must be a matrix in 16 or 32 bits, got {tensor.dtype} {shape}")
        if not bool(tensor.isfinite().all()):
            raise WeightsError(f"{path}: {name} has numbers that are not finite")
        if parts.setdefault(found["module"], {}).setdefault(found["part"], tensor) is not tensor:
            raise WeightsError(f"{path}: {found['module']} has several lora_{found['part']}: one adapter a directory")
    if not parts:
        raise WeightsError(f"{path} has no tensors")
    for module, found_parts in parts.items():
        missing = {"A", "B"} - found_parts.keys()
        if missing:
            raise WeightsError(f"{path}: {module} has no lora_{missing.pop()}")
        down_RI, up_OR = found_parts["A"], found_parts["B"]
        if len(down_RI) != up_OR.shape[1] or not len(down_RI):
            shapes = f"{list(down_RI.shape)} and {list(up_OR.shape)}"
            raise WeightsError(f"{path}: {module}: lora_A and lora_B have shapes {shapes}, which share no rank")
    return {module: Factors(found_parts["A"], found_parts["B"]) for module, found_parts in parts.items()}
