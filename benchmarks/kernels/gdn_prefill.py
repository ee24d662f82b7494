"""Times Gated DeltaNet prefill at the shape of Qwen3.5's layers on a GPU; `--sweep` tries how its kernels are launched.

With fewer heads it is a rank's part of such a layer.

PYTHONPATH=src python3 benchmarks/kernels/gdn_prefill.py [--heads 16] [--sweep]
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor
from triton.testing import do_bench

from strandline.kernels.chunk_table import CHUNK_TOKENS, ChunkTable, build_chunk_table
from strandline.kernels.recurrences import delta_rule_triton, gdn
from strandline.kernels.recurrences import gdn_prefill_triton as kernels
from strandline.kernels.recurrences.delta_rule_triton import Advance

HEADS, DIM = 32, 128
HEADS_PER_KEY = 2
SLOT_ELEMENTS = 16 * 2**20
COPY_BYTES_PER_S = 4.3e12
BF16_FLOPS_PER_S = 700e12
PEERS_MS = {(8192, 1): (0.591, 0.395), (8192, 8): (0.566, 0.127), (65536, 1): (4.65, 3.10), (65536, 8): (4.37, 0.862)}
"""Tokens, sequences: the same of 32 heads on an H200, by FLA's Triton kernels as vLLM 0.25.1 carries them and by
FlashInfer."""


@dataclass(frozen=True)
class Case:
    """One layer's work: random bfloat16 inputs of equal sequences, each with the same number of cuts."""

    num_tokens: int
    num_sequences: int
    num_cuts: int
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
    state_SHKV: Tensor
    src_N: Tensor
    dst_N: Tensor
    chunks: ChunkTable

    @property
    def num_heads(self) -> int:
        return len(self.inputs[-1])

    @property
    def name(self) -> str:
        return f"H={self.num_heads} T={self.num_tokens} N={self.num_sequences} cuts={self.num_cuts}"

    @property
    def floor_ms(self) -> float:
        """Every input read and every output written once; or the products that the chunkwise form needs."""
        heads, key_heads = self.num_heads, self.num_heads // HEADS_PER_KEY
        num_bytes = self.num_tokens * DIM * 2 * (2 * key_heads + 2 * heads)
        num_bytes += (2 * self.num_sequences + self.num_cuts) * heads * DIM * DIM * 4
        flops_of_head = 2 * 64 * (3 * DIM * DIM + 2 * 64 * DIM + 64 * 64)
        num_flops = len(self.chunks.starts) * (heads * flops_of_head + key_heads * 2 * 2 * 64 * 64 * DIM)
        return 1e3 * max(num_bytes / COPY_BYTES_PER_S, num_flops / BF16_FLOPS_PER_S)


