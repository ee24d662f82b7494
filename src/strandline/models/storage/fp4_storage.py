"""Weights in FP4 (NVFP4 and MXFP4): dequantised as they load."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch

from strandline.models.layers.targets import Target
from strandline.models.storage.fp4 import PublishedFp4, find_fp4
from strandline.models.storage.published import Holders
from strandline.models.storage.quantization_config import Fp4Scheme


@dataclass(frozen=True, slots=True)
class Fp4Format:
    """See ``WeightFormat``."""

    scheme: Fp4Scheme
    kind: ClassVar[str] = "FP4"
    bits: ClassVar[int] = 4
    can_stay: ClassVar[bool] = False

    def find(self, holders: Holders) -> Mapping[str, PublishedFp4]:
        """See ``WeightFormat``."""
        return find_fp4(holders, self.scheme)

    def can_store(self, weight: PublishedFp4, target: Target) -> bool:
        """See ``WeightFormat``."""
        return False

    def stored(self, weights: Mapping[str, PublishedFp4]) -> NoReturn:
        """See ``WeightFormat``."""
        raise NotImplementedError

    def stored_randomly(self, dtype: torch.dtype) -> NoReturn:
        """See ``WeightFormat``."""
        raise NotImplementedError
