"""The memory of encoded pictures, and the vision tower that fills it before a step.

The scheduler decides which pictures are encoded, and where (``StepPlan.pictures``). A picture's embeddings depend on
its pixels alone where the engine is deterministic: each is encoded in a call of its own. Elsewhere several share one.

Shape suffixes: X rows of the memory, E hidden size, N tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from strandline.device.hardware.upload import upload
from strandline.kernels.ranks import Ranks
from strandline.models.layers.protocol import PictureEncoder
from strandline.picture_config import NUM_CHANNELS
from strandline.records.pictures import Picture
from strandline.records.plan import PictureToEncode

MAX_SHARED_TOKENS: Final = 1024
"""Tokens of pictures that share a call: enough to keep a GPU busy."""


class EncodedPictures:
    """The memory, and what encodes.

    Args:
        memory_XE: takes the embeddings of pictures.
        max_tokens: limit on the tokens of the pictures of a call, if they are several; 0: each picture has its own.
        ranks: divide the pictures of a step among each other; all have all embeddings.
    """

    def __init__(self, encoder: PictureEncoder, memory_XE: Tensor, max_tokens: int, ranks: Ranks) -> None:
        self._encoder, self._memory_XE, self._max_tokens, self._ranks = encoder, memory_XE, max_tokens, ranks

    def encode(self, pictures: Sequence[PictureToEncode]) -> None:
        """Encode pictures, and store their embeddings. Does not wait for the device."""
        if self._ranks.size == 1 or len(pictures) == 1:
            self._encode(pictures)
            return
        rows = [self._rows(each) for each in pictures]
        for of_picture in rows:
            self._memory_XE[of_picture].zero_()
        self._encode(self._share(pictures))
        # All ranks but one add zeros to an embedding, so the sum is exact.
        embedded_NE = self._ranks.sum(torch.cat([self._memory_XE[of_picture] for of_picture in rows]))
        self._store(embedded_NE, rows)

    def _encode(self, pictures: Sequence[PictureToEncode]) -> None:
        for group in self._groups(pictures):
            pixels = [upload(pixels_of(each.picture), self._memory_XE.device) for each in group]
            self._store(self._encoder(pixels), [self._rows(each) for each in group])

    def _store(self, embedded_NE: Tensor, rows: Sequence[slice]) -> None:
        parts = embedded_NE.split([of_picture.stop - of_picture.start for of_picture in rows])
        for of_picture, part_NE in zip(rows, parts, strict=True):
            self._memory_XE[of_picture].copy_(part_NE)

    def _share(self, pictures: Sequence[PictureToEncode]) -> list[PictureToEncode]:
        """Return the pictures that this rank encodes: the next largest goes to the rank with the fewest tokens."""
        num_tokens, share = [0] * self._ranks.size, list[PictureToEncode]()
        for each in sorted(pictures, key=self._num_tokens, reverse=True):
            rank = num_tokens.index(min(num_tokens))
            num_tokens[rank] += self._num_tokens(each)
            if rank == self._ranks.rank:
                share.append(each)
        return share

    def _groups(self, pictures: Sequence[PictureToEncode]) -> Iterator[list[PictureToEncode]]:
        group, num_tokens = list[PictureToEncode](), 0
        for each in pictures:
            num_tokens += self._num_tokens(each)
            if group and num_tokens > self._max_tokens:
                yield group
                group, num_tokens = [], self._num_tokens(each)
            group.append(each)
        if group:
            yield group

    def _rows(self, each: PictureToEncode) -> slice:
        return slice(each.row, each.row + self._num_tokens(each))

    def _num_tokens(self, each: PictureToEncode) -> int:
        return each.picture.height * each.picture.width // self._encoder.pictures.token_side**2


def pixels_of(picture: Picture) -> np.ndarray:
    """Return the pixels ``[height, width, channels]``, in memory of their own."""
    pixels = np.frombuffer(picture.pixels, dtype=np.uint8)
    return pixels.reshape(picture.height, picture.width, NUM_CHANNELS).copy()


def encode_largest(encoder: PictureEncoder, num_tokens: int, device: torch.device) -> None:
    """Encode a black picture of ``num_tokens``: no smaller one takes more memory."""
    side = encoder.pictures.token_side
    encoder([torch.zeros(side, num_tokens * side, NUM_CHANNELS, dtype=torch.uint8, device=device)])
