"""Steps that are captured as CUDA graphs and replayed: hundreds of launches become one.

Steps of decodes are captured at a ladder of batch sizes; with a draft layer or a drafter, also with drafts. Small steps
with prompts, which the host takes longer to launch kernel by kernel than a GPU to run, are captured at a ladder of rows
with some decodes. A step is padded to the size of the graph that is replayed (``PaddedStep``). Captured operations
must not need the host.

The first graph of a step fills in what the host did not know yet, and runs the model up to the final hidden states; of
decodes without drafts, up to the most likely tokens. Then tokens are chosen. The second graph, the *finish*, does what
needs these: with drafts, it counts which of them agree, and drafts for the next step; without, it stores the keys and
values of a draft layer. So the next step may be launched before the host knows what this one found.

Shape suffixes as in ``kernels/batch.py`` and ``choice.py``; I integers of a buffer, E hidden size.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from strandline.device.batches.batch import DeviceBatch, HostBatch
from strandline.device.batches.padded_step import PaddedStep, StepSize, fill_buffer
from strandline.device.batches.prompt_room import is_prefix_long
from strandline.device.hardware.upload import UploadedTable, upload_together
from strandline.device.sampling.choice import Chosen
from strandline.device.sampling.divided_sampling import likeliest
from strandline.device.steps.drafter import StepDrafter, Verified
from strandline.device.steps.forward import Forward
from strandline.ids import NO_TOKEN
from strandline.kernels.binding import Kernels
from strandline.kernels.sampling.verification import (
    LastStep,
    Verdict,
    VerificationTables,
    accept_drafts,
    resolve_pending,
)
from strandline.kernels.step import fetch_integers, hand_over_drafts, hand_over_tokens

STEPS_IN_FLIGHT: Final = 2
"""Steps whose results may still be awaited when the next one is launched, at most."""


def capture_error_mode(kernels: Kernels) -> str:
    """Return which calls end a capture: with several ranks, this thread's alone, as one of NCCL's asks after events."""
    return "global" if kernels.ranks.size == 1 else "thread_local"


class Graph(Protocol):
    """A captured CUDA graph."""

    def replay(self) -> None:
        """Launch it."""


class _NoGraph:
    """What stands for a graph on a device without memory."""

    def replay(self) -> None:
        """Do nothing."""


@cache
def _capture_stream() -> torch.cuda.Stream:
    """Return the stream that a process captures all its graphs on.

    torch keeps a cuBLAS workspace for each stream on which a GEMM has run, and never frees it.
    """
    return torch.cuda.Stream()


def capture(run: Callable[[], None], pool: Any, kernels: Kernels) -> Graph:
    """Capture a function whose operations do not need the host.

    ``torch.cuda.graph`` would return torch's free memory to the driver before each capture; the step that runs before
    the next one would allocate it again.

    Args:
        pool: a ``torch.cuda.graph_pool_handle``, scratch memory of graphs that are never replayed at once.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(_capture_stream()):
        graph.capture_begin(pool, capture_error_mode(kernels))
        try:
            run()
        finally:
            graph.capture_end()
    return graph


