"""Time attention over blocks at the shapes of Qwen3.5-4B and Qwen3.5-35B-A3B on a GPU, and torch's on the same work.

Run: ``PYTHONPATH=src python3 benchmarks/kernels/attention.py [--sweep] [--only decode|prefill]``. Times are medians of
graph replays; block tables take turns, so that keys are not found in the cache. Blocks lie as far apart as a model's
layers put them, in random order. Torch's versions read contiguous keys and values, the small ones from the cache.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import e, log2
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench

from strandline.kernels.attention import attention, attention_prefix_triton, attention_splits, attention_triton
from strandline.kernels.attention.attention_triton import Tile
from strandline.kernels.batch import AttentionBatch, KVMemory

BYTES_PER_S, FLOPS = 4.3e12, 700e12
BLOCK_STRIDE = 2**20
"""Elements from block to block: 8 or 10 layers of keys and values, 2 MiB."""
ARENA_BLOCKS = 2**15
HEAD_DIM, SCALE = 256, 256**-0.5
HEADS = {"4B": (16, 4), "35B": (16, 2)}
COLD_BYTES = 200e6
"""Read between two uses of one table: three times the second-level cache."""

DECODES = [(1, 1152), (1, 4608), (1, 32768), (16, 1152), (16, 4608), (16, 32768), (64, 1152), (64, 4608)]
DECODES += [(64, 32768), (256, 1152), (256, 4608)]
PREFILLS = {
    "1 x 8192": [(0, 8192)],
    "8 x 1024": [(0, 1024)] * 8,
    "16 x 128 over 4096": [(4096, 4224)] * 16,
    "1 x 128 over 4096": [(4096, 4224)],
    "1 x 2048 over 8192": [(8192, 10240)],
    "1 x 1024": [(0, 1024)],
    "1 x 8192 over 24576": [(24576, 32768)],
    "1 x 8192 over 91904": [(91904, 100096)],
    "1 x 2048 over 91904": [(91904, 93952)],
    "1 x 512 over 91904": [(91904, 92416)],
}
DECODE_TILES = [
    Tile(16, 32, 4, 2),
    Tile(16, 32, 4, 3),
    Tile(16, 32, 4, 4),
    Tile(16, 32, 4, 5),
    Tile(16, 16, 4, 5),
    Tile(16, 16, 2, 6),
    Tile(16, 64, 4, 2),
    Tile(16, 64, 4, 3),
    Tile(16, 64, 8, 3),
]
DECODE_PROGRAMS = [132, 264, 396, 528, 792]
PREFILL_TILES = [
    Tile(128, 64, 8, 2),
    Tile(128, 64, 8, 1),
    Tile(128, 64, 8, 3),
    Tile(128, 32, 8, 2),
    Tile(128, 32, 8, 3),
    Tile(128, 32, 8, 4),
    Tile(64, 64, 4, 1),
    Tile(64, 32, 4, 2),
    Tile(64, 64, 8, 2),
]


@dataclass(frozen=True)
class Work:
    """Steps of one shape that take turns, and the least that one of them moves and computes."""

    label: str
    steps: list[tuple[Tensor, AttentionBatch]]
    num_decodes: int
    read_bytes: float
    flops: float


def make_memory(num_kv_heads: int, num_blocks: int = ARENA_BLOCKS) -> KVMemory:
    """Return one layer's blocks of random numbers."""
    arena = torch.empty(num_blocks * BLOCK_STRIDE, dtype=torch.bfloat16, device="cuda")
    shape = (num_blocks, 64, num_kv_heads, HEAD_DIM)
    strides = (BLOCK_STRIDE, num_kv_heads * HEAD_DIM, HEAD_DIM, 1)
    between = 64 * num_kv_heads * HEAD_DIM
    k_BPGD, v_BPGD = (arena.as_strided(shape, strides, layer * between).normal_() for layer in range(2))
    return KVMemory(k_BPGD, v_BPGD)


