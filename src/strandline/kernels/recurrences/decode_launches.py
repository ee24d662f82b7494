"""How kernels are launched that advance states by a token per sequence, by the number of sequences.

Times are of an H200, in µs, and those of heads are of a delta rule with 32 (benchmarks/kernels, `*/decode`).
"""

from typing import Final, NamedTuple

from strandline.kernels.operation import Launches
from strandline.kernels.sizes import next_power_of_2


class DecodeLaunch(NamedTuple):
    """How a kernel is launched."""

    block_v: int
    """Value channels of a program."""
    num_warps: int


class DecodeLaunches(NamedTuple):
    """The launches of a kernel; each may sum over a state in another order."""

    few: DecodeLaunch
    """For batches that do not fill the GPU."""
    max_few: int
    """The most sequences of these."""
    many: DecodeLaunch
    """For larger batches, and for all where launches are fixed."""


HEADS: Final = DecodeLaunches(few=DecodeLaunch(16, 1), max_few=8, many=DecodeLaunch(64, 4))
"""States are matrices of heads. For few: one warp ends the sums over K in shuffles, with no barrier; 3.1, 6.0 and 10.4
for one, four and eight sequences, where the other takes 4.6, 7.4 and 11.1.

For many: rows of a tile are 256 bytes, and four programs of 32 KiB, the registers' limit, fit on a multiprocessor:
21.1, 70.6 and 270.9 for 16, 64 and 256 sequences (93 % of a copy's bandwidth), where tiles of 32 columns take 21.9,
76.7 and 294.6. Neither cache hints nor tiles fetched ahead by persistent programs gained anything."""

HEADS_WITH_LOG: Final = DecodeLaunches(few=DecodeLaunch(16, 1), max_few=4, many=DecodeLaunch(32, 1))
"""The same, after the tokens of a log. One warp: no barrier, in a kernel that is more sums than loads. 8.9, 15.9, 50.4
and 176 for 8, 16, 64 and 256 sequences, a mean over logs of any length, where the state written in every step takes
11.2, 20.8, 72.2 and 273. Other tiles: ``docs/decisions/0008-log-of-decoded-tokens.md``."""

CHANNELS: Final = DecodeLaunches(few=DecodeLaunch(32, 4), max_few=8, many=DecodeLaunch(64, 2))
"""Every channel has a state of its own. For few: 4 of a state's numbers, one load, are a thread's: 3.7 for 8 sequences
of 8,192 channels, with 16 channels and 2 warps 6.0. For many: more of what a program loads once, its projections and
addresses, is shared by more channels."""


MAX_NUMBERS: Final = 128
"""A state's numbers that a thread holds; every GPU gives it 255 registers. With 256, from 32 columns of 256 keys in one
warp, a decode with a log keeps 0.9 to 1.1 KB of a thread in memory and takes 1.7 times as long
(benchmarks/results/2026-11-29-h200.md)."""


def fit_registers(launch: DecodeLaunch, key_dim: int) -> DecodeLaunch:
    """Return the launch with as many warps as have registers for states of ``key_dim`` keys."""
    num_warps = launch.block_v * next_power_of_2(key_dim) // (MAX_NUMBERS * 32)
    return launch._replace(num_warps=max(launch.num_warps, num_warps))


def choose_decode(measured: DecodeLaunches, num_sequences: int, launches: Launches = Launches.MEASURED) -> DecodeLaunch:
    """Return the launch for a batch."""
    is_few = num_sequences <= measured.max_few and launches is Launches.MEASURED
    return measured.few if is_few else measured.many
