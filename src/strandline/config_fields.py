"""The fields of a configuration, checked one by one before anything depends on them."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar

from strandline.errors import ConfigError

T = TypeVar("T")

DTYPES: Final = ("float32", "bfloat16", "float16")
"""Dtypes of published weights and of recurrent states."""

MAX_LAYERS: Final = 1024

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


class Fields:
    """The fields of a configuration, checked for type and range as they are read.

    Every method raises a ConfigError that names the field, its value and what is allowed. A field that is missing or
    null has the default, if there is one.

    Args:
        prefix: prefix of the names in messages: the file, and the path of a configuration inside another.
        spelled: names that the file has for fields, where they differ; messages use them.
    """

    def __init__(
        self, config: Mapping[str, Any], prefix: str = "config.json: ", spelled: Mapping[str, str] | None = None
    ) -> None:
        self._config, self._prefix, self._spelled = config, prefix, spelled or {}

    @property
    def prefix(self) -> str:
        """What messages put before a name."""
        return self._prefix

    def replaced(self, values: Mapping[str, Any], path: str) -> "Fields":
        """Return these fields with other values, which are in the file below a path."""
        spelled = {name: f"{path}.{name}" for name in values}
        return Fields({**self._config, **values}, self._prefix, {**self._spelled, **spelled})

    def name_in_file(self, name: str) -> str:
        """Return what the file calls a field."""
        return self._spelled.get(name, name)

    def value(self, name: str, default: Any = None) -> Any:
        """Return a field as it is."""
        value = self._config.get(name)
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
            named = f"{self._prefix}{self.name_in_file(name)}"
            raise ConfigError(f"{named} {found} is not supported; supported: {supported}")
        return value

    def list_of(self, name: str, read: "Callable[[Fields, str], T]") -> tuple[T, ...]:
        """Return a list whose entries are read by ``read``, a method of this class."""
        values = self.value(name)
        if not isinstance(values, list | tuple):
            self.reject(name, "a list")
        named = {f"{self.name_in_file(name)}[{index}]": value for index, value in enumerate(values)}
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
        raise ConfigError(f"{self._prefix}{self.name_in_file(name)} {found}; it must be {allowed}")


def read_vocab_size(fields: Fields) -> int:
    """Return the number of token ids."""
    return fields.size("vocab_size", at_most=MAX_VOCAB)


def read_layer_types(fields: Fields, kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the kind of each layer."""
    layer_types = fields.list_of("layer_types", lambda entries, name: entries.choice(name, kinds))
    if fields.size("num_hidden_layers", at_most=MAX_LAYERS) != len(layer_types):
        fields.reject("num_hidden_layers", f"the number of layer_types, {len(layer_types)}")
    return layer_types


def read_layer_kinds(fields: Fields, name: str, kinds: Sequence[str], num_layers: int) -> tuple[str, ...]:
    """Return the kind of a part of each layer."""
    found = fields.list_of(name, lambda entries, entry: entries.choice(entry, kinds))
    if len(found) != num_layers:
        fields.reject(name, f"a list of {num_layers}, one for each layer")
    return found


def read_mlp_layer_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Return the kind of each layer's feed-forward part, ``dense`` or ``sparse``."""
    return read_layer_kinds(fields, "mlp_layer_types", ("dense", "sparse"), num_layers)


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
