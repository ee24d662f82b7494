"""Pending tokens and final hidden states, by torch and by Triton's interpreter."""

from collections.abc import Callable

import pytest
import torch

from strandline.ids import PendingToken
from strandline.kernels import step
from strandline.kernels.step import NO_TOKEN

triton = pytest.importorskip("triton", reason="Triton is not installed")


def versions(name: str) -> list[Callable[..., None]]:
    from strandline.kernels import step_triton

    return [getattr(step, name), getattr(step_triton, name)]


@pytest.mark.parametrize("resolve_pending", versions("resolve_pending"), ids=["torch", "triton"])
def test_pending_tokens_are_filled_in_and_a_stop_token_leaves_the_state_alone(
    resolve_pending: Callable[..., None],
) -> None:
    token_ids = torch.tensor([70, 71, 72, 73, 74, 75])
    dst = torch.tensor([11, 12, 13, 14, 15])
    last_rows = torch.tensor([0, 1, 2, 3, 5])
    pending = torch.tensor([PendingToken.NONE, PendingToken.GOES_ON, *[PendingToken.MAY_STOP] * 3])
    sampled = torch.tensor([8, 9, 5])
    source_rows = torch.tensor([0, 2, 2, 1, 0])
    stop_ids = torch.tensor([[NO_TOKEN, NO_TOKEN], [5, NO_TOKEN], [3, 8]])
    stop_sets = torch.tensor([2, 1, 1, 1, 2])
    resolve_pending(token_ids, dst, last_rows, pending, source_rows, sampled, stop_sets, stop_ids)
    assert token_ids.tolist() == [70, 5, 5, 9, 74, 8]
    assert dst.tolist() == [11, 12, 0, 14, 0]


@pytest.mark.parametrize("store_hidden", versions("store_hidden"), ids=["torch", "triton"])
def test_final_hidden_states_go_to_their_slots_and_the_null_slot_stays_as_it_is(
    store_hidden: Callable[..., None],
) -> None:
    hidden_TE = torch.randn(5, 1030)
    hidden_SE = torch.full((6, 1100), torch.nan)[:, :1030]
    store_hidden(hidden_TE, torch.tensor([4, 1, 2]), hidden_SE, torch.tensor([3, 0, 5]))
    assert torch.equal(hidden_SE[3], hidden_TE[4])
    assert torch.equal(hidden_SE[5], hidden_TE[2])
    assert bool(hidden_SE[[0, 1, 2, 4]].isnan().all())
