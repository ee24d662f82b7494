"""Shards of a model for tensor and expert parallelism: one of several equal parts for each rank.

Layers are built with the sizes of their shard, and their targets select its part of every published tensor
(``targets.py``).
"""

from dataclasses import dataclass
from typing import Final

from strandline.errors import ConfigError
from strandline.specs import TensorSpec


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``count`` parts."""

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        """Whether it adds the terms that must be added once, such as biases of sums over shards."""
        return self.index == 0

    def part_of(self, num: int, what: str) -> int:
        """Return the number of items, for example heads, in each shard out of ``num``.

        Args:
            what: plural name of the items, for messages.

        Raises:
            ConfigError: they cannot be divided equally.
        """
        if num % self.count:
            raise ConfigError(f"--tensor-parallel-size {self.count} does not divide the model's {num:,} {what}")
        return num // self.count

    def divided(self, tensor: TensorSpec, dim: int = 0) -> TensorSpec:
        """Return the spec of one share of a tensor that all shards divide equally along a dimension."""
        return tensor.divided((tensor.shape[dim], self.count), dim=dim)

    def shared(self, num: int, what: str) -> "Shard":
        """Return this shard's part of ``num`` items; if there are fewer items than shards, shards share them.

        Raises:
            ConfigError: they can neither be divided nor replicated equally.
        """
        if num % self.count == 0:
            return self
        if self.count % num:
            raise ConfigError(
                f"--tensor-parallel-size {self.count} is neither a divisor nor a multiple of the model's {num:,} {what}"
            )
        return Shard(self.index * num // self.count, num)

    def span(self, num: int, what: str) -> range:
        """Return this shard's range of ``num`` items; sizes differ by at most one.

        Raises:
            ConfigError: there are fewer items than shards.
        """
        if num < self.count:
            raise ConfigError(f"--tensor-parallel-size {self.count} is more than the model's {num:,} {what}")
        return range(self.index * num // self.count, (self.index + 1) * num // self.count)


WHOLE: Final = Shard(0, 1)