def make_case(
    num_tokens: int,
    num_sequences: int,
    num_cuts: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    num_heads: int = HEADS,
    past_grid: int = 5,
) -> Case:
    """Return random work whose cuts (of all sequences together) lie ``past_grid`` tokens past the grid of 64.

    A cut off the grid adds a chunk, one on it does not.
    """
    key_heads = num_heads // HEADS_PER_KEY
    channels = (2 * key_heads + num_heads) * DIM
    fused_TC = torch.randn(num_tokens, channels, device="cuda").to(dtype)
    q_TX, k_TX, v_TX = fused_TC.split([key_heads * DIM, key_heads * DIM, num_heads * DIM], dim=1)
    gates_TX = torch.randn(num_tokens, 2 * num_heads, device="cuda").to(dtype)
    inputs = (
        q_TX.unflatten(1, (key_heads, DIM)),
        k_TX.unflatten(1, (key_heads, DIM)),
        v_TX.unflatten(1, (num_heads, DIM)),
        gates_TX[:, :num_heads],
        gates_TX[:, num_heads:],
        torch.empty(num_heads, device="cuda").uniform_(0.001, 16).log(),
        torch.randn(num_heads, device="cuda"),
    )
    num_slots = 2 * num_sequences + num_cuts + 1
    arena_SX = torch.randn(num_slots, SLOT_ELEMENTS, device="cuda")
    state_SHKV = arena_SX[:, : num_heads * DIM * DIM].unflatten(1, (num_heads, DIM, DIM))
    length = num_tokens // num_sequences
    cuts: list[list[tuple[int, int]]] = [[] for _ in range(num_sequences)]
    for i in range(num_cuts):
        turn = i // num_sequences + 1
        turns = -(-num_cuts // num_sequences)
        position = turn * length // (turns + 1) // CHUNK_TOKENS * CHUNK_TOKENS + past_grid
        cuts[i % num_sequences].append((position, 2 * num_sequences + 1 + i))
    return Case(
        num_tokens,
        num_sequences,
        num_cuts,
        inputs,
        state_SHKV,
        torch.arange(1, num_sequences + 1, device="cuda"),
        torch.arange(num_sequences + 1, 2 * num_sequences + 1, device="cuda"),
        build_chunk_table([(0, length)] * num_sequences, cuts, "cuda"),
    )


def verify(num_heads: int) -> None:
    """Compare with the reference, in float32 on the CPU, at the real shape."""
    for (dtype, limit), num_sequences in product([(torch.bfloat16, 1.5e-2), (torch.float32, 2e-5)], (2, 1)):
        case = make_case(2048, num_sequences, 3, dtype, num_heads=num_heads)
        expected_SHKV = case.state_SHKV.cpu()
        chunks = build_chunk_table(*cuts_of(case.chunks))
        q, k, v, a, b, A_log, dt_bias = (x.cpu().float() for x in case.inputs)
        slots = case.src_N.cpu(), case.dst_N.cpu()
        expected = gdn.gdn_prefill.reference(q, k, v, a, b, A_log, dt_bias, expected_SHKV, *slots, chunks)
        out = kernels.gdn_prefill(*case.inputs, case.state_SHKV, case.src_N, case.dst_N, case.chunks).cpu().float()
        errors = [
            float((x - y).norm() / y.norm()) for x, y in ((out, expected), (case.state_SHKV.cpu(), expected_SHKV))
        ]
        verdict = "ok" if max(errors) <= limit else "WRONG"
        print(
            f"gdn_prefill {case.name} {dtype}: error of outputs {errors[0]:.2e}, of states {errors[1]:.2e}: {verdict}"
        )


def cuts_of(chunks: ChunkTable) -> tuple[list[tuple[int, int]], list[list[tuple[int, int]]]]:
    """Return the ranges and cuts that a table of whole prompts was built from."""
    ranges, cuts = [], []
    for first, end in zip(chunks.first_chunks, chunks.first_chunks[1:], strict=False):
        base = chunks.starts[first]
        stops = [chunks.starts[c] + chunks.lengths[c] - base for c in range(first, end)]
        ranges.append((0, stops[-1]))
        cuts.append(
            [(stop, chunks.cut_slots[first + i]) for i, stop in enumerate(stops) if chunks.cut_slots[first + i]]
        )
    return ranges, cuts


def time_ms(function: Callable[[], object], budget_ms: int = 100) -> float:
    return float(do_bench(function, warmup=25, rep=budget_ms, return_mode="median"))


def try_ms(function: Callable[[], object]) -> float | str:
    """Return the time, or the first line of why there is none."""
    try:
        return time_ms(function, 40)
    except Exception as error:  # noqa: BLE001 - a variant that fails must not end the sweep
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"


def report(case: Case) -> float:
    """Print the times of the whole and of each kernel; return the whole's."""
    q, k, v, *_ = case.inputs
    gates = case.inputs[3:]
    slots = case.state_SHKV, case.src_N, case.dst_N, case.chunks
    whole = time_ms(lambda: kernels.gdn_prefill(*case.inputs, *slots))
    prepare = time_ms(lambda: kernels.prepare(q, k, *gates, case.chunks))
    prepared = kernels.prepare(q, k, *gates, case.chunks)
    launch = delta_rule_triton.choose_launch(case.chunks, *v.shape[1:])
    advance = time_ms(lambda: delta_rule_triton.advance(q, k, v, prepared, *slots, launch))
    peers = PEERS_MS.get((case.num_tokens, case.num_sequences)) if case.num_heads == HEADS else None
    print(
        f"gdn_prefill {case.name}: {1e3 * whole:.1f} µs (prepare {1e3 * prepare:.1f}, "
        f"advance {1e3 * advance:.1f}, in {launch.num_segments} segments); "
        f"floor {1e3 * case.floor_ms:.1f} µs, {100 * case.floor_ms / whole:.0f} % of it"
        + (f"; peers {1e3 * peers[0]:.0f} and {1e3 * peers[1]:.0f} µs" if peers else ""),
        flush=True,
    )
    return whole


def sweep(case: Case) -> None:
    """Print the time of every way to launch each kernel, the best last."""
    q, k, v, *_ = case.inputs
    gates = case.inputs[3:]
    slots = case.state_SHKV, case.src_N, case.dst_N, case.chunks
    variants: dict[str, Callable[[], object]] = {}
    for registers in (None, 168, 128):
        variants[f"prepare registers={registers}"] = partial(prepare_with, registers, case)
    print_best(case, variants)
    prepared = kernels.prepare(q, k, *gates, case.chunks)
    variants = {}
    for columns, stages in product([64, 128], [2, 3]):
        launch = Advance(columns, columns // 16, stages)
        variants[str(launch)] = partial(delta_rule_triton.advance, q, k, v, prepared, *slots, launch)
    for columns, stages, segments, partial_stages in product([64, 128], [2, 3], [2, 3, 4, 5, 6, 8], [2, 3]):
        launch = Advance(columns, columns // 16, stages, segments)
        advance = partial(delta_rule_triton.advance, q, k, v, prepared, *slots, launch)
        variants[f"{launch}, {partial_stages} without outputs"] = partial(with_stages, partial_stages, advance)
    print_best(case, variants)


def with_stages(partial_stages: int, advance: Callable[[], object]) -> None:
    chosen, delta_rule_triton.PARTIAL_STAGES = delta_rule_triton.PARTIAL_STAGES, partial_stages
    try:
        advance()
    finally:
        delta_rule_triton.PARTIAL_STAGES = chosen


def prepare_with(registers: int | None, case: Case) -> None:
    q, k, _, a, b, A_log, dt_bias = case.inputs
    chosen, kernels.PREPARE_REGISTERS = kernels.PREPARE_REGISTERS, registers
    try:
        kernels.prepare(q, k, a, b, A_log, dt_bias, case.chunks)
    finally:
        kernels.PREPARE_REGISTERS = chosen


def print_best(case: Case, variants: dict[str, Callable[[], object]]) -> None:
    results = {name: try_ms(function) for name, function in variants.items()}
    for name, result in results.items():
        print(f"  {case.name} {name}: {result if isinstance(result, str) else f'{1e3 * result:.1f} µs'}", flush=True)
    times = {name: result for name, result in results.items() if isinstance(result, float)}
    if times:
        best = min(times, key=times.__getitem__)
        print(f"best for {case.name}: {best}: {1e3 * times[best]:.1f} µs", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Verify, then time; or sweep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--heads", type=int, default=HEADS, help="value heads (default: %(default)s)")
    parser.add_argument("--sweep", action="store_true", help="try how the kernels are launched")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    verify(options.heads)
    make = partial(make_case, num_heads=options.heads)
    for num_tokens, num_sequences in ((8192, 1), (8192, 2), (8192, 8), (65536, 1), (65536, 8), (2048, 1), (2048, 16)):
        if options.sweep:
            if num_tokens < 65536:
                sweep(make(num_tokens, num_sequences, 0))
            continue
        without, off_grid = (report(make(num_tokens, num_sequences, cuts)) for cuts in (0, 8))
        on_grid = report(make(num_tokens, num_sequences, 8, past_grid=0))
        print(
            f"gdn_prefill T={num_tokens} N={num_sequences}: with 8 cuts {off_grid / without:.3f} of the time without, "
            f"on the grid {on_grid / without:.3f}"
        )


if __name__ == "__main__":
    main()
