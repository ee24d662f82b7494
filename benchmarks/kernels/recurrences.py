"""Time the decode and the prefill of recurrences without logs on a GPU, at the shapes of published models.

    PYTHONPATH=src python3 benchmarks/kernels/recurrences.py [--kinds mamba2] [--sweep]

Decode: a graph holds a call for each of several layers, whose states together are larger than the cache; a time is the
median of its replays over the calls. Every slot is read and written in place; the floor is these bytes. Prefill: one
call; the floor is the larger of the time for all inputs, outputs and states, and that for the chunks' products.
``--sweep`` tries how the kernels are launched.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

from strandline.kernels.chunk_table import CHUNK_TOKENS, ChunkTable, build_chunk_table
from strandline.kernels.recurrences import (
    head_decay_triton,
    kda_triton,
    lightning_triton,
    mamba1_prefill_triton,
    mamba1_triton,
    mamba2_triton,
    rglru_triton,
)
from strandline.kernels.recurrences.segments_triton import Division
from strandline.kernels.sizes import NUM_SMS

COPY_BYTES_PER_S = {"H200": 4.28e12, "H100": 2.9e12}
BF16_FLOPS_PER_S = 700e12
TOUCHED_BYTES = 400 << 20
"""Bytes of the states of all calls of one graph: several times the cache."""

BATCHES = (1, 4, 8, 16, 64, 256)
PROMPTS = ((8192, 1, 0), (8192, 1, 8), (8192, 8, 0), (65536, 8, 0), (512, 1, 0))
"""Tokens of all sequences together, sequences, cuts of each."""

WORK_OF_LAUNCHES: dict[str, tuple[tuple[int, ...], ...]] = {
    "FEW": ((1,), (8,)),
    "MANY": ((64,), (256,)),
    "NARROW": (PROMPTS[0], PROMPTS[2]),
    "WIDE": (PROMPTS[0], PROMPTS[2]),
    "WANTED_PROGRAMS": (PROMPTS[0], (2048, 1, 0), (16384, 4, 0)),
    "PREPARE_WARPS": (PROMPTS[2],),
    "PREPARE_REGISTERS": (PROMPTS[2],),
    "SLICE": (PROMPTS[2],),
    "LAUNCH": (PROMPTS[0], PROMPTS[2], PROMPTS[3]),
    "DIVISION": (PROMPTS[0], PROMPTS[2], PROMPTS[4], (2048, 1, 0)),
    "WIDENED_TOKENS": (PROMPTS[0], PROMPTS[4], (2048, 1, 0)),
}
"""What each launch is for."""


@dataclass(frozen=True)
class Kind:
    """A recurrence at the shape of a model."""

    prefill: Callable[..., Tensor]
    decode: Callable[..., Tensor]
    tokens: tuple[tuple[int, ...], ...]
    """Shapes of a token's inputs."""
    parameters: Callable[[], tuple[Any, ...]]
    state: tuple[int, ...]
    chunk_flops: int
    """Operations of the matrix products of a chunk."""
    launches: tuple[tuple[Any, str, tuple[Any, ...]], ...] = ()
    """Module, constant, and the values that a sweep tries."""
    state_dtype: torch.dtype = torch.float32

    @property
    def state_bytes(self) -> int:
        return torch.Size(self.state).numel() * self.state_dtype.itemsize

    def inputs(self, num_tokens: int) -> tuple[Any, ...]:
        """Return random inputs, parts of one wide tensor's rows, and parameters."""
        sizes = [torch.Size(shape).numel() for shape in self.tokens]
        parts = torch.randn(num_tokens, sum(sizes), device="cuda").bfloat16().split(sizes, dim=1)
        return (*(x.unflatten(1, shape) for x, shape in zip(parts, self.tokens, strict=True)), *self.parameters())


def decay_rates(num_heads: int) -> Tensor:
    return torch.empty(num_heads, device="cuda").uniform_(0.001, 16).log()


