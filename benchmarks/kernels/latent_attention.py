"""Time attention over latents at Kimi-Linear's shape on a GPU; `--sweep` tries how the kernel is launched.

    PYTHONPATH=src python3 benchmarks/kernels/latent_attention.py [--sweep]

A decode's floor is every latent of the contexts read once; a prefill's, the products of queries and keys, and of
weights and values: over latents, or over keys and values that are computed again (*expanded*), whose time has the
projections in it.
"""

import argparse
from collections.abc import Sequence
from itertools import accumulate, product

import torch
from torch import Tensor
from triton.testing import do_bench, do_bench_cudagraph

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.attention import latent_attention_triton as kernels
from strandline.kernels.attention import latent_expansion_triton as expansion
from strandline.kernels.attention.attention_triton import Tile
from strandline.kernels.batch import AttentionBatch

NUM_HEADS, NUM_CHANNELS, VALUE_DIM = 32, 576, 512
HEAD_DIM = 128
"""Channels of a head's key that come from the latent, and of its value."""
COPY_BYTES_PER_S = 4.28e12
BF16_FLOPS_PER_S = 700e12
LAYERS = 7
"""That a graph of decodes holds: their latents together are larger than the cache."""

DECODES = ((1, 4096), (1, 65536), (16, 4096), (64, 4096), (256, 2048))
"""Sequences, context."""
PREFILLS = ((1024, 0), (8192, 0), (2048, 30720))
"""New tokens, context before them."""
EXPANDED = ((512, 4096), (8192, 0), (8192, 24576))
EXPANDED_CHANNELS = 2 * HEAD_DIM + NUM_CHANNELS - VALUE_DIM

DECODE_TILES = tuple(
    Tile(rows, keys, num_warps, num_stages)
    for rows, keys, num_warps, num_stages in product((32, 64), (32, 64), (4, 8), (2, 3))
)
PREFILL_TILES = tuple(
    Tile(rows, keys, 8, num_stages) for rows, keys, num_stages in product((32, 64), (32, 64), (1, 2, 3))
)

EXPANDED_TILES = tuple(
    Tile(rows, keys, num_warps, num_stages)
    for rows, keys, num_warps, num_stages in product((64, 128), (64, 128), (4, 8), (2, 3))
)


