"""The memory of encoded pictures: which of its rows hold which picture.

Its size is bounded by the largest picture and the largest step, so it holds what running prompts need, and what is left
of others, the last used longest. A picture is encoded once for all prompts that need it together, and not at all where
the prefix cache covers it.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise

from strandline.errors import EngineError
from strandline.records.pictures import Picture
from strandline.records.plan import PictureToEncode


class EncodedPictures:
    """Allocates rows, by picture.

    Args:
        num_rows: of the memory, one for each token.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._rows = OrderedDict[bytes, range]()
        """By digest; the last used last."""
        self._pinned = set[bytes]()
        self._to_encode = dict[bytes, PictureToEncode]()

    def pin(self, digests: Iterable[bytes]) -> None:
        """Keep these pictures, which running prompts have begun, and no others from now on."""
        self._pinned = set(digests)

    def __contains__(self, digest: bytes) -> bool:
        """Whether a picture has rows."""
        return digest in self._rows

    def take(self, digest: bytes, num_tokens: int, picture: Picture | None) -> bool:
        """Find or allocate rows for a picture, and keep it until the next ``pin``; whether there is room.

        Args:
            picture: its pixels; None only if it has rows.

        Raises:
            EngineError: there never is room.
        """
        if num_tokens > self._num_rows:
            raise EngineError(f"a picture of {num_tokens} tokens exceeds the {self._num_rows} that can be encoded")
        if digest not in self._rows:
            if picture is None:
                raise EngineError(f"picture {digest.hex()} cannot be encoded without its pixels")
            first = self._make_room(num_tokens)
            if first is None:
                return False
            self._rows[digest] = range(first, first + num_tokens)
            self._to_encode[digest] = PictureToEncode(picture, first)
        self._rows.move_to_end(digest)
        self._pinned.add(digest)
        return True

    def rows(self, digest: bytes) -> range:
        """Return the rows of a picture that was taken."""
        return self._rows[digest]

    def take_new(self) -> tuple[PictureToEncode, ...]:
        """Return the pictures to be encoded before the step that is planned."""
        new, self._to_encode = self._to_encode, {}
        return tuple(new.values())

    def _make_room(self, num_tokens: int) -> int | None:
        """Return the first of as many free rows; evict pictures that are not pinned. None: those pinned leave none."""
        pinned = [rows for digest, rows in self._rows.items() if digest in self._pinned]
        if _first_gap(pinned, num_tokens, self._num_rows) is None:
            return None
        while (first := _first_gap(self._rows.values(), num_tokens, self._num_rows)) is None:
            oldest = next(digest for digest in self._rows if digest not in self._pinned)
            del self._rows[oldest]
            self._to_encode.pop(oldest, None)
        return first


def _first_gap(taken: Iterable[range], num_tokens: int, num_rows: int) -> int | None:
    """Return the first row of a free range; None: there is none that is long enough."""
    bounds = sorted(taken, key=lambda rows: rows.start)
    edges = [range(0), *bounds, range(num_rows, num_rows)]
    return next((left.stop for left, right in pairwise(edges) if right.start - left.stop >= num_tokens), None)
