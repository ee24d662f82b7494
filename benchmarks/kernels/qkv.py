"""Time what lies between attention's projection and attention, at the shapes of Qwen3.5-4B and 35B-A3B on a GPU.

Run: ``PYTHONPATH=src python3 benchmarks/kernels/qkv.py [--sweep]``. Times are medians of graph replays over several
projections, so that none is found in the cache; the floor is reading and writing every channel once at 4.3 TB/s.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.testing import do_bench

from strandline.kernels.attention import qkv, qkv_triton
from strandline.kernels.attention.qkv import HeadNorm
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.rowwise.rotary import default_frequencies, rotary_table

BYTES_PER_S = 4.3e12
HEADS = {"4B": (16, 4), "35B": (16, 2)}
HEAD_DIM, ROTARY_DIM, EPS = 256, 64, 1e-6
BLOCK_STRIDE, NUM_BLOCKS = 2**20, 300
"""Elements from block to block, 2 MiB: 8 or 10 layers of keys and values."""
TOKENS = (1, 4, 16, 64, 256, 2048, 8192)
COLD_BYTES = 200e6
LAUNCHES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8), (16, 4), (16, 8), (32, 8)]
"""Heads per program and warps."""

Rotary = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Work:
    """Projections that take turns, and what they are prepared with."""

    model: str
    projections: list[Tensor]
    norm: HeadNorm
    rotary: Rotary
    memory: KVMemory
    batch: AttentionBatch

    def run(self) -> None:
        for projected_TO in self.projections:
            self.prepare(qkv_triton.prepare_qkv, projected_TO)

    def prepare(self, operation: object, projected_TO: Tensor) -> Tensor:
        assert callable(operation)
        num_heads, num_kv_heads = HEADS[self.model]
        q_TO, k_TO, v_TO, _ = projected_TO.tensor_split(
            [num_heads * HEAD_DIM, (num_heads + num_kv_heads) * HEAD_DIM, (num_heads + 2 * num_kv_heads) * HEAD_DIM], 1
        )
        result = operation(q_TO, k_TO, v_TO, self.norm, self.rotary, self.memory, self.batch)
        assert isinstance(result, Tensor)
        return result

    @property
    def moved_bytes(self) -> float:
        num_heads, num_kv_heads = HEADS[self.model]
        return 4.0 * len(self.projections[0]) * (num_heads + 2 * num_kv_heads) * HEAD_DIM


def make_memory(num_kv_heads: int) -> KVMemory:
    arena = torch.zeros(NUM_BLOCKS * BLOCK_STRIDE, dtype=torch.bfloat16, device="cuda")
    strides = (BLOCK_STRIDE, num_kv_heads * HEAD_DIM, HEAD_DIM, 1)
    between = 64 * num_kv_heads * HEAD_DIM
    shape = (NUM_BLOCKS, 64, num_kv_heads, HEAD_DIM)
    return KVMemory(arena.as_strided(shape, strides), arena.as_strided(shape, strides, between))


def make_work(model: str, num_tokens: int, memory: KVMemory) -> Work:
    """Return projections that carry, like the fused one, as many features behind the values as there are queries."""
    num_heads, num_kv_heads = HEADS[model]
    features = (2 * num_heads + 2 * num_kv_heads) * HEAD_DIM
    count = max(1, min(64, int(COLD_BYTES / (2 * features * num_tokens))))
    projections = [torch.randn(num_tokens, features, device="cuda").bfloat16() for _ in range(count)]
    positions_T = torch.arange(num_tokens, device="cuda") + 1000
    blocks_M = torch.randperm(NUM_BLOCKS - 1, device="cuda") + 1
    empty = torch.zeros(0, dtype=torch.int64, device="cuda")
    batch = AttentionBatch(
        query_starts=(),
        context_lens=(),
        query_starts_N1=empty,
        context_lens_N=empty,
        block_table_NM=empty,
        write_blocks_T=blocks_M[torch.arange(num_tokens, device="cuda") // 64],
        write_offsets_T=positions_T % 64,
        is_all_written=True,
    )
    q_norm_D, k_norm_D = torch.randn(2, HEAD_DIM, device="cuda").bfloat16()
    norm = HeadNorm(q_norm_D, k_norm_D, EPS, is_zero_centered=True)
    rotary = rotary_table.reference(positions_T, default_frequencies(1e7, ROTARY_DIM).cuda(), 1.0)
    return Work(model, projections, norm, rotary, memory, batch)


def verify(work: Work) -> None:
    """Compare queries, keys and values with the torch version's."""
    projected_TO = work.projections[0]
    results = []
    for operation in (qkv_triton.prepare_qkv, qkv.prepare_qkv.reference):
        work.memory.k_BPGD.zero_()
        work.memory.v_BPGD.zero_()
        q_THD = work.prepare(operation, projected_TO)
        results.append([x.float() for x in (q_THD, work.memory.k_BPGD, work.memory.v_BPGD)])
    for name, actual, expected in zip("qkv", *results, strict=True):
        error = float((actual - expected).norm() / expected.norm())
        verdict = "ok" if error < 1e-2 else "WRONG"
        print(f"{work.model} {len(projected_TO)} tokens {name}: |out - ref| / |ref| = {error:.2e} {verdict}")


def time_us(work: Work) -> float:
    work.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.run()
    replay_ms = float(do_bench(graph.replay, warmup=10, rep=60, return_mode="median"))
    return replay_ms * 1000 / len(work.projections)


def report(name: str, work: Work, us: float) -> None:
    floor_us = work.moved_bytes / BYTES_PER_S * 1e6
    shape = f"{work.model} {len(work.projections[0])} tokens"
    print(
        f"prepare_qkv {shape:18} {name:16} {us:8.2f} us {work.moved_bytes / us / 1e3:6.0f} GB/s "
        f"{100 * floor_us / us:4.0f} % of floor",
        flush=True,
    )


def sweep(work: Work, launches: Sequence[tuple[int, int]]) -> None:
    """Time all launches on one shape and print the best."""
    before = qkv_triton.FEW_TOKENS_LAUNCH, qkv_triton.MANY_TOKENS_LAUNCH
    times = dict[tuple[int, int], float]()
    for launch in launches:
        qkv_triton.FEW_TOKENS_LAUNCH = qkv_triton.MANY_TOKENS_LAUNCH = launch
        try:
            times[launch] = time_us(work)
        except Exception as error:  # noqa: BLE001 -- a sweep goes on after whatever a variant fails with
            print(f"{launch}: {type(error).__name__} {str(error).splitlines()[:1]}")
            continue
        report(str(launch), work, times[launch])
    qkv_triton.FEW_TOKENS_LAUNCH, qkv_triton.MANY_TOKENS_LAUNCH = before
    if times:
        best = min(times, key=times.__getitem__)
        report(f"best {best}", work, times[best])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try launch parameters, on the 35B model's heads")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    for model, (_, num_kv_heads) in HEADS.items():
        memory = make_memory(num_kv_heads)
        for num_tokens in TOKENS:
            work = make_work(model, num_tokens, memory)
            if num_tokens in (1, 256):
                verify(work)
            report("strandline", work, time_us(work))
            if arguments.sweep and model == "35B":
                sweep(work, LAUNCHES)


if __name__ == "__main__":
    main()
