"""Moves: when they end, in what order their ends act, and what the ends get."""

import pytest

from strandline.cache.tiers.moves import Move, Moves
from strandline.errors import CacheInvariantError
from strandline.ids import TransferId
from strandline.records.actions import Completion


class End:
    """A source or a target that records the end of its move."""

    def __init__(self, name: str, ends: list[tuple[str, Completion]]) -> None:
        self._name, self._ends = name, ends

    def end(self, completion: Completion) -> None:
        self._ends.append((self._name, completion))


def begun(num_transfers: int) -> tuple[Moves, list[tuple[str, Completion]]]:
    """Return a move under way, and a list of the ends that have acted."""
    ends = list[tuple[str, Completion]]()
    moves, move = Moves(lambda _: None), Move(End("source", ends), End("target", ends))
    for _ in range(num_transfers):
        moves.begin(move, moves.next_transfer())
    return moves, ends


def test_a_move_ends_with_its_last_transfer_target_first() -> None:
    moves, ends = begun(2)
    [move] = moves
    assert moves.complete(Completion(TransferId(2), is_done=True, seconds=1.0)) is None
    assert (ends, list(moves), moves.find(TransferId(2))) == ([], [move], None)
    assert moves.complete(Completion(TransferId(1), is_done=True, seconds=2.0)) is move
    both = Completion(TransferId(2), is_done=True, seconds=3.0)
    assert (ends, list(moves)) == ([("target", both), ("source", both)], [])


def test_a_move_fails_with_any_of_its_transfers() -> None:
    moves, ends = begun(3)
    moves.complete(Completion(TransferId(1), is_done=True, seconds=1.0))
    moves.complete(Completion(TransferId(2), is_done=False, lost=(7,), cause="no space", max_free_bytes=5))
    moves.complete(Completion(TransferId(3), is_done=True, seconds=1.0, lost=(9,)))
    failed = Completion(TransferId(1), is_done=False, lost=(7, 9), cause="no space", max_free_bytes=5)
    assert ends == [("target", failed), ("source", failed)]


def test_transfers_that_nothing_waits_for_end_silently() -> None:
    moves, ends = begun(1)
    assert moves.complete(Completion(moves.next_transfer(), is_done=True)) is None
    assert ends == []
    with pytest.raises(CacheInvariantError, match="transfer 3 ended but had not begun"):
        moves.complete(Completion(TransferId(3), is_done=True))
