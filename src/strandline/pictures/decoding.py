"""Decoding of pictures: from the bytes of a file to the pixels that a model reads.

A file comes from anywhere. Only readers of common formats are tried, the size in its head is checked before anything is
decoded, and whatever a reader raises becomes a RequestError that says why.
"""

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import numpy as np

from strandline.errors import RequestError, cause_of
from strandline.picture_config import PictureConfig
from strandline.pictures.sizes import resized_size
from strandline.records.pictures import Picture, picture_digest

if TYPE_CHECKING:
    from PIL import Image

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_DECODED_PIXELS: Final = 2**26
"""Largest picture that is decoded, such as 8,192 × 8,192: four bytes a pixel are 256 MiB."""
START_OF_JPEG: Final = b"\xff\xd8\xff"
START_OF_SCAN: Final = b"\xff\xda"
"""Encoded pixels do not contain it."""
MAX_SCANS: Final = 100
MAX_SCANNED_PIXELS: Final = 2**30
"""Each scan of a progressive JPEG takes the time of decoding all pixels. Encoders write about ten."""
MAX_PIXELS_PER_BYTE: Final = 512
"""Most pixels that a byte of a JPEG encodes: a block of 8 × 8 has a Huffman code, of one bit at least."""
MAX_READS: Final = 200_000
"""Reads of a file by its reader: a file of very many small parts would take half a minute of the interpreter's time."""
LOW_DETAIL_TOKENS: Final = 256
ORIENTATION: Final = 0x0112
"""The tag of EXIF that says how to turn a picture."""
EXIF_FAULTS: Final = (
    *(OSError, SyntaxError, ValueError, struct.error, EOFError),
    *(TypeError, KeyError, IndexError, AttributeError, OverflowError, ZeroDivisionError),
)
WHITE: Final = (255, 255, 255)
_SHADES: Final = ((np.arange(0x10000) * 255 + 0x7FFF) // 0xFFFF).astype(np.uint8)
"""A grey of 8 bits for each of 16 bits."""


def is_pillow_installed() -> bool:
    """Whether pictures can be decoded here."""
    return find_spec("PIL") is not None


class _CountedReads(io.BytesIO):
    """A file that can be read a limited number of times."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._num_reads += 1
        if self._num_reads > MAX_READS:
            raise RequestError("the picture's file has too many parts; send it in another form")
        return super().read(size)


def decode_picture(data: bytes, config: PictureConfig, max_tokens: int) -> Picture:
    """Decode a file and scale the picture to the size that the model reads.

    Of animations, the first frame counts. Transparent pixels become white.

    Raises:
        RequestError: it is no picture of a known format, broken, or too large.
    """
    from PIL import Image

    with _reading(), Image.open(_CountedReads(data), formats=FORMATS) as opened:
        _check_size(*opened.size)
        if data.startswith(START_OF_JPEG):
            _check_jpeg(data, opened.width, opened.height)
        return _scaled(opened, config, max_tokens)


def scale_picture(image: "Image.Image", config: PictureConfig, max_tokens: int) -> Picture:
    """Scale a picture to the size that the model reads, as its EXIF turns it. Raises as ``decode_picture``."""
    with _reading():
        _check_size(*image.size)
        return _scaled(image, config, max_tokens)


@contextmanager
def _reading() -> Iterator[None]:
    """Turn whatever Pillow raises into a RequestError that says why."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except RequestError:
        raise
    except Image.DecompressionBombError:
        raise RequestError(f"a picture may have at most {MAX_DECODED_PIXELS:,} pixels; send a smaller one") from None
    except UnidentifiedImageError:
        raise RequestError(f"the data are not a picture of a known format: {', '.join(FORMATS)}") from None
    except Exception as error:
        # Its readers raise whatever a broken file leads them to.
        raise RequestError(f"the picture cannot be decoded: {cause_of(error)}") from error


def _scaled(image: "Image.Image", config: PictureConfig, max_tokens: int) -> Picture:
    from PIL import Image

    image.load()
    upright = _upright(image)
    side = config.token_side
    max_pixels = min(config.max_pixels, max_tokens * side * side)
    width, height = upright.size
    new_height, new_width = resized_size(height, width, side, config.min_pixels, max_pixels)
    resized = _in_colours(upright).resize((new_width, new_height), Image.Resampling.BICUBIC)
    pixels = resized.tobytes()
    return Picture(picture_digest(pixels, new_height, new_width), pixels, new_height, new_width, (width, height))


def _check_size(width: int, height: int) -> None:
    """Raise a RequestError if a picture is too large to be decoded, or empty."""
    if width * height > MAX_DECODED_PIXELS:
        raise RequestError(
            f"a picture may have at most {MAX_DECODED_PIXELS:,} pixels, got {width:,} × {height:,}; send a smaller one"
        )
    if width < 1 or height < 1:
        raise RequestError(f"a picture must have pixels, got {width} × {height}")


def _check_jpeg(data: bytes, width: int, height: int) -> None:
    """Raise a RequestError if a JPEG takes long to decode, or cannot have the pixels that its head says it has.

    Its reader would fill the missing ones with grey. Pillow has another name for one that has further pictures, MPO.
    """
    max_scans = min(MAX_SCANS, MAX_SCANNED_PIXELS // (width * height))
    if data.count(START_OF_SCAN) > max_scans:
        raise RequestError(f"a JPEG of this size may have at most {max_scans} scans; send it in another form")
    if width * height > MAX_PIXELS_PER_BYTE * len(data):
        raise RequestError(f"a JPEG of {len(data):,} bytes cannot have {width:,} × {height:,} pixels; it is broken")


def _upright(image: "Image.Image") -> "Image.Image":
    """Return a picture as its EXIF turns it; EXIF that cannot be read turns nothing."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        turn = turns.get(image.getexif().get(ORIENTATION, 1))
    except EXIF_FAULTS:
        turn = None
    return image if turn is None else image.transpose(turn)


def _in_colours(image: "Image.Image") -> "Image.Image":
    """Return a picture in RGB, over white where it is transparent."""
    from PIL import Image

    if image.mode.startswith("I"):
        # Pillow would cut off values above 255, and leave out which of them is transparent.
        grey = np.clip(np.asarray(image), 0, 0xFFFF).astype(np.uint16, copy=False)
        shown = _SHADES[grey]
        clear = image.info.get("transparency")
        if clear is not None:
            shown[grey == clear] = 255
        image = Image.fromarray(shown)
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        over = image.convert("RGBA")
        under = Image.new("RGB", over.size, WHITE)
        under.paste(over, mask=over.getchannel("A"))
        return under
    return image.convert("RGB")
