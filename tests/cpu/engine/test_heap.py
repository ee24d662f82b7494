"""The heap's settings are taken, or their absence is told."""

import ctypes

from strandline.engine.heap import keep_scratch_memory


def test_the_c_library_takes_the_settings_where_it_has_them() -> None:
    assert keep_scratch_memory() == hasattr(ctypes.CDLL(None), "mallopt")
