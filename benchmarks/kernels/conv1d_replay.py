"""Time the convolution of steps that verify drafts, at the sizes of Qwen3.5-35B-A3B on a GPU: one launch or four.

Run: ``PYTHONPATH=src:benchmarks/kernels python3 benchmarks/kernels/conv1d_replay.py``. Every sequence has two logged
tokens and two drafts. One graph holds the calls of 30 layers; a time is the median of its replays over the calls.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from timing import gpu_time_us as time_us

from strandline.kernels.batch import ReplayBatch
from strandline.kernels.chunk_table import Chunks, ChunkTable
from strandline.kernels.recurrences import conv1d, conv1d_replay_triton
from strandline.kernels.recurrences.replay_triton import insert_logged

SIZES, TAPS, ROW = (8192, 32, 32), 4, 12_352
LAYERS, DRAFTS = 30, 2
NUM_SEQUENCES = (1, 4, 16, 64)

Outputs = tuple[torch.Tensor, ...]


def measure(num_sequences: int) -> None:
    """Check and time steps of one size."""
    normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    sequence_N1 = torch.arange(num_sequences, device="cuda")[:, None]
    own_D, draft_D = torch.arange(1 + DRAFTS, device="cuda"), torch.arange(DRAFTS, device="cuda")
    all_rows = 2 * DRAFTS + 1
    columns = (
        sequence_N1 * all_rows + DRAFTS + own_D,
        sequence_N1 * all_rows + draft_D,
        (sequence_N1 + 1) * DRAFTS + draft_D,
        sequence_N1 * (1 + DRAFTS) + 1 + draft_D,
        (sequence_N1 + 1) * DRAFTS + draft_D,
    )
    starts = [i * all_rows + part for i in range(num_sequences) for part in (0, 1 + DRAFTS)]
    cuts = [slot for i in range(num_sequences) for slot in (i + 1, 0)]
    host = Chunks(
        tuple(range(0, 2 * num_sequences + 1, 2)),
        tuple(starts),
        (1 + DRAFTS, DRAFTS) * num_sequences,
        tuple(cuts),
        is_short=True,
    )
    chunks = host.with_tensors([torch.tensor(column, device="cuda") for column in host.columns])
    slots = torch.arange(1, num_sequences + 1, device="cuda")
    window_SLRC = normal(num_sequences + 1, LAYERS, TAPS - 1, SIZES[0])
    logs = [normal(LAYERS, (num_sequences + 1) * DRAFTS, size) for size in SIZES]
    projected = normal(LAYERS, num_sequences * (1 + DRAFTS), ROW)
    weight_CW = normal(SIZES[0], TAPS)
    replay = ReplayBatch(num_sequences * all_rows, *map(torch.flatten, columns), insert_logged=insert_logged)

    def call(layer: int, function: Callable[..., Outputs], table: ChunkTable) -> Outputs:
        inputs = projected[layer, :, : sum(SIZES)].split(SIZES, dim=1)
        log = tuple(log[layer] for log in logs)
        window = (window_SLRC[:, layer], slots, torch.zeros_like(slots))
        return function(inputs, log, replay, weight_CW, None, *window, table, "silu")

    kernel, whole = conv1d_replay_triton.causal_conv1d_replay, replace(chunks, is_short=False)
    memory = [x.clone() for x in (*logs, window_SLRC)]
    expected = call(0, conv1d.causal_conv1d_replay.reference, chunks)
    for tensor, copy in zip((*logs, window_SLRC), memory, strict=True):
        tensor.copy_(copy)
    error = max(float((x - y).abs().max()) for x, y in zip(call(0, kernel, chunks), expected, strict=True))
    one, four = (time_us([partial(call, i, kernel, table) for i in range(LAYERS)]) for table in (chunks, whole))
    print(f"sequences={num_sequences}: one launch {one:.2f} us, four {four:.2f} us, error {error:.1e}", flush=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    for num_sequences in NUM_SEQUENCES:
        measure(num_sequences)
