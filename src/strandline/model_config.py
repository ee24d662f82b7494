"""A model's ``config.json``: read by transformers, and checked field by field before anything depends on it.

transformers is imported by the function that needs it, so that importing this module loads no tensor library.
"""

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from strandline.errors import ConfigError, cause_of

if TYPE_CHECKING:
    from transformers.configuration_utils import PretrainedConfig

T = TypeVar("T")

ARCHITECTURES: Final = (
    "BambaForCausalLM",
    "FalconH1ForCausalLM",
    "FalconMambaForCausalLM",
    "Glm5NextForConditionalGeneration",
    "GraniteMoeHybridForCausalLM",
    "InklingForCausalLM",
    "InklingForConditionalGeneration",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "LlamaForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "MiniMaxForCausalLM",
    "NemotronHForCausalLM",
    "OlmoHybridForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration",
    "RecurrentGemmaForCausalLM",
    "Zamba2ForCausalLM",
    "ZayaForCausalLM",
)
"""Supported architectures. ``models/registry.py`` has a builder for each; this list can be checked without torch."""

NEAREST_BY_LAYERS: Final = {
    "BailingHybrid": "KimiLinearForCausalLM",  # a linear attention beside latent attention
    "BailingMoeV2_5": "KimiLinearForCausalLM",  # the same
    "DeepseekV2": "KimiLinearForCausalLM",  # latent attention, experts
    "DeepseekV3": "KimiLinearForCausalLM",  # the same
    "Lfm3": "Lfm2ForCausalLM",
    "Mistral": "LlamaForCausalLM",
}
"""Unsupported families whose layers resemble those of a family with another name."""

DTYPES: Final = ("float32", "bfloat16", "float16")
"""Dtypes of published weights and of recurrent states."""

MAX_LAYERS: Final = 1024
LISTED: Final = {"num_hidden_layers": MAX_LAYERS, "num_labels": 2**16}
"""Counts that transformers expands into lists while it reads a configuration, and their maximum values."""

MAX_HEADS: Final = 1024
MAX_HEAD_DIM: Final = 256
"""Maximum channels of a head: kernels hold whole rows of them in registers."""
MAX_SIZE: Final = 2**20
"""Maximum channels of the hidden and intermediate states."""
MAX_VOCAB: Final = 2**24
MAX_POSITION: Final = 2**31 - 1
UNLIMITED_POSITION: Final = 2**20
"""Maximum context length of a model without a limit: every sequence has a table of blocks."""
MIN_EPS: Final = 1e-12
"""Prevents NaN from norms of zeros."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ConfigError: it cannot be read, or is not a JSON object.
    """
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be a JSON object, got {reprlib.repr(values)}")
    return values


def read_model_config(path: Path) -> "PretrainedConfig":
    """Read a ``config.json``, given by its own path or that of its directory.

    Raises:
        ConfigError: it is missing or transformers does not understand it.
    """
    from transformers import AutoConfig

    file, values = _read_file(path)
    for part in (values, *(value for value in values.values() if isinstance(value, dict))):
        for name, most in LISTED.items():
            Fields(part).size(name, at_least=0, at_most=most, default=0)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"{file} cannot be read: {cause_of(error)}") from error
    return config


def _read_file(path: Path) -> tuple[Path, dict[str, Any]]:
    file = path if path.is_file() else path / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path} has no config.json: is it a model directory in Hugging Face layout?")
    return file, read_json_object(file)


def check_architecture(path: Path) -> None:
    """Check that a ``config.json`` names a supported architecture; takes milliseconds, as transformers is not imported.

    Raises:
        ConfigError: the architecture is unsupported, or the file is missing.
    """
    find_architecture(_read_file(path)[1].get("architectures"))


def find_architecture(names: Sequence[str] | None) -> str:
    """Return the first of a model's ``architectures`` that is supported.

    Raises:
        ConfigError: none is supported; the message lists the supported ones and the nearest: by its layers where they
            are known, else by name.
    """
    names = [str(name) for name in names] if isinstance(names, list) else []
    for name in names:
        if name in ARCHITECTURES:
            return name
    asked = ", ".join(names) or "no architecture"
    nearest = f"; the nearest is {_find_nearest(names[0])}" if names else ""
    raise ConfigError(f"the model's configuration names {asked}; supported: {', '.join(ARCHITECTURES)}{nearest}")


