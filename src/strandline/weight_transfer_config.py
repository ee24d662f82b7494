"""The configuration of weights that trainers send: names and meanings are vLLM's where vLLM has the field."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from strandline.errors import ConfigError
from strandline.json_options import read_json_option

FLAG: Final = "--weight-transfer-config"
EXAMPLE: Final = '{"backend": "nccl"}'
BACKENDS: Final = ("nccl", "ipc")
DEFAULT_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTransferConfig:
    """How a trainer sends weights to an engine.

    Raises:
        ConfigError: a value is out of range.
    """

    backend: str
    """``nccl``: broadcasts from the trainer, over gloo where the engine computes on a CPU. ``ipc``: handles of memory
    that a trainer on the same device shares."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """How long the trainer may take to meet the engine, or to send as much as is received at a time."""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"{FLAG}: backend must be one of {', '.join(BACKENDS)}; got {self.backend!r}")
        timeout_s: object = self.timeout_s
        if type(timeout_s) not in (int, float) or not 0 < self.timeout_s < 3600:
            raise ConfigError(f"{FLAG}: timeout_s must be above 0 and below 3600 seconds, got {timeout_s!r}")


def read_weight_transfer_config(value: str | Mapping[str, Any]) -> WeightTransferConfig:
    """Read the configuration from a mapping, or from JSON.

    Raises:
        ConfigError: the value is not a mapping, a field is unknown or missing, or a value is out of range.
    """
    known = [field.name for field in fields(WeightTransferConfig)]
    given = read_json_option(FLAG, value, known=known, example=EXAMPLE)
    if "backend" not in given:
        raise ConfigError(f"{FLAG}: backend is missing; an example is {EXAMPLE}")
    return WeightTransferConfig(**given)
