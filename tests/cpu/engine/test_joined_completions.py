"""A transfer has ended when all ranks have reported it, in whatever order they do."""

from hypothesis import given
from hypothesis import strategies as st

from strandline.engine.workers.joined_completions import JoinedCompletions
from strandline.ids import TransferId
from strandline.records.actions import Completion


def done(transfer: int, seconds: float = 0.0) -> Completion:
    return Completion(TransferId(transfer), is_done=True, seconds=seconds)


def failed(transfer: int, *lost: int) -> Completion:
    return Completion(TransferId(transfer), is_done=False, lost=lost)


def test_a_transfer_ends_with_the_last_rank() -> None:
    joined = JoinedCompletions(2)
    assert joined.add([[done(1, 0.5), done(2)], []]) == ()
    assert joined.add([[], [done(1, 0.25)]]) == (done(1, 0.5),)
    assert joined.add([[done(3)], [done(3, 2.0), done(2)]]) == (done(3, 2.0), done(2))


def test_a_transfer_that_fails_on_one_rank_has_failed() -> None:
    joined = JoinedCompletions(3)
    assert joined.add([[done(1)], [failed(1, 7, 5)], []]) == ()
    assert joined.add([[], [], [failed(1, 5, 3)]]) == (failed(1, 3, 5, 7),)


def test_only_ranks_that_are_behind_are_waited_for() -> None:
    joined = JoinedCompletions(3)
    assert joined.timeouts_s(2.0) == [2.0, 2.0, 2.0]
    joined.add([[done(1)], [], [done(1), done(2)]])
    assert joined.timeouts_s(2.0) == [2.0, 2.0, 0.0]
    joined.add([[done(2)], [done(1)], []])
    assert joined.timeouts_s(2.0) == [0.0, 2.0, 0.0]
    joined.add([[], [done(2)], []])
    assert joined.timeouts_s(2.0) == [2.0, 2.0, 2.0]


REPORTS = [(rank, transfer) for rank in range(3) for transfer in range(4)]


@given(st.permutations(REPORTS))
def test_every_transfer_ends_once_in_any_order(order: list[tuple[int, int]]) -> None:
    joined, left = JoinedCompletions(3), list(REPORTS)
    for rank, transfer in order:
        left.remove((rank, transfer))
        reports = [[done(transfer)] if rank == each else [] for each in range(3)]
        is_last = transfer not in {other for _, other in left}
        assert joined.add(reports) == ((done(transfer),) if is_last else ())


def test_why_one_rank_failed_is_kept() -> None:
    refused = Completion(TransferId(1), is_done=False, cause="the disk is full", max_free_bytes=5)
    [joined] = JoinedCompletions(2).add([[done(1)], [refused]])
    assert (joined.is_done, joined.cause, joined.max_free_bytes) == (False, "the disk is full", 5)
