"""The sizes of a model's windows, as a cache counts them."""

from strandline.cache.size import WindowClass
from strandline.specs import ModelSpec


def window_classes(spec: ModelSpec) -> tuple[WindowClass, ...]:
    """Return the sizes of windows whose layers have window blocks."""
    pairs = zip(spec.window_sizes, spec.window_blocks_per_slab, strict=True)
    return tuple(WindowClass(size.num_tokens, num_blocks) for size, num_blocks in pairs)
