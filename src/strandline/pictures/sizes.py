"""The size to which a picture is scaled.

Source: ``smart_resize`` of the image processors in transformers, whose rounding published models were trained with.
"""

import math
from typing import Final

from strandline.errors import RequestError

MAX_ASPECT: Final = 200


def resized_size(height: int, width: int, side: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return the height and width to which a picture is scaled: multiples of a token's side, about as wide as high.

    Args:
        side: pixels of a token's side.
        min_pixels: fewest pixels of the result, rounded up to whole tokens.
        max_pixels: most pixels of the result.

    Raises:
        RequestError: one side is more than ``MAX_ASPECT`` times the other.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise RequestError(
            f"a picture's longer side may be at most {MAX_ASPECT} times the shorter one, got {width} × {height} pixels"
        )
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side * side > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        rows, columns = (max(math.floor(length / scale / side), 1) for length in (height, width))
    elif rows * columns * side * side < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(length * scale / side) for length in (height, width))
    max_tokens = max(max_pixels // (side * side), 1)
    rows = min(rows, max_tokens)  # a strip of one row or column can be longer than that
    return rows * side, min(columns, max_tokens // rows) * side
