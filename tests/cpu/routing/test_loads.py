"""Loads agree with a dictionary of reservations after any sequence of operations."""

from collections.abc import Iterable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from strandline.routing.loads import Loads

REPLICAS = st.integers(0, 60)


class LoadMachine(RuleBasedStateMachine):
    """Replicas that come and go, and their requests."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = Loads()
        self.last: dict[int, int] = {}
        """By replica: when it was chosen last."""
        self.requests: dict[str, tuple[int, int]] = {}
        """By request: its replica and its tokens."""
        self.num_reserved = 0
        self.filled: dict[int, int] = {}

    @rule(replicas=st.sets(REPLICAS, max_size=40))
    def add(self, replicas: set[int]) -> None:
        for replica in sorted(replicas - self.last.keys()):
            self.loads.add(replica)
            self.last[replica] = 0
            self.filled[replica] = 0

    @precondition(lambda self: self.last)
    @rule(place=REPLICAS)
    def remove(self, place: int) -> None:
        replica = self.pick(place)
        gone = [name for name, (where, _) in self.requests.items() if where == replica]
        assert self.loads.remove(replica) == gone
        del self.last[replica]
        self.requests = {name: found for name, found in self.requests.items() if name not in gone}

    @precondition(lambda self: self.last)
    @rule(place=REPLICAS, num_tokens=st.integers(0, 3))
    def reserve(self, place: int, num_tokens: int) -> None:
        replica = self.pick(place)
        self.num_reserved += 1
        self.last[replica] = self.num_reserved
        self.requests[f"r{self.num_reserved}"] = (replica, num_tokens)
        self.loads.reserve(f"r{self.num_reserved}", replica, num_tokens)

    @rule(number=st.integers(1, 30), num_tokens=st.integers(0, 3))
    def shrink(self, number: int, num_tokens: int) -> None:
        name = f"r{number}"
        self.loads.shrink(name, num_tokens)
        if name in self.requests:
            replica, before = self.requests[name]
            self.requests[name] = (replica, min(before, num_tokens))

    @rule(number=st.integers(1, 30))
    def release(self, number: int) -> None:
        self.loads.release(f"r{number}")
        self.requests.pop(f"r{number}", None)

    @precondition(lambda self: self.last)
    @rule(places=st.sets(REPLICAS, min_size=1))
    def least_of_a_mask(self, places: set[int]) -> None:
        some = {self.pick(index) for index in places}
        assert self.loads.least_of(sum(1 << replica for replica in some)) == self.in_order(some)[0]

    @precondition(lambda self: self.last)
    @rule(place=REPLICAS, amount=st.integers(0, 2))
    def fill(self, place: int, amount: int) -> None:
        replica = self.pick(place)
        self.loads.fill(replica, amount)
        self.filled[replica] = amount

    @invariant()
    def order_is_that_of_the_dictionary(self) -> None:
        assert list(self.loads) == self.in_order(self.last)
        for replica in self.last:
            assert self.loads.load(replica) == self.load(replica)
            assert self.loads.num_requests(replica) == sum(where == replica for where, _ in self.requests.values())
        if self.last:
            assert self.loads.least_load == min(map(self.load, self.last))
            least = self.in_order(self.last)[0]
            assert self.loads.least_requests == sum(where == least for where, _ in self.requests.values())

    def pick(self, place: int) -> int:
        return sorted(self.last)[place % len(self.last)]

    def place(self, replica: int) -> tuple[int, int, int, int]:
        return self.load(replica), self.filled[replica], self.last[replica], replica

    def load(self, replica: int) -> int:
        return sum(tokens for where, tokens in self.requests.values() if where == replica)

    def in_order(self, replicas: Iterable[int]) -> list[int]:
        return sorted(replicas, key=self.place)


TestLoads = LoadMachine.TestCase
