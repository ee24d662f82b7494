"""What two engines must agree on before bytes of one mean anything to the other, and how the bytes are divided."""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Final, NamedTuple

from strandline.ids import BLOCK_TOKENS, PATH, Lifetime
from strandline.specs import ModelSpec

PROTOCOL: Final = "4"
PIECE_BYTES: Final = 8 * 2**20
"""Pieces are about as large: reading or writing one takes an engine a few milliseconds at most."""
CHUNK_BYTES: Final = 2 * 2**20
"""At most this much of a piece travels in one frame, so that a snapshot of tens of MiB is checked as it comes."""


def layout_of(
    spec: ModelSpec,
    *,
    weights: str,
    is_deterministic: bool,
    connector: str = "SocketConnector",
    num_ranks: int = 1,
) -> dict[str, str]:
    """Return what must be equal in two engines that fetch from each other, by name.

    Args:
        connector: what moves the bytes.
        weights: a digest of the model's weights.
        is_deterministic: whether a token's bits depend on the tokens before it alone.
        num_ranks: on how many ranks the bytes are computed, if that must be equal, too.
    """
    layers = [
        [(t.name, t.shape, t.dtype) for t in (*layer.streams, *layer.states)] + [len(layer.streams)]
        for layer in spec.layers
    ]
    return {
        "protocol": PROTOCOL,
        "connector": connector,
        "weights": weights,
        "layers": sha256(repr(layers).encode()).hexdigest(),
        "hidden state": f"{spec.hidden_size} of {spec.hidden_dtype}",
        "block": f"{BLOCK_TOKENS} tokens in {spec.raw_block_bytes} bytes",
        "slot": f"{spec.raw_slot_bytes} bytes",
        **_window_layout(spec),
        "tensor-parallel size": str(num_ranks),
        "deterministic": str(is_deterministic).lower(),
    }


def _window_layout(spec: ModelSpec) -> dict[str, str]:
    """Return what must be equal where snapshots have window blocks."""
    if not spec.has_window_blocks:
        return {}
    sizes = (f"{size.block_bytes} bytes, {size.num_tokens} tokens before a snapshot" for size in spec.window_sizes)
    layout = {"window block": "; ".join(sizes)}
    if len(spec.window_sizes) > 1:
        layout["windows of layers"] = " ".join(str(spec.lifetime_of(layer)) for layer in spec.layers)
    return layout


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return in words how two layouts differ; empty: they do not."""
    names = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    return "; ".join(f"{name}: {ours.get(name, 'none')} here, {theirs.get(name, 'none'):.80} there" for name in names)


class Items(NamedTuple):
    """What one piece holds, in this order."""

    start_block: int
    end_block: int
    """Blocks ``[start_block, end_block)`` of the prefix."""
    positions: tuple[int, ...]
    """Positions of snapshots."""
    num_bytes: int
    window_of: int = 0
    """Position of the snapshot whose window blocks it holds."""
    num_window_blocks: int = 0
    lifetime: Lifetime = PATH
    """That of these window blocks."""

    @property
    def num_entries(self) -> int:
        """How many blocks, slots and window blocks it holds, all of one size."""
        return self.end_block - self.start_block + len(self.positions) + self.num_window_blocks


def pieces_of(first_block: int, positions: Sequence[int], spec: ModelSpec, *, past: int) -> Iterator[Items]:
    """Yield the pieces in which blocks are sent, from one to a prefix's last, then those of slots, then windows.

    None has two of these, so that all parts of a piece are of one size.

    Args:
        past: the index after a prefix's last block.
    """
    blocks_per_piece = max(PIECE_BYTES // spec.raw_block_bytes, 1)
    for start in range(first_block, past, blocks_per_piece):
        end = min(start + blocks_per_piece, past)
        yield Items(start, end, (), (end - start) * spec.raw_block_bytes)
    slots_per_piece = max(PIECE_BYTES // spec.raw_slot_bytes, 1)
    for start in range(0, len(positions) if spec.has_states else 0, slots_per_piece):
        some = tuple(positions[start : start + slots_per_piece])
        yield Items(past, past, some, len(some) * spec.raw_slot_bytes)
    for position in positions:
        for number, size in enumerate(spec.window_sizes, 1):
            if count := size.num_blocks_before(position):
                yield Items(past, past, (), count * size.block_bytes, position, count, Lifetime(number))
