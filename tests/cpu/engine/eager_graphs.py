"""What stands for CUDA graphs on a CPU: what they are replayed for is computed at once, from the same buffers.

Padding is left out of the model's pass, which CPU kernels have no use for; the rows of a step stay where they are. What
is captured on a GPU runs without the host (``without_host.py``), but for what these functions do instead.
"""

from array import array
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, cast

import numpy as np
from torch import Tensor

from strandline.device.batches.adapter_tiles import tile_rows
from strandline.device.batches.batch import DeviceBatch, build_host_batch, to_device
from strandline.device.batches.padded_step import StepSize
from strandline.device.batches.prompt_room import MAX_PROMPTS, PromptRoom
from strandline.device.drafters.block_drafts import padded_blocks
from strandline.device.drafters.draft_layer import single_rows
from strandline.device.hardware.upload import upload_together
from strandline.device.runner import Runner
from strandline.device.steps.adapter_pool import AdapterPool
from strandline.device.steps.forward import Forward
from strandline.device.steps.graphs import CapturedStep, Graph, StepGraphs
from strandline.engine.drafting.drafts import Drafts
from strandline.ids import NULL_LOG, NULL_SLOT, LogId, PendingToken, RequestId, SlotId
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.gemm.low_rank import NO_ROW, NO_SLOT, TILE_ROWS, TiledRows
from strandline.kernels.sampling.verification import VerificationTables
from strandline.models.layers.protocol import LanguageModel, ModelMemory
from strandline.records.plan import SequencePlan
from tests.cpu.engine.without_host import on_the_host, without_host

PROMPT_ROWS = (16, 64, 128)
PADDED_TABLE = "padded table"


class Rerun:
    """A function instead of a CUDA graph."""

    def __init__(self, run: Callable[[], None], kernels: Kernels) -> None:
        self._run, self._kernels = run, kernels

    def replay(self) -> None:
        with without_host(self._kernels):
            self._run()


class EagerModel:
    """A model that computes batches as graphs say."""

    def __init__(self, model: LanguageModel, graphs: "EagerGraphs") -> None:
        self._model, self._graphs = model, graphs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: StepBatch, memory: ModelMemory) -> Tensor:
        return self._graphs.hidden(batch, lambda each: self._model.forward(each, memory))


