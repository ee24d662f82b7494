"""Attention over blocks, and what prepares it, at the shapes of Qwen3.5-4B and 35B-A3B; latents at Kimi-Linear's.

Block tables take turns, so that keys are not found in the cache. Blocks are as far apart as a model's layers put them,
in random order. Torch's versions read contiguous keys and values.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from math import e, log2
from typing import Any

import torch
import torch.nn.functional as F
from case import Call, Launch, Skipped, Work, bound, case, parse_launches, random, turns
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.attention import attention_prefix_triton
from strandline.kernels.attention.attention import paged_attention
from strandline.kernels.attention.latent_attention import latent_attention
from strandline.kernels.attention.latent_expansion import expanded_latent_attention
from strandline.kernels.attention.qkv import HeadNorm, prepare_qkv
from strandline.kernels.attention.tiles_triton import Tile
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.rowwise.rotary import default_frequencies, rotary_table

Heads = tuple[int, int, int]
"""Query heads, key/value heads, channels of a head."""
HEADS = {"4B": (16, 4, 256), "35B": (16, 2, 256), "8B": (32, 8, 128)}
TINY_HEADS = (2, 1, 16)
BLOCK_STRIDE = 2**20
"""Elements from block to block: 8 or 10 layers of keys and values, 2 MiB."""
MAX_BLOCKS = 2**15

Ranges = list[tuple[int, int]]
"""Of each sequence, the tokens ``[start, end)`` of a step."""

CONTEXTS = (1152, 4608, 32768)
DECODES = {f"{n}x{end}": [(end - 1, end)] * n for n in (1, 16, 64, 256) for end in CONTEXTS if n * end < 64 * 32768}
PREFILLS = {
    "1x8192": [(0, 8192)],
    "8x1024": [(0, 1024)] * 8,
    "16x128-over-4096": [(4096, 4224)] * 16,
    "1x128-over-4096": [(4096, 4224)],
    "1x2048-over-8192": [(8192, 10240)],
    "1x1024": [(0, 1024)],
    "1x8192-over-24576": [(24576, 32768)],
    "1x8192-over-91904": [(91904, 100096)],
    "1x2048-over-91904": [(91904, 93952)],
    "1x512-over-91904": [(91904, 92416)],
}
VERIFICATIONS = {
    f"{n}x{rows}-over-{start}": [(start, start + rows)] * n
    for n, rows in ((1, 3), (16, 3), (64, 3), (1, 8))
    for start in (640, 4608)
}
"""Of sequences that verify drafts."""
GRAPH_TOKENS = 8192
"""The context that a CUDA graph of verifications is planned for."""
PREFIXES = {name: ranges for name, ranges in PREFILLS.items() if len(ranges) == 1 and ranges[0][0] > 8192}
DECODE_TILES = "16,32,2,4 16,32,4,2 16,32,4,3 16,32,4,4 16,32,4,5 16,16,4,5 16,16,2,6 16,64,4,2 16,64,4,3 16,64,8,3"
VERIFICATION_TILES = "64,32,4,2 64,32,4,4 64,16,4,3 64,16,4,5 64,64,4,2 64,32,8,3 64,32,2,3 64,16,2,4"
PREFILL_TILES = "128,64,8,2 128,64,8,1 128,64,8,3 128,32,8,2 128,32,8,3 128,32,8,4 64,64,4,1 64,32,4,2 64,64,8,2"
"""Rows, keys, warps and stages."""


def make_batch(ranges: Ranges, blocks: Tensor) -> AttentionBatch:
    """Return a step; its sequences' blocks follow each other in ``blocks``."""
    counts = [-(-end // BLOCK_TOKENS) for _, end in ranges]
    table_NM = torch.zeros(len(ranges), max(counts), dtype=torch.int32)
    for row_M, part in zip(table_NM, blocks.split(counts), strict=True):
        row_M[: len(part)] = part
    starts = tuple(accumulate((end - start for start, end in ranges), initial=0))
    ends = tuple(end for _, end in ranges)
    sequence_T = torch.repeat_interleave(torch.arange(len(ranges)), torch.tensor(starts).diff())
    position_T = torch.cat([torch.arange(start, end) for start, end in ranges])
    return AttentionBatch(
        query_starts=starts,
        context_lens=ends,
        query_starts_N1=torch.tensor(starts),
        context_lens_N=torch.tensor(ends),
        block_table_NM=table_NM,
        write_blocks_T=table_NM[sequence_T, position_T // BLOCK_TOKENS].long(),
        write_offsets_T=position_T % BLOCK_TOKENS,
        is_all_written=True,
    )


def num_blocks_of(ranges: Ranges) -> int:
    return sum(-(-end // BLOCK_TOKENS) for _, end in ranges)


def make_memory(heads: Heads, num_blocks: int) -> KVMemory:
    """Return one layer's blocks of random numbers."""
    _, num_kv_heads, head_dim = heads
    size = BLOCK_TOKENS * num_kv_heads * head_dim
    stride = BLOCK_STRIDE if torch.get_default_device().type == "cuda" else 2 * size
    arena = torch.empty(num_blocks * stride, dtype=torch.bfloat16)
    shape, strides = (num_blocks, BLOCK_TOKENS, num_kv_heads, head_dim), (stride, size // BLOCK_TOKENS, head_dim, 1)
    k_BPGD, v_BPGD = (arena.as_strided(shape, strides, layer * size).normal_() for layer in range(2))
    return KVMemory(k_BPGD, v_BPGD)


def attention(num_decodes: int | None, heads: Heads, step: Ranges) -> Work:
    """Return attention of decodes or of prefills.

    Args:
        num_decodes: None: all sequences.
    """
    num_heads, num_kv_heads, head_dim = heads
    num_blocks, num_tokens = num_blocks_of(step), sum(end - start for start, end in step)
    kv_bytes = sum(end for _, end in step) * num_kv_heads * head_dim * 4
    count = min(turns(kv_bytes), (MAX_BLOCKS - 1) // num_blocks)
    memory = make_memory(heads, num_blocks * count + 1)
    blocks = torch.randperm(num_blocks * count) + 1
    decodes = len(step) if num_decodes is None else num_decodes
    call: dict[str, Call] = {
        "strandline": partial(bound(paged_attention), scale=head_dim**-0.5),
        "deterministic": partial(bound(paged_attention, is_deterministic=True), scale=head_dim**-0.5),
    }
    peers = torch_decode(heads, step) if decodes else torch_prefill(heads, step)
    pairs = sum((end - start) * (end + start + 1) // 2 for start, end in step)
    return Work(
        {**call, **peers},
        [
            (random(num_tokens, num_heads, head_dim), memory, make_batch(step, part), decodes)
            for part in blocks.split(num_blocks)
        ],
        num_bytes=kv_bytes + 4.0 * num_tokens * num_heads * head_dim,
        num_flops=4.0 * pairs * num_heads * head_dim,
        reference=partial(paged_attention.reference, scale=head_dim**-0.5),
        peers=peers,
        partial=peers,
        eager=() if decodes else peers,
        launches=decode_launches if decodes else prefill_launches,
    )


def torch_decode(heads: Heads, step: Ranges) -> dict[str, Call]:
    """Return torch's attention of equal contexts."""
    (num_heads, num_kv_heads, head_dim), batch, context = heads, len(step), step[0][1]
    q = random(batch, num_heads, 1, head_dim)
    k, v = (random(batch, num_kv_heads, context, head_dim) for _ in range(2))
    return {"torch sdpa": lambda *_: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)}


def torch_prefill(heads: Heads, step: Ranges) -> dict[str, Call]:
    """Return torch's attention of sequences of any length, whose arguments differ from release to release."""
    num_heads, num_kv_heads, head_dim = heads
    q_lens, k_lens = [end - start for start, end in step], [end for _, end in step]
    q_starts, k_starts = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (q_lens, k_lens))
    q = random(sum(q_lens), num_heads, head_dim)
    k, v = (random(sum(k_lens), num_kv_heads, head_dim) for _ in range(2))
    causal: Sequence[dict[str, Any]] = ({"is_causal": True}, {"window_size": (-1, 0)})
    grouped: Sequence[dict[str, Any]] = ({}, {"enable_gqa": True})
    options = [{**a, **b} for a, b in product(causal, grouped)]

    def attend(*_: object) -> Any:
        lengths = (q_starts, k_starts, max(q_lens), max(k_lens))
        while True:
            try:
                return varlen_attn(q, k, v, *lengths, **options[0])
            except (TypeError, RuntimeError, ValueError):
                if len(options) == 1:
                    raise
                options.pop(0)

    return {"torch varlen_attn": attend} if q.is_cuda else {}  # it runs on GPUs alone


def decode_launches() -> Iterator[Launch]:
    for tile in parse_launches(Tile, DECODE_TILES):
        yield Launch(str(tuple(tile)), {"attention.attention_triton.decode_tile": tile})
    for programs in (132, 264, 396, 528, 792):
        yield Launch(f"{programs} programs", {"attention.attention_triton.DECODE_PROGRAMS": programs})


def verification_launches() -> Iterator[Launch]:
    for tile in parse_launches(Tile, VERIFICATION_TILES):
        yield Launch(str(tuple(tile)), {"attention.attention_triton.SHORT_TILE": tile})
    for splits in (1, 2, 4, 8, 16, 32, 64):
        yield Launch(f"{splits} splits", {"attention.attention_splits.num_decode_splits": splits})


def prefill_launches() -> Iterator[Launch]:
    for tile in parse_launches(Tile, PREFILL_TILES):
        yield Launch(str(tuple(tile)), {"attention.attention_triton.PREFILL_TILE": tile})
    for splits in (1, 2, 4, 8, 16):
        yield Launch(f"{splits} splits", {"attention.attention_splits.num_prefill_splits": splits})


for _name, _num_decodes, _steps, _tiny in (
    ("decode", None, DECODES, [(69, 70), (9, 10)]),
    ("prefill", 0, PREFILLS, [(64, 80)]),
):
    case(f"attention/{_name}", heads=HEADS, step=_steps, tiny={"heads": TINY_HEADS, "step": _tiny})(
        partial(attention, _num_decodes)
    )


@case("attention/verify", heads=HEADS, step=VERIFICATIONS, tiny={"heads": TINY_HEADS, "step": [(69, 72), (9, 12)]})
def verification(heads: Heads, step: Ranges) -> Work:
    """Return attention of sequences that verify drafts, as a CUDA graph launches it."""
    work, (start, end) = attention(0, heads, step), step[0]
    planned: dict[str, Any] = {"most_rows": end - start}
    if torch.get_default_device().type == "cuda":  # other backends read lengths on the host
        planned["context_lens"] = (GRAPH_TOKENS,) * len(step)
    return replace(
        work,
        variants={"strandline": work.variants["strandline"]},
        arguments=[
            (q_THD, memory, replace(batch, **planned), num_decodes)
            for q_THD, memory, batch, num_decodes in work.arguments
        ],
        reference=lambda *_: paged_attention.reference(*work.arguments[0], scale=heads[2] ** -0.5),
        peers=(),
        partial=(),
        eager=(),
        launches=verification_launches,
    )


@case("attention/prefix", heads=HEADS, step=PREFIXES, tiny={"heads": TINY_HEADS, "step": [(128, 144)]})
def prefix(heads: Heads, step: Ranges) -> Work:
    """Return attention to the keys before the queries alone: ours, of keys in e4m3 too, and torch's."""
    (num_heads, num_kv_heads, head_dim), [(start, end)] = heads, step
    num_blocks, scale = start // BLOCK_TOKENS, head_dim**-0.5
    q_THD, memory = random(end - start, num_heads, head_dim), make_memory(heads, num_blocks)
    if not attention_prefix_triton.supports(q_THD, memory):
        raise Skipped("the kernel needs another device or layout")
    shape = (num_blocks, BLOCK_TOKENS, num_kv_heads, head_dim)
    k_BPGD, v_BPGD = (random(*shape).to(torch.float8_e4m3fn) for _ in range(2))
    e4m3 = KVMemory(k_BPGD, v_BPGD)
    table_M = torch.randperm(num_blocks).int()
    attend: Call = attention_prefix_triton.attend_prefix
    ours = partial(attend, q_THD, table_M=table_M, num_blocks=num_blocks, scale_log2=scale * log2(e))
    q = q_THD.transpose(0, 1).unsqueeze(0)
    k, v = (random(1, num_kv_heads, start, head_dim) for _ in range(2))
    # Without masks, the query heads of a key/value head are further queries, which read the same keys.
    folded = q.unflatten(1, (num_kv_heads, num_heads // num_kv_heads)).flatten(2, 3)
    aten: Any = torch.ops.aten
    in_cudnn = aten._scaled_dot_product_cudnn_attention
    variants: dict[str, Call] = {
        "strandline": partial(ours, memory),
        "strandline, e4m3": partial(ours, e4m3),
        "torch cuDNN": partial(in_cudnn, q, k, v, None, True, 0.0, False, False, scale=scale),
        "torch FlashAttention-2": partial(aten._scaled_dot_product_flash_attention, folded, k, v, scale=scale),
    }
    flops = 4.0 * (end - start) * start * num_heads * head_dim
    return Work(variants, [()], num_flops=flops, peers={"torch cuDNN", "torch FlashAttention-2"})


LATENT_HEADS, LATENT_CHANNELS, VALUE_DIM, HEAD_DIM = 32, 576, 512, 128
"""Of Kimi-Linear; the last: channels of a head's key that come from the latent, and of its value."""
LATENT_SCALE = 0.1
LATENT_DECODES = {f"{n}x{end}": [(end - 1, end)] * n for n, end in ((1, 4096), (1, 65536), (16, 4096), (64, 4096))}
LATENT_DECODES["256x2048"] = [(2047, 2048)] * 256
LATENT_PREFILLS = {f"{n}-over-{start}": [(start, start + n)] for n, start in ((1024, 0), (8192, 0), (2048, 30720))}
EXPANDED = {f"{n}-over-{start}": [(start, start + n)] for n, start in ((512, 4096), (8192, 0), (8192, 24576))}


def latents(num_decodes: int | None, step: Ranges, num_heads: int = LATENT_HEADS) -> Work:
    """Return attention over latents, of several layers: a decode's floor is every latent read once."""
    num_blocks, num_tokens = num_blocks_of(step), sum(end - start for start, end in step)
    latent_bytes = 2.0 * LATENT_CHANNELS * sum(end for _, end in step)
    num_layers = turns(latent_bytes, at_most=30)
    arena_BLPD = random(num_blocks + 1, num_layers, BLOCK_TOKENS, LATENT_CHANNELS)
    batch, decodes = make_batch(step, torch.randperm(num_blocks) + 1), len(step) if num_decodes is None else num_decodes
    q_THD, latent_TD = random(num_tokens, num_heads, LATENT_CHANNELS), random(num_tokens, LATENT_CHANNELS)
    tiles = product((32, 64), (32, 64), (4, 8), (2, 3)) if decodes else product((32, 64), (32, 64), (8,), (1, 2, 3))
    pairs = sum((end - start) * (end + start + 1) / 2 for start, end in step)
    return Work(
        {
            "strandline": partial(bound(latent_attention), scale=LATENT_SCALE),
            "deterministic": partial(bound(latent_attention, is_deterministic=True), scale=LATENT_SCALE),
        },
        [(q_THD, latent_TD, arena_BLPD[:, layer], batch, decodes, VALUE_DIM) for layer in range(num_layers)],
        num_bytes=latent_bytes,
        num_flops=2.0 * pairs * num_heads * (LATENT_CHANNELS + VALUE_DIM),
        reference=partial(latent_attention.reference, scale=LATENT_SCALE),
        launches=partial(
            tile_launches, f"latent_attention_triton.{'DECODE' if decodes else 'PREFILL'}_TILE", tuple(tiles)
        ),
    )


def tile_launches(name: str, tiles: Iterable[tuple[int, ...]]) -> Iterator[Launch]:
    for tile in tiles:
        yield Launch(str(tile), {f"attention.{name}": Tile(*tile)})


case("latent-attention/decode", step=LATENT_DECODES, tiny={"step": [(69, 70)], "num_heads": 2})(partial(latents, None))
case("latent-attention/prefill", step=LATENT_PREFILLS, tiny={"step": [(0, 8)], "num_heads": 2})(partial(latents, 0))


@case("latent-attention/expanded", step=EXPANDED, tiny={"step": [(0, 8)], "num_heads": 1})
def expanded(step: Ranges, num_heads: int = LATENT_HEADS) -> Work:
    """Return attention over keys and values that are computed from latents again, whose products are in the time."""
    num_blocks, [(start, end)] = num_blocks_of(step), step
    shared_dim = LATENT_CHANNELS - VALUE_DIM
    up_HKR, value_up_HKR = (random(num_heads, HEAD_DIM, VALUE_DIM, scale=VALUE_DIM**-0.5) for _ in range(2))
    q_THD = random(end - start, num_heads, HEAD_DIM + shared_dim)
    latent_BPC = random(num_blocks + 1, BLOCK_TOKENS, LATENT_CHANNELS)
    batch = make_batch(step, torch.randperm(num_blocks) + 1)
    pairs = (end - start) * (end + start + 1) / 2
    tiles = tuple(product((64, 128), (64, 128), (4, 8), (2, 3)))
    return Work(
        {"strandline": partial(bound(expanded_latent_attention), scale=LATENT_SCALE)},
        [(q_THD, latent_BPC, up_HKR, value_up_HKR, batch, 0)],
        num_flops=2.0 * pairs * num_heads * (2 * HEAD_DIM + shared_dim),
        reference=partial(expanded_latent_attention.reference, scale=LATENT_SCALE),
        launches=partial(tile_launches, "latent_expansion_triton.TILE", tiles),
    )


@case("qkv", heads=HEADS, tokens=(1, 4, 16, 64, 256, 2048, 8192), tiny={"heads": TINY_HEADS, "tokens": 3})
def qkv(heads: Heads, tokens: int) -> Work:
    """Return what is between attention's projection and attention: norms, rotary embedding, writes to blocks."""
    num_heads, num_kv_heads, head_dim = heads
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim, num_heads * head_dim]
    num_blocks = -(-tokens // BLOCK_TOKENS)
    memory, batch = make_memory(heads, num_blocks + 1), make_batch([(0, tokens)], torch.randperm(num_blocks) + 1)
    norm = HeadNorm(random(head_dim), random(head_dim), 1e-6, is_zero_centered=True)
    frequencies = default_frequencies(1e7, head_dim // 4)
    rotary = rotary_table.reference(torch.arange(tokens) + 1000, frequencies, 1.0)
    # The fused projection has as many features after the values as there are queries.
    arguments = [
        (*random(tokens, sum(sizes)).split(sizes, dim=1)[:3], norm, rotary, memory, batch)
        for _ in range(turns(2.0 * tokens * sum(sizes), at_most=64))
    ]
    return Work(
        {"strandline": bound(prepare_qkv), "deterministic": bound(prepare_qkv, is_deterministic=True)},
        arguments,
        num_bytes=4.0 * tokens * sum(sizes[:3]),
        reference=prepare_qkv.reference,
        memory=lambda *_: [memory.k_BPGD[1:], memory.v_BPGD[1:]],
        launches=qkv_launches,
    )


def qkv_launches() -> Iterator[Launch]:
    names = ("FEW_TOKENS_LAUNCH", "MANY_TOKENS_LAUNCH")
    for launch in parse_launches(lambda *sizes: sizes, "1,1 1,2 2,1 2,2 4,1 4,2 4,4 8,2 8,4 8,8 16,4 16,8 32,8"):
        yield Launch(str(launch), {f"attention.qkv_triton.{name}": launch for name in names})
