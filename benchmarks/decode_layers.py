"""Time of a layer when sequences decode, from a CUDA graph of some layers, without the engine and its host.

    PYTHONPATH=src python benchmarks/decode_layers.py --model benchmarks/configs/qwen3.5-35b-a3b-fp8
    PYTHONPATH=src python benchmarks/decode_layers.py --dequantize --sweep
    PYTHONPATH=src python benchmarks/decode_layers.py --drafts 2
    PYTHONPATH=src python benchmarks/decode_layers.py --drafts 2 --sequences 16

With drafts, each sequence verifies these, and as many that were accepted are logged.

Weights are random. The graph is replayed sixty times, in five rounds that take turns with those of other variants;
microseconds per layer are of the fastest round. Hidden states are compared with those of the first variant. Kernels are
compiled in parallel before. ``--registers`` compiles alone, without a GPU, and lists the registers of each kernel.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from pkgutil import resolve_name
from tempfile import NamedTemporaryFile
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from strandline.device.meta_device import META, zeros_from_meta
from strandline.device.uni_executor import choose_kernels
from strandline.ids import BLOCK_TOKENS
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.batch import AttentionBatch, RecurrentBatch, RerunBatch, StepBatch
from strandline.kernels.chunk_table import Chunks, build_chunk_table
from strandline.kernels.gemm.formats import fp8
from strandline.kernels.gemm.formats.launches import few_pair, rows_launch
from strandline.kernels.gemm.weights import DenseWeight
from strandline.kernels.gpu import GPUS, kind_of
from strandline.kernels.recording_triton import Variant, recording
from strandline.kernels.recurrences.rerun import insert_logged
from strandline.kernels.step import fetch_integers
from strandline.model_config import ModelConfig, parse_model_config
from strandline.models.model_options import ModelOptions
from strandline.models.weights import FillOptions, load_model

REPLAYS, ROUNDS = 60, 5
CONTEXT_TOKENS = 640
VOCAB_SIZE = 4096
"""Rows of the embedding; the head is not measured."""

Patches = Mapping[str, Any]


FP8_LAUNCHES = "gemm.formats.fp8.FP8.launches"


def norms(elements: int, warps_short: int, warps_long: int) -> Patches:
    values = {"ROW_ELEMENTS": elements, "WARPS_SHORT": warps_short, "WARPS_LONG": warps_long}
    return {f"rowwise.norm_triton.{name}": value for name, value in values.items()}


def products(block_n: int, block_k: int, warps: int) -> Patches:
    """Return launches of narrow products."""
    launch = rows_launch(block_n, block_k, warps)
    assert fp8.LAUNCHES.linear is not None
    return {FP8_LAUNCHES: fp8.LAUNCHES._replace(linear=fp8.LAUNCHES.linear._replace(rows_one=launch))}


def first_products(*up: *tuple[int, int, int]) -> Patches:
    """Return launches of the experts' first product."""
    assert fp8.LAUNCHES.few_experts is not None
    return {
        FP8_LAUNCHES: fp8.LAUNCHES._replace(few_experts=(few_pair(up, 4, 4), fp8.LAUNCHES.few_experts[1])),
        "experts.few_launches.UP_ONE": up,
    }


VARIANTS: dict[str, Patches] = {
    "experts chosen by all warps of a program together": {"experts.few_triton.can_choose_by_warp": lambda *_: False},
    "as it is": {},
}
SWEPT: dict[str, Patches] = {
    **{
        f"norms of {elements} elements, {short} and {long} warps": norms(elements, short, long)
        for elements, short, long in ((128, 1, 8), (256, 1, 8), (512, 2, 8), (1024, 4, 4), (1024, 4, 16))
    },
    **{
        f"router in programs of {n} outputs and {warps} warps": {
            "experts.moe_triton.ROUTER": rows_launch(n, 2048, warps)
        }
        for n, warps in ((1, 4), (2, 8), (4, 8))
    },
    **{
        f"narrow products in programs of {n} outputs, {k} inputs and {warps} warps": products(n, k, warps)
        for n, k, warps in ((2, 2048, 4), (4, 2048, 8), (8, 2048, 4), (8, 4096, 8))
    },
    **{
        f"experts' first product in programs of {n} outputs, {k} inputs and {warps} warps": first_products(n, k, warps)
        for n, k, warps in ((4, 1024, 2), (4, 2048, 4), (8, 1024, 4), (8, 2048, 8))
    },
}


def decoding(slot_1: Tensor) -> RecurrentBatch:
    return RecurrentBatch(slot_1, slot_1, build_chunk_table([], [], slot_1.device))


@contextmanager
def patched(patches: Patches) -> Iterator[None]:
    with ExitStack() as stack:
        for path, value in patches.items():
            owner, _, name = path.rpartition(".")
            stack.enter_context(patch.object(resolve_name(f"strandline.kernels.{owner}"), name, value))
        yield


