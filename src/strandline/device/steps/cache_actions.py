"""Execution of the cache's actions on device memory.

Shape suffixes: N logs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import assert_never

from strandline.device.batches.batch import fold_batch
from strandline.device.hardware.upload import upload_together
from strandline.device.stores.transfers import Transfers
from strandline.ids import BlockId
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.binding import Kernels
from strandline.kernels.step import store_hidden
from strandline.models.layers.protocol import ModelMemory
from strandline.records.actions import (
    Action,
    CancelTransfer,
    CopyTokens,
    DropBlocks,
    DropSlot,
    DropStored,
    EnterFiles,
    FoldLog,
    LoadIn,
    MoveBlock,
    StoreOut,
)


class CacheActions:
    """Applies actions to an arena.

    Args:
        memory: the arena as bound by a model.
        poison: fill freed memory with NaN, so that tests notice when it is read.
    """

    def __init__(
        self, arena: ArenaTensors, memory: ModelMemory, transfers: Transfers, kernels: Kernels, *, poison: bool
    ) -> None:
        self._arena, self._memory, self._transfers, self._kernels = arena, memory, transfers, kernels
        self._poison = poison

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Apply actions in order; consecutive folds together."""
        folds: list[FoldLog] = []
        for action in actions:
            if isinstance(action, FoldLog):
                folds.append(action)
                continue
            self._fold(folds)
            folds = []
            self._apply(action)
        self._fold(folds)

    def _apply(
        self,
        action: CopyTokens
        | MoveBlock
        | DropBlocks
        | DropSlot
        | LoadIn
        | StoreOut
        | DropStored
        | EnterFiles
        | CancelTransfer,
    ) -> None:
        match action:
            case StoreOut() if self._poison and action.is_held:
                self._transfers.begin(replace(action, is_held=False))  # what is freed is poisoned at once
            case LoadIn() | StoreOut() | DropStored() | EnterFiles() | CancelTransfer():
                self._transfers.begin(action)
            case CopyTokens(src, dst, num_tokens, lifetime):
                self._arena.copy_block(src, dst, num_tokens, lifetime)
            case MoveBlock(src, dst, lifetime):
                self._arena.move_block(src, dst, lifetime)
                if self._poison:
                    self._arena.poison([src], [], lifetime)
            case DropBlocks(blocks, lifetime):
                if self._poison:
                    self._arena.poison(map(BlockId, blocks), [], lifetime)
            case DropSlot(slot):
                if self._poison:
                    self._arena.poison([], [slot])
            case _:
                assert_never(action)

    def _fold(self, folds: Sequence[FoldLog]) -> None:
        """Fold logs of both kinds; no two of them belong to one sequence."""
        arena = self._arena
        if drafts := [fold for fold in folds if fold.holds_drafts]:
            batch = fold_batch(drafts, arena.bytes.device, self._kernels, arena.draft_tokens)
            for rerun in self._memory.reruns:
                rerun(batch)
            self._fold_hidden(drafts)
        decoded = [(fold.slot, fold.log, fold.num_tokens) for fold in folds if not fold.holds_drafts]
        if decoded:
            slot_N, log_N, len_N = upload_together(list(zip(*decoded, strict=True)), arena.bytes.device)
            for fold in self._memory.folds:
                fold(slot_N, log_N, len_N)

    def _fold_hidden(self, folds: Sequence[FoldLog]) -> None:
        """Store the hidden state of the last draft that each action folds in its slot."""
        arena = self._arena
        if arena.hidden_drafts_JE is None:
            return
        entries = [fold.log * arena.draft_tokens + fold.num_tokens - 1 for fold in folds]
        entries_N, slots_N = upload_together([entries, [fold.slot for fold in folds]], arena.bytes.device)
        self._kernels[store_hidden](arena.hidden_drafts_JE, entries_N, arena.hidden_SE, slots_N)
