"""Time what surrounds the model in steps that verify drafts on a GPU: tables and accepted drafts, by torch and Triton.

Run: ``PYTHONPATH=src:benchmarks/kernels python3 benchmarks/kernels/verification.py``. Every sequence verifies two
drafts behind two logged tokens, and its token is pending. One graph holds 20 calls of both operations; a time is the
median of its replays over the calls.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timing import gpu_time_us as time_us

from strandline.ids import NO_TOKEN, PendingToken
from strandline.kernels.sampling import verification, verification_triton
from strandline.kernels.sampling.verification import LastVerification, PlannedVerification

DRAFTS, CALLS, NUM_BLOCKS = 2, 20, 64
NUM_SEQUENCES = (1, 4, 16, 64, 256, 512)


def measure(num_sequences: int) -> None:
    """Check and time steps of one size."""
    device = torch.device("cuda")
    full = partial(torch.full, dtype=torch.int64, device=device)
    index_N, rows = torch.arange(num_sequences, device=device), 1 + DRAFTS
    columns = {name: full((num_sequences,), 0) for name in PlannedVerification._fields}
    columns |= {
        "token_ids": full((num_sequences * rows,), 5),
        "verdicts": full((num_sequences * rows,), 0),
        "query_starts": torch.cat((torch.arange(num_sequences + 1, device=device), index_N[-1:] + 1)) * rows,
        "start": 100 + index_N,
        "end": 100 + rows + index_N,
        "state_dst": index_N + 1,
        "log": index_N + 1,
        "num_logged": full((num_sequences,), DRAFTS),
        "num_drafts": full((num_sequences,), DRAFTS),
        "next_drafts": full((num_sequences,), DRAFTS),
        "pending": full((num_sequences,), PendingToken.MAY_STOP),
        "source_row": index_N,
    }
    planned, last = PlannedVerification(**columns), LastVerification.empty(num_sequences, DRAFTS, device)
    stop_ids_XS = full((512, 8), NO_TOKEN)
    tokens_T, table_NM = full((num_sequences * rows,), 7), full((num_sequences + 1, NUM_BLOCKS), 3).int()

    def call(complete: Callable[..., Any], accept: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        # No draft agrees, so that the next call finds the same step.
        tables = complete(planned, last, stop_ids_XS, DRAFTS)
        return (*tables, *accept(planned, tokens_T, last, stop_ids_XS, table_NM))

    torchs = partial(call, verification.complete_verification.reference, verification.accept_drafts.reference)
    tritons = partial(call, verification_triton.complete_verification, verification_triton.accept_drafts)
    # The last row of each of the two tables of replayed rows is in no chunk.
    undefined = {planned.token_ids.numel() + num_sequences * DRAFTS + 1}
    for found, expected in zip(tritons(), torchs(), strict=True):
        rest = slice(-1) if found.numel() in undefined else slice(None)
        if not torch.equal(found.flatten()[rest], expected.flatten()[rest]):
            raise SystemExit(f"sequences={num_sequences}: the tables differ")
    two, many = (time_us([function] * CALLS) for function in (tritons, torchs))
    print(f"sequences={num_sequences}: two launches {two:.2f} us, torch {many:.2f} us", flush=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    for num_sequences in NUM_SEQUENCES:
        measure(num_sequences)