def make_batch(ranges: Sequence[tuple[int, int]]) -> tuple[AttentionBatch, int]:
    """Return a step of sequences with new tokens ``[start, end)``, and how many blocks they have."""
    counts = [-(-end // BLOCK_TOKENS) for _, end in ranges]
    blocks = torch.randperm(sum(counts)) + 1
    table_NM = torch.zeros(len(ranges), max(counts), dtype=torch.int32)
    for row_M, part in zip(table_NM, blocks.split(counts), strict=True):
        row_M[: len(part)] = part
    positions = [(i, position) for i, (start, end) in enumerate(ranges) for position in range(start, end)]
    starts = tuple(accumulate((end - start for start, end in ranges), initial=0))
    ends = tuple(end for _, end in ranges)
    batch = AttentionBatch(
        query_starts=starts,
        context_lens=ends,
        query_starts_N1=torch.tensor(starts, device="cuda"),
        context_lens_N=torch.tensor(ends, device="cuda"),
        block_table_NM=table_NM.cuda(),
        write_blocks_T=torch.tensor([int(table_NM[i, p // BLOCK_TOKENS]) for i, p in positions], device="cuda"),
        write_offsets_T=torch.tensor([p % BLOCK_TOKENS for _, p in positions], device="cuda"),
        is_all_written=True,
    )
    return batch, sum(counts) + 1


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def decode_us(num_sequences: int, context: int) -> float:
    """Return the time of one layer's call in a graph."""
    batch, num_blocks = make_batch([(context - 1, context)] * num_sequences)
    arena = random(num_blocks, LAYERS, BLOCK_TOKENS, NUM_CHANNELS)
    q_THD, latent_TD = random(num_sequences, NUM_HEADS, NUM_CHANNELS), random(num_sequences, NUM_CHANNELS)

    def run() -> None:
        for layer in range(LAYERS):
            kernels.latent_attention(q_THD, latent_TD, arena[:, layer], batch, num_sequences, VALUE_DIM, scale=0.1)

    return 1000 * float(do_bench_cudagraph(run, rep=40, return_mode="median")) / LAYERS


def prefill_us(num_tokens: int, context: int) -> float:
    batch, num_blocks = make_batch([(context, context + num_tokens)])
    latent_BPD = random(num_blocks, BLOCK_TOKENS, NUM_CHANNELS)
    q_THD, latent_TD = random(num_tokens, NUM_HEADS, NUM_CHANNELS), random(num_tokens, NUM_CHANNELS)
    run = lambda: kernels.latent_attention(q_THD, latent_TD, latent_BPD, batch, 0, VALUE_DIM, scale=0.1)  # noqa: E731
    return 1000 * float(do_bench(run, warmup=10, rep=40, return_mode="median"))


def expanded_us(num_tokens: int, context: int) -> float:
    batch, num_blocks = make_batch([(context, context + num_tokens)])
    latent_BPC = random(num_blocks, BLOCK_TOKENS, NUM_CHANNELS)
    q_THD = random(num_tokens, NUM_HEADS, HEAD_DIM + NUM_CHANNELS - VALUE_DIM)
    up_HKR = random(NUM_HEADS, HEAD_DIM, VALUE_DIM).mul_(VALUE_DIM**-0.5)
    attend = expansion.expanded_latent_attention
    run = lambda: attend(q_THD, latent_BPC, up_HKR, up_HKR.clone(), batch, 0, scale=0.1)  # noqa: E731
    return 1000 * float(do_bench(run, warmup=10, rep=40, return_mode="median"))


def decode_floor_us(num_sequences: int, context: int) -> float:
    return 1e6 * num_sequences * context * NUM_CHANNELS * 2 / COPY_BYTES_PER_S


def prefill_floor_us(num_tokens: int, context: int, num_channels: int = NUM_CHANNELS + VALUE_DIM) -> float:
    """Return the time of the products; ``num_channels`` are those of a key and of its value."""
    num_pairs = num_tokens * (context + (num_tokens + 1) / 2)
    return 1e6 * num_pairs * NUM_HEADS * 2 * num_channels / BF16_FLOPS_PER_S


def sweep(name: str, tiles: Sequence[Tile], cases: Sequence[tuple[int, int]]) -> None:
    """Print the four best tiles of each case."""
    module = expansion if name == "TILE" else kernels
    before, time_us = getattr(module, name), {"DECODE_TILE": decode_us, "TILE": expanded_us}.get(name, prefill_us)
    for case in cases:
        found = []
        for tile in tiles:
            setattr(module, name, tile)
            try:
                found.append((time_us(*case), tile))
            except Exception as error:  # noqa: BLE001 - a variant that does not compile is a result, too
                print(f"    {tile}: {type(error).__name__} {str(error).splitlines()[:1]}")
        for us, tile in sorted(found)[:4]:
            print(f"  {name} {case}: {us:8.1f} us {tile}", flush=True)
    setattr(module, name, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()} · torch {torch.__version__}")
    for case in DECODES:
        us, floor = decode_us(*case), decode_floor_us(*case)
        print(f"decode of {case[0]} at {case[1]}: {us:8.1f} us, floor {floor:6.1f} ({floor / us:.0%})", flush=True)
    for case in PREFILLS:
        us, floor = prefill_us(*case), prefill_floor_us(*case)
        print(f"prefill of {case[0]} behind {case[1]}: {us:8.1f} us, floor {floor:6.1f} ({floor / us:.0%})", flush=True)
    for case in EXPANDED:
        us, floor = expanded_us(*case), prefill_floor_us(*case, num_channels=EXPANDED_CHANNELS)
        print(f"expanded, {case[0]} behind {case[1]}: {us:8.1f} us, floor {floor:6.1f} ({floor / us:.0%})", flush=True)
    if options.sweep:
        sweep("TILE", EXPANDED_TILES, EXPANDED[1:3])
        sweep("DECODE_TILE", DECODE_TILES, (DECODES[0], DECODES[3]))
        sweep("PREFILL_TILE", PREFILL_TILES, PREFILLS[1:2])


if __name__ == "__main__":
    main()
