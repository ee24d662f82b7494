"""What one tier has of a run's blocks."""

from array import array


class Part:
    """Addresses of blocks, and how many are needed."""

    __slots__ = ("addresses", "num_blocks")

    def __init__(self, num_known: int) -> None:
        self.addresses = array("q", bytes(8 * num_known))
        """``NO_ADDRESS``: the device has it, it is being written to the store, or nothing needs it."""
        self.num_blocks = 0
        """How many of the run's blocks, from the first, the tier has."""

    def append(self, other: "Part") -> None:
        """Append what the tier has of the blocks after these."""
        self.addresses += other.addresses

    def split(self, count: int) -> "Part":
        """Remove the first blocks; return what the tier has of them."""
        upper = Part(0)
        upper.addresses, self.addresses = self.addresses[:count], self.addresses[count:]
        upper.num_blocks = min(self.num_blocks, count)
        self.num_blocks -= upper.num_blocks
        return upper
