"""Garbage collection settings of a serving process, and while CUDA graphs are captured."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

YOUNG_OBJECTS: Final = 10_000
"""Net allocations between collections of the youngest generation; Python's default of 700 suits smaller programs."""


def freeze_gc() -> None:
    """Exclude everything loaded so far from garbage collection, and make collections rarer.

    A full collection over torch's and transformers' modules takes 200 ms, during which all streams stall, and a large
    request body triggers many.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect garbage now, and none inside.

    CUDA graphs of an earlier engine are garbage in cycles. To free one while another is captured invalidates that.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
