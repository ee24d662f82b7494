"""Logs are folded by the recurrence of each layer, in as few calls as layers that are alike allow."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from strandline.kernels.arena import ArenaTensors
from strandline.kernels.recurrences.gdn import gdn_decode, gdn_prefill
from strandline.kernels.recurrences.gdn_log import gdn_log
from strandline.kernels.recurrences.lightning import lightning_decode, lightning_prefill
from strandline.kernels.recurrences.mamba2 import mamba2_decode, mamba2_prefill
from strandline.kernels.recurrences.recurrence import Recurrence, bind_folds
from strandline.kernels.recurrences.state_recurrence import StateRecurrence
from strandline.specs import LayerSpec, LogSpec, ModelSpec, TensorSpec, kv_spec

STATE = TensorSpec("total", (3,), "float32", is_recurrent=True)
LOG = LogSpec(4, (TensorSpec("summand", (4, 3), "float32"),))
LAYER = LayerSpec(states=(STATE,), log=LOG)


@dataclass(frozen=True)
class ScaledSum:
    """Adds what it has logged, times a factor."""

    factor: float
    calls: list[int] = field(default_factory=list, compare=False)
    states: tuple[TensorSpec, ...] = (STATE,)
    log: LogSpec = LOG

    def bind(self, states: Mapping[str, Tensor], log: Mapping[str, Tensor] | None) -> tuple[Tensor, Tensor]:
        assert log is not None
        return states["total"], log["summand"]

    def prefill(self, *args: Any) -> Tensor:
        raise NotImplementedError

    def decode(self, *args: Any) -> Tensor:
        raise NotImplementedError

    def fold(self, memory: tuple[Tensor, Tensor], slot_N: Tensor, log_N: Tensor, len_N: Tensor) -> None:
        total_RSK, summand_RJLK = memory
        self.calls.append(len(total_RSK))
        for slot, log, num_tokens in zip(slot_N.tolist(), log_N.tolist(), len_N.tolist(), strict=True):
            total_RSK[:, slot] += self.factor * summand_RJLK[:, log, :num_tokens].sum(1)


def test_each_layer_is_folded_by_its_own_recurrence() -> None:
    spec = ModelSpec((LAYER, kv_spec(1, 8, "float32"), LAYER, LAYER, LayerSpec(), LAYER), 4, "float32")
    arena = ArenaTensors(spec, num_slabs=4, num_logs=3)
    calls = list[int]()
    one, two = ScaledSum(1.0, calls), ScaledSum(2.0, calls)
    recurrences: list[Recurrence[Any, Any] | None] = [one, None, ScaledSum(1.0, calls), two, None, two]
    folds = bind_folds(recurrences, arena.stacks)
    for index in (0, 2, 3, 5):
        log = arena.layers[index].log
        assert log is not None
        log["summand"][2] = index + 1
    for fold in folds:
        fold(torch.tensor([3]), torch.tensor([2]), torch.tensor([2]))
    assert calls == [2, 2]
    totals = [float(arena.layers[index].states["total"][3].mean()) for index in (0, 2, 3, 5)]
    assert totals == [2 * 1, 2 * 3, 2 * 2 * 4, 2 * 2 * 6]
    assert not any(bool(arena.layers[index].states["total"][:3].any()) for index in (0, 2, 3, 5))


def test_recurrences_are_equal_where_operations_sizes_and_logs_are() -> None:
    logged = ((gdn_prefill, gdn_decode), (4, 8, 8), "float32")
    assert StateRecurrence[Any](*logged, gdn_log(2, 4, 8, 8)) == StateRecurrence(*logged, gdn_log(2, 4, 8, 8))
    assert StateRecurrence[Any](*logged, gdn_log(2, 4, 8, 8)) != StateRecurrence(*logged, gdn_log(4, 4, 8, 8))
    operations = (mamba2_prefill, mamba2_decode)
    one = StateRecurrence[Any](operations, (4, 16, 8), "float32")
    assert one == StateRecurrence(operations, (4, 16, 8), "float32")
    assert one != StateRecurrence(operations, (4, 16, 4), "float32")
    assert one != StateRecurrence((lightning_prefill, lightning_decode), (4, 16, 8), "float32")
    recurrence: Recurrence[Any, Any] = one
    assert [(state.shape, state.is_recurrent) for state in recurrence.states] == [((4, 16, 8), True)]
    assert recurrence.log is None
