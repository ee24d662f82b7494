"""The memory of encoded pictures, and the vision tower that fills it before a step.

The scheduler decides which pictures are encoded, and where (``StepPlan.pictures``). A picture's embeddings depend on
its pixels alone where the engine is deterministic: each is encoded in a call of its own. Elsewhere several share one.

Shape suffixes: X rows of the memory, E hidden size, N tokens.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from strandline.device.upload import upload
from strandline.models.layers.protocol import PictureEncoder
from strandline.picture_config import NUM_CHANNELS
from strandline.records.pictures import Picture
from strandline.records.plan import PictureToEncode


class EncodedPictures:
    """The memory, and what encodes.

    Args:
        memory_XE: takes the embeddings of pictures.
        max_tokens: of the pictures of a call, together, unless it is one; 0: each has its own.
    """

    def __init__(self, encoder: PictureEncoder, memory_XE: Tensor, max_tokens: int) -> None:
        self._encoder, self._memory_XE, self._max_tokens = encoder, memory_XE, max_tokens

    def encode(self, pictures: Sequence[PictureToEncode]) -> None:
        """Encode pictures, and store their embeddings. Does not wait for the device."""
        device = self._memory_XE.device
        for group in self._groups(pictures):
            embedded_NE = self._encoder([upload(pixels_of(each.picture), device) for each in group])
            start = 0
            for picture, row in group:
                end = start + self._num_tokens(picture)
                self._memory_XE[row : row + end - start].copy_(embedded_NE[start:end])
                start = end

    def _groups(self, pictures: Sequence[PictureToEncode]) -> Iterator[list[PictureToEncode]]:
        group, num_tokens = list[PictureToEncode](), 0
        for each in pictures:
            num_tokens += self._num_tokens(each.picture)
            if group and num_tokens > self._max_tokens:
                yield group
                group, num_tokens = [], self._num_tokens(each.picture)
            group.append(each)
        if group:
            yield group

    def _num_tokens(self, picture: Picture) -> int:
        return picture.height * picture.width // self._encoder.pictures.token_side**2


def pixels_of(picture: Picture) -> np.ndarray:
    """Return the pixels ``[height, width, channels]``, in memory of their own."""
    pixels = np.frombuffer(picture.pixels, dtype=np.uint8)
    return pixels.reshape(picture.height, picture.width, NUM_CHANNELS).copy()


def encode_largest(encoder: PictureEncoder, num_tokens: int, device: torch.device) -> None:
    """Encode a black picture of ``num_tokens``: no smaller one takes more memory."""
    side = encoder.pictures.token_side
    encoder([torch.zeros(side, num_tokens * side, NUM_CHANNELS, dtype=torch.uint8, device=device)])
