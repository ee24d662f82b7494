"""Drafts by suffix: the most frequent continuation of the longest match, as deep as the match is long."""

from typing import Any

import pytest

from strandline.engine.drafting.drafters import new_drafter
from strandline.engine.drafting.suffix_drafter import SuffixDrafter
from strandline.engine.requests.request import Request
from strandline.ids import RequestId
from strandline.records.events import FinishReason, Submission
from strandline.records.plan import NewRequest
from strandline.records.sampling_params import SamplingParams
from strandline.speculative_config import MIN_TREE_DEPTH, read_speculative_config

RUN = list(range(100, 140))
"""Tokens that differ from each other."""


def make(num_drafts: int = 16, **fields: Any) -> SuffixDrafter:
    given = {f"suffix_decoding_{name}": value for name, value in fields.items()}
    config = read_speculative_config({"method": "suffix", "num_speculative_tokens": num_drafts, **given})
    drafter = new_drafter(config)
    assert isinstance(drafter, SuffixDrafter)
    return drafter


def request_of(
    prompt: list[int], output: list[int] | None = None, *, salt: str = "", is_audit: bool = False
) -> Request:
    new = NewRequest(RequestId("r"), tuple(prompt), SamplingParams(max_tokens=500), 0, frozenset(), ())
    request = Request(Submission(new, 1000, salt), is_audit=is_audit)
    request.append(output or [])
    return request


def answer(drafter: SuffixDrafter, output: list[int], *, prompt: list[int] | None = None, **options: Any) -> None:
    """Let a request end with an answer."""
    request = request_of([1] if prompt is None else prompt, output, **options)
    request.finish_reason = FinishReason.STOP
    drafter.add_answer(request)


@pytest.mark.parametrize(("num_match", "num_drafts"), [(2, 0), (3, 3), (5, 5), (12, 12), (20, 12)])
def test_as_many_tokens_are_drafted_as_match(num_match: int, num_drafts: int) -> None:
    request = request_of([*RUN, 1, *RUN[20 - num_match : 20]])
    assert list(make().propose(request, 16)) == RUN[20 : 20 + num_drafts]


@pytest.mark.parametrize(("factor", "num_drafts"), [(0.25, 1), (0.5, 2), (2, 8), (0.1, 0), (1e308, 16)])
def test_spec_factor_scales_the_number_of_drafts(factor: float, num_drafts: int) -> None:
    request = request_of([*RUN, 1, *RUN[:4]])
    assert list(make(max_spec_factor=factor).propose(request, 16)) == RUN[4 : 4 + num_drafts]


@pytest.mark.parametrize("depth", [MIN_TREE_DEPTH, 5, 8, 24, 40])
def test_match_and_drafts_fit_the_tree_depth(depth: int) -> None:
    drafts = make(max_tree_depth=depth).propose(request_of([*RUN, 1, *RUN[:20]]), 16)
    assert list(drafts) == RUN[20 : 20 + len(drafts)]
    assert 1 <= len(drafts) <= depth // 2


def test_fewer_drafts_leave_room_for_longer_matches() -> None:
    drafter = make(3, max_tree_depth=24)
    # The latest occurrence matches 20 tokens, the one before 21.
    text = [*RUN[9:30], 7, 1, *RUN[10:30], 8, 2, *RUN[9:30]]
    assert drafter.propose(request_of(text), 1) == (7,)
    assert make(16, max_tree_depth=24).propose(request_of(text), 1) == (8,)


def test_most_frequent_tokens_are_drafted() -> None:
    drafter = make()
    for number in range(5):
        answer(drafter, [*RUN[:8], *([50, 51, 52] if number in (0, 2, 4) else [60, 61, number])])
    request = request_of([1], RUN[:8])
    assert drafter.propose(request, 3) == (50, 51, 52)


