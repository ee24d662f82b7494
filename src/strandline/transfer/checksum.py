"""Checksums of bytes on their way to another engine or to a disk: XXH3 of 64 bits.

They tell damage, not intent: who changes the bytes can change the checksum, too.
"""

from xxhash import xxh3_64, xxh3_64_intdigest

Buffer = bytes | bytearray | memoryview


def checksum(data: Buffer, before: int = 0) -> int:
    """Return the checksum of some bytes; other threads run meanwhile.

    Args:
        before: checksum of what comes before them, which makes it one of both.
    """
    return xxh3_64_intdigest(data, before)


class Checksum:
    """The checksum of bytes that come piece by piece; as that of all together."""

    def __init__(self) -> None:
        self._hasher = xxh3_64()

    def add(self, data: Buffer) -> None:
        """Take further bytes; other threads run meanwhile."""
        self._hasher.update(data)

    @property
    def value(self) -> int:
        return self._hasher.intdigest()