def make_work(
    label: str, model: str, ranges: Sequence[tuple[int, int]], num_decodes: int, num_blocks: int = ARENA_BLOCKS
) -> Work | None:
    """Return steps over random blocks; None where the arena is too small."""
    num_heads, num_kv_heads = HEADS[model]
    width = max(-(-end // 64) for _, end in ranges)
    if len(ranges) * width >= num_blocks:
        return None
    kv_bytes = sum(end for _, end in ranges) * num_kv_heads * HEAD_DIM * 4
    num_tokens = sum(end - start for start, end in ranges)
    pairs = sum((end - start) * (end + start + 1) // 2 for start, end in ranges)
    read_bytes = kv_bytes + 4 * num_tokens * num_heads * HEAD_DIM
    starts = torch.tensor([0, *(end - start for start, end in ranges)]).cumsum(0)
    ends = [end for _, end in ranges]
    empty = torch.zeros(0, dtype=torch.int64, device="cuda")
    steps = []
    for _ in range(max(1, min(32, int(COLD_BYTES / kv_bytes)))):
        blocks = torch.randperm(num_blocks - 1, device="cuda")[: len(ranges) * width] + 1
        q_THD = torch.randn(num_tokens, num_heads, HEAD_DIM, device="cuda").bfloat16()
        batch = AttentionBatch(
            query_starts=tuple(starts.tolist()),
            context_lens=tuple(ends),
            query_starts_N1=starts.cuda(),
            context_lens_N=torch.tensor(ends, device="cuda"),
            block_table_NM=blocks.int().view(len(ranges), width),
            write_blocks_T=empty,
            write_offsets_T=empty,
            is_all_written=True,
        )
        steps.append((q_THD, batch))
    return Work(f"{model} {label}", steps, num_decodes, read_bytes, 4.0 * pairs * num_heads * HEAD_DIM)


def decode_work(model: str, batch: int, context: int) -> Work | None:
    return make_work(f"decode {batch} x {context}", model, [(context - 1, context)] * batch, batch)


def run_all(work: Work, memory: KVMemory) -> None:
    for q_THD, batch in work.steps:
        attention_triton.paged_attention(q_THD, memory, batch, work.num_decodes, scale=SCALE)


def graph_us(run: Callable[[], object], num_steps: int) -> float:
    """Return the median time of one of the steps that ``run`` takes, replayed from a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return float(do_bench(graph.replay, warmup=10, rep=60, return_mode="median")) * 1000 / num_steps


def report(name: str, work: Work, us: float) -> None:
    floor_us = max(work.read_bytes / BYTES_PER_S, work.flops / FLOPS) * 1e6
    print(
        f"{work.label:32} {name:34} {us:9.1f} us {work.read_bytes / us / 1e3:7.0f} GB/s "
        f"{work.flops / us / 1e6:6.0f} TFLOP/s {100 * floor_us / us:4.0f} % of floor",
        flush=True,
    )


@contextmanager
def launched(**constants: object) -> Iterator[None]:
    """Replace launch parameters for a while."""
    module_of = {name: attention_triton if hasattr(attention_triton, name) else attention_splits for name in constants}
    before = {name: getattr(module, name) for name, module in module_of.items()}
    for name, value in constants.items():
        setattr(module_of[name], name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module_of[name], name, value)


def verify(model: str) -> None:
    """Compare with the torch version in float32, at a model's heads."""
    num_heads, num_kv_heads = HEADS[model]
    memory = make_memory(num_kv_heads, 128)
    wide = KVMemory(memory.k_BPGD.float(), memory.v_BPGD.float())
    for label, ranges, num_decodes in [
        ("decodes", [(1151, 1152), (0, 1), (699, 700)], 3),
        ("prefills", [(1000, 1128), (0, 300), (64, 65)], 0),
        ("mixed", [(1151, 1152), (2000, 2128)], 1),
    ]:
        work = make_work(label, model, ranges, num_decodes, 128)
        assert work is not None
        q_THD, batch = work.steps[0]
        for window in (None, 500):
            out = attention_triton.paged_attention(
                q_THD, memory, batch, num_decodes, scale=SCALE, window_tokens=window
            ).float()
            expected = attention.paged_attention.reference(
                q_THD.float(), wide, batch, num_decodes, scale=SCALE, window_tokens=window
            )
            error = float((out - expected).norm() / expected.norm())
            verdict = "ok" if error < 1e-2 else "WRONG"
            print(f"{model} {label} window {window}: |out - ref| / |ref| = {error:.2e} {verdict}", flush=True)
    assert num_heads % num_kv_heads == 0


def time_torch_decode(work: Work, model: str, batch: int, context: int) -> None:
    num_heads, num_kv_heads = HEADS[model]
    q = torch.randn(batch, num_heads, 1, HEAD_DIM, device="cuda").bfloat16()
    k, v = (torch.randn(batch, num_kv_heads, context, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
    report("torch sdpa", work, graph_us(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), 1))


def time_torch_prefill(work: Work, model: str, ranges: Sequence[tuple[int, int]]) -> None:
    from torch.nn.attention.varlen import varlen_attn

    num_heads, num_kv_heads = HEADS[model]
    q_lens, k_lens = [end - start for start, end in ranges], [end for _, end in ranges]
    q_starts, k_starts = (torch.tensor([0, *lens]).cumsum(0).int().cuda() for lens in (q_lens, k_lens))
    q = torch.randn(sum(q_lens), num_heads, HEAD_DIM, device="cuda").bfloat16()
    k, v = (torch.randn(sum(k_lens), num_kv_heads, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
    last_error: Exception | None = None
    spellings: tuple[dict[str, Any], ...] = ({"is_causal": True}, {"window_size": (-1, 0)})
    for causal in spellings:
        for gqa in (dict[str, Any](), {"enable_gqa": True}):
            try:
                run = partial(varlen_attn, q, k, v, q_starts, k_starts, max(q_lens), max(k_lens), **causal, **gqa)
                run()
            except (TypeError, RuntimeError, ValueError) as error:
                last_error = error
                continue
            report("torch varlen_attn", work, do_bench(run, warmup=10, rep=60, return_mode="median") * 1000)
            return
    print(f"{work.label}: torch varlen_attn: {str(last_error).splitlines()[0]}")


def time_prefix(work: Work, model: str, start: int, end: int, memory: KVMemory) -> None:
    """Time attention to the keys before the queries alone, and torch's versions on contiguous keys and values."""
    num_heads, num_kv_heads = HEADS[model]
    q_THD, batch = work.steps[0]
    flops = 4.0 * (end - start) * start * num_heads * HEAD_DIM
    prefix = Work(f"{work.label}, prefix", [], 0, work.read_bytes, flops)
    scale_log2 = SCALE * log2(e)
    if attention_prefix_triton.supports(q_THD, memory):
        run = lambda: attention_prefix_triton.attend_prefix(  # noqa: E731
            q_THD, memory, batch.block_table_NM[0], start // 64, scale_log2
        )
        report("strandline", prefix, do_bench(run, warmup=20, rep=200, return_mode="median") * 1000)
        shape = (start // 64, 64, num_kv_heads, HEAD_DIM)
        k_BPGD, v_BPGD = (torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
        e4m3 = KVMemory(k_BPGD, v_BPGD)
        table = torch.randperm(start // 64, device="cuda").int()
        run = lambda: attention_prefix_triton.attend_prefix(q_THD, e4m3, table, start // 64, scale_log2)  # noqa: E731
        report("strandline, e4m3", prefix, do_bench(run, warmup=20, rep=200, return_mode="median") * 1000)
    q = q_THD.transpose(0, 1).unsqueeze(0)
    k, v = (torch.randn(1, num_kv_heads, start, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
    run = lambda: torch.ops.aten._scaled_dot_product_cudnn_attention(  # noqa: E731
        q, k, v, None, True, 0.0, False, False, scale=SCALE
    )
    report("torch cuDNN", prefix, do_bench(run, warmup=20, rep=200, return_mode="median") * 1000)
    # Without masks, the query heads of a key/value head are further queries, which read the same keys.
    q = q.unflatten(1, (num_kv_heads, num_heads // num_kv_heads)).flatten(2, 3)
    run = lambda: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=SCALE)  # noqa: E731
    report("torch FlashAttention-2", prefix, do_bench(run, warmup=20, rep=200, return_mode="median") * 1000)


def time_all(name: str, works: Sequence[Work], memory: KVMemory, best: dict[str, tuple[float, str]]) -> None:
    """Time a variant on every shape; one that does not compile or fit says so and is left."""
    for work in works:
        try:
            us = graph_us(partial(run_all, work, memory), len(work.steps))
        except Exception as error:  # noqa: BLE001 -- a sweep goes on after whatever a variant fails with
            print(f"{work.label} {name}: {type(error).__name__} {str(error).splitlines()[:1]}", flush=True)
            return
        report(name, work, us)
        best[work.label] = min(best.get(work.label, (us, name)), (us, name))


def sweep_decodes(model: str, memory: KVMemory, best: dict[str, tuple[float, str]]) -> None:
    shapes = [(1, 1152), (1, 4608), (16, 4608), (64, 1152), (256, 1152)]
    works = [work for shape in shapes if (work := decode_work(model, *shape))]
    for tile in DECODE_TILES:
        with launched(DECODE_TILE=tile):
            time_all(f"{tuple(tile)}", works, memory, best)
    for programs in DECODE_PROGRAMS:
        with launched(DECODE_PROGRAMS=programs):
            time_all(f"programs {programs}", works, memory, best)


def sweep_prefills(model: str, memory: KVMemory, best: dict[str, tuple[float, str]]) -> None:
    works = [work for label, ranges in PREFILLS.items() if (work := make_work(label, model, ranges, 0))]
    for tile in PREFILL_TILES:
        with launched(PREFILL_TILE=tile):
            time_all(f"{tuple(tile)}", works, memory, best)
    short = [work for work in works if work.label.endswith(("1 x 128 over 4096", "1 x 1024"))]
    for splits in (1, 2, 4, 8, 16):
        with launched(num_prefill_splits=lambda *_, s=splits: s):
            time_all(f"{splits} splits", short, memory, best)


def time_model(model: str, memory: KVMemory, only: str | None) -> None:
    """Time the launch parameters that are in force, and torch beside them."""
    if only != "prefill":
        for shape in DECODES:
            if work := decode_work(model, *shape):
                time_all("strandline", [work], memory, {})
                if shape[0] * shape[1] <= 16 * 32768:
                    time_torch_decode(work, model, *shape)
    if only != "decode":
        for label, ranges in PREFILLS.items():
            if work := make_work(label, model, ranges, 0):
                time_all("strandline", [work], memory, {})
                time_torch_prefill(work, model, ranges)
                if " over " in label and len(ranges) == 1 and ranges[0][0] > 8192:
                    time_prefix(work, model, *ranges[0], memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try launch parameters, on the 35B model's heads")
    parser.add_argument("--only", choices=["decode", "prefill"])
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    for model in HEADS:
        verify(model)
    for model, (_, num_kv_heads) in HEADS.items():
        memory = make_memory(num_kv_heads)
        time_model(model, memory, arguments.only)
        if arguments.sweep and model == "35B":
            best = dict[str, tuple[float, str]]()
            if arguments.only != "prefill":
                sweep_decodes(model, memory, best)
            if arguments.only != "decode":
                sweep_prefills(model, memory, best)
            for label, (us, name) in best.items():
                print(f"best {label:32} {name:30} {us:9.1f} us")
        del memory
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
