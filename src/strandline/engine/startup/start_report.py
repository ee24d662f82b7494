"""Lines of the log at the start of an engine."""

from collections.abc import Iterable

from strandline.kernels.binding import Fallback
from strandline.specs import ModelSpec


def describe_fallbacks(fallbacks: Iterable[Fallback]) -> list[str]:
    """Return a line for each reason why operations run reference implementations."""
    operations: dict[tuple[str, str], list[str]] = {}
    for fallback in fallbacks:
        operations.setdefault((fallback.backend, fallback.reason), []).append(fallback.operation)
    return [
        f"kernels: slower reference implementations instead of {backend} for {', '.join(names)}: {reason}"
        for (backend, reason), names in operations.items()
    ]


def describe_snapshots(spec: ModelSpec) -> str:
    """Return how much memory a snapshot takes, as a text."""
    if not spec.has_states:
        return "no snapshots are needed, as the model keeps no recurrent state"
    return f"snapshot: {spec.slab_bytes / 2**10:,.0f} KiB; a snapshot takes the room of {spec.blocks_per_slab} blocks"