def _find_nearest(name: str) -> str:
    """Return the supported architecture with similar layers, or else with the most similar name.

    The suffix that all names share is ignored.
    """
    family = name.partition("For")[0]
    if family in NEAREST_BY_LAYERS:
        return NEAREST_BY_LAYERS[family]
    families = {architecture.partition("For")[0]: architecture for architecture in reversed(ARCHITECTURES)}
    return families[get_close_matches(family, families, n=1, cutoff=0)[0]]


class Fields:
    """The fields of a configuration, checked for type and range as they are read.

    Every method raises a ConfigError that names the field, its value and what is allowed. A field that is missing or
    null has the default, if there is one.

    Args:
        prefix: of the names in messages: the file, and the path of a configuration inside another.
    """

    def __init__(self, config: "PretrainedConfig | Mapping[str, Any]", prefix: str = "config.json: ") -> None:
        self._config, self._prefix = config, prefix

    def value(self, name: str, default: Any = None) -> Any:
        """Return a field as it is."""
        value = self._config.get(name) if isinstance(self._config, Mapping) else getattr(self._config, name, None)
        return default if value is None else value

    def size(self, name: str, *, at_least: int = 1, at_most: int = MAX_SIZE, default: int | None = None) -> int:
        """Return a whole number."""
        value = self.value(name, default)
        if type(value) is not int or not at_least <= value <= at_most:
            self.reject(name, f"a whole number from {at_least:,} to {at_most:,}")
        return value

    def number(self, name: str, *, at_least: float, at_most: float, default: float | None = None) -> float:
        """Return a number."""
        value = self.value(name, default)
        if type(value) not in (int, float) or not at_least <= value <= at_most:
            self.reject(name, f"a number from {at_least:g} to {at_most:g}")
        return float(value)

    def flag(self, name: str, *, default: bool | None = None) -> bool:
        """Return a boolean."""
        value = self.value(name, default)
        if type(value) is not bool:
            self.reject(name, "true or false")
        return value

    def choice(self, name: str, choices: Sequence[str], *, default: str | None = None) -> str:
        """Return one of several strings."""
        value = self.value(name, default)
        if not isinstance(value, str) or value not in choices:
            found, supported = reprlib.repr(value), ", ".join(choices)
            raise ConfigError(f"{self._prefix}{name} {found} is not supported; supported: {supported}")
        return value

    def list_of(self, name: str, read: "Callable[[Fields, str], T]") -> tuple[T, ...]:
        """Return a list whose entries are read by ``read``, a method of this class."""
        values = self.value(name)
        if not isinstance(values, list | tuple):
            self.reject(name, "a list")
        named = {f"{name}[{index}]": value for index, value in enumerate(values)}
        entries = Fields(named, self._prefix)
        return tuple(read(entries, entry) for entry in named)

    def tokens(self, name: str, vocab_size: int) -> frozenset[int]:
        """Return one token id or a list of them as a set, which is empty if the field is missing."""

        def token(fields: Fields, name: str) -> int:
            return fields.size(name, at_least=0, at_most=vocab_size - 1)

        value = self.value(name)
        if value is None:
            return frozenset()
        return frozenset(self.list_of(name, token) if isinstance(value, list) else [token(self, name)])

    def reject(self, name: str, allowed: str) -> NoReturn:
        """Raise a ConfigError that names a field, its value and what is ``allowed``."""
        value = self.value(name)
        found = "is missing" if value is None else f"is {reprlib.repr(value)}"
        raise ConfigError(f"{self._prefix}{name} {found}; it must be {allowed}")


def read_vocab_size(fields: Fields) -> int:
    """Return the number of token ids."""
    return fields.size("vocab_size", at_most=MAX_VOCAB)


def read_layer_types(fields: Fields, kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the kind of each layer."""
    layer_types = fields.list_of("layer_types", lambda entries, name: entries.choice(name, kinds))
    if fields.size("num_hidden_layers", at_most=MAX_LAYERS) != len(layer_types):
        fields.reject("num_hidden_layers", f"the number of layer_types, {len(layer_types)}")
    return layer_types


def read_head_dim(fields: Fields) -> int:
    """Return the channels of an attention head: ``head_dim``, or the hidden size divided by the number of heads."""
    share = fields.size("hidden_size") // fields.size("num_attention_heads", at_most=MAX_HEADS)
    return fields.size("head_dim", at_most=MAX_HEAD_DIM, default=share)


def read_eps(fields: Fields, name: str = "rms_norm_eps") -> float:
    """Return the epsilon of norms."""
    return fields.number(name, at_least=MIN_EPS, at_most=1)


def read_max_position(fields: Fields) -> int:
    """Return the maximum context length in tokens."""
    return fields.size("max_position_embeddings", at_most=MAX_POSITION)
