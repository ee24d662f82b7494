"""Drafts by a drafter of blocks: one pass over a sequence's newest token and masks after it.

The model stores what the drafter keeps of the tokens that it computes (``models/drafters/block_drafter.py``). So a step
that drafts nothing leaves nothing to do, and a sequence that resumes anywhere drafts at once. The keys and values of a
block are in the positions of its tokens, and are overwritten when the model computes these.

Shape suffixes: T rows of blocks, N sequences, D drafts, E hidden size; M blocks per table.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from strandline.device.batches.batch import build_host_batch, to_device
from strandline.device.batches.padded_step import room_of
from strandline.device.sampling.divided_sampling import likeliest
from strandline.device.steps.drafter import NextDrafts, StepRows, Verified
from strandline.errors import EngineError
from strandline.ids import NO_TOKEN
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.sampling.verification import LastStep
from strandline.kernels.step import PlannedStep, SequenceColumns, locate_rows
from strandline.models.layers.protocol import DraftBlock, DraftingModel, ModelMemory
from strandline.records.plan import SequencePlan


class BlockDrafts:
    """A ``StepDrafter``: the drafter of blocks of one model.

    Args:
        memory: an arena as bound by the model.
        last: takes what a step samples.
    """

    keeps_pairs = False

    def __init__(self, model: DraftingModel, memory: ModelMemory, last: LastStep, kernels: Kernels) -> None:
        if model.drafter is None or model.drafter.block is None:
            raise EngineError("the model's drafter drafts no blocks")
        self._model, self._memory, self._last, self._kernels = model, memory, last, kernels
        self._block = model.drafter.block

    def keep_decoded(self, batch: StepBatch, hidden_TE: Tensor) -> None:
        """Do nothing: the model's pass has stored all."""

    @torch.no_grad()
    def follow(self, rows: StepRows) -> NextDrafts | None:
        """Draft a block for each sequence that goes on."""
        sampled = rows.sampled or {}
        blocks = {
            index: _block_plan(sequence, sampled.get(index, ()), self._block)
            for index, sequence in enumerate(rows.sequences)
            if sequence.next_drafts and NO_TOKEN not in sampled.get(index, (NO_TOKEN,))
        }
        if not blocks:
            return None
        most, newest = max(plan.next_drafts for plan in blocks.values()), [x.token_ids[0] for x in blocks.values()]
        host = build_host_batch([*blocks.values()], 0)
        batch = to_device(host, rows.hidden_XE.device, self._kernels, [newest])
        [newest_N] = batch.others
        return NextDrafts({index: row for row, index in enumerate(blocks)}, self._drafts(batch.step, newest_N, most))

    def draft_verified(self, verified: Verified, num_drafts: int) -> Tensor:
        """Draft after each sequence's last token that counts; where fewer drafts are wanted, others are undefined."""
        newest_N = self._last.tokens_P[: len(verified.sampled.columns.end)].clamp_min(0)
        batch = padded_blocks(verified, newest_N, num_drafts, self._block, self._kernels)
        return self._drafts(batch, newest_N, num_drafts)

    def _drafts(self, batch: StepBatch, newest_N: Tensor, num_drafts: int) -> Tensor:
        """Run blocks; return their drafts, ``[N, num_drafts]``; undefined where a block is shorter."""
        first_row_N = batch.attention.query_starts_N1[: len(newest_N), None] + self._block.first_row
        rows_ND = first_row_N + torch.arange(num_drafts, device=newest_N.device)
        rows_ND = rows_ND.clamp_max(len(batch.token_ids_T) - 1)
        hidden_NE = self._model.draft_block(batch, self._memory, rows_ND.flatten())
        logits_NZ, chain = self._model.draft_logits(hidden_NE), self._block.chain
        if chain is None:
            return likeliest(logits_NZ, self._kernels).view(rows_ND.shape)
        logits, hidden = logits_NZ.unflatten(0, rows_ND.shape), hidden_NE.unflatten(0, rows_ND.shape)
        drafts = [newest_N]
        for index in range(num_drafts):
            logits_NZ = chain.logits_after(drafts[-1].clamp_min(0), logits[:, index], hidden[:, index])
            drafts.append(likeliest(logits_NZ, self._kernels))
        return torch.stack(drafts[1:], dim=1)


def padded_blocks(
    verified: Verified, newest_N: Tensor, num_drafts: int, block: DraftBlock, kernels: Kernels
) -> StepBatch:
    """Return the blocks of all sequences of a padded step, padded: unused rows are the last filler's.

    Args:
        newest_N: each sequence's last sampled token.
        num_drafts: most of a sequence.
    """
    sampled, table_NM, count = verified.sampled.columns, verified.block_table_NM, len(newest_N)
    most_rows = num_drafts + block.first_row
    num_rows = count * most_rows
    lengths_N = (sampled.next_drafts + block.first_row) * (sampled.next_drafts > 0)
    ends_N = lengths_N.cumsum(0)
    start_N1 = pad(sampled.end - sampled.num_drafts + verified.accepted.num_accepted_N, (0, 1))
    end_N1 = start_N1 + torch.cat((lengths_N, num_rows - ends_N[-1:]))
    starts_N2 = pad(ends_N, (1, 1))
    # Assigning a number would copy it from the host, which a graph that is being captured cannot.
    starts_N2[-1:].fill_(num_rows)
    none_N1 = torch.zeros_like(start_N1)
    row_T = torch.arange(num_rows, device=newest_N.device)
    sequence_T = torch.searchsorted(starts_N2[1:], row_T, right=True)
    is_newest_T = row_T == starts_N2[sequence_T]
    tokens_T = torch.where(is_newest_T, pad(newest_N, (0, 1))[sequence_T], block.mask_token_id)
    # Blocks have no states, logs or drafts: all other columns are zeros.
    columns = SequenceColumns(*[none_N1] * len(SequenceColumns._fields))._replace(start=start_N1, end=end_N1)
    addresses = kernels[locate_rows](PlannedStep(tokens_T, starts_N2, columns), table_NM)
    attention = replace(
        verified.batch.attention,
        query_starts=room_of(count + 1, num_rows),
        context_lens=verified.batch.attention.context_lens[:1] * (count + 1),
        query_starts_N1=starts_N2,
        context_lens_N=end_N1,
        block_table_NM=table_NM,
        write_blocks_T=addresses.write_blocks_T,
        write_offsets_T=addresses.write_offsets_T,
        most_rows=most_rows,
        is_padded=False,
        gathers={},
        parts=(),
    )
    return StepBatch(tokens_T, addresses.positions_T, 0, 0, attention, verified.batch.recurrent)


def _block_plan(sequence: SequencePlan, sampled: Sequence[int], block: DraftBlock) -> SequencePlan:
    """Return the block after a step: from the newest token, which is the last that was sampled."""
    start = sequence.end - sequence.num_drafts + len(sampled) - 1
    masks = (block.mask_token_id,) * (sequence.next_drafts - 1 + block.first_row)
    return sequence.stateless(start, (sampled[-1], *masks), sequence.kv_start)._replace(pictures=())
