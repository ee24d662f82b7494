"""How attention's work is divided among programs: how many share the keys of a sequence, and how many tiles there are.

All of it follows from shapes and host integers, so that a CUDA graph can hold the launches.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.batch import AttentionBatch
from strandline.kernels.operation import Launches
from strandline.kernels.sizes import NUM_SMS, cdiv, next_power_of_2

DECODE_PROGRAMS = 4 * NUM_SMS
"""Programs that a step of few decodes is split into, where the caller has no number of its own."""

MAX_SPLIT_BLOCKS = 128
"""Blocks that one program of a decode reads at most, so that one long context does not outlast the others."""

MAX_DECODE_SPLITS = 128

DECODE_BYTES = 8_000_000
"""Decodes are not split where this many bytes are under way without it: 128 programs with a head dim of 256 take 40 µs
in one part, and 49 in two or three (benchmarks/results/2026-11-28-h200-families.md)."""

FIXED_SPLIT_BLOCKS = 16
"""Blocks of a split in deterministic mode, whatever else is decoded and however long the context is."""

MAX_PREFILL_SPLITS = 16

PROGRAM_COST_TILES = 2
"""What a program costs besides its tiles of keys, in tiles: reading queries, writing results."""

COMBINE_COST_TILES = 3
"""What a second kernel costs, in tiles of keys."""


def num_decode_splits(
    num_programs: int,
    num_blocks: int,
    least_programs: int = DECODE_PROGRAMS,
    max_splits: int = MAX_DECODE_SPLITS,
) -> int:
    """Return how many programs share the context of one sequence and key/value head.

    Args:
        least_programs: what a step is split into, if it has fewer programs.
    """
    wanted = max(-(-least_programs // num_programs), -(-num_blocks // MAX_SPLIT_BLOCKS))
    return max(1, min(wanted, num_blocks, max_splits))


def least_decode_programs(num_programs: int, bytes_each: int, least_programs: int) -> int:
    """Return how many programs decodes are split into at least, if they are ``num_programs`` with one split.

    Args:
        bytes_each: bytes of keys and values that a program loads ahead.
        least_programs: least number of programs of few decodes.
    """
    return num_programs if num_programs * bytes_each >= DECODE_BYTES else least_programs


class DecodePlan(NamedTuple):
    """How the contexts of decodes are divided."""

    num_splits: int
    split_blocks: int
    """Blocks of a split, whatever the context's length; 0: the splits of a sequence share its context."""

    @property
    def is_split(self) -> bool:
        """Whether programs leave partial results."""
        return self.num_splits > 1 or self.split_blocks > 0


def plan_decodes(
    num_programs: int,
    num_blocks: int,
    launches: Launches,
    *,
    least_programs: int = DECODE_PROGRAMS,
    min_split_blocks: int = 1,
) -> DecodePlan:
    """Return how decodes of at most ``num_blocks`` blocks are divided; if launches are fixed, by that number alone.

    Args:
        num_programs: with one split.
        least_programs: see ``num_decode_splits``.
        min_split_blocks: blocks of a split, at least, where launches are not fixed.
    """
    if launches is Launches.FIXED:
        return DecodePlan(cdiv(num_blocks, FIXED_SPLIT_BLOCKS), FIXED_SPLIT_BLOCKS)
    return DecodePlan(num_decode_splits(num_programs, cdiv(num_blocks, min_split_blocks), least_programs), 0)


@lru_cache(maxsize=1024)
def num_prefill_splits(num_programs: int, num_key_tiles: int) -> int:
    """Return how many programs share the keys of one tile of rows, if all tiles see about as many keys."""
    if num_programs >= 2 * NUM_SMS:
        return 1

    def cost_tiles(num_splits: int) -> int:
        waves = -(-num_programs * num_splits // NUM_SMS)
        combine = COMBINE_COST_TILES if num_splits > 1 else 0
        return waves * (-(-num_key_tiles // num_splits) + PROGRAM_COST_TILES) + combine

    return min(range(1, MAX_PREFILL_SPLITS + 1), key=cost_tiles)


@lru_cache(maxsize=64)
def num_row_tiles(query_starts: tuple[int, ...], group: int, tile_rows: int) -> int:
    """Return the tiles of rows of all sequences; every layer of a step asks for the same."""
    return sum(-(-(end - start) * group // tile_rows) for start, end in pairwise(query_starts))


def parts_of(batch: AttentionBatch, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of each part of a step, and the part."""
    num_rows = [len(part.write_blocks_T) for part in batch.parts]
    return zip(*(tensor.split(num_rows) for tensor in tensors), batch.parts, strict=True)


class SplitLimits(NamedTuple):
    """How far contexts are split, as ``num_decode_splits`` takes it."""

    least_programs: int = DECODE_PROGRAMS
    max_splits: int = MAX_DECODE_SPLITS


DECODE_LIMITS = SplitLimits()


class PrefillPlan(NamedTuple):
    """How some prefills are launched together."""

    num_tokens: int
    num_tiles: int
    """Tiles of rows."""
    num_splits: int
    max_prefills: int
    """What the kernel is compiled for: few sizes, so that a server compiles few kernels."""


def plan_prefills(
    batch: AttentionBatch,
    prefills: tuple[int, int],
    num_rows: int,
    heads: tuple[int, int],
    tile: tuple[int, int],
    window_tokens: int | None,
    launches: Launches,
    short: SplitLimits = DECODE_LIMITS,
) -> PrefillPlan:
    """Return how the prefills ``[first, end)`` of a step of ``num_rows`` rows are launched.

    Args:
        heads: query heads per key/value head, and key/value heads.
        tile: its rows and keys.
        short: if all prefills are.
    """
    (first, end), (group, num_kv_heads), (tile_rows, tile_keys) = prefills, heads, tile
    query_starts = batch.query_starts[first : end + 1]
    # A padded step's last prompt ends, on the host, after its rows: there is a tile for every prompt's last row.
    num_tokens = min(query_starts[-1], num_rows) - query_starts[0]
    num_tiles = num_row_tiles(query_starts, group, tile_rows)
    max_keys = max(batch.context_lens[first:end])
    if window_tokens is not None:
        max_keys = min(max_keys, window_tokens + tile_rows // group)
    if launches is Launches.FIXED:
        num_splits = 1
    elif batch.most_rows is not None:
        num_programs, num_blocks = (end - first) * num_kv_heads, cdiv(max_keys, BLOCK_TOKENS)
        num_splits = num_decode_splits(num_programs, num_blocks, *short)
    else:
        num_splits = num_prefill_splits(num_tiles * num_kv_heads, -(-max_keys // tile_keys))
    is_small = end - first <= 16 and launches is Launches.MEASURED
    max_prefills = 16 if is_small else max(256, next_power_of_2(end - first))
    return PrefillPlan(num_tokens, num_tiles, num_splits, max_prefills)
