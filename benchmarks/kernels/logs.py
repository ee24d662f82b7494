"""Logs of decoded tokens and of drafts, at the shapes of Qwen3.5-35B-A3B and Nemotron-3-Nano-30B-A3B.

Decodes with logs read states, and write those of sequences whose log is full. In a step that verifies drafts, every
sequence has two logged tokens and two drafts, which the kernels of prefills compute.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from case import Launch, Work, bound, case, parse_launches, random, turns
from recurrences import KINDS, TINY_KINDS, Kind, decodes, gdn
from torch import Tensor

from strandline.ids import NO_TOKEN, PendingToken
from strandline.kernels.batch import LogBatch, RerunBatch, Slots
from strandline.kernels.chunk_table import Chunks, ChunkTable
from strandline.kernels.operation import Operation
from strandline.kernels.recurrences.conv1d import Convolution, causal_conv1d_rerun
from strandline.kernels.recurrences.gdn import gdn_prefill
from strandline.kernels.recurrences.gdn_log import LOG_TOKENS, LogMemory, gdn_decode_logged
from strandline.kernels.recurrences.gdn_short_triton import Short
from strandline.kernels.recurrences.mamba2_log import mamba2_decode_logged
from strandline.kernels.recurrences.rerun import insert_logged
from strandline.kernels.sampling.verification import LastStep, accept_drafts, resolve_pending
from strandline.kernels.step import PlannedStep, SequenceColumns
from strandline.records.plan import MAX_STOP_IDS

LOGGED = {**{str(length): length for length in range(LOG_TOKENS + 1)}, "mixed": None}
"""Tokens in every log; mixed: every number is as frequent."""
DRAFTS = 2
ROWS = 2 * DRAFTS + 1
"""Logged tokens of a sequence, its certain token and its drafts."""
SEQUENCES = (1, 4, 16, 64)
GDN = gdn(32)


@case(
    "gdn/decode-logged",
    batch=(1, 4, 16, 64, 256),
    logged=LOGGED,
    state_dtype={"float32": torch.float32, "bfloat16": torch.bfloat16},
    tiny={"batch": 2, "logged": 1, "state_dtype": torch.float32, "kind": TINY_KINDS["gdn"]},
)
def decode_gdn_logged(batch: int, logged: int | None, state_dtype: torch.dtype, kind: Kind = GDN) -> Work:
    """Return decode steps of Gated DeltaNet."""
    return decode_logged(gdn_decode_logged, replace(kind, state_dtype=state_dtype), kind.tokens[0][0], batch, logged)


@case(
    "mamba2/decode-logged",
    batch=(1, 4, 16, 64, 256, 1024),
    logged=LOGGED,
    kind={name: KINDS[name] for name in ("mamba2", "mamba2-of-256")},
    tiny={"batch": 2, "logged": 1, "kind": TINY_KINDS["mamba2"]},
)
def decode_mamba2_logged(batch: int, logged: int | None, kind: Kind) -> Work:
    """Return decode steps of Mamba-2."""
    work = decode_logged(mamba2_decode_logged, kind, kind.tokens[1][0], batch, logged)
    return replace(work, launches=partial(decodes, "mamba2_log_triton"))


def decode_logged(operation: Operation[..., Tensor], kind: Kind, num_keys: int, batch: int, logged: int | None) -> Work:
    """Return decode steps of several layers with logs; the mean over all numbers is the mean step."""
    num_layers = turns(batch * kind.state_bytes, at_least=4, at_most=30)
    state_SLX, slots = kind.states(batch, num_layers), torch.randperm(batch) + 1
    lens = tuple(i % (LOG_TOKENS + 1) if logged is None else logged for i in range(batch))
    folded = tuple(length + 1 if length == LOG_TOKENS else 0 for length in lens)
    log_N = torch.randperm(batch) + 1
    logs = LogBatch(log_N, torch.tensor(lens), log_N, lens, torch.tensor(folded), folded)
    num_heads, key_dim, value_dim = kind.state
    shapes = ((num_keys, LOG_TOKENS, key_dim), (num_heads, LOG_TOKENS, value_dim), (num_heads, LOG_TOKENS))

    def make_memory() -> LogMemory:
        parts = [torch.rand(batch + 1, *shape).mul_(-0.1) for shape in shapes]
        for log, length in zip(log_N.tolist(), lens, strict=True):
            for part in parts:
                part[log, :, length:] = 0  # as empty places are
        return LogMemory(*parts)

    arguments = [
        (kind.inputs(batch), state_SLX[:, layer], Slots(slots, slots), make_memory(), logs)
        for layer in range(num_layers)
    ]
    token_bytes = 4 * (num_keys * key_dim + num_heads * value_dim)
    written = sum(count > 0 for count in folded)
    return Work(
        {"strandline": bound(operation)},
        arguments,
        num_bytes=(batch + written) * kind.state_bytes + token_bytes * (sum(lens) + batch - written),
        reference=operation.reference,
        limit=2e-2,
        memory=lambda *arguments: [
            arguments[1][1:],
            *(part[1:] for part in (arguments[-2].key_JGLK, arguments[-2].value_JHLV, arguments[-2].decay_JHL)),
        ],
    )


def rerun_of(num_sequences: int, *, is_padded: bool) -> tuple[RerunBatch, ChunkTable]:
    """Return the rows and the chunks of a step in which every sequence verifies drafts.

    Args:
        is_padded: whether a last row belongs to no token.
    """
    sequence_N1 = torch.arange(num_sequences)[:, None]
    own_D, draft_D = torch.arange(1 + DRAFTS), torch.arange(DRAFTS)
    log_ND = (sequence_N1 + 1) * DRAFTS + draft_D
    columns = (
        sequence_N1 * ROWS + DRAFTS + own_D,
        sequence_N1 * ROWS + draft_D,
        log_ND,
        sequence_N1 * (1 + DRAFTS) + 1 + draft_D,
        log_ND,
    )
    flat = [column.flatten() for column in columns]
    options: dict[str, Any] = {"insert_logged": bound(insert_logged), "is_padded": is_padded}
    rerun = RerunBatch(num_sequences * ROWS + is_padded, *flat, **options)
    starts = tuple(i * ROWS + part for i in range(num_sequences) for part in (0, 1 + DRAFTS))
    cuts = tuple(slot for i in range(num_sequences) for slot in (i + 1, 0))
    firsts = tuple(range(0, 2 * num_sequences + 1, 2))
    chunks = Chunks(firsts, starts, (1 + DRAFTS, DRAFTS) * num_sequences, cuts, is_short=True)
    return rerun, chunks.with_tensors([torch.tensor(column) for column in chunks.columns])


@case("gdn/verify", sequences=SEQUENCES, tiny={"sequences": 2, "kind": gdn(4, 16)})
def verify_gdn(sequences: int, kind: Kind = GDN) -> Work:
    """Return the recurrence of steps that verify drafts; it writes the states that it reads."""
    num_layers = turns(sequences * kind.state_bytes, at_least=4, at_most=30)
    rerun, chunks = rerun_of(sequences, is_padded=True)
    state_SLX, slots = kind.states(sequences, num_layers), torch.arange(1, sequences + 1)
    function = bound(gdn_prefill)
    further = (Slots(slots, torch.zeros_like(slots)), chunks, rerun)
    whole = (further[0], replace(chunks, is_short=False), rerun)
    return Work(
        {
            "strandline": function,
            "as a prefill": lambda inputs, state, *_: function(inputs, state, *whole),
        },
        [(kind.inputs(rerun.num_rows), state_SLX[:, layer], *further) for layer in range(num_layers)],
        num_bytes=2.0 * sequences * kind.state_bytes,
        reference=gdn_prefill.reference,
        limit=2e-2,
        memory=lambda *arguments: [arguments[1][1:]],
        launches=verify_launches,
    )


def verify_launches() -> Iterator[Launch]:
    for skips_logged in (False, True):
        make = partial(Short, skips_logged=skips_logged)
        for launch in parse_launches(make, "16,1,- 16,1,128 16,1,168 8,1,- 32,1,- 32,2,- 32,2,168 64,4,-"):
            yield Launch(str(tuple(launch)), {"recurrences.gdn_short_triton.choose_launch": launch})


@case("convolution/verify", sequences=SEQUENCES, tiny={"sequences": 2, "sizes": (32, 8, 8)})
def verify_convolution(sequences: int, sizes: tuple[int, ...] = (8192, 32, 32)) -> Work:
    """Return the convolution of steps that verify drafts, in one launch or, as a prefill, in four."""
    num_layers = turns(1, at_least=2, at_most=30)
    rerun, chunks = rerun_of(sequences, is_padded=False)
    slots_N, convolution = torch.arange(1, sequences + 1), Convolution(random(sizes[0], 4))
    window_SLRC = random(sequences + 1, num_layers, 3, sizes[0])
    projected = random(num_layers, sequences * (1 + DRAFTS), sum(sizes) + 4096)
    logs = [random(num_layers, (sequences + 1) * DRAFTS, size) for size in sizes]
    function, whole = bound(causal_conv1d_rerun), replace(chunks, is_short=False)
    slots = Slots(slots_N, torch.zeros_like(slots_N))
    arguments = [
        (
            projected[layer, :, : sum(sizes)].split(sizes, dim=1),
            tuple(log[layer] for log in logs),
            rerun,
            convolution,
            window_SLRC[:, layer],
            slots,
            chunks,
        )
        for layer in range(num_layers)
    ]
    return Work(
        {
            "strandline": function,
            "in four launches": lambda *arguments: function(*arguments[:-1], whole),
        },
        arguments,
        reference=causal_conv1d_rerun.reference,
        memory=lambda *arguments: [*arguments[1], arguments[4][1:]],
        launches=convolution_launches,
    )


def convolution_launches() -> Iterator[Launch]:
    for channels, warps in ((32, 1), (64, 1), (64, 2), (128, 1), (128, 2), (128, 4), (256, 2), (256, 4)):
        launches = {1 << 62: (channels, warps)}
        yield Launch(f"{channels}, {warps}", {"recurrences.conv1d_rerun_triton.LAUNCHES": launches})


@case("verification", sequences=(*SEQUENCES, 256, 512), tiny={"sequences": 2})
def verification(sequences: int) -> Work:
    """Return what surrounds the model in steps that verify drafts: tables, and accepted drafts."""
    full = partial(torch.full, dtype=torch.int64)
    index_N, rows, num_blocks = torch.arange(sequences), 1 + DRAFTS, 64
    columns = {name: full((sequences,), 0) for name in SequenceColumns._fields}
    columns |= {
        "start": 100 + index_N,
        "end": 100 + rows + index_N,
        "last_row": index_N * rows + DRAFTS,
        "state_dst": index_N + 1,
        "log": index_N + 1,
        "num_logged": full((sequences,), DRAFTS),
        "num_drafts": full((sequences,), DRAFTS),
        "next_drafts": full((sequences,), DRAFTS),
        "pending": full((sequences,), PendingToken.MAY_STOP),
        "source_row": index_N,
        "stop_ids": full((sequences, MAX_STOP_IDS), NO_TOKEN),
    }
    query_starts = torch.cat((torch.arange(sequences + 1), index_N[-1:] + 1)) * rows
    planned = PlannedStep(full((sequences * rows,), 5), query_starts, SequenceColumns(**columns))
    verdicts_T = full((sequences * rows,), 0)
    last = LastStep.empty(sequences, DRAFTS, torch.get_default_device())
    tokens_T, table_NM = full((sequences * rows,), 7), full((sequences + 1, num_blocks), 3).int()
    # The last row of each of the two tables of rerun rows is in no chunk.
    undefined = sequences * rows + sequences * DRAFTS + 1

    def call(resolve: Any, accept: Any) -> list[Tensor]:
        # No draft agrees, so that the next call finds the same step.
        tables = resolve(planned, last, DRAFTS)
        found = (*tables, *accept(planned, verdicts_T, tokens_T, last, table_NM, DRAFTS))
        return [table.flatten()[: -1 if table.numel() == undefined else None] for table in found]

    references = (resolve_pending.reference, accept_drafts.reference)
    return Work(
        {
            "strandline": partial(call, bound(resolve_pending), bound(accept_drafts)),
            "torch": partial(call, *references),
        },
        [()] * 20,
        reference=partial(call, *references),
        limit=0.0,
        peers={"torch"},
    )