class EagerGraphs(StepGraphs):
    """Computes steps as the buffer says whose pending tokens have been filled in.

    A step with drafts is computed sequence by sequence, and the filler, if it has rows.
    """

    def __init__(self, forward: Forward, *args: Any, adapters: AdapterPool, **options: Any) -> None:
        self._adapters = adapters
        self._replayed: CapturedStep
        self.num_replayed = {False: 0, True: 0}
        """Steps of decodes, and of prompts."""
        self.num_mixed = 0
        """Steps that verify drafts and compute prompts."""
        forward = copy(forward)
        forward.model = cast(LanguageModel, EagerModel(forward.model, self))
        super().__init__(forward, *args, **options)

    def _captured(self, parts: Sequence[Callable[[], None]]) -> list[Graph]:
        return [Rerun(run, self._kernels) for run in parts]

    def _step(self, step: CapturedStep) -> None:
        super()._step(step)
        if step.padded.size.has_drafts:
            # A copy on its way to the host must not be overwritten.
            step.tokens_T = step.padded.named["next_ids"].clone()

    def _batch(self, step: CapturedStep, tables: VerificationTables | None) -> DeviceBatch:
        self._replayed = step
        padded = super()._batch(step, tables)
        if not step.padded.size.has_drafts:
            return padded
        with on_the_host():
            return replace(padded, step=self._by_sequence(step))

    def _by_sequence(self, step: CapturedStep) -> StepBatch:
        """Return a step with drafts whose sequences are prompts."""
        size, named = step.padded.size, {name: part.tolist() for name, part in step.padded.named.items()}
        starts = named["query_starts"]
        self.num_mixed += size.num_prompts > 0
        plans, kept = [], []
        for n in range(size.num_sequences):
            num_rows, num_drafts = starts[n + 1] - starts[n], named["num_drafts"][n]
            slot, has_ended = SlotId(named["state_dst"][n]), named["state_dst"][n] == NULL_SLOT
            if num_rows == 0:
                continue
            plan = SequencePlan(
                request_id=RequestId(f"{n}"),
                start=named["start"][n],
                end=named["start"][n] + num_rows,
                token_ids=tuple(named["token_ids"][starts[n] : starts[n + 1]]),
                block_table=step.block_tables[0][n].numpy().tobytes(),
                window_blocks=window_blocks_of(step, n),
                kv_start=named["kv_start"][n],
                state_src=SlotId(named["state_src"][n]),
                state_dst=slot,
                cuts=cuts_of(step, n),
                is_sampled=True,
                pending=PendingToken.NONE,
                is_prefill=True,
                log=NULL_LOG if has_ended else LogId(named["log"][n]),
                num_logged=0 if has_ended else named["num_logged"][n],
                num_folded=1,
                num_drafts=num_drafts,
                rotary_delta=named["rotary_delta"][n],
            )
            plans.append(plan)
            kept.append(n)
        host = build_host_batch(plans, 0, draft_tokens=self._arena.draft_tokens)
        batch = to_device(host, step.padded.buffer_I.device, self._kernels).step
        if size.takes_pictures:
            batch = replace(batch, picture_offsets=step.padded.named["picture_offsets"].view(3, -1))
        # Whole tables: further drafts may lie in a block that no row of the step does.
        attention = replace(batch.attention, block_table_NM=step.block_tables[0][kept])
        attention.gathers[PADDED_TABLE] = step.block_tables[0]
        return replace(batch, attention=attention)

    def hidden(self, batch: StepBatch, compute: Callable[[StepBatch], Tensor]) -> Tensor:
        """Compute without padding, but for the filler of steps with drafts."""
        if self._replayed.padded.size.has_drafts:
            return compute(batch)
        with on_the_host():
            compact, rows = self._without_padding(batch)
        compact_TE = compute(compact)
        hidden_TE = compact_TE.new_full((len(batch.positions_T), compact_TE.shape[1]), float("nan"))
        with on_the_host():
            hidden_TE[rows] = compact_TE
        return hidden_TE

    def _without_padding(self, batch: StepBatch) -> tuple[StepBatch, list[int]]:
        """Return a step without drafts, and its rows in the padded one."""
        captured = self._replayed
        size, named = captured.padded.size, {name: part.tolist() for name, part in captured.padded.named.items()}
        self.num_replayed[size.num_prompts > 0] += 1
        starts = named["query_starts"]
        plans, rows = list[SequencePlan](), list[int]()
        num_decodes = 0
        # The filler is the last one.
        for n in range(size.num_sequences - (size.num_prompts > 0)):
            is_decode = n < size.num_decodes
            first, end = (n, n + 1) if is_decode else (starts[n], starts[n + 1])
            is_real = named["end"][n] > 0 if is_decode else end > first
            if not is_real:
                continue
            assert named["end"][n] - named["start"][n] == end - first
            plans.append(
                SequencePlan(
                    request_id=RequestId(f"{n}"),
                    start=named["start"][n],
                    end=named["end"][n],
                    token_ids=tuple(named["token_ids"][first:end]),
                    block_table=captured.block_tables[0][n].numpy().tobytes(),
                    window_blocks=window_blocks_of(captured, n),
                    kv_start=named["kv_start"][n],
                    state_src=SlotId(named["state_src"][n]),
                    state_dst=SlotId(named["state_dst"][n]),
                    cuts=cuts_of(captured, n),
                    is_sampled=True,
                    pending=PendingToken.NONE,
                    is_prefill=not is_decode,
                    log=LogId(named["log"][n]),
                    num_logged=named["num_logged"][n],
                    num_folded=named["num_folded"][n],
                    rotary_delta=named["rotary_delta"][n],
                )
            )
            rows += range(first, end)
            num_decodes += is_decode
        host = build_host_batch(plans, num_decodes)
        compact = to_device(host, captured.padded.buffer_I.device, self._kernels).step
        if batch.picture_offsets is not None:
            compact = replace(compact, picture_offsets=batch.picture_offsets[:, rows].contiguous())
        if (tiled := captured.batch.tiled) is not None:
            slots_T = np.full(size.num_rows, NO_SLOT)
            tile_slots_M = tiled.slots_U.numpy().repeat(TILE_ROWS)
            is_used_M = (tile_slots_M != NO_SLOT) & (tiled.rows_M.numpy() != NO_ROW)
            slots_T[tiled.rows_M.numpy()[is_used_M]] = tile_slots_M[is_used_M]
            self._adapters.compute_with(
                TiledRows(*upload_together(tile_rows(slots_T[rows]), captured.padded.buffer_I.device))
            )
        return compact, rows


