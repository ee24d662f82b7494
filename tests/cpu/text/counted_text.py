"""Text that counts the characters that operations on it read or copy."""

from collections.abc import Iterator
from typing import Any


class CountedText(str):
    """Text whose results are counted too. Comparisons with a tag are not: they read no more than the tag has."""

    num_characters = 0
    """Read or copied so far, by all instances."""
    __slots__ = ()

    @classmethod
    def take_count(cls) -> int:
        """Return the number of characters since the last call."""
        num_characters, cls.num_characters = cls.num_characters, 0
        return num_characters

    def __add__(self, other: str) -> "CountedText":
        return _counted(str.__add__(self, other))

    def __radd__(self, other: str) -> "CountedText":
        return _counted(str.__add__(other, self))

    def __getitem__(self, key: Any) -> "CountedText":
        return _counted(str.__getitem__(self, key))

    def __iter__(self) -> Iterator[str]:
        _counted(self)
        return str.__iter__(self)

    def find(self, *arguments: Any) -> int:
        return str.find(_counted(self), *arguments)

    def isspace(self) -> bool:
        return str.isspace(_counted(self))

    def lstrip(self, characters: str | None = None) -> "CountedText":
        return CountedText(str.lstrip(_counted(self), characters))

    def rstrip(self, characters: str | None = None) -> "CountedText":
        return CountedText(str.rstrip(_counted(self), characters))

    def strip(self, characters: str | None = None) -> "CountedText":
        return CountedText(str.strip(_counted(self), characters))

    def partition(self, separator: str) -> Any:
        return tuple(map(CountedText, str.partition(_counted(self), separator)))

    def removeprefix(self, prefix: str) -> "CountedText":
        return CountedText(str.removeprefix(self, prefix))

    def removesuffix(self, suffix: str) -> "CountedText":
        return CountedText(str.removesuffix(self, suffix))


def _counted(text: str) -> CountedText:
    CountedText.num_characters += len(text)
    return text if isinstance(text, CountedText) else CountedText(text)
