"""CUDA graphs of steps, captured once per size and replayed: hundreds of launches become one.

Steps of decodes are captured at a ladder of batch sizes, up to the most likely tokens; small steps with prompts, which
the host takes longer to launch kernel by kernel than a GPU to run, at a ladder of rows beside some decodes, up to the
hidden states. A step is padded to the size of the graph that is replayed (``PaddedStep``). Captured operations must not
need the host.

Shape suffixes as in ``kernels/batch.py``; I integers of a buffer, E hidden size, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from strandline.device.batch import HostBatch
from strandline.device.divided_sampling import likeliest
from strandline.device.padded_step import PaddedStep, StepSize
from strandline.device.padded_verification import VerificationSize
from strandline.device.pending import PendingTokens
from strandline.device.upload import UploadedTable, upload
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.step import fetch_integers, hand_over_tokens, store_hidden

PROMPT_ROWS: Final = (64, 128, 256, 512, 1024)
DECODES_BESIDE_PROMPTS: Final = (0, 16, 64, 128)
"""And as many as there may be. Steps with fewer rows of prompts than of decodes are padded to as many."""

MANY_PROMPT_ROWS: Final = (1536, 2048, 3072, 4096)
"""Beyond the last, a GPU takes longer to run a step than the host to launch it: 70 ms for a mixture of 35B weights on
an H200's host, whose GPU computes 2,048 tokens in 40 ms."""
DIVIDED_PROMPT_ROWS: Final = (6144, 8192)
"""Also, with several ranks: each computes a part of a step, and launches as much as one that computes all."""
DECODES_BESIDE_MANY: Final = (16,)
"""And as many as there may be: beside thousands of rows, padding costs little."""

MAX_CAPTURED_PREFIX: Final = 32768
"""Tokens before a prefill. Many rows behind more are launched: kernels for prefixes need to know their lengths."""

WARM_UP_RUNS: Final = 2

STEPS_IN_FLIGHT: Final = 2
"""Steps whose results may still be awaited when the next one is launched, at most."""

Forward = Callable[[StepBatch], Tensor]

KeepForDrafts = Callable[[StepBatch, Tensor], None]
"""Stores a draft layer's inputs from decodes: the step, whose tokens have been sampled, and its hidden states."""


def graph_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, num_ranks: int = 1, *, takes_pictures: bool = False
) -> list[StepSize]:
    """Return the sizes to capture: close together where a step is short, so that padding costs little."""
    many_rows = MANY_PROMPT_ROWS if num_ranks == 1 else (*MANY_PROMPT_ROWS, *DIVIDED_PROMPT_ROWS)
    ladder = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, max_num_seqs, 32)]
    decodes = [*(count for count in ladder if count < max_num_seqs), max_num_seqs]
    beside = [*(count for count in DECODES_BESIDE_PROMPTS if count < max_num_seqs), max_num_seqs]
    beside_many = sorted({min(count, max_num_seqs) for count in (*DECODES_BESIDE_MANY, max_num_seqs)})
    mixed = [
        StepSize(count, num_rows, takes_pictures)
        for counts, rows in ((beside, PROMPT_ROWS), (beside_many, many_rows))
        for count in counts
        for num_rows in rows
        if count <= num_rows < 2 * max_num_batched_tokens
    ]
    return [*map(StepSize, decodes), *mixed]


def verification_sizes(max_num_seqs: int, draft_tokens: int) -> list[VerificationSize]:
    """Return the sizes of steps that verify or make drafts: few, or as many as there may be."""
    depths = sorted({1, min(2, draft_tokens), draft_tokens})
    counts = sorted({size.num_sequences for size in graph_sizes(max_num_seqs, 1) if not size.num_prompt_rows})
    return [VerificationSize(count, depth, draft_tokens) for count in counts for depth in depths]


def capture_error_mode(kernels: Kernels) -> str:
    """Return which calls end a capture: with several ranks, this thread's alone, as one of NCCL's asks after events."""
    return "global" if kernels.ranks.size == 1 else "thread_local"


class Graph(Protocol):
    """A captured CUDA graph."""

    def replay(self) -> None:
        """Launch it."""


def capture(run: Callable[[], None], pool: Any, kernels: Kernels) -> Graph:
    """Capture a function whose operations do not need the host.

    Args:
        pool: of ``torch.cuda.graph_pool_handle``: scratch memory of graphs that are never replayed at once.
    """
    graph = torch.cuda.CUDAGraph()
    for _ in range(WARM_UP_RUNS):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode=capture_error_mode(kernels)):
        run()
    # What is captured next may read what this one writes.
    graph.replay()
    return graph