def window_blocks_of(step: CapturedStep, index: int) -> tuple[bytes, ...]:
    """Return the window blocks of one of a captured step's sequences."""
    return tuple(array("i", [0, *table_NM[index].tolist()]).tobytes() for table_NM in step.block_tables[1:])


def cuts_of(step: CapturedStep, index: int) -> tuple[tuple[int, SlotId], ...]:
    """Return the cuts of one of a captured step's sequences."""
    size, named = step.padded.size, {name: part.tolist() for name, part in step.padded.named.items()}
    prompt = index - size.first_prompt
    if prompt < 0 or not size.num_prompts:
        return ()
    cuts = []
    for chunk in range(*named["first_chunks"][prompt : prompt + 2]):
        last = size.num_decode_rows + named["starts"][chunk] + named["lengths"][chunk]
        if named["cut_slots"][chunk]:
            position = named["start"][index] + last - named["query_starts"][index]
            cuts.append((position, SlotId(named["cut_slots"][chunk])))
    return tuple(cuts)


def single_rows_on_the_host(batch: StepBatch, *args: Any) -> StepBatch:
    """Return what kernels that look for lengths on the host need."""
    single = single_rows(batch, *args)
    with on_the_host():
        lengths = tuple(single.attention.context_lens_N.tolist())
    table_NM = batch.attention.gathers[PADDED_TABLE][: len(lengths)]
    return replace(
        single, attention=replace(single.attention, context_lens=lengths, block_table_NM=table_NM, gathers={})
    )


def padded_blocks_on_the_host(*args: Any) -> StepBatch:
    """Return what kernels that look for lengths on the host need."""
    blocks = padded_blocks(*args)
    with on_the_host():
        return _without_padding(blocks)


def _without_padding(blocks: StepBatch) -> StepBatch:
    attention = blocks.attention
    starts = attention.query_starts_N1.tolist()
    used = [n for n in range(len(starts) - 1) if starts[n + 1] > starts[n]]
    on_host = replace(
        attention,
        query_starts=(0, *(starts[n + 1] for n in used)),
        context_lens=tuple(attention.context_lens_N[used].tolist()),
        block_table_NM=attention.block_table_NM[used],
    )
    return replace(blocks, attention=on_host)


def complete_on_device(drafts: Drafts) -> None:
    """Let an engine plan steps that replayed graphs complete."""
    room = PromptRoom(max(PROMPT_ROWS), MAX_PROMPTS)
    drafts.limits = drafts.limits._replace(corrects_lengths=True, verified_prompts=room)


def replay_eagerly(
    runner: Runner, num_drafts: int, max_num_seqs: int, max_model_len: int, *, replays_plain: bool = False
) -> EagerGraphs:
    """Let a runner replay steps with drafts, and prompts; if ``replays_plain``, also those without: of decodes, and of
    prompts beside some.
    """
    takes_pictures = runner.model.tower is not None
    sizes = [
        StepSize(count, draft_tokens=depth, log_tokens=num_drafts)
        for count in range(1, 1 + max_num_seqs)
        for depth in sorted({0, 1, num_drafts})
        if num_drafts
    ]
    if num_drafts:
        mixed = [(count, rows) for count in (2, max_num_seqs) for rows in PROMPT_ROWS]
        drafts = {"draft_tokens": num_drafts, "log_tokens": num_drafts}
        sizes += [StepSize(count, rows, takes_pictures, **drafts) for count, rows in mixed]
    if replays_plain:
        sizes += [StepSize(count) for count in sorted({1, 2, max_num_seqs})]
        mixed = [(count, rows) for count in (0, 2, max_num_seqs) for rows in PROMPT_ROWS if count <= rows]
        sizes += [StepSize(count, rows, takes_pictures) for count, rows in mixed]
    if (slots := runner.model.adapters) is not None:
        sizes += [replace(size, num_adapters=slots.num_slots) for size in sizes]
    runner._graphs = graphs = EagerGraphs(
        runner._forward,
        runner._pending.last,
        runner._drafter,
        adapters=runner.adapters,
        sizes=sizes,
        max_model_len=max_model_len,
    )
    return graphs