class CapturedStep:
    """A step of one size: its inputs, the graphs, their outputs. The next replay overwrites all of them.

    Args:
        tables: take ``HostBatch.block_tables``; other steps may share them.
        pinned: takes what the device may still read or write.
    """

    def __init__(
        self, size: StepSize, tables: Sequence[UploadedTable], kernels: Kernels, pinned: deque[Tensor]
    ) -> None:
        self._fetch, self._tables, self._pinned = kernels[fetch_integers], tables, pinned
        device = tables[0].table_NM.device
        self.padded = PaddedStep(size, torch.zeros(size.num_integers, dtype=torch.int64, device=device))
        self.block_tables = [table.table_NM[: size.num_sequences] for table in tables]
        self._num_decodes = 0
        """Those of the step that is replayed."""
        self.graph: Graph
        self.finish_graph: Graph | None = None
        """None: nothing needs the tokens."""
        self.batch: DeviceBatch
        """Set by the graph; its tables are in the graph's memory."""
        self.hidden_TE = self.logits_NV = torch.empty(0)
        self.host_results_I = torch.empty(0)
        """What graphs store on the host (``StepSize.num_results``), once the device is done; not overwritten."""
        if size.has_drafts:
            num_sampled = size.num_sequences - 1
            self.tokens_T = self.padded.named["next_ids"]
            """What was chosen after every row, to be filled in between the graphs; of prompts, what is known."""
            self.drafts_ND = torch.full((num_sampled, 0), NO_TOKEN, dtype=torch.int64, device=device)
            """For the next step; as many columns as the model drafts."""
            self.num_accepted_N = torch.zeros(num_sampled, dtype=torch.int64, device=device)
            self.single_starts_N1 = torch.arange(num_sampled + 1, device=device)
            """Where rows begin in a step of one token of each sequence."""

    def replay(self, host: HostBatch) -> Tensor:
        """Compute a step that there is room for, up to the choice of tokens; return its final hidden states."""
        self.upload(host)
        self.graph.replay()
        return self.hidden_TE

    def upload(self, host: HostBatch | None) -> None:
        """Upload integers and block tables; None: those of no sequence.

        Integers and tokens are moved by kernels, since a copy before and one after a graph take 15 µs on an H200.
        """
        size, buffer_I = self.padded.size, self.padded.buffer_I
        pinned_I = torch.zeros(len(buffer_I) + size.num_results, dtype=torch.int64, pin_memory=buffer_I.is_cuda)
        integers_I, self.host_results_I = pinned_I[: len(buffer_I)], pinned_I[len(buffer_I) :]
        fill_buffer(size, integers_I.numpy(), host, self.host_results_I.data_ptr())
        self._pinned.append(pinned_I)
        self._fetch(integers_I, buffer_I)
        if host is None:
            return
        self._num_decodes = host.num_decodes
        for table, rows_NM in zip(self._tables, host.block_tables, strict=False):
            table.write(rows_NM[: host.num_decodes])
            if size.num_prompts:
                table.write(rows_NM[host.num_decodes :], size.first_prompt)

    def finish(self, chosen: Chosen) -> None:
        """Replay what needs the tokens that were chosen, if anything does.

        If the step verifies drafts, ``chosen`` gets their tokens, and how many of each sequence's drafts agree.
        """
        size = self.padded.size
        if size.has_drafts:
            self._take(chosen)
        if self.finish_graph is not None:
            self.finish_graph.replay()
        if not size.has_drafts:
            return
        chosen.tokens_R, chosen.num_accepted_N = self.tokens_T[chosen.rows], self.num_accepted_N[: self._num_decodes]
        if size.num_results and isinstance(chosen.rows, slice):
            chosen.host_tokens_R = self.host_results_I[chosen.rows]
            chosen.num_accepted_N = self.host_results_I[size.num_rows :][: self._num_decodes]

    @property
    def next_drafts_ND(self) -> Tensor:
        """What was drafted for the next step: on the host, once the device is done, if graphs store it there."""
        size = self.padded.size
        if not size.num_results:
            return self.drafts_ND
        drafts_ND = self.host_results_I[size.num_rows + size.num_decodes :].view(size.num_decodes, size.draft_tokens)
        return drafts_ND[:, : self.drafts_ND.shape[1]]

    def _take(self, chosen: Chosen) -> None:
        """Take the tokens that were chosen; where the host has compared drafts, what it found."""
        if chosen.token_ids is None:
            self.tokens_T[chosen.rows] = chosen.tokens_R
            return
        tokens, verdicts = list[int](), list[int]()
        for each, taken in zip(chosen.candidates, chosen.token_ids, strict=True):
            num_others = each.num_rows - len(taken)
            tokens += taken + [NO_TOKEN] * num_others
            # The last token may be a draft after which none is chosen.
            verdicts += [Verdict.COMPARE] * (len(taken) - 1) + [Verdict.REJECT] * (1 + num_others)
        tokens_R, verdicts_R = upload_together([tokens, verdicts], self.tokens_T.device)
        self.tokens_T[chosen.rows], self.padded.named["verdicts"][chosen.rows] = tokens_R, verdicts_R