def read_config(options: argparse.Namespace) -> ModelConfig:
    """Return a model's configuration with fewer layers."""
    fields = json.loads(Path(options.model, "config.json").read_text())
    fields |= {"num_hidden_layers": options.layers, "vocab_size": VOCAB_SIZE}
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][: options.layers]
    return parse_model_config(fields)


class Layers:
    """A model of some layers, and a step in which sequences decode, or verify drafts."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.model: Any = load_model(
            options.model,
            ModelOptions(device=device, keeps_quantized=not options.dequantize),
            FillOptions(load_format="dummy"),
            config=read_config(options),
        )
        self.model.lay_out(DenseWeight)
        self.kernels = choose_kernels(self.model, kind_of(device))
        self.model.use_kernels(self.kernels)
        self.num_layers = len(self.model.spec.layers)
        count, num_rows = options.sequences, 1 + options.drafts
        per_slab, num_blocks = self.model.spec.blocks_per_slab, -(-CONTEXT_TOKENS // BLOCK_TOKENS)
        drafts = {"num_draft_logs": 1 + count, "draft_tokens": options.drafts} if options.drafts else {}
        num_slabs = 1 + count + -(-(1 + count * num_blocks) // per_slab)
        arena = ArenaTensors(self.model.spec, num_slabs, device, **drafts)
        self.memory = self.model.bind(arena)
        sequence_N1, row_R = torch.arange(count, device=device)[:, None], torch.arange(num_rows, device=device)
        block_table_NM = 1 + sequence_N1 * num_blocks + torch.arange(num_blocks, device=device)
        positions_NR = (CONTEXT_TOKENS - num_rows + row_R).expand(count, num_rows)
        # Slots are counted from the first slab, blocks from the last.
        slot_N, num_decodes = num_slabs - 1 - sequence_N1.flatten(), 0 if options.drafts else count
        self.batch = StepBatch(
            token_ids_T=(7 + 11 * (sequence_N1 * num_rows + row_R)).flatten() % VOCAB_SIZE,
            positions_T=positions_NR.flatten(),
            num_decodes=num_decodes,
            num_decode_rows=num_decodes,
            attention=AttentionBatch(
                query_starts=tuple(range(0, (count + 1) * num_rows, num_rows)),
                context_lens=(CONTEXT_TOKENS,) * count,
                query_starts_N1=torch.arange(count + 1, device=device) * num_rows,
                context_lens_N=torch.full((count,), CONTEXT_TOKENS, dtype=torch.int64, device=device),
                block_table_NM=block_table_NM.int(),
                write_blocks_T=block_table_NM.gather(1, positions_NR // BLOCK_TOKENS).flatten(),
                write_offsets_T=positions_NR.flatten() % BLOCK_TOKENS,
                is_all_written=True,
                most_rows=num_rows if options.drafts else None,
            ),
            recurrent=self.verifying(slot_N, options.drafts) if options.drafts else decoding(slot_N),
        )
        self.arena = arena

    def verifying(self, slot_N: Tensor, num_drafts: int) -> RecurrentBatch:
        """Return a step of sequences whose accepted drafts are logged, and which have as many new ones."""
        count, device = len(slot_N), slot_N.device
        sequence_N1, row_D = torch.arange(count, device=device)[:, None], torch.arange(num_drafts, device=device)
        first_N1, step_row_N1 = sequence_N1 * (2 * num_drafts + 1), sequence_N1 * (1 + num_drafts)
        entry_ND = (1 + sequence_N1) * num_drafts + row_D
        # Rows of the step among all, logged rows and their entries in the log; then rows and entries of new drafts.
        tables = (
            first_N1 + num_drafts + torch.arange(1 + num_drafts, device=device),
            first_N1 + row_D,
            entry_ND,
            step_row_N1 + 1 + row_D,
            entry_ND,
        )
        num_rows = count * (2 * num_drafts + 1)
        flat = [table.flatten() for table in tables]
        rerun = RerunBatch(num_rows, *flat, insert_logged=self.kernels[insert_logged])
        # The state is stored behind the last token that is certain.
        slots = [0] * count if device == META else slot_N.tolist()
        starts = [row for first in range(0, num_rows, 2 * num_drafts + 1) for row in (first, first + num_drafts + 1)]
        cuts = tuple(cut for slot in slots for cut in (slot, 0))
        firsts = tuple(range(0, 2 * count + 1, 2))
        chunks = Chunks(firsts, tuple(starts), (num_drafts + 1, num_drafts) * count, cuts, is_short=True)
        columns = [torch.tensor(column, device=device) for column in chunks.columns]
        return RecurrentBatch(slot_N, torch.zeros_like(slot_N), chunks.with_tensors(columns), rerun=rerun)

    @torch.inference_mode()
    def forward(self) -> Tensor:
        hidden_TE: Tensor = self.model.forward(self.batch, self.memory)
        return hidden_TE

    def fresh(self) -> Tensor:
        """Return the hidden states of three steps from zeroed memory."""
        self.arena.bytes.zero_()
        for memory in self.arena.layers:
            for log in (memory.draft_log or {}).values():
                log.zero_()
        return torch.cat([self.forward().clone() for _ in range(3)])


def find_kernels(options: argparse.Namespace, variants: Mapping[str, Patches]) -> list[Variant]:
    """Return what all variants launch."""
    found: list[Variant] = []
    with recording(GPUS["sm_90"], found.append), zeros_from_meta():
        layers = Layers(options, META)
        for patches in variants.values():
            with patched(patches):
                layers.forward()
        integers = torch.zeros(64, dtype=torch.int64, device=META)
        layers.kernels[fetch_integers](integers, integers)
    return found


def compile_one(variant: Variant) -> None:
    variant.compile(GPUS["sm_90"])


def compile_all(kernels: list[Variant], num_processes: int) -> None:
    """Fill Triton's cache."""
    running: list[Any] = []
    for variant in kernels:
        while len(running) >= num_processes:
            wait([each.sentinel for each in running])
            running = [each for each in running if each.is_alive()]
        running.append(get_context("fork").Process(target=compile_one, args=(variant,)))
        running[-1].start()
    for process in running:
        process.join()


