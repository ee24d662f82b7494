"""What stands for CUDA graphs on a CPU: what they are replayed for is computed at once, from the same buffers.

Padding is left out of the model's pass, which CPU kernels have no use for; the rows of a step stay where they are.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strandline.device.batch import build_host_batch, to_device
from strandline.device.graphs import Forward, StepGraphs, _Captured
from strandline.device.padded_step import StepSize
from strandline.device.padded_verification import VerificationSize, single_rows
from strandline.device.runner import Runner
from strandline.device.verification_graphs import VerificationGraphs, VerificationStep
from strandline.ids import NULL_LOG, NULL_SLOT, LogId, PendingToken, RequestId, SlotId
from strandline.kernels.batch import StepBatch
from strandline.kernels.sampling.verification import VerificationTables
from strandline.records.plan import SequencePlan

PROMPT_ROWS = (16, 64, 128)


class Rerun:
    """A function instead of a CUDA graph."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class EagerGraphs(VerificationGraphs):
    """Computes steps as the corrected buffer says, sequence by sequence and the filler, if it has rows."""

    def _captured(self, run: Callable[[], None]) -> Rerun:
        return Rerun(run)

    def verify(self, *args: Any) -> VerificationStep | None:
        step = super().verify(*args)
        if step is not None:
            # A copy on its way to the host must not be overwritten.
            step.tokens_T = torch.zeros_like(step.tokens_T)
        return step

    def _batch(self, step: VerificationStep, tables: VerificationTables) -> StepBatch:
        named = {name: part.tolist() for name, part in step.named.items()}
        starts = named["query_starts"]
        plans, kept = [], []
        for n in range(step.padded.size.num_sequences + 1):
            num_rows, num_drafts = starts[n + 1] - starts[n], named["num_drafts"][n]
            slot, has_ended = SlotId(named["state_dst"][n]), named["state_dst"][n] == NULL_SLOT
            if num_rows == 0:
                continue
            plan = SequencePlan(
                request_id=RequestId(f"{n}"),
                start=named["start"][n],
                end=named["start"][n] + num_rows,
                token_ids=tuple(named["token_ids"][starts[n] : starts[n + 1]]),
                block_table=step.block_table_NM[n].numpy().tobytes(),
                kv_start=named["kv_start"][n],
                state_src=SlotId(named["state_src"][n]),
                state_dst=slot,
                cuts=(),
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
        batch = to_device(host, step.buffer_I.device, self._kernels).step
        # Whole tables: further drafts may lie in a block that no row of the step does.
        return replace(batch, attention=replace(batch.attention, block_table_NM=step.block_table_NM[kept]))


class EagerStepGraphs(StepGraphs):
    """Computes steps without drafts as the buffer says whose pending tokens have been filled in."""

    def __init__(self, forward: Forward, *args: Any, **options: Any) -> None:
        self._compute = forward
        self._replayed: _Captured
        self.num_replayed = {False: 0, True: 0}
        """Steps without and with prompts."""
        super().__init__(self._forward_without_padding, *args, **options)

    def _captured(self, run: Callable[[], None]) -> Rerun:
        return Rerun(run)

    def _batch(self, captured: _Captured) -> StepBatch:
        self._replayed = captured
        return super()._batch(captured)

    def _forward_without_padding(self, batch: StepBatch) -> Tensor:
        captured = self._replayed
        size, named = captured.padded.size, {name: part.tolist() for name, part in captured.named.items()}
        self.num_replayed[size.num_prompts > 0] += 1
        starts, first_chunks = named["query_starts"], named.get("first_chunks", [])
        plans, rows = list[SequencePlan](), list[int]()
        num_decodes = 0
        # The filler is the last one.
        for n in range(size.num_sequences - (size.num_prompts > 0)):
            is_decode = n < size.num_decodes
            first, end = (n, n + 1) if is_decode else (starts[n], starts[n + 1])
            is_real = named["end"][n] > 0 if is_decode else end > first
            if not is_real:
                continue
            cuts = []
            if not is_decode:
                place = n - size.num_decodes
                for chunk in range(first_chunks[place], first_chunks[place + 1]):
                    last = size.num_decode_rows + named["starts"][chunk] + named["lengths"][chunk]
                    if named["cut_slots"][chunk]:
                        cuts.append((named["start"][n] + last - first, SlotId(named["cut_slots"][chunk])))
            assert named["end"][n] - named["start"][n] == end - first
            plans.append(
                SequencePlan(
                    request_id=RequestId(f"{n}"),
                    start=named["start"][n],
                    end=named["end"][n],
                    token_ids=tuple(named["token_ids"][first:end]),
                    block_table=captured.block_table_NM[n].numpy().tobytes(),
                    kv_start=named["kv_start"][n],
                    state_src=SlotId(named["state_src"][n]),
                    state_dst=SlotId(named["state_dst"][n]),
                    cuts=tuple(cuts),
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
        compact = to_device(host, captured.buffer_I.device, self._kernels).step
        if batch.picture_offsets is not None:
            compact = replace(compact, picture_offsets=batch.picture_offsets[:, rows].contiguous())
        compact_TE = self._compute(compact)
        hidden_TE = compact_TE.new_full((size.num_rows, compact_TE.shape[1]), float("nan"))
        hidden_TE[rows] = compact_TE
        return hidden_TE


def single_rows_on_the_host(batch: StepBatch, *args: Any) -> StepBatch:
    """Return what kernels that look for lengths on the host need."""
    single = single_rows(batch, *args)
    lengths = tuple(single.attention.context_lens_N.tolist())
    return replace(single, attention=replace(single.attention, context_lens=lengths, gathers={}))


def verify_eagerly(runner: Runner, num_drafts: int, max_num_seqs: int, max_model_len: int) -> None:
    """Let a runner replay steps that verify drafts."""
    runner._verification_graphs = EagerGraphs(
        runner.model,
        runner._memory,
        runner._forward,
        runner.arena,
        runner._pending.stop_ids_XI,
        runner._kernels,
        sizes=[
            VerificationSize(n, depth, num_drafts)
            for n in range(1, 1 + max_num_seqs)
            for depth in sorted({0, 1, num_drafts})
        ],
        max_model_len=max_model_len,
    )


def replay_eagerly(runner: Runner, max_num_seqs: int, max_model_len: int) -> EagerStepGraphs:
    """Let a runner replay steps without drafts: of decodes, and of prompts beside some."""
    counts = sorted({1, 2, max_num_seqs})
    takes_pictures = runner.model.tower is not None
    sizes = [StepSize(count) for count in counts]
    sizes += [
        StepSize(count, rows, takes_pictures) for count in (0, 2, max_num_seqs) for rows in PROMPT_ROWS if count <= rows
    ]
    runner._graphs = graphs = EagerStepGraphs(
        runner._forward,
        runner.model.logits,
        runner.arena,
        runner._pending,
        runner._kernels,
        sizes=sizes,
        max_model_len=max_model_len,
        keep_for_drafts=None if runner._memory.draft is None else runner._keep_decoded,
    )
    return graphs