class StepGraphs:
    """CUDA graphs of one model's steps.

    Args:
        last: takes what a step samples.
        drafter: drafts after a step; None: nothing does.
        max_model_len: length of the longest request, in tokens.
    """

    def __init__(
        self,
        forward: Forward,
        last: LastStep,
        drafter: StepDrafter | None,
        *,
        sizes: Iterable[StepSize],
        max_model_len: int,
        progress: bool = False,
    ) -> None:
        """Capture."""
        self._forward, self._last, self._drafter = forward, last, drafter
        self._arena, self._kernels = forward.arena, forward.kernels
        self._max_model_len = max_model_len
        self._tables: dict[tuple[int, ...], UploadedTable] = {}
        by_rows = sorted(sizes, key=lambda size: (size.has_drafts, size.num_rows, size.num_decodes))
        self._most_decodes = max((size.num_decodes for size in by_rows if not size.has_filler), default=0)
        self._num_blocks = max(size.num_blocks(max_model_len) for size in by_rows)
        self._pool: Any = None
        captured, pinned = list[CapturedStep](), deque[Tensor](maxlen=STEPS_IN_FLIGHT + 1)
        # The largest first: the smaller ones then fit into its scratch memory.
        for size in tqdm(by_rows[::-1], desc="Capturing CUDA graphs", disable=not progress):
            tables = [self._table(size, lifetime) for lifetime in self._arena.spec.lifetimes]
            step = CapturedStep(size, tables, self._kernels, pinned)
            captured.append(step)
            # Compiles the kernel at the start: it is launched before a graph, not in it.
            step.upload(None)
            finishes = list[Callable[[], None]]()
            if size.has_drafts:
                finishes.append(partial(self._verify, step))
            elif drafter is not None and drafter.keeps_pairs and not size.num_prompts:
                finishes.append(partial(self._keep, step, drafter))
            step.graph, *graphs = self._captured([partial(self._step, step), *finishes])
            step.finish_graph = next(iter(graphs), None)
        self._plain = [step for step in captured[::-1] if not step.padded.size.has_drafts]
        self._with_drafts = [step for step in captured[::-1] if step.padded.size.has_drafts]

    def _captured(self, parts: Sequence[Callable[[], None]]) -> list[Graph]:
        """Return what does the same as functions; each may read what those before it write."""
        if self._arena.bytes.is_meta:
            for run in parts:
                run()  # its kernels are not launched but recorded
            return [_NoGraph() for _ in parts]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with self._forward.model.computing_distinct_layers():
            for run in parts:
                run()  # loads kernels, and lets libraries allocate, which cannot be captured
        return [capture(run, self._pool, self._kernels) for run in parts]

    def _table(self, size: StepSize, lifetime: int) -> UploadedTable:
        """Return a block table. Steps of decodes share one; so do all in which fillers, whose rows stay zero, have the
        same indices, and prompts begin at one."""
        key = (lifetime, size.first_prompt, size.num_sequences) if size.has_filler else (lifetime,)
        if key not in self._tables:
            num_rows = size.num_sequences if size.has_filler else self._most_decodes
            self._tables[key] = UploadedTable((num_rows, self._num_blocks), self._arena.bytes.device)
        return self._tables[key]

    # What is captured

    def _step(self, step: CapturedStep) -> None:
        """Compute hidden states and, of decodes without drafts, the likeliest tokens.

        With drafts these are left to the host's launches: a graph with torch's product of several rows, which clears
        memory, takes longer from each of its kernels to the next.
        """
        size, last, resolve = step.padded.size, self._last, self._kernels[resolve_pending]
        decodes, *prompts = step.padded.planned_parts()
        tables = resolve(decodes, last, size.log_tokens)
        for part in prompts:
            resolve(part, last)
        step.batch = self._batch(step, tables)
        step.hidden_TE = self._forward.run(step.batch)
        if not size.has_filler:
            step.logits_NV = self._forward.model.logits(step.hidden_TE)
            tokens_N = likeliest(step.logits_NV, self._kernels)
            self._kernels[hand_over_tokens](tokens_N, last.tokens_P, step.padded.named["results_address"])

    def _batch(self, step: CapturedStep, tables: VerificationTables | None) -> DeviceBatch:
        return step.padded.batch(step.block_tables, self._max_model_len, self._kernels, tables)

    def _keep(self, step: CapturedStep, drafter: StepDrafter) -> None:
        """Store what the drafter keeps of decodes."""
        drafter.keep_decoded(step.batch.step, step.hidden_TE)

    def _verify(self, step: CapturedStep) -> None:
        """Count the drafts that agree, and draft for the next step."""
        num_drafts, last, table_NM = step.padded.size.draft_tokens, self._last, step.block_tables[0]
        sampled, verdicts_T = step.batch.planned, step.padded.named["verdicts"]
        accepted = self._kernels[accept_drafts](sampled, verdicts_T, step.tokens_T, last, table_NM, num_drafts)
        step.num_accepted_N = accepted.num_accepted_N
        if self._drafter is not None and num_drafts:
            batch, starts_N1 = step.batch.step, step.single_starts_N1
            verified = Verified(batch, table_NM, sampled, accepted, step.hidden_TE, starts_N1)
            step.drafts_ND = self._drafter.draft_verified(verified, num_drafts)
        if step.padded.size.num_results:
            found = step.tokens_T, accepted.num_accepted_N, step.drafts_ND
            self._kernels[hand_over_drafts](*found, last.drafts_PD, step.padded.named["results_address"])
        else:
            last.drafts_PD[: len(step.drafts_ND), : step.drafts_ND.shape[1]].copy_(step.drafts_ND)

    # What is replayed

    def find(self, host: HostBatch, *, verifies: bool) -> CapturedStep | None:
        """Return the smallest captured step that has room, and verifies drafts or does not; None: there is none."""
        starts = host.columns.start[host.num_decodes :]
        if is_prefix_long(host.num_prompt_rows, int(starts.max(initial=0))):
            return None
        steps = self._with_drafts if verifies else self._plain
        return next((step for step in steps if step.padded.size.has_room_for(host)), None)