def per_head(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def linear_flops(num_heads: int, num_groups: int, key_dim: int, value_dim: int) -> int:
    """Return the operations of a chunk: scores per group; per head, two with the state and one with the scores."""
    rows = CHUNK_TOKENS
    return 2 * rows * (num_groups * rows * key_dim + num_heads * (2 * key_dim + rows) * value_dim)


PREFILL_LAUNCHES = tuple(
    head_decay_triton.Launch(*launch)
    for launch in ((64, 4, 1), (64, 4, 2), (64, 4, 3), (64, 8, 2), (64, 8, 3), (128, 8, 2), (128, 8, 3))
)
SEGMENTED = (1, 2 * NUM_SMS, 4 * NUM_SMS, 8 * NUM_SMS)
DECODE_LAUNCHES = tuple(
    head_decay_triton.DecodeLaunch(*launch)
    for launch in ((8, 1), (16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (64, 8))
)

RGLRU_LAUNCHES = tuple(
    rglru_triton.Launch(*launch)
    for launch in ((32, 1, 8), (64, 1, 8), (64, 2, 8), (64, 2, 16), (64, 2, 32), (128, 2, 4), (128, 2, 8), (128, 4, 16))
)
MAMBA1_LAUNCHES = tuple(
    mamba1_prefill_triton.Launch(*launch) for launch in ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2), (4, 4))
)
MAMBA1_DECODE_LAUNCHES = tuple(
    mamba1_triton.Launch(*launch)
    for launch in ((8, 1), (16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (128, 4), (128, 8))
)


def divisions(division: Division, *per_sm: int) -> tuple[Division, ...]:
    """Return others, and none, that want so many programs per multiprocessor."""
    wanted = tuple(count * NUM_SMS for count in per_sm)
    return (division._replace(max_segments=1), *(division._replace(wanted_programs=count) for count in wanted))


KINDS = {
    "mamba2": Kind(  # Nemotron-3-Nano-30B-A3B
        mamba2_triton.mamba2_prefill,
        mamba2_triton.mamba2_decode,
        ((64, 64), (8, 128), (8, 128), (64,)),
        lambda: (decay_rates(64), per_head(64), per_head(64), (0.0, torch.inf)),
        (64, 128, 64),
        linear_flops(64, 8, 128, 64),
        (
            (head_decay_triton, "NARROW", PREFILL_LAUNCHES[:5]),
            (head_decay_triton, "WANTED_PROGRAMS", SEGMENTED),
            (head_decay_triton, "FEW", DECODE_LAUNCHES),
            (head_decay_triton, "MANY", DECODE_LAUNCHES),
        ),
    ),
    "kda": Kind(  # Kimi-Linear-48B-A3B
        kda_triton.kda_prefill,
        kda_triton.kda_decode,
        ((32, 128), (32, 128), (32, 128), (32, 128), (32,)),
        lambda: (decay_rates(32), per_head(32, 128) - 4.0, None),  # decays as moderate as published models' are
        (32, 128, 128),
        32 * 2 * 64 * (3 * 128 * 128 + 4 * 64 * 128 + 64 * 64),
        (
            (head_decay_triton, "FEW", DECODE_LAUNCHES),
            (head_decay_triton, "MANY", DECODE_LAUNCHES),
            (kda_triton, "PREPARE_WARPS", (4, 8)),
            (kda_triton, "SLICE", (32, 64)),
            (kda_triton, "PREPARE_REGISTERS", (128, 168, None)),
        ),
    ),
    "lightning": Kind(  # MiniMax-Text-01
        lightning_triton.lightning_prefill,
        lightning_triton.lightning_decode,
        ((64, 128), (64, 128), (64, 128)),
        lambda: (-torch.rand(64, device="cuda"),),
        (64, 128, 128),
        linear_flops(64, 64, 128, 128),
        (
            (head_decay_triton, "WIDE", PREFILL_LAUNCHES),
            (head_decay_triton, "WANTED_PROGRAMS", SEGMENTED),
        ),
    ),
    "rglru": Kind(  # RecurrentGemma-9B
        rglru_triton.rglru_prefill,
        rglru_triton.rglru_decode,
        ((4096,), (4096,), (4096,), (1,)),
        lambda: (per_head(4096),),
        (4096,),
        0,
        (
            (rglru_triton, "LAUNCH", RGLRU_LAUNCHES),
            (rglru_triton, "DIVISION", divisions(rglru_triton.DIVISION, 6, 12, 24, 32)),
        ),
    ),
    "mamba1": Kind(  # Falcon-Mamba-7B
        mamba1_prefill_triton.mamba1_prefill,
        mamba1_triton.mamba1_decode,
        ((8192,), (8192,), (16,), (16,), (8192,)),
        lambda: (per_head(8192), per_head(8192), per_head(8192, 16)),
        (8192, 16),
        0,
        (
            (mamba1_triton, "FEW", MAMBA1_DECODE_LAUNCHES),
            (mamba1_triton, "MANY", MAMBA1_DECODE_LAUNCHES),
            (mamba1_prefill_triton, "LAUNCH", MAMBA1_LAUNCHES),
            (mamba1_prefill_triton, "DIVISION", divisions(mamba1_prefill_triton.DIVISION, 4, 8, 12, 16, 24)),
            (mamba1_prefill_triton, "WIDENED_TOKENS", (0, 1 << 30)),
        ),
    ),
}


def bytes_per_s() -> float:
    name = torch.cuda.get_device_name()
    return next((rate for key, rate in COPY_BYTES_PER_S.items() if key in name), COPY_BYTES_PER_S["H200"])


def decode_us(kind: Kind, batch_size: int) -> float:
    """Return the time of one layer's call."""
    num_layers = min(30, max(4, TOUCHED_BYTES // (batch_size * kind.state_bytes)))
    arena = torch.randn(batch_size + 1, num_layers, *kind.state, device="cuda").to(kind.state_dtype)
    slots = torch.randperm(batch_size, device="cuda") + 1
    return replayed_us(
        [partial(kind.decode, *kind.inputs(batch_size), arena[:, i], slots, slots) for i in range(num_layers)]
    )


def replayed_us(calls: Sequence[Callable[[], object]]) -> float:
    """Return the time of one of these calls in a graph of all of them."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = list[float]()
    for _ in range(15):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return sorted(times[3:])[6]


def decode_floor_us(kind: Kind, batch_size: int) -> float:
    return 2e6 * batch_size * kind.state_bytes / bytes_per_s()


def table_of(num_tokens: int, num_sequences: int, num_cuts: int) -> ChunkTable:
    """Return equal prompts whose cuts lie off the grid."""
    length = num_tokens // num_sequences
    cuts = [
        [(length * (i + 1) // (num_cuts + 1) + 5, 2 * num_sequences + 1 + n * num_cuts + i) for i in range(num_cuts)]
        for n in range(num_sequences)
    ]
    return build_chunk_table([(0, length)] * num_sequences, cuts, "cuda")


def prefill_us(kind: Kind, num_tokens: int, num_sequences: int, num_cuts: int) -> float:
    state = torch.randn((2 + num_cuts) * num_sequences + 1, *kind.state, device="cuda").to(kind.state_dtype)
    slots = torch.arange(1, 2 * num_sequences + 1, device="cuda").chunk(2)
    arguments = (*kind.inputs(num_tokens), state, *slots, table_of(num_tokens, num_sequences, num_cuts))
    return 1000 * float(do_bench(lambda: kind.prefill(*arguments), warmup=10, rep=40, return_mode="median"))


def prefill_floor_us(kind: Kind, num_tokens: int, num_sequences: int, num_cuts: int) -> float:
    of_inputs = sum(torch.Size(shape).numel() for shape in kind.tokens)
    out = max(torch.Size(shape).numel() for shape in kind.tokens)
    num_bytes = 2 * num_tokens * (of_inputs + out) + (2 + num_cuts) * num_sequences * kind.state_bytes
    num_chunks = len(table_of(num_tokens, num_sequences, num_cuts).starts)
    return 1e6 * max(num_bytes / bytes_per_s(), num_chunks * kind.chunk_flops / BF16_FLOPS_PER_S)


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def sweep(kind: Kind) -> None:
    """Print the four best values of every constant, for each batch or step."""
    for module, name, values in kind.launches:
        is_decode = name in ("FEW", "MANY")
        for case in WORK_OF_LAUNCHES[name]:
            found = []
            for value in values:
                with replaced(module, name, value):
                    try:
                        found.append((decode_us(kind, *case) if is_decode else prefill_us(kind, *case), value))
                    except Exception as error:  # noqa: BLE001 - a variant that does not compile is a result, too
                        print(f"    {value}: {type(error).__name__} {str(error).splitlines()[:1]}")
            for us, value in sorted(found)[:4]:
                print(f"  {name} {case}: {us:8.1f} us {value}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()} · torch {torch.__version__}")
    for name in options.kinds.split(","):
        kind = KINDS[name]
        for batch_size in BATCHES:
            us, floor = decode_us(kind, batch_size), decode_floor_us(kind, batch_size)
            print(f"{name} decode at {batch_size:3}: {us:8.1f} us, floor {floor:6.1f} ({floor / us:.0%})", flush=True)
        for case in PROMPTS:
            us, floor = prefill_us(kind, *case), prefill_floor_us(kind, *case)
            print(
                f"{name} prefill of {case[0]} in {case[1]}, {case[2]} cuts each: {us:8.1f} us, "
                f"floor {floor:6.1f} ({floor / us:.0%})",
                flush=True,
            )
        if options.sweep:
            sweep(kind)


if __name__ == "__main__":
    main()
