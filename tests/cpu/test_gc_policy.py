"""No garbage is collected while CUDA graphs are captured: freeing another graph then would invalidate them."""

import gc
import weakref

from strandline.gc_policy import gc_paused


class Cycle:
    """An object that only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_freed_before_and_not_inside() -> None:
    assert gc.isenabled()
    before = weakref.ref(Cycle())
    with gc_paused():
        assert before() is None
        inside = weakref.ref(Cycle())
        kept = [[] for _ in range(100_000)]  # would make Python collect
        assert len(kept) > 0
        assert inside() is not None
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_pause_leaves_collection_as_it_was() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
