"""Filters, penalties and draws against plain per-row definitions, and draws against their distribution.

Shape suffixes as in ``kernels/sampling/sampling.py``.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from strandline.kernels.sampling import sampling
from strandline.kernels.sampling.sampling import (
    apply_penalties,
    apply_temperature,
    gather_logprobs,
    logprobs_of,
    uniform_from_seed,
)
from tests.bound import bound

greedy = bound(sampling.greedy)
mask_top_k_top_p_min_p = bound(sampling.mask_top_k_top_p_min_p)
sample = bound(sampling.sample)

VOCAB = 1000
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def mask(logits_NV: Tensor, *rows: dict[str, float]) -> Tensor:
    """Filter one row per mapping of what differs from `OFF`."""
    top_k, top_p, min_p = ([{**OFF, **row}[name] for row in rows] for name in OFF)
    return mask_top_k_top_p_min_p(
        logits_NV, torch.tensor(top_k, dtype=torch.int64), torch.tensor(top_p), torch.tensor(min_p)
    )


def kept(logits_V: Tensor, top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """Filter one row by the definition: a list of tokens, cut from its end."""
    share_V = logits_V.double().softmax(-1)
    order_V, shares = share_V.argsort(descending=True, stable=True).tolist(), share_V.tolist()
    tokens = [token for token in order_V if shares[token] >= min_p * shares[order_V[0]]]
    tokens = tokens[: int(top_k)] if top_k > 0 else tokens
    if top_p < 1:
        total, mass, count = sum(shares[t] for t in tokens), 0.0, 0
        while mass < top_p * total and count < len(tokens):
            mass += shares[tokens[count]]
            count += 1
        tokens = tokens[:count]
    return set(tokens)


def survivors(logits_V: Tensor) -> set[int]:
    return set(logits_V.isfinite().nonzero().squeeze(-1).tolist())


@pytest.mark.parametrize("vocab", [1, 2, 7, VOCAB, 20000])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_each_row_keeps_what_its_own_filters_keep(vocab: int, scale: float) -> None:
    rows: list[dict[str, float]] = [
        {},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": -1},
        {"top_k": 5000},
        {"top_k": 600, "top_p": 0.7},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
        {"top_p": 0.5},
        {"top_p": 1e-6},
        {"top_p": 0.999},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"top_p": 0.3, "min_p": 0.1},
    ]
    logits_NV = scale * torch.randn(len(rows), vocab)
    masked_NV = mask(logits_NV.clone(), *rows)
    for logits_V, masked_V, row in zip(logits_NV, masked_NV, rows, strict=True):
        assert survivors(masked_V) == kept(logits_V, **row), row
        assert torch.equal(masked_V[masked_V.isfinite()], logits_V[masked_V.isfinite()])


def test_the_input_of_the_filters_is_left_alone() -> None:
    logits_NV = torch.randn(2, VOCAB)
    before_NV = logits_NV.clone()
    mask(logits_NV, {"top_k": 3}, {"min_p": 0.5})
    apply_temperature(logits_NV, torch.tensor([0.5, 2.0]))
    assert torch.equal(logits_NV, before_NV)


def test_filters_that_are_off_change_nothing() -> None:
    logits_NV = torch.randn(3, VOCAB)
    assert torch.equal(mask(logits_NV, {}, {}, {}), logits_NV)


def test_banned_tokens_stay_banned() -> None:
    logits_NV = torch.randn(3, VOCAB)
    logits_NV[:, 10:] = -torch.inf
    masked_NV = mask(logits_NV, {"top_k": 50}, {"top_p": 0.9999}, {"top_k": 700, "top_p": 0.99})
    assert not masked_NV[:, 10:].isfinite().any()
    assert survivors(masked_NV[0]) == set(range(10))


def test_ties_do_not_widen_the_set() -> None:
    masked_NV = mask(torch.zeros(2, VOCAB), {"top_k": 7}, {"top_p": 0.2505})
    assert masked_NV.isfinite().sum(-1).tolist() == [7, 251]


def test_few_candidates_keep_what_the_whole_vocabulary_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_NV = torch.randn(40, VOCAB) * torch.linspace(0.1, 6, 40).unsqueeze(-1)
    rows: list[dict[str, float]] = [{"top_p": 0.9}, {"top_k": 40, "top_p": 0.8}, {"top_k": 70}, {}] * 10
    monkeypatch.setattr(sampling, "NUM_CANDIDATES_CPU", (4, 64))
    few_NV = mask(logits_NV, *rows)
    monkeypatch.setattr(sampling, "NUM_CANDIDATES_CPU", ())
    assert torch.equal(few_NV, mask(logits_NV, *rows))


def test_temperature_divides_each_row() -> None:
    logits_NV = torch.randn(2, 5)
    expected_NV = torch.stack((logits_NV[0] / 0.5, logits_NV[1] / 3.0))
    assert torch.equal(apply_temperature(logits_NV, torch.tensor([0.5, 3.0])), expected_NV)


def test_uniforms_are_those_of_splitmix64() -> None:
    def mix(word: int) -> int:
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    gamma = 0x9E3779B97F4A7C15
    pairs = [(0, 0), (1, 0), (0, 1), (-1, 5), (2**63 - 1, 131072), (-(2**63), 7), (123456789, 2**40)]
    expected = [(mix((mix((s + gamma) % 2**64) + p * gamma) % 2**64) >> 11) / 2**53 for s, p in pairs]
    seeds, positions = zip(*pairs, strict=True)
    assert uniform_from_seed(torch.tensor(seeds), torch.tensor(positions)).tolist() == expected


@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**31))
def test_uniforms_lie_in_the_half_open_interval(seed: int, position: int) -> None:
    uniform = float(uniform_from_seed(torch.tensor([seed]), torch.tensor([position])))
    assert 0.0 <= uniform < 1.0


@pytest.mark.parametrize("axis", ["seed", "position", "both"])
def test_uniforms_of_neighbours_are_uniform_and_uncorrelated(axis: str) -> None:
    count, fixed = torch.arange(20000), torch.full((20000,), 17)
    uniform_N = uniform_from_seed(fixed if axis == "position" else count, fixed if axis == "seed" else count)
    # Five standard deviations of the mean, of a bin's count, and of the correlation.
    assert abs(float(uniform_N.mean()) - 0.5) < 5 * math.sqrt(1 / 12 / 20000)
    assert (uniform_N.histc(20, 0, 1) - 1000).abs().max() < 5 * math.sqrt(1000)
    assert abs(float(torch.corrcoef(torch.stack((uniform_N[:-1], uniform_N[1:])))[0, 1])) < 5 / math.sqrt(20000)


def test_draws_follow_the_distribution() -> None:
    logits_V = torch.randn(300)
    num_draws = 40000
    uniform_N = uniform_from_seed(torch.arange(num_draws), torch.zeros(num_draws, dtype=torch.int64))
    count_V = sample(logits_V.expand(num_draws, -1), uniform_N).bincount(minlength=300)
    expected_V = logits_V.softmax(-1) * num_draws
    assert ((count_V - expected_V).abs() < 6 * (expected_V + 1).sqrt()).all()


@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 1000, 5000])
def test_draws_invert_the_cumulated_distribution(vocab: int) -> None:
    logits_V = 2 * torch.randn(vocab)
    sum_V = logits_V.double().softmax(-1).cumsum(-1)
    middle_V = sum_V - logits_V.double().softmax(-1) / 2
    assert sample(logits_V.expand(vocab, -1), middle_V).tolist() == list(range(vocab))


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("possible", [[0], [999], [128], [127, 128], [3, 500, 998]])
def test_a_token_of_probability_zero_is_never_drawn(possible: list[int], uniform: float) -> None:
    logits_NV = torch.full((1, VOCAB), -torch.inf)
    logits_NV[0, possible] = torch.linspace(-70, 0, len(possible))
    token = int(sample(logits_NV, torch.tensor([uniform], dtype=torch.float64)))
    assert token in possible
    if len(possible) == 1 or uniform >= 0.5:
        assert token == possible[-1]


def test_a_draw_does_not_depend_on_the_batch_around_it() -> None:
    logits_NV = torch.randn(32, VOCAB)
    uniform_N = uniform_from_seed(torch.arange(32), torch.arange(32))
    drawn_N = sample(mask(logits_NV, *[{"top_k": 40, "top_p": 0.9}] * 32), uniform_N)
    for i in range(32):
        alone = mask(logits_NV[i : i + 1], {"top_k": 40, "top_p": 0.9})
        assert sample(alone, uniform_N[i : i + 1])[0] == drawn_N[i]


def test_penalties_count_the_prompt_only_for_repetition() -> None:
    logits_NV = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0]])
    prompt_mask_NV = torch.tensor([[True, True, False, False, False]])
    output_counts_NV = torch.tensor([[0, 0, 3, 1, 0]])
    repetition_N, presence_N, frequency_N = torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([0.25])
    penalised_NV = apply_penalties(logits_NV, prompt_mask_NV, output_counts_NV, repetition_N, presence_N, frequency_N)
    assert penalised_NV.tolist() == [[1.0, -4.0, 1.0 - 0.75 - 0.5, -4.0 - 0.25 - 0.5, 2.0]]


def test_neutral_penalties_change_nothing_and_rows_are_apart() -> None:
    logits_NV, ones_N, zeros_N = torch.randn(2, VOCAB), torch.ones(2), torch.zeros(2)
    prompt_mask_NV, counts_NV = torch.rand(2, VOCAB) < 0.5, torch.randint(0, 3, (2, VOCAB))
    assert torch.equal(apply_penalties(logits_NV, prompt_mask_NV, counts_NV, ones_N, zeros_N, zeros_N), logits_NV)
    half_N = torch.tensor([1.0, 1.5])
    penalised_NV = apply_penalties(logits_NV, prompt_mask_NV, counts_NV, half_N, zeros_N, zeros_N)
    assert torch.equal(penalised_NV[0], logits_NV[0])
    assert not torch.equal(penalised_NV[1], logits_NV[1])


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_logprobs_ranks_and_top_tokens(num_top: int) -> None:
    logits_NV = torch.randn(4, VOCAB)
    token_N = torch.tensor([0, 999, int(logits_NV[2].argmax()), int(logits_NV[3].argmin())])
    logprob_N, rank_N, ids_NK, top_NK = gather_logprobs(logits_NV, token_N, num_top)
    expected_NV = logits_NV.log_softmax(-1)
    torch.testing.assert_close(logprob_N, expected_NV.gather(-1, token_N[:, None])[:, 0])
    assert rank_N[2:].tolist() == [1, VOCAB]
    order_NV = logits_NV.argsort(-1, descending=True)
    assert torch.equal(order_NV[torch.arange(4), rank_N - 1], token_N)
    assert torch.equal(ids_NK, order_NV[:, :num_top])
    torch.testing.assert_close(top_NK, expected_NV.gather(-1, ids_NK))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_and_ranks_of_given_tokens(dtype: torch.dtype) -> None:
    logits_NV = torch.randn(18, VOCAB).to(dtype)
    logits_NV[17, ::2] = -torch.inf
    token_NK = torch.randint(0, VOCAB, (18, 128))
    logprob_NK, rank_NK = logprobs_of(logits_NV, token_NK)
    torch.testing.assert_close(logprob_NK, logits_NV.float().log_softmax(-1).gather(-1, token_NK))
    chosen_NK = logits_NV.gather(-1, token_NK)
    assert torch.equal(rank_NK, (logits_NV[:, None] > chosen_NK[:, :, None]).sum(-1) + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_equal_logits_greedy_takes_the_first(dtype: torch.dtype) -> None:
    logits_NV = torch.randint(0, 3, (7, VOCAB)).to(dtype)
    firsts = [row.index(max(row)) for row in logits_NV.tolist()]
    assert greedy(logits_NV).tolist() == firsts