def list_registers(kernels: list[Variant]) -> None:
    tool = Path(str(import_module("triton").__file__)).parent / "backends/nvidia/bin/cuobjdump"
    for variant in kernels:
        kernel, options = variant.compile(GPUS["sm_90"])
        with NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        usage = re.findall(r"(REG|STACK|SHARED):(\d+)", shown)
        sizes = {name: value for name, value in options.items() if name.startswith(("BLOCK", "num_warps", "NUM_K"))}
        print(f"{variant.name}: {dict(usage)} {sizes}")


def capture(layers: Layers) -> torch.cuda.CUDAGraph:
    layers.forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers.forward()
    return graph


def replay_us(run: Callable[[], None]) -> float:
    """Return the time of a step on the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    start.record()
    for _ in range(REPLAYS):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000 / REPLAYS


def measure(options: argparse.Namespace, variants: Mapping[str, Patches]) -> int:
    layers = Layers(options, torch.device("cuda"))
    graphs, errors, expected = {}, {}, None
    for name, patches in variants.items():
        with patched(patches):
            found = layers.fresh().float()
            expected = found if expected is None else expected
            errors[name] = float((found - expected).norm() / expected.norm())
            graphs[name] = capture(layers)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name].append(replay_us(graph.replay) / layers.num_layers)
    for name, each in times.items():
        print(f"{min(each):7.2f} us a layer (largest {max(each):.2f}), error {errors[name]:.1e}: {name}", flush=True)
    measure_gaps(layers)
    return int(any(not error < options.limit for error in errors.values()))


@torch.inference_mode()
def measure_gaps(layers: Layers) -> None:
    """Print what lies between two replays, by what is launched there."""
    fetch = layers.kernels[fetch_integers]
    host_I = torch.zeros(64, dtype=torch.int64, pin_memory=True)
    buffer_I = torch.zeros(64, dtype=torch.int64, device="cuda")
    fetch(host_I, buffer_I)
    torch.cuda.synchronize()
    graph, with_fetch = capture(layers), torch.cuda.CUDAGraph()
    with torch.cuda.graph(with_fetch):
        fetch(host_I, buffer_I)
        layers.forward()

    def fetch_first() -> None:
        fetch(host_I, buffer_I)
        graph.replay()

    def mark_end() -> None:
        graph.replay()
        torch.cuda.Event().record()

    def both() -> None:
        fetch_first()
        torch.cuda.Event().record()

    def fetched_and_marked() -> None:
        with_fetch.replay()
        torch.cuda.Event().record()

    ways = {
        "replay": graph.replay,
        "replay, event": mark_end,
        "fetch, replay": fetch_first,
        "fetch, replay, event": both,
        "replay with fetch": with_fetch.replay,
        "replay with fetch, event": fetched_and_marked,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            times[name].append(replay_us(way))
    for name, each in times.items():
        print(f"{min(each):7.2f} us a step: {name}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="benchmarks/configs/qwen3.5-35b-a3b-fp8")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--dequantize", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="also try other launches")
    parser.add_argument("--registers", action="store_true")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--limit", type=float, default=2e-2, help="largest relative error")
    options = parser.parse_args()
    variants = VARIANTS | (SWEPT if options.sweep else {})
    kernels = find_kernels(options, variants)
    if options.registers:
        list_registers(kernels)
        return 0
    start_s = time.perf_counter()
    compile_all(kernels, options.processes)
    print(f"{len(kernels)} kernels compiled in {time.perf_counter() - start_s:.1f} s", flush=True)
    return measure(options, variants)


if __name__ == "__main__":
    sys.exit(main())
