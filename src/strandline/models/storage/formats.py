"""The formats of quantised weights: how each is found in files, and how it stays quantised on a device.

| format | weights in files | rows on a device |
| --- | --- | --- |
| FP8 with float32 scales | ``fp8.py`` | ``fp8_storage.py`` |
| integers of 4 bits | ``four_bit.py`` | ``coded_storage.py`` |
| NVFP4, MXFP4, MXFP8 | ``microscaled.py`` | ``coded_storage.py`` |

``quantization_config.py`` reads which of them a configuration announces; the names of tensors are in ``layouts.py``.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from strandline.errors import WeightsError
from strandline.model_config import ModelConfig
from strandline.models.layers.parts.targets import Target
from strandline.models.storage.four_bit import FourBitFormat
from strandline.models.storage.fp8_storage import Fp8Format
from strandline.models.storage.layouts import Layout
from strandline.models.storage.microscaled import MicroscaledFormat
from strandline.models.storage.published import Holders, PublishedWeight
from strandline.models.storage.quantization_config import (
    FourBitScheme,
    Fp8Scheme,
    Scheme,
    read_schemes,
)
from strandline.models.storage.stored_rows import StoredFormat


class FoundWeight(PublishedWeight, Protocol):
    """A quantised weight in files."""

    @property
    def has_own_scales(self) -> bool:
        """Whether its scales are those of its format, not of another one whose numbers have the same dtype."""


class WeightFormat(Protocol):
    """A format, with what the configuration says of the weights that have it."""

    @property
    def kind(self) -> str:
        """Its name in messages."""

    @property
    def bits(self) -> int:
        """Size of a weight, without scales."""

    @property
    def scheme(self) -> Scheme:
        """How weights are published."""

    @property
    def can_stay(self) -> bool:
        """Whether kernels multiply with weights that are published so."""

    @property
    def has_e4m3(self) -> bool:
        """Whether kernels convert numbers in e4m3, which not every GPU does."""

    def find(self, holders: Holders) -> Mapping[str, FoundWeight]:
        """Return the weights of this format in files, by their names in a model that is not quantised."""

    def can_store(self, weight: Any, target: Target) -> bool:
        """Return whether kernels multiply with one of the found weights as it is published."""

    def stored(self, weights: Mapping[str, Any]) -> StoredFormat:
        """Return how found weights stay quantised, those that ``can_store``."""

    def stored_randomly(self, dtype: torch.dtype) -> StoredFormat:
        """Return how random weights are stored; scales that have no dtype of their own get this one."""


def read_formats(config: ModelConfig) -> tuple[WeightFormat, ...]:
    """Return the formats that a model's weights may have.

    Raises:
        ConfigError: the weights are quantised in a way that is not supported.
    """
    return tuple(map(_format, read_schemes(config)))


def _format(scheme: Scheme) -> WeightFormat:
    match scheme:
        case Fp8Scheme():
            return Fp8Format(scheme)
        case FourBitScheme():
            return FourBitFormat(scheme)
        case Layout():
            return MicroscaledFormat(scheme)


def find_weights(formats: tuple[WeightFormat, ...], holders: Holders) -> dict[str, tuple[int, PublishedWeight]]:
    """Return the quantised weights in files, each with the index of its format.

    Raises:
        WeightsError: a weight is published twice.
    """
    claims = dict[str, list[tuple[int, FoundWeight]]]()
    for index, format in enumerate(formats):
        for name, weight in format.find(holders).items():
            claims.setdefault(name, []).append((index, weight))
    found = dict[str, tuple[int, PublishedWeight]]()
    for name, claimed in claims.items():
        numbers = sorted({weight.tensors[0] for _, weight in claimed} | ({name} & holders.keys()))
        if len(numbers) > 1:
            first = "it is" if name in holders else numbers[0]
            raise WeightsError(f"{name} is published twice, as {first} and as {numbers[1]}")
        found[name] = next((claim for claim in claimed if claim[1].has_own_scales), claimed[0])
    return found
