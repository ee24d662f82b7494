"""Addresses of rows and final hidden states, by torch, by Triton's interpreter and by Numba."""

import random
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from strandline.ids import BLOCK_TOKENS, NO_TOKEN
from strandline.kernels import step
from strandline.kernels.binding import why_unavailable
from strandline.kernels.step import PlannedStep, RowAddresses, SequenceColumns

triton = pytest.importorskip("triton", reason="Triton is not installed")


def versions(name: str) -> list[Callable[..., Any]]:
    from strandline.kernels import step_triton

    return [getattr(step, name).reference, getattr(step_triton, name)]


def locators() -> list[Any]:
    """Return the versions of ``locate_rows``."""
    found = [pytest.param(x, id=name) for x, name in zip(versions("locate_rows"), ("torch", "triton"), strict=True)]
    if why_unavailable("Numba", "cpu") is None:
        from strandline.kernels import step_numba

        found.append(pytest.param(step_numba.locate_rows, id="numba"))
    return found


def planned_step(query_starts_N1: Tensor, *columns: list[int]) -> PlannedStep:
    """Return sequences of the given ``start``, ``end``, ``kv_start`` and ``rotary_delta``."""
    zeros = dict.fromkeys(SequenceColumns._fields, torch.zeros(len(columns[0]), dtype=torch.int64))
    named = zip(("start", "end", "kv_start", "rotary_delta"), map(torch.tensor, columns), strict=True)
    token_ids_T = torch.zeros(int(query_starts_N1[-1]), dtype=torch.int64)
    return PlannedStep(token_ids_T, query_starts_N1, SequenceColumns(**{**zeros, **dict(named)}))


@pytest.mark.parametrize("locate_rows", locators())
@pytest.mark.parametrize("num_sequences", [1, 4, 300])
def test_rows_follow_from_a_base_and_a_count_per_sequence(
    locate_rows: Callable[..., RowAddresses], num_sequences: int
) -> None:
    rng = random.Random(num_sequences)
    starts = [rng.randrange(200) for _ in range(num_sequences)]
    counts = [rng.choice([0, 1, 1, 2, 70]) for _ in range(num_sequences - 1)] + [3]
    real = [max(0, count - rng.choice([0, 0, 1])) for count in counts]
    kv_starts = [start + rng.choice([0, 0, 1, 65]) for start in starts]
    table_NM = torch.randint(1, 10**6, (num_sequences, 6), dtype=torch.int32)
    deltas = [-rng.randrange(100) for _ in range(num_sequences)]
    rows: list[list[int]] = [[], [], [], []]
    for n, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for position in range(start, start + count):
            is_written = kv_starts[n] <= position < start + real[n]
            rows[0].append(position)
            rows[1].append(int(table_NM[n, position // BLOCK_TOKENS]) if is_written else 0)
            rows[2].append(position % BLOCK_TOKENS)
            rows[3].append(position + deltas[n])
    offsets = torch.tensor([0, *accumulate(counts)])
    ends = [start + count for start, count in zip(starts, real, strict=True)]
    places = locate_rows(planned_step(offsets, starts, ends, kv_starts, deltas), table_NM)
    assert [each.tolist() for each in places] == rows


@pytest.mark.parametrize("store_hidden", versions("store_hidden"), ids=["torch", "triton"])
def test_final_hidden_states_reach_slots_except_null_slot(
    store_hidden: Callable[..., None],
) -> None:
    hidden_TE = torch.randn(5, 1030)
    hidden_SE = torch.full((6, 1100), torch.nan)[:, :1030]
    store_hidden(hidden_TE, torch.tensor([4, 1, 2]), hidden_SE, torch.tensor([3, 0, 5]))
    assert torch.equal(hidden_SE[3], hidden_TE[4])
    assert torch.equal(hidden_SE[5], hidden_TE[2])
    assert bool(hidden_SE[[0, 1, 2, 4]].isnan().all())


@pytest.mark.parametrize("locate_rows", locators())
def test_single_rows_need_no_search(locate_rows: Callable[..., RowAddresses]) -> None:
    starts, kv_starts, ends = [3, 64, 0, 130], [0, 65, 0, 0], [4, 65, 0, 131]
    table_NM = torch.randint(1, 10**6, (4, 6), dtype=torch.int32)
    planned = planned_step(torch.arange(5), starts, ends, kv_starts, [0, -9, 0, -130])
    places = locate_rows(planned, table_NM, are_single=True)
    blocks = [int(table_NM[0, 0]), 0, 0, int(table_NM[3, 2])]
    assert [each.tolist() for each in places] == [starts, blocks, [3, 0, 0, 2], [3, 55, 0, 0]]


@pytest.mark.parametrize("num_tokens", [1, 130])
@pytest.mark.parametrize("hand_over_tokens", versions("hand_over_tokens"), ids=["torch", "triton"])
def test_tokens_are_handed_over_to_two_places(hand_over_tokens: Callable[..., None], num_tokens: int) -> None:
    token_N = torch.randint(NO_TOKEN, 10**6, (num_tokens,))
    sampled_P, host_N = torch.zeros(140, dtype=torch.int64), torch.zeros(num_tokens + 1, dtype=torch.int64)
    hand_over_tokens(token_N, sampled_P, torch.tensor([host_N.data_ptr()]))
    for found in (sampled_P, host_N):
        assert torch.equal(found[:num_tokens], token_N)
        assert not found[num_tokens:].any()


@pytest.mark.parametrize(("num_sequences", "num_drafts"), [(1, 2), (3, 0), (60, 3)])
@pytest.mark.parametrize("hand_over_drafts", versions("hand_over_drafts"), ids=["torch", "triton"])
def test_drafts_are_handed_over_with_what_was_found(
    hand_over_drafts: Callable[..., None], num_sequences: int, num_drafts: int
) -> None:
    tokens_T = torch.randint(NO_TOKEN, 10**6, (num_sequences * (1 + num_drafts),))
    num_accepted_N = torch.randint(0, 1 + num_drafts, (num_sequences,))
    drafts_ND = torch.randint(NO_TOKEN, 10**6, (num_sequences, num_drafts))
    drafts_PD = torch.zeros(num_sequences + 1, 4, dtype=torch.int64)
    expected = torch.cat((tokens_T, num_accepted_N, drafts_ND.flatten()))
    host_I = torch.zeros(len(expected) + 1, dtype=torch.int64)
    hand_over_drafts(tokens_T, num_accepted_N, drafts_ND, drafts_PD, torch.tensor([host_I.data_ptr()]))
    assert torch.equal(host_I[:-1], expected)
    assert torch.equal(drafts_PD[:num_sequences, :num_drafts], drafts_ND)
    assert not drafts_PD[num_sequences:].any()
    assert not drafts_PD[:, num_drafts:].any()
    assert not host_I[-1:].any()


@pytest.mark.parametrize("fetch_integers", versions("fetch_integers"), ids=["torch", "triton"])
def test_integers_are_fetched_from_the_host(fetch_integers: Callable[..., None]) -> None:
    host_I, buffer_I = torch.randint(-(2**40), 2**40, (1030,)), torch.zeros(1030, dtype=torch.int64)
    fetch_integers(host_I, buffer_I)
    assert torch.equal(buffer_I, host_I)
