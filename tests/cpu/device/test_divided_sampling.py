"""Ranks that have parts of the logits choose the tokens of one rank that has all, and say little to each other.

Ranks are threads; no model runs. Shape suffixes: N rows, V vocabulary, P a rank's part of it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from strandline.device.sampling import choice
from strandline.device.sampling.choice import Candidates
from strandline.device.sampling.divided_sampling import SAMPLING_OPERATIONS, likeliest
from strandline.device.sampling.grammar_mask import GuardedMatcher
from strandline.device.sampling.sampling_state import SamplingState
from strandline.ids import NO_TOKEN, RequestId
from strandline.kernels.binding import Kernels, bind_kernels
from strandline.kernels.operation import Workload
from strandline.kernels.ranks import ONE_RANK, Ranks, columns_of
from strandline.records.plan import NewRequest, TokenLogprobs
from strandline.records.sampling_params import SamplingParams, StructuredOutputsParams
from tests.cpu.models.rank_threads import RankThread, RankThreads

VOCAB = 1500
CPU = torch.device("cpu")


class CountingRanks:
    """A rank that counts what it says to the others."""

    few_rows = many_rows = None

    def __init__(self, ranks: RankThread) -> None:
        self._ranks, self.rank, self.size = ranks, ranks.rank, ranks.size
        self.num_calls = Counter[str]()
        self.most_columns = 0

    def connect(self) -> None:
        raise NotImplementedError

    def sum(self, x: Tensor) -> Tensor:
        self.num_calls["sum"] += 1
        return self._ranks.sum(x)

    def gather(self, x: Tensor) -> Tensor:
        self.num_calls["gather"] += 1
        self.most_columns = max(self.most_columns, x.shape[1])
        return self._ranks.gather(x)

    def least(self, number: int) -> int:
        raise NotImplementedError


class EverySecond:
    """A grammar that allows every second of the last tokens, and moves on with each token."""

    num_free_tokens = 0

    def __init__(self, num_allowed: int) -> None:
        self._num_allowed, self._num_tokens = num_allowed, 0

    def append(self, token: int) -> None:
        del token
        self._num_tokens += 1

    def fill(self, words: NDArray[np.int32], row: int) -> None:
        words[row] = 0
        for token in range(VOCAB - 1 - self._num_tokens, VOCAB - 1 - 2 * self._num_allowed, -2):
            words.view(np.uint32)[row, token // 32] |= np.uint32(1 << token % 32)


def kernels_of(ranks: Ranks) -> Kernels:
    return bind_kernels(SAMPLING_OPERATIONS, Workload("cpu", "float32"), ranks)


def part_of(logits_NV: Tensor, ranks: Ranks) -> Tensor:
    """Return what a rank has of the logits, as ``Decoder.logits`` does."""
    columns = columns_of(logits_NV.shape[1], ranks.rank, ranks.size)
    return pad(logits_NV, (0, columns.stop), value=-torch.inf)[:, columns.start : columns.stop].clone()


def state_of(new: NewRequest, ranks: Ranks, num_allowed: int = 40) -> SamplingState:
    is_structured = new.params.structured_outputs is not None
    matcher = GuardedMatcher(lambda: EverySecond(num_allowed)) if is_structured else None
    return SamplingState(new, columns_of(VOCAB, ranks.rank, ranks.size), CPU, matcher)


def request(row: int, **options: Any) -> NewRequest:
    bad_words = options.pop("bad_words_ids", ())
    prompt = tuple(range(5 * row, VOCAB, 11))
    params = SamplingParams(**options)
    return NewRequest(RequestId(str(row)), prompt, params, 1000 + row, frozenset({3, VOCAB - 2}), bad_words)


Answer = tuple[list[list[int]], list[list[TokenLogprobs]], list[dict[RequestId, str]]]


def choose(steps: Sequence[Tensor], requests: Sequence[NewRequest], ranks: Ranks) -> Answer:
    """Sample step after step, as an engine on these ranks does."""
    candidates = [Candidates(row, state_of(new, ranks), (), row) for row, new in enumerate(requests)]
    tokens, logprobs, failures = list[list[int]](), list[list[TokenLogprobs]](), list[dict[RequestId, str]]()
    for logits_NV in steps:
        chosen = choice.choose(part_of(logits_NV, ranks), candidates, kernels_of(ranks))
        tokens.append(chosen.tokens_R.tolist())
        logprobs.append([tensors.read()[0] for _, [tensors] in sorted(chosen.logprobs.items())])
        failures.append(chosen.failures)
        for each, token in zip(candidates, tokens[-1], strict=True):
            each.state.append(token)
    return tokens, logprobs, failures


def test_banned_token_is_not_sampled_whatever_its_logit_is() -> None:
    logits_NV = torch.zeros(1, VOCAB)
    logits_NV[0, 7], logits_NV[0, 9] = torch.inf, 1.0
    new = request(0, temperature=0.0, logit_bias={7: 100.0}, bad_words_ids=((7,),))
    assert choose([logits_NV], [new], ONE_RANK)[0] == [[9]]


def assert_alike(found: Answer, expected: Answer) -> None:
    """Check that tokens, and all that is said of them, are the same; log-probabilities up to rounding."""
    assert (found[0], found[2]) == (expected[0], expected[2])
    for found_step, expected_step in zip(found[1], expected[1], strict=True):
        assert len(found_step) == len(expected_step)
        for one, other in zip(found_step, expected_step, strict=True):
            assert one._replace(logprob=0.0, reported_logprobs=()) == other._replace(logprob=0.0, reported_logprobs=())
            expected_values = (other.logprob, *other.reported_logprobs)
            assert (one.logprob, *one.reported_logprobs) == pytest.approx(expected_values, abs=1e-5)


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 20, "top_p": 0.95},
    {"top_k": 50, "top_p": 0.7, "min_p": 0.02},
    {"top_k": 64},
    {"top_k": 300, "top_p": 0.9},
    {"top_k": 1200},
    {"top_k": 10**6, "min_p": 0.01},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"top_p": 0.3, "min_p": 0.05},
]
EXTRAS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"logit_bias": {0: 5.0, 700: 6.0, 1499: 7.0}, "min_tokens": 2},
    {"bad_words_ids": ((1,), (4, 750), (1400,))},
    {"structured_outputs": StructuredOutputsParams(regex="a")},
    {"structured_outputs": StructuredOutputsParams(regex="a"), "repetition_penalty": 2.0, "min_tokens": 3},
    {"logprobs": 0},
    {"logprobs": 7},
    {"logprob_token_ids": [1499, 3, 700, 3]},
    {"logprob_token_ids": [0]},
]

rows = st.builds(
    lambda temperature, filters, extras: {"temperature": temperature, **filters, **extras},
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from(FILTERS),
    st.sampled_from(EXTRAS),
)
EVERY_FILTER = [{"temperature": 1.0, **filters} for filters in FILTERS]
EVERY_EXTRA = [{"temperature": 0.7, "top_k": 20, **extras} for extras in EXTRAS]


@settings(max_examples=60, deadline=None)
@given(
    options=st.lists(rows, min_size=1, max_size=6),
    size=st.sampled_from([2, 3, 4]),
    scale=st.sampled_from([0.3, 2.0, 8.0]),
    seed=st.integers(0, 2**20),
)
@example(options=EVERY_FILTER, size=2, scale=2.0, seed=0)
@example(options=EVERY_FILTER, size=4, scale=0.01, seed=1)
@example(options=EVERY_EXTRA, size=2, scale=2.0, seed=2)
@example(options=[{**row, "temperature": 0.0} for row in EVERY_EXTRA], size=3, scale=2.0, seed=3)
def test_ranks_choose_the_tokens_of_one(options: list[dict[str, Any]], size: int, scale: float, seed: int) -> None:
    """Whatever the parameters, next to whatever other rows."""
    generator = torch.Generator().manual_seed(seed)
    steps = [scale * torch.randn(len(options), VOCAB, generator=generator) for _ in range(2)]
    requests = [request(row, **choices) for row, choices in enumerate(options)]
    expected = choose(steps, requests, ONE_RANK)
    for found in RankThreads(size).run(lambda ranks: choose(steps, requests, ranks)):
        assert_alike(found, expected)


@pytest.mark.parametrize("size", [2, 3])
def test_drafts_are_verified_alike(size: int) -> None:
    """Some agree with what is sampled, with and without history, in grammars, and with log-probabilities."""
    options: list[dict[str, Any]] = [{"temperature": 1.0, **extras} for extras in EXTRAS]
    num_drafts, depth = len(options), 3
    logits_RV = 3 * torch.randn(num_drafts * (depth + 1), VOCAB)
    requests = [request(row, **choices) for row, choices in enumerate(options)]

    def verify(ranks: Ranks, drafts: Sequence[Sequence[int]]) -> list[list[int]]:
        candidates = [
            Candidates(row, state_of(new, ranks), tuple(drafts[row]), row * (depth + 1))
            for row, new in enumerate(requests)
        ]
        return choice.choose(part_of(logits_RV, ranks), candidates, kernels_of(ranks)).read()

    drafts = [[0] * depth for _ in requests]
    for index in range(depth):
        for row, token_ids in enumerate(verify(ONE_RANK, drafts)):
            if index < min(len(token_ids), row % (depth + 1)):
                drafts[row][index] = token_ids[index]
    expected = verify(ONE_RANK, drafts)
    assert {len(token_ids) for token_ids in expected} >= {1, 2, 3, 4}
    assert RankThreads(size).run(lambda ranks: verify(ranks, drafts)) == [expected] * size


def test_rows_are_chosen_alike_where_positions_are_on_the_device() -> None:
    requests = [request(row, temperature=1.0, **filters) for row, filters in enumerate(FILTERS)]
    logits_NV, positions_N = torch.randn(len(requests), VOCAB), torch.arange(len(requests))

    def run(ranks: Ranks) -> list[int]:
        candidates = [Candidates(row, state_of(new, ranks), (), row) for row, new in enumerate(requests)]
        part_NP = part_of(logits_NV, ranks)
        return choice.choose(part_NP, candidates, kernels_of(ranks), positions_R=positions_N).tokens_R.tolist()

    assert RankThreads(2).run(run) == [run(ONE_RANK)] * 2


@pytest.mark.parametrize("vocab", [1, 5, 127, 1001])
@pytest.mark.parametrize("size", [2, 4])
def test_of_equal_logits_the_first_is_likeliest_on_any_rank(vocab: int, size: int) -> None:
    logits_NV = torch.randint(0, 3, (9, vocab)).float()
    logits_NV[6], logits_NV[7], logits_NV[8, -1] = -torch.inf, -1e30, torch.nan
    expected = [row.index(max(row)) for row in logits_NV[:6].tolist()] + [NO_TOKEN, 0, NO_TOKEN]
    found = RankThreads(size).run(lambda ranks: likeliest(part_of(logits_NV, ranks), kernels_of(ranks)).tolist())
    assert found == [expected] * size


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}], ids=str)
def test_a_row_without_a_finite_maximum_gives_no_token(filters: dict[str, Any]) -> None:
    logits_NV = torch.randn(4, VOCAB)
    logits_NV[1, 2], logits_NV[2, VOCAB - 1], logits_NV[3] = torch.nan, torch.inf, -torch.inf
    requests = [request(row, temperature=1.0, **filters) for row in range(4)]
    for tokens, _, _ in RankThreads(2).run(lambda ranks: choose([logits_NV], requests, ranks)):
        assert [token == NO_TOKEN for token in tokens[0]] == [False, True, True, True]


PLAIN, TOP_K = {"temperature": 1.0}, {"temperature": 1.0, "top_k": 20, "top_p": 0.95}
SAID: list[tuple[list[dict[str, Any]], dict[str, int]]] = [
    ([{"temperature": 0.0}] * 3, {"gather": 1}),
    ([{"temperature": 0.0, "repetition_penalty": 1.2, "logit_bias": {5: 1.0}}] * 3, {"gather": 1}),
    ([TOP_K] * 3, {"gather": 1}),
    ([TOP_K, {"temperature": 0.0}], {"gather": 1}),
    ([PLAIN] * 3, {"gather": 1, "sum": 1}),
    ([PLAIN, TOP_K, {"temperature": 0.0}], {"gather": 1, "sum": 1}),
    ([{"temperature": 0.0, "logprobs": 3}] * 3, {"gather": 2, "sum": 1}),
    ([{**TOP_K, "structured_outputs": StructuredOutputsParams(regex="a")}] * 2, {"gather": 1, "sum": 1}),
]


@pytest.mark.parametrize(("options", "said"), SAID)
def test_ranks_say_little_to_each_other(options: list[dict[str, Any]], said: dict[str, int]) -> None:
    """However many rows there are, and never their logits."""

    def run(ranks: RankThread) -> CountingRanks:
        counting = CountingRanks(ranks)
        choose([torch.randn(len(options), VOCAB)], [request(row, **x) for row, x in enumerate(options)], counting)
        return counting

    for counting in RankThreads(2).run(run):
        assert counting.num_calls == said
        assert counting.most_columns <= 100


def test_only_rows_that_need_it_are_gathered() -> None:
    def run(ranks: RankThread) -> list[tuple[int, ...]]:
        shapes, gather = list[tuple[int, ...]](), ranks.gather

        def noting(x: Tensor) -> Tensor:
            shapes.append(tuple(x.shape))
            return gather(x)

        patched: Callable[[Tensor], Tensor] = noting
        ranks.gather = patched  # type: ignore[method-assign]
        options = [TOP_K, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.0}]
        choose([torch.randn(3, VOCAB)], [request(row, **x) for row, x in enumerate(options)], ranks)
        return shapes

    for (_, told), whole in RankThreads(2).run(run):
        assert told < 100
        assert whole == (1, VOCAB // 2)
