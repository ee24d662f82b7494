"""Which bytes of a block or slot a rank holds, and copies of them: to and from blocks and slots of the whole model.

All ranks together hold what an engine on one rank holds, some of it several times. Engines on different numbers of
ranks hand over blocks and slots as the whole model has them: each rank copies its own bytes there, or takes them out.

Shape suffixes: N blocks or slots, X the bytes of one that a rank holds, Y those that the whole model has; C runs of
bytes, B bytes of a run.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from strandline.ids import BLOCK_TOKENS
from strandline.specs import ITEM_BYTES, ModelSpec, TensorSpec, align


class Runs(NamedTuple):
    """Runs of bytes at equal distances, both here and in the whole model."""

    num_runs: int
    run_bytes: int
    start: int
    stride: int
    whole_start: int
    whole_stride: int
    is_first: bool
    """Whether no rank before this one holds the same."""


class RankParts:
    """What a rank holds of blocks and of slots.

    Args:
        spec: what each rank keeps.
    """

    def __init__(self, spec: ModelSpec, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        streams = [
            [stream for layer in spec.layers if spec.lifetime_of(layer) == lifetime for stream in layer.streams]
            for lifetime in spec.lifetimes
        ]
        states = [state for layer in spec.layers for state in layer.states]
        hidden = TensorSpec("hidden", (spec.hidden_size,), spec.hidden_dtype)
        of_blocks, *of_windows = (list(self._runs_of(tensors, BLOCK_TOKENS)) for tensors in streams)
        self._runs = (of_blocks, list(self._runs_of([*states, hidden], 1)), *of_windows)

    def join(self, parts: Sequence[np.ndarray], wholes: Sequence[np.ndarray]) -> None:
        """Copy what this rank is the first to hold into entries of the whole model, ``uint8`` both.

        Args:
            parts: ``part_NX`` of blocks, of slots and of window blocks of each size; the last sizes may be left out.
            wholes: ``whole_NY`` of the same.
        """
        for runs, part_NX, whole_NY in zip(self._runs, parts, wholes, strict=False):
            _join(runs, part_NX, whole_NY)

    def split(self, wholes: Sequence[np.ndarray], parts: Sequence[np.ndarray]) -> None:
        """Copy what this rank holds out of entries of the whole model. Arguments as of ``join``."""
        for runs, part_NX, whole_NY in zip(self._runs, parts, wholes, strict=False):
            _split(runs, whole_NY, part_NX)

    def _runs_of(self, tensors: Sequence[TensorSpec], num_tokens: int) -> Iterator[Runs]:
        """Yield the runs of tensors with ``num_tokens`` rows each, which lie one after the other on aligned bytes."""
        start = whole_start = 0
        for tensor in tensors:
            yield from self._runs_of_one(tensor, num_tokens, start, whole_start)
            start += align(num_tokens * tensor.num_bytes)
            whole_start += align(num_tokens * tensor.whole.num_bytes)

    def _runs_of_one(self, tensor: TensorSpec, num_tokens: int, start: int, whole_start: int) -> Iterator[Runs]:
        division = tensor.division
        if division is None:
            yield Runs(1, num_tokens * tensor.num_bytes, start, 0, whole_start, 0, self._rank == 0)
            return
        dim, whole = division.dim, tensor.whole
        num_runs = num_tokens * prod(tensor.shape[:dim])
        item_bytes = prod(tensor.shape[dim + 1 :]) * ITEM_BYTES[tensor.dtype]
        stride, whole_stride = tensor.shape[dim] * item_bytes, whole.shape[dim] * item_bytes
        for size, num_shares in division.parts:
            share, num_holders = self._rank * num_shares // self._num_ranks, self._num_ranks // num_shares
            run_bytes, is_first = size * item_bytes, self._rank % num_holders == 0
            at = whole_start + share * run_bytes
            yield Runs(num_runs, run_bytes, start, stride, at, whole_stride, is_first)
            start, whole_start = start + run_bytes, whole_start + num_shares * run_bytes


def _join(runs: Sequence[Runs], part_NX: np.ndarray, whole_NY: np.ndarray) -> None:
    for run in runs if len(part_NX) else ():
        if run.is_first:
            _whole_runs(run, whole_NY)[:] = _own_runs(run, part_NX)


def _split(runs: Sequence[Runs], whole_NY: np.ndarray, part_NX: np.ndarray) -> None:
    for run in runs if len(part_NX) else ():
        _own_runs(run, part_NX)[:] = _whole_runs(run, whole_NY)


def _own_runs(run: Runs, part_NX: np.ndarray) -> np.ndarray:
    """Return the view ``run_NCB``."""
    shape, strides = (len(part_NX), run.num_runs, run.run_bytes), (part_NX.strides[0], run.stride, 1)
    return as_strided(part_NX[:, run.start :], shape, strides)


def _whole_runs(run: Runs, whole_NY: np.ndarray) -> np.ndarray:
    """Return the view ``run_NCB``."""
    shape, strides = (len(whole_NY), run.num_runs, run.run_bytes), (whole_NY.strides[0], run.whole_stride, 1)
    return as_strided(whole_NY[:, run.whole_start :], shape, strides)
