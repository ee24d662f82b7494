"""What pictures are called where a prompt's tokens are shown."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Final

from strandline.records.pictures import PlacedPicture, is_virtual, virtual_ids

MAX_NAMES: Final = 8192
UNKNOWN: Final = "[picture]"


class PictureNames:
    """Names of the pictures of recent prompts, such as ``[picture 640×480, 300 tokens]``."""

    def __init__(self) -> None:
        self._names = OrderedDict[int, str]()
        """By a picture's first id, and by its last one; the oldest first."""

    def note(self, pictures: Iterable[PlacedPicture]) -> None:
        """Remember the pictures of a prompt."""
        for span, picture in pictures:
            width, height = picture.original_size
            ids = virtual_ids(span.digest, span.rows, span.columns)
            for token_id in (ids[0], ids[-1]):
                self._names[token_id] = f"[picture {width}×{height}, {span.num_tokens:,} tokens]"
                self._names.move_to_end(token_id)
        while len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)

    def text_of(self, tokens: Sequence[int], decode: Callable[[list[int]], str]) -> str:
        """Return the text of tokens. Pictures have their names instead."""
        pieces = []
        for is_picture, run in groupby(tokens, is_virtual):
            ids = list(run)
            name = self._names.get(ids[0]) or self._names.get(ids[-1]) or UNKNOWN
            pieces.append(name if is_picture else decode(ids))
        return "".join(pieces)
