"""The log of lookups: the newest are kept, prompts within a budget, and a request is found by its answer's name."""

import pytest

from strandline.cache.inspection.lookups import Lookup, LookupLog
from strandline.ids import RequestId
from strandline.records.account import Account


def lookup(name: str) -> Lookup:
    return Lookup(RequestId(name), "", 0.0, Account(10, 0, 0, None, ()))


def test_lookups_come_newest_first_and_oldest_are_dropped() -> None:
    log = LookupLog(max_lookups=3)
    for name in "abcde":
        log.record(lookup(name), name.encode())
    assert [(kept.request_id, prompt) for kept, prompt in log] == [("e", b"e"), ("d", b"d"), ("c", b"c")]
    assert log.find("c") == (lookup("c"), b"c")
    assert log.find("b") is None


@pytest.mark.parametrize("size", [1, 4, 10, 11, 25])
def test_newest_prompts_are_kept_within_the_budget(size: int) -> None:
    log = LookupLog(max_lookups=5, max_prompt_bytes=10)
    for index in range(20):
        log.record(lookup(str(index)), bytes(size))
        kept = [found[1] for name in range(index + 1) if (found := log.find(str(name))) is not None]
        assert len(kept) == min(index + 1, 5)
        num_kept = min(10 // size, len(kept))
        assert kept == [None] * (len(kept) - num_kept) + [bytes(size)] * num_kept


def test_long_prompt_displaces_older_prompts_but_not_their_accounts() -> None:
    log = LookupLog(max_lookups=5, max_prompt_bytes=10)
    for name, size in (("a", 3), ("b", 3), ("c", 9)):
        log.record(lookup(name), bytes(size))
    assert [log.find(name) for name in "abc"] == [(lookup("a"), None), (lookup("b"), None), (lookup("c"), bytes(9))]


def test_request_is_found_by_the_id_of_its_answer() -> None:
    log = LookupLog()
    for name in ("chat-1-0", "chat-1-1", "chat-2-0#0", "chat-2-0#1", "chat-22-0"):
        log.record(lookup(name), b"x")
    for name, newest in (("chat-1", "chat-1-1"), ("chat-2", "chat-2-0#1"), ("chat-2-0", "chat-2-0#1")):
        assert log.find(name) == (lookup(newest), b"x")
    assert log.find("cha") is None
