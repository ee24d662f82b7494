"""Which part of a model a rank holds: one of several equal ones, in tensor and expert parallelism.

Layers are built with the sizes of their shard, and say of every published tensor which part of it is theirs
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
        """Whether it adds what must be added once, such as biases of sums over shards."""
        return self.index == 0

    def part_of(self, num: int, what: str) -> int:
        """Return how many of ``num`` things, heads for example, each shard holds.

        Args:
            what: the plural of their name, for the message.

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
        """Return the shard of ``num`` things that goes with this one; several hold the same if there are too few.

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
        """Return which of ``num`` things are held here: as many as elsewhere, or one more.

        Raises:
            ConfigError: there are fewer than shards.
        """
        if num < self.count:
            raise ConfigError(f"--tensor-parallel-size {self.count} is more than the model's {num:,} {what}")
        return range(self.index * num // self.count, (self.index + 1) * num // self.count)


WHOLE: Final = Shard(0, 1)
