"""The garbage collector of a process that many wait for."""

import gc
from typing import Final

YOUNG_OBJECTS: Final = 10_000
"""How many more objects there are when the garbage collector looks at the young ones; Python's own 700 is for smaller
programs."""


def freeze_gc() -> None:
    """Take what is loaded out of the garbage collector's rounds, and make the rounds rarer.

    A full round over torch's and transformers' modules takes 200 ms, which all streams would wait for, and a large body
    sets off many.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
