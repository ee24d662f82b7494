"""The Triton filters and draws keep and draw what the torch versions do, on rows of every kind.

The ``check_`` functions run on any device; tests/gpu runs them at larger shapes.
"""

import pytest
import torch
from torch import Tensor

from strandline.ids import NO_TOKEN
from strandline.kernels.sampling import sampling
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.sampling import filters_triton, sampling_triton

# NumPy, under the interpreter, warns of what the kernels mean to do: log(0), and arithmetic with infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
ROWS: list[dict[str, float]] = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10**6},
    {"top_k": 60, "top_p": 0.7},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"top_p": 0.999},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_p": 0.3, "min_p": 0.1},
    {"top_k": 50, "min_p": 0.5},
]


def filters(rows: list[dict[str, float]], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows' parameters as columns of one tensor."""
    floats = torch.tensor([[{**OFF, **row}[name] for name in OFF] for row in rows], device=device)
    integers = torch.tensor([[int(row.get("top_k", 0)), 0] for row in rows], device=device)
    return integers[:, 0], floats[:, 1], floats[:, 2]


def check_filters(logits_NV: Tensor, rows: list[dict[str, float]]) -> None:
    """Compare with the torch version in float32; both sum rounded shares, so that a border may fall on either side."""
    parameters = filters(rows, str(logits_NV.device))
    with poisoned_memory():
        masked_NV = filters_triton.mask_top_k_top_p_min_p(logits_NV, *parameters)
    expected_NV = sampling.mask_top_k_top_p_min_p.reference(logits_NV.cpu(), *(x.cpu() for x in parameters))
    masked_NV = masked_NV.cpu()
    is_kept_NV, is_expected_NV = masked_NV.isfinite(), expected_NV.isfinite()
    assert torch.equal(masked_NV[is_kept_NV], logits_NV.cpu()[is_kept_NV])
    assert is_kept_NV.any(dim=-1).all()
    difference_N = (is_kept_NV != is_expected_NV).sum(dim=-1)
    assert (difference_N <= is_expected_NV.sum(dim=-1) // 1000).all(), difference_N.tolist()


def check_greedy(logits_NV: Tensor) -> None:
    with poisoned_memory():
        token_N = sampling_triton.greedy(logits_NV)
    # Rows are compared on the host: torch's own argmax on a GPU does not promise the first of equals.
    assert token_N.cpu().tolist() == [
        int((row == row.max()).nonzero()[0]) if row.max().isfinite() else NO_TOKEN for row in logits_NV.float().cpu()
    ]


def check_draws(logits_V: Tensor, num_draws: int) -> None:
    """Compare with the cumulated distribution in float64, but for numbers close to a border."""
    sum_V = logits_V.double().softmax(-1).cumsum(-1)
    uniform_N = torch.rand(num_draws, dtype=torch.float64, device=logits_V.device)
    with poisoned_memory():
        token_N = sampling_triton.sample(logits_V.expand(num_draws, -1), uniform_N)
    low_N = torch.where(token_N > 0, sum_V[(token_N - 1).clamp_min(0)], 0.0)
    assert (uniform_N > low_N - 1e-6).all()
    assert (uniform_N < sum_V[token_N] + 1e-6).all()
    assert logits_V[token_N].isfinite().all()
    expected_N = sampling.sample.reference(logits_V.expand(num_draws, -1), uniform_N)
    assert (token_N != expected_N).float().mean() < 0.01


def check_rows_without_a_maximum(vocab: int, device: str) -> None:
    """Rows with NaN of either sign, an infinity or nothing but bans, between others, give no token."""
    logits_NV = torch.randn(6, vocab, device=device)
    logits_NV[1, vocab // 2] = torch.nan
    logits_NV[2, vocab - 1] = -torch.tensor(torch.nan)
    logits_NV[3, 0] = torch.inf
    logits_NV[4] = -torch.inf
    is_bad = [False, True, True, True, True, False]
    uniform_N = torch.rand(6, dtype=torch.float64, device=device)
    for version in (sampling_triton, sampling):
        greedy, sample = (getattr(version, name) for name in ("greedy", "sample"))
        if version is sampling:
            greedy, sample = greedy.reference, sample.reference
        assert [token == NO_TOKEN for token in greedy(logits_NV).tolist()] == is_bad
        assert [token == NO_TOKEN for token in sample(logits_NV, uniform_N).tolist()] == is_bad
    top_k, top_p, min_p = filters([{"top_k": 5, "top_p": 0.9, "min_p": 0.1}] * 6, device)
    for mask in (filters_triton.mask_top_k_top_p_min_p, sampling.mask_top_k_top_p_min_p.reference):
        tokens = sampling.sample.reference(mask(logits_NV, top_k, top_p, min_p), uniform_N).tolist()
        assert all(NO_TOKEN <= token < vocab for token in tokens)
        assert [tokens[row] == NO_TOKEN for row in (0, 5)] == [False, False]


def check_parts(logits_NV: Tensor, num_ranks: int, num_sent: int) -> None:
    """Compare what several ranks find in parts of equal width with what is found in whole rows."""
    device, num_rows = logits_NV.device, len(logits_NV)
    parts = [part.clone() for part in logits_NV.chunk(num_ranks, dim=-1)]
    firsts = [rank * parts[0].shape[1] for rank in range(num_ranks)]
    uniform_N = torch.rand(num_rows, dtype=torch.float64, device=device)
    top_k_N = torch.randint(1, num_sent + 1, (num_rows,), device=device)
    with poisoned_memory():
        keys_NS = torch.cat([sampling_triton.top_keys(*x) for x in zip(parts, firsts, strict=True)], dim=1)
        token_N = sampling_triton.token_of_keys(keys_NS)
        sums_N2S = torch.cat([sampling_triton.chunk_sums(part) for part in parts], dim=2)
        drawn = [sampling_triton.draw(part, sums_N2S, uniform_N, rank) for rank, part in enumerate(parts)]
        shown = [filters_triton.top_candidates(x, top_k_N, y, num_sent) for x, y in zip(parts, firsts, strict=True)]
    assert torch.equal(token_N, sampling_triton.greedy(logits_NV))
    assert torch.equal(sum(drawn, torch.zeros_like(token_N)), sampling_triton.sample(logits_NV, uniform_N))
    for part, first, found in zip(parts, firsts, shown, strict=True):
        expected = sampling.top_candidates.reference(part.cpu(), top_k_N.cpu(), first, num_sent)
        assert torch.equal(found.cpu(), expected)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small rows have several chunks, and more tokens than candidates."""
    monkeypatch.setattr(sampling_triton, "CHUNK", 256)
    for name, value in {"CHUNK": 256, "TILE": 16, "BOUND_TILES": 40, "MAX_CANDIDATES": 128}.items():
        monkeypatch.setattr(filters_triton, name, value)


@pytest.mark.parametrize("vocab", [7, 300, 1000])
def test_rows_without_a_finite_maximum_give_no_token(vocab: int) -> None:
    check_rows_without_a_maximum(vocab, "cpu")


@pytest.mark.parametrize(("vocab", "scale"), [(7, 0.01), (130, 3.0), (300, 0.5)])
def test_filters_keep_what_the_torch_version_keeps(vocab: int, scale: float) -> None:
    wide = torch.full((len(ROWS), vocab + 3), torch.nan)
    logits_NV = wide[:, 1 : 1 + vocab].normal_().mul_(scale)
    check_filters(logits_NV, ROWS)


def test_banned_tokens_stay_banned() -> None:
    logits_NV = torch.randn(4, 300)
    logits_NV[:, 10:290] = -torch.inf
    check_filters(logits_NV, [{"top_k": 50}, {"top_p": 0.9999}, {"min_p": 0.1}, {}])


def test_ties_go_to_first_token_without_widening_set() -> None:
    rows: list[dict[str, float]] = [{"top_k": 7}, {"top_p": 0.2505}, {"top_k": 300, "top_p": 0.5}]
    masked_NV = filters_triton.mask_top_k_top_p_min_p(torch.zeros(3, 400), *filters(rows, "cpu"))
    for masked_V, count in zip(masked_NV, (7, 101, 150), strict=True):
        assert masked_V.isfinite().nonzero().squeeze(-1).tolist() == list(range(count))


@pytest.mark.parametrize("vocab", [1, 255, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_greedy_takes_the_first_of_the_largest(vocab: int, dtype: torch.dtype) -> None:
    logits_NV = torch.randn(5, vocab).to(dtype)
    logits_NV[1] = 0.0
    logits_NV[2] = -torch.inf
    logits_NV[3] = torch.tensor([0.0, -0.0])[torch.randint(2, (vocab,))]
    logits_NV[4, vocab // 2 :] = 7.0
    check_greedy(logits_NV)
    check_greedy(torch.cat((logits_NV, logits_NV), dim=-1)[:, :vocab])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_largest_keys_are_the_torch_versions(dtype: torch.dtype) -> None:
    logits_NV = torch.randn(6, 600)
    logits_NV[1:].abs_().neg_()
    logits_NV[2, 300:310] = -1e-30
    logits_NV[3, 400] = torch.nan
    logits_NV[4] = -torch.inf
    logits_NV[5, 256:] = torch.tensor([0.0, -0.0])[torch.randint(2, (344,))]
    keys_NS = sampling_triton.top_keys(logits_NV.to(dtype), 7)
    assert keys_NS.shape == (6, 3)
    assert torch.equal(keys_NS.amax(dim=1, keepdim=True), sampling.top_keys.reference(logits_NV.to(dtype), 7))


@pytest.mark.parametrize("vocab", [1, 127, 300, 1000])
def test_draws_invert_the_cumulated_distribution(vocab: int) -> None:
    logits_V = 2 * torch.randn(vocab)
    logits_V[vocab // 3 : vocab // 2] = -torch.inf
    check_draws(logits_V, 40)


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("possible", [[0], [999], [256], [255, 256], [3, 500, 998]])
def test_a_token_of_probability_zero_is_never_drawn(possible: list[int], uniform: float) -> None:
    logits_NV = torch.full((1, 1000), -torch.inf)
    logits_NV[0, possible] = torch.linspace(-70, 0, len(possible))
    token = int(sampling_triton.sample(logits_NV, torch.tensor([uniform], dtype=torch.float64)))
    assert token in possible
    if len(possible) == 1 or uniform >= 0.5:
        assert token == possible[-1]


def test_parts_of_ranks_give_what_whole_rows_give() -> None:
    logits_NV = 3 * torch.randn(4, 530)
    logits_NV[1, :265] = -torch.inf
    logits_NV[2, 5:] = -torch.inf
    check_parts(logits_NV, 2, 16)