@pytest.mark.parametrize(("probability", "num_drafts"), [(0.0, 3), (0.25, 3), (0.3, 2), (0.5, 2), (0.6, 0)])
def test_unlikely_tokens_are_not_drafted(probability: float, num_drafts: int) -> None:
    drafter = make(min_token_prob=probability)
    for tail in ([5, 6, 7], [5, 6, 8], [9, 5, 6], [8, 5, 6]):
        answer(drafter, [*RUN[:8], *tail])
    assert drafter.propose(request_of([1], RUN[:8]), 3) == (5, 6, 8)[:num_drafts]


def test_longer_match_wins_over_more_frequent_ones() -> None:
    drafter = make()
    for _ in range(5):
        answer(drafter, [*RUN[2:8], 50])
    request = request_of([*RUN[:8], 60, 1], RUN[:8])
    assert drafter.propose(request, 1) == (60,)


def test_earlier_answers_win_over_the_prompt_where_equal() -> None:
    drafter = make()
    answer(drafter, [*RUN[:8], 50])
    assert drafter.propose(request_of([*RUN[:8], 60, 1], RUN[:8]), 1) == (50,)


def test_loops_are_drafted_beyond_one_period() -> None:
    assert make().propose(request_of([1], [5, 6] * 20), 10) == (5, 6) * 5


def test_answers_begin_behind_the_end_of_their_prompts() -> None:
    drafter = make()
    answer(drafter, [50, 51, 52], prompt=[1, 2, 3, *RUN[:4]])
    assert drafter.propose(request_of([4, 5, 6, *RUN[:4]]), 3) == (50, 51, 52)


def test_drafts_end_where_the_answer_ended() -> None:
    drafter = make()
    answer(drafter, [*RUN[:8], 255])
    answer(drafter, [9] * 20)
    assert drafter.propose(request_of([1], RUN[:8]), 8) == (255,)


@pytest.mark.parametrize("num_answers", [1, 50])
def test_text_of_another_salt_never_changes_a_draft(num_answers: int) -> None:
    drafter, alone = make(max_cached_requests=10), make(max_cached_requests=10)
    for each in (drafter, alone):
        answer(each, [*RUN[:8], 50, 51, 52], salt="a")
    for number in range(num_answers):
        answer(drafter, [*RUN[8:], *RUN[:8], 200 + number, 61], salt="b")
    for text in (RUN[:8], RUN[10:20], [2, *RUN[4:8]], [1, 2, 3]):
        for salt in ("a", "", "c"):
            drafts = [each.propose(request_of([7], text, salt=salt), 16) for each in (drafter, alone)]
            assert drafts[0] == drafts[1], (salt, text)
    assert drafter.propose(request_of([7], RUN[:8], salt="a"), 16) == (50, 51, 52)
    assert drafter.propose(request_of([7], RUN[:8], salt="b"), 1) == (200 + num_answers - 1,)


def test_audits_and_failed_requests_leave_no_answer() -> None:
    drafter = make()
    answer(drafter, [*RUN[:8], 50], is_audit=True)
    failed = request_of([1], [*RUN[:8], 50])
    failed.finish_reason = FinishReason.ERROR
    drafter.add_answer(failed)
    assert drafter.answers.num_tokens == 0


def test_zero_cached_requests_search_the_request_alone() -> None:
    drafter = make(max_cached_requests=0)
    answer(drafter, [*RUN[:8], 50])
    assert drafter.propose(request_of([1], RUN[:8]), 3) == ()
    assert drafter.propose(request_of([*RUN[:8], 60, 1], RUN[:8]), 1) == (60,)


def test_drafts_depend_on_history_alone() -> None:
    found = []
    for _ in range(2):
        drafter, drafts = make(), []
        request = request_of([3, 1, 2] * 5)
        for number in range(60):
            drafts.append(drafter.propose(request, 1 + number % 8))
            request.append([(number * number) % 7])
            if number % 9 == 0:
                answer(drafter, request.output_ids[-9:])
        found.append(drafts)
    assert found[0] == found[1]
    assert any(found[0])
