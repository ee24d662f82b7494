"""Drives a model directly: builds the step's tensors by hand, one call per step, with no engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from strandline.device.uni_executor import choose_kernels
from strandline.ids import BLOCK_TOKENS, BlockId, SlotId
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.batch import AttentionBatch, RecurrentBatch, StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.chunk_table import build_chunk_table
from strandline.kernels.ranks import ONE_RANK, Ranks


@dataclass
class Running:
    """A sequence that is being computed: its tokens so far, its blocks, and the slot its state lies in."""

    blocks: list[int] = field(default_factory=list)
    slot: int = 0
    num_tokens: int = 0


@dataclass(frozen=True)
class Part:
    """What a step computes of one sequence."""

    sequence: Running
    tokens: Sequence[int]
    cuts: Sequence[int] = ()
    """Positions after which a snapshot is wanted."""


class Driver:
    """Owns the memory of one model; everything that no sequence owns is NaN."""

    def __init__(
        self, model: Any, num_slabs: int = 40, kernels: Kernels | None = None, ranks: Ranks = ONE_RANK
    ) -> None:
        self.model, self._ranks = model, ranks
        self.arena = ArenaTensors(model.spec, num_slabs)
        model.use_kernels(kernels or choose_kernels(model, "cpu", ranks))
        self._memory = model.bind(self.arena)
        per_slab = model.spec.blocks_per_slab
        half = num_slabs // 2
        # Slabs of the lower half hold blocks, the others slots; scattered, so that no order is taken for granted.
        generator = torch.Generator().manual_seed(0)
        self._blocks = (torch.randperm(half * per_slab - 1, generator=generator) + 1).tolist()
        self._slots = (torch.randperm(num_slabs - half, generator=generator) + half).tolist()
        self.arena.poison([BlockId(b) for b in self._blocks], [SlotId(s) for s in self._slots])

    def new_slot(self) -> int:
        return int(self._slots.pop())

    def fork(self, parent: Running, position: int, snapshot: int) -> Running:
        """Return a sequence that goes on at ``position`` from a snapshot, with its own copy of the last block."""
        full, rest = divmod(position, BLOCK_TOKENS)
        blocks = list(parent.blocks[:full])
        if rest:
            blocks.append(int(self._blocks.pop()))
            self.arena.copy_block(BlockId(parent.blocks[full]), BlockId(blocks[-1]), rest)
        return Running(blocks, snapshot, position)

    def step(self, parts: Sequence[Part]) -> tuple[list[Tensor], list[dict[int, int]]]:
        """Run one step; return each part's logits, row by row, and the snapshots it left, by position.

        Each sequence moves on to a new slot, so that the slot it came from keeps what it held.
        """
        decodes = [part for part in parts if len(part.tokens) == 1 and not part.cuts]
        ordered = [*decodes, *(part for part in parts if not any(part is other for other in decodes))]
        targets = [self.new_slot() for _ in ordered]
        snapshots = [{position: self.new_slot() for position in part.cuts} for part in ordered]
        batch = self._batch(ordered, len(decodes), targets, snapshots)
        logits = self._ranks.gather(self.model.logits(self.model.forward(batch, self._memory)))
        logits = logits[:, : self.model.vocab_size]
        for part, target in zip(ordered, targets, strict=True):
            part.sequence.slot = target
            part.sequence.num_tokens += len(part.tokens)
        rows = dict(zip(map(id, ordered), logits.split([len(part.tokens) for part in ordered]), strict=True))
        left = dict(zip(map(id, ordered), snapshots, strict=True))
        return [rows[id(part)] for part in parts], [left[id(part)] for part in parts]

    def draft(self, sequence: Running, tokens: Sequence[int], hidden_TE: Tensor) -> Tensor:
        """Give the draft layer hidden states, and the token after each; return logits.

        Args:
            sequence: whose blocks keep what the layer does.
        """
        part = Part(sequence, tokens)
        batch = self._batch([part], int(len(tokens) == 1), [self.new_slot()], [{}])
        sequence.num_tokens += len(tokens)
        logits: Tensor = self.model.logits(self.model.draft(batch, hidden_TE, self._memory))
        return logits

    def _batch(
        self, parts: Sequence[Part], num_decodes: int, targets: list[int], snapshots: list[dict[int, int]]
    ) -> StepBatch:
        starts = [part.sequence.num_tokens for part in parts]
        ends = [start + len(part.tokens) for start, part in zip(starts, parts, strict=True)]
        tables = [self._table(part.sequence, end) for part, end in zip(parts, ends, strict=True)]
        width = max(map(len, tables))
        positions = [range(start, end) for start, end in zip(starts, ends, strict=True)]
        query_starts = [0]
        for part in parts:
            query_starts.append(query_starts[-1] + len(part.tokens))
        prefills = range(num_decodes, len(parts))
        sources = torch.tensor([part.sequence.slot for part in parts])
        return StepBatch(
            token_ids_T=torch.tensor([token for part in parts for token in part.tokens]),
            positions_T=torch.tensor([p for sequence in positions for p in sequence]),
            num_decodes=num_decodes,
            num_decode_rows=num_decodes,
            attention=AttentionBatch(
                query_starts=tuple(query_starts),
                context_lens=tuple(ends),
                query_starts_N1=torch.tensor(query_starts),
                context_lens_N=torch.tensor(ends),
                block_table_NM=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
                write_blocks_T=torch.tensor(
                    [t[p // BLOCK_TOKENS] for t, ps in zip(tables, positions, strict=True) for p in ps]
                ),
                write_offsets_T=torch.tensor([p % BLOCK_TOKENS for ps in positions for p in ps]),
                is_all_written=True,
            ),
            recurrent=RecurrentBatch(
                src_N=sources,
                dst_N=torch.tensor(targets),
                chunks=build_chunk_table(
                    [(starts[i], ends[i]) for i in prefills], [list(snapshots[i].items()) for i in prefills]
                ),
            ),
        )

    def _table(self, sequence: Running, end: int) -> list[int]:
        while len(sequence.blocks) * BLOCK_TOKENS < end:
            sequence.blocks.append(int(self._blocks.pop()))
        return sequence.blocks
