"""Adapters as PEFT writes them: ``adapter_config.json`` and one file of tensors, each module's by its name.

The names in the weights file say which modules are changed; ``target_modules`` and its relatives only say what was
asked for. Whatever is not a plain LoRA adapter is refused.

Source: ``peft`` 0.21 (``tuners/lora``) for the format.

Shape suffixes: O outputs, I inputs, R ranks.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from strandline.config_fields import Fields
from strandline.errors import ConfigError, WeightsError
from strandline.model_config import read_json_object

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
PICKLES: Final = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

MAX_RANK: Final = 2**12
MAX_ALPHA: Final = 1e6
MAX_PATTERN: Final = 256
"""Maximum length of a key of ``rank_pattern`` and ``alpha_pattern``, which are regular expressions."""

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

CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq")
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
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    is_rank_stabilised: bool

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of a module's change.

        Raises:
            WeightsError: its tensors have another rank than the configuration says.
        """
        expected = _match(self.rank_pattern, module, self.rank)
        if rank != expected:
            raise WeightsError(f"{module} has rank {rank} in {WEIGHTS_NAME}, but {expected} in {CONFIG_NAME}")
        alpha: float = _match(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


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
        return max(self.config.rank, *self.config.rank_pattern.values(), 0)


def read_adapter(directory: Path) -> AdapterFiles:
    """Read the adapter in a directory.

    Raises:
        ConfigError: a file is missing or unreadable, or the adapter is of a kind that is not supported.
        WeightsError: a tensor is unknown, misshapen, of another dtype, or has no counterpart.
    """
    config_path, weights_path = directory / CONFIG_NAME, directory / WEIGHTS_NAME
    if not config_path.is_file():
        raise ConfigError(f"{directory} holds no adapter: {CONFIG_NAME} is missing")
    config = read_adapter_config(read_json_object(config_path), str(config_path))
    if not weights_path.is_file():
        pickle = next((name for name in PICKLES if (directory / name).is_file()), None)
        hint = "" if pickle is None else f"; {pickle} could run code when it is read: save it as safetensors"
        raise WeightsError(f"{weights_path} is missing{hint}")
    digest = blake2b(config_path.read_bytes(), digest_size=16)
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


def _read_pattern(fields: Fields, name: str, read: Any) -> dict[str, Any]:
    """Return what the modules whose names match have, by regular expressions."""
    values = fields.value(name, {})
    if not isinstance(values, dict):
        fields.reject(name, "an object")
    for pattern in values:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(f"{CONFIG_NAME}: {name} has {pattern!r}, no regular expression: {error}") from None
        if len(pattern) > MAX_PATTERN:
            raise ConfigError(f"{CONFIG_NAME}: {name} has a pattern of more than {MAX_PATTERN} characters")
    entries = Fields(values, f"{CONFIG_NAME}: {name}: ")
    return {pattern: read(entries, pattern) for pattern in values}


def _match(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that a module's name ends with."""
    matching = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(matching, default)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is not a safetensors file, or is truncated: {error}") from error


def _pair(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Factors]:
    """Return the two tensors of every module."""
    parts = dict[str, dict[str, Tensor]]()
    for name, tensor in tensors.items():
        found = TENSOR.fullmatch(name)
        if found is None:
            raise WeightsError(f"{path}: {name} is no part of a LoRA adapter's linear layer")
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