class Decoded(NamedTuple):
    """What a replayed step of decodes leaves behind, which the next replay overwrites."""

    logits_NV: Tensor
    likeliest_N: Tensor
    """Each row's likeliest token, in ``PendingTokens.sampled_P``."""
    host_likeliest_N: Tensor
    """The same on the host, once the device is done; not overwritten."""


class StepHidden(NamedTuple):
    """The final hidden states of a step."""

    hidden_TE: Tensor
    first_prompt_row: int


class _Captured:
    """A step of one size: its inputs, the graph, its outputs."""

    def __init__(self, size: StepSize, block_table: UploadedTable) -> None:
        device = block_table.table_NM.device
        self.padded = PaddedStep(size)
        self.buffer_I = torch.zeros(self.padded.num_integers, dtype=torch.int64, device=device)
        self.named = self.padded.named(self.buffer_I)
        self.columns = self.padded.columns(self.buffer_I)
        self.block_table, self.block_table_NM = block_table, block_table.table_NM[: size.num_sequences]
        self.graph: Graph
        self.keeping: Graph | None = None
        """Graph to replay after a step of decodes has sampled its tokens; None: there is none."""
        self.hidden_TE = self.logits_NV = torch.empty(0)


class StepGraphs:
    """CUDA graphs of one model's steps."""

    def __init__(
        self,
        forward: Forward,
        logits: Callable[[Tensor], Tensor],
        arena: ArenaTensors,
        pending: PendingTokens,
        kernels: Kernels,
        *,
        sizes: Iterable[StepSize],
        max_model_len: int,
        keep_for_drafts: KeepForDrafts | None = None,
        progress: bool = False,
    ) -> None:
        """Capture.

        Args:
            max_model_len: of the longest request, in tokens.
            keep_for_drafts: None: there is no draft layer.
        """
        self._arena = arena
        self._pending = pending
        self._kernels = kernels
        self._store_hidden, self._fetch, self._hand_over = (
            kernels[operation] for operation in (store_hidden, fetch_integers, hand_over_tokens)
        )
        self._pinned = deque[Tensor](maxlen=STEPS_IN_FLIGHT + 1)
        """What the device may still read or write."""
        self._forward, self._logits = forward, logits
        self._keep_for_drafts = keep_for_drafts
        self._max_model_len = max_model_len
        self._tables: dict[int | None, UploadedTable] = {}
        by_rows = sorted(sizes, key=lambda size: (size.num_rows, size.num_decodes))
        self._most_decodes = max(size.num_decodes for size in by_rows)
        self._num_blocks = max(size.num_blocks(max_model_len) for size in by_rows)
        self._pool: Any = None
        captured = dict[StepSize, _Captured]()
        # The largest first: the smaller ones then fit into its scratch memory.
        for size in tqdm(by_rows[::-1], desc="Capturing CUDA graphs", disable=not progress):
            step = captured[size] = _Captured(size, self._table(size))
            # Compiles the kernel at the start: it is launched before a graph, not in it.
            self._pinned.append(self._pinned_zeros(step.padded.num_integers))
            self._fetch(self._pinned[-1], step.buffer_I)
            step.named["token_address"].fill_(pending.sampled_P.data_ptr())
            step.graph = self._captured(partial(self._step, step))
            if keep_for_drafts is not None and not size.num_prompts:
                step.keeping = self._captured(partial(self._keep, step))
        self._decodes = [captured[size] for size in by_rows if not size.num_prompt_rows]
        self._mixed = [captured[size] for size in by_rows if size.num_prompt_rows]

    def _captured(self, run: Callable[[], None]) -> Graph:
        """Return what does the same as a function, as often as it is replayed."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return capture(run, self._pool, self._kernels)

    def _table(self, size: StepSize) -> UploadedTable:
        """Return a block table. Steps of decodes share one; so do all in which the filler has one place."""
        place = size.num_decodes if size.num_prompts else None
        if place not in self._tables:
            num_rows = size.num_sequences if size.num_prompts else self._most_decodes
            self._tables[place] = UploadedTable((num_rows, self._num_blocks), self._arena.bytes.device)
        return self._tables[place]

    def _batch(self, captured: _Captured) -> StepBatch:
        return captured.padded.batch(captured.buffer_I, captured.block_table_NM, self._max_model_len, self._kernels)

    def _keep(self, captured: _Captured) -> None:
        if self._keep_for_drafts is not None:
            self._keep_for_drafts(self._batch(captured), captured.hidden_TE)

    def _step(self, captured: _Captured) -> None:
        columns, batch = captured.columns, self._batch(captured)
        self._pending.resolve(batch, columns)
        hidden_TE = captured.hidden_TE = self._forward(batch)
        self._store_hidden(hidden_TE, columns.last_row, self._arena.hidden_SE, columns.state_dst)
        if captured.padded.size.num_prompts:
            self._store_hidden(
                hidden_TE, captured.named["cut_rows"], self._arena.hidden_SE, captured.named["cut_slots"]
            )
        else:
            captured.logits_NV = self._logits(hidden_TE)
            tokens_N = likeliest(captured.logits_NV, self._kernels)
            self._hand_over(tokens_N, self._pending.sampled_P, captured.named["token_address"])

    def decode(self, host: HostBatch) -> Decoded | None:
        """Replay a step of decodes; None: none has room."""
        captured = _first_with_room(self._decodes, host)
        if captured is None:
            return None
        host_tokens_N = self._replay_decodes(captured, host)
        rows = slice(host.num_sequences)
        return Decoded(captured.logits_NV[rows], self._pending.sampled_P[rows], host_tokens_N[rows])

    def keep_for_drafts(self, host: HostBatch) -> None:
        """Where there is a draft layer: keep what it needs of the decodes that were replayed last.

        Their tokens are in ``PendingTokens.sampled_P``.
        """
        captured = _first_with_room(self._decodes, host)
        if captured is not None and captured.keeping is not None:
            captured.keeping.replay()

    def prefill(self, host: HostBatch) -> StepHidden | None:
        """Replay a step; return hidden states, which the next replay overwrites. None: none has room.

        Without prompts, it is one of decodes beside sequences whose hidden states are stored.
        """
        if not host.num_prompts:
            if (captured := _first_with_room(self._decodes, host)) is None:
                return None
            self._replay_decodes(captured, host)
            return StepHidden(captured.hidden_TE, len(captured.hidden_TE))
        captured = None if _has_long_prefix(host) else _first_with_room(self._mixed, host)
        if captured is None:
            return None
        self._replay_mixed(captured, host)
        return StepHidden(captured.hidden_TE, captured.padded.size.num_decode_rows)

    def _replay_decodes(self, captured: _Captured, host: HostBatch) -> Tensor:
        """Replay a step of decodes; return memory of the host that takes its likeliest tokens.

        Integers and tokens are moved by kernels, since a copy before and one behind a graph take 15 µs on an H200.
        """
        padded = captured.padded
        num_integers, num_decodes = padded.num_integers, padded.size.num_decodes
        pinned_I = self._pinned_zeros(num_integers + num_decodes)
        integers_I, tokens_D = pinned_I[:num_integers], pinned_I[num_integers:]
        padded.fill(integers_I.numpy(), host)
        padded.named(integers_I)["token_address"].fill_(tokens_D.data_ptr())
        self._pinned.append(pinned_I)
        self._fetch(integers_I, captured.buffer_I)
        captured.block_table.write(host.block_table_NM)
        captured.graph.replay()
        return tokens_D

    def _pinned_zeros(self, num_integers: int) -> Tensor:
        is_pinned = self._arena.bytes.device.type == "cuda"
        return torch.zeros(num_integers, dtype=torch.int64, pin_memory=is_pinned)

    def _replay_mixed(self, captured: _Captured, host: HostBatch) -> None:
        pinned_I = self._pinned_zeros(captured.padded.num_integers)
        captured.padded.fill(pinned_I.numpy(), host)
        captured.buffer_I.copy_(pinned_I, non_blocking=True)
        self._write_beside_filler(captured, host)
        captured.graph.replay()

    def _write_beside_filler(self, captured: _Captured, host: HostBatch) -> None:
        """Bring the block tables of decodes and of prompts to their places."""
        tables_NM = upload(host.block_table_NM, self._arena.bytes.device)
        width, num_decodes = tables_NM.shape[1], host.num_decodes
        for tables, place in (
            (tables_NM[:num_decodes], 0),
            (tables_NM[num_decodes:], captured.padded.size.num_decodes),
        ):
            if len(tables):
                captured.block_table_NM[place : place + len(tables), :width].copy_(tables)


def _has_long_prefix(host: HostBatch) -> bool:
    """Whether a step has many rows of prompts behind more tokens than graphs are for."""
    starts = host.columns.start[host.num_decodes :]
    return host.num_prompt_rows > PROMPT_ROWS[-1] and bool((starts > MAX_CAPTURED_PREFIX).any())


def _first_with_room(steps: Sequence[_Captured], host: HostBatch) -> _Captured | None:
    return next((step for step in steps if step.padded.size.has_room_for(host)), None)
