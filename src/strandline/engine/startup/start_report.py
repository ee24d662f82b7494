"""Lines of the log at the start of an engine."""

from collections.abc import Iterable, Sequence

from strandline.ids import BLOCK_TOKENS
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


def describe_sizes(spec: ModelSpec) -> list[str]:
    """Return lines about the memory that a block, a snapshot and layers with windows take."""
    lines = [f"block: {_size(spec.block_bytes)} for 64 tokens; {_describe_snapshots(spec)}"]
    if spec.has_window_blocks:
        most = _size(_windows_bytes(spec, [window.max_blocks for window in spec.window_sizes]))
        of_snapshots = f", and of a snapshot in at most {most} more" if spec.has_states else ""
        num_tokens = " or ".join(f"{window.num_tokens:,}" for window in spec.window_sizes) + " tokens of a request"
        lines.append(f"windows: layers with windows store the last {num_tokens}{of_snapshots}")
    return lines


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**10:,.0f} KiB" if num_bytes >= 2**10 else f"{num_bytes} bytes"


def _windows_bytes(spec: ModelSpec, counts: Sequence[int]) -> int:
    """Return the memory of this many window blocks of each size."""
    return sum(count * stride_bytes for count, stride_bytes in zip(counts, spec.window_strides_bytes, strict=True))


def _describe_snapshots(spec: ModelSpec) -> str:
    if not spec.has_states and spec.has_window_blocks:
        counts = [-(-window.num_tokens // BLOCK_TOKENS) for window in spec.window_sizes]
        return f"snapshot: {_size(_windows_bytes(spec, counts))}, the layers' windows without a state"
    if not spec.has_states:
        return "no snapshots are needed, as the model keeps no recurrent state"
    return f"snapshot: {_size(spec.slab_bytes)}; a snapshot takes the room of {spec.blocks_per_slab} blocks"
