"""The load on a server: arrivals, the cap on concurrency, the ideal, and what is left when it is cut short."""

import asyncio
from argparse import Namespace
from dataclasses import dataclass, field
from math import inf

import numpy as np
import pytest

from strandline.bench.serving.adapters import assign_adapters
from strandline.bench.serving.load import Load, Run, arrival_times
from strandline.bench.serving.options import Pace
from strandline.bench.serving.prompt_vocabulary import Vocabulary
from strandline.bench.serving.session import Answer, Ask, Asks, Session, single
from strandline.errors import ConfigError
from strandline.records.tokens import encode

NOTHING = Vocabulary(())


@dataclass
class Echo:
    """A server that answers when the event loop has gone round a few times."""

    num_rounds: int = 3
    running: int = 0
    most: int = 0
    sent: list[Ask] = field(default_factory=list)
    hangs_from: int | None = None
    """From this request on it never answers."""

    async def send(self, ask: Ask) -> Answer:
        self.sent.append(ask)
        self.running += 1
        self.most = max(self.most, self.running)
        if self.hangs_from is not None and len(self.sent) > self.hangs_from:
            await asyncio.Event().wait()
        for _ in range(self.num_rounds):
            await asyncio.sleep(0)
        self.running -= 1
        return Answer(token_ids=[7, 7])


def ask(*tokens: int) -> Ask:
    return Ask(list(tokens), 1, encode(tokens))


def run(server: Echo, sessions: list[Session], pace: Pace) -> Run:
    async def execute() -> Run:
        return await Load(server, pace, NOTHING).execute(sessions)  # type: ignore[arg-type]

    return asyncio.run(execute())


@pytest.mark.parametrize("assignment", ["random", "round-robin"])
def test_conversations_name_adapters_that_share_no_prefix(assignment: str) -> None:
    def asks() -> Asks:
        answer = yield ask(1, 2, 3)
        yield ask(1, 2, 3, *answer.token_ids, 4)

    options = Namespace(lora_modules=["a", "b"], lora_assignment=assignment, seed=3)
    sessions = assign_adapters([Session(asks, holds_its_place=True)] * 40, options, [])
    server = Echo()
    result = run(server, sessions, Pace(max_concurrency=1))
    names = [each.body["model"] for each in server.sent]
    assert names[::2] == names[1::2]
    assert assignment == "random" or names[::2] == ["a", "b"] * 20
    assert {*names} == {"a", "b"}
    firsts = [names.index(name) for name in ("a", "b")]
    assert [result.answers[index].ideal_tokens for index in firsts] == [0, 0]
    assert sum(answer.ideal_tokens or 0 for answer in result.answers) > 38 * 3 + 40 * 5
    with pytest.raises(ConfigError, match="the server serves base, a, not b"):
        assign_adapters(sessions, options, ["base", "a"])
    assert assign_adapters(sessions, Namespace(lora_modules=[]), ["base"]) == sessions


def test_arrivals_keep_to_the_rate_whatever_the_burstiness() -> None:
    for burstiness in (0.3, 1.0, 5.0, inf):
        times = arrival_times(400, Pace(request_rate=20, burstiness=burstiness))
        assert times[-1] == pytest.approx(20)
        assert times == sorted(times)
    gaps = {k: np.diff(arrival_times(4000, Pace(request_rate=20, burstiness=k))) for k in (0.25, 1.0, 4.0, inf)}
    # A gamma distribution of shape k has a deviation of 1 / sqrt(k) times its mean; 4,000 draws are within a tenth.
    assert [np.std(gap) * 20 for gap in gaps.values()] == pytest.approx([2, 1, 0.5, 0], rel=0.1, abs=1e-6)


def test_without_a_rate_all_come_at_once() -> None:
    assert arrival_times(3, Pace()) == [0, 0, 0]


@pytest.mark.parametrize("ramp", ["linear", "exponential"])
def test_a_ramp_goes_from_one_rate_to_the_other(ramp: str) -> None:
    times = arrival_times(101, Pace(ramp=ramp, ramp_rates=(1, 100), burstiness=inf))
    gaps = np.diff([0, *times])
    assert (gaps[0], gaps[-1]) == pytest.approx((1, 0.01))
    assert gaps[50] == pytest.approx(1 / 50.5 if ramp == "linear" else 0.1)


def test_no_more_requests_run_at_once_than_allowed() -> None:
    server = Echo()
    sessions = [single(ask(index)) for index in range(20)]
    assert len(run(server, sessions, Pace(max_concurrency=3)).answers) == 20
    assert server.most == 3
    free = Echo()
    run(free, sessions, Pace())
    assert free.most == 20


def turns(*asks: Ask) -> Asks:
    for each in asks:
        answer = yield each
        assert not answer.error


def test_conversations_that_hold_their_place_are_had_one_after_another() -> None:
    def order(holds: bool) -> list[int]:
        server = Echo()
        sessions = [Session(lambda k=k: turns(ask(k), ask(k)), holds_its_place=holds) for k in (1, 2)]  # type: ignore[misc]
        run(server, sessions, Pace(max_concurrency=1))
        return [each.prompt[0] for each in server.sent]  # type: ignore[misc]

    assert order(True) == [1, 1, 2, 2]
    assert order(False) == [1, 2, 1, 2]


def test_no_more_requests_are_sent_than_asked_for() -> None:
    server = Echo()
    sessions = [Session(lambda: turns(*[ask(1)] * 10), start_s=start) for start in (0.0, 0.0, 1e6)]
    assert len(run(server, sessions, Pace(num_requests=7)).answers) == len(server.sent) == 7


def test_the_ideal_is_the_longest_prefix_sent_or_generated_before() -> None:
    asks = [ask(1, 2, 3), ask(1, 2, 9), ask(1, 2, 3, 7, 7, 5), ask(1, 2, 3, 7, 7, 5), ask(4)]
    result = run(Echo(), [Session(lambda: turns(*asks))], Pace())
    assert [answer.ideal_tokens for answer in result.answers] == [0, 2, 5, 6, 0]
    unknown = run(Echo(), [single(Ask("text", 1))], Pace())
    assert unknown.answers[0].ideal_tokens is None


def test_a_run_that_is_cut_short_keeps_what_has_come() -> None:
    server = Echo(hangs_from=4)

    async def execute() -> Run:
        load = Load(server, Pace(), NOTHING)  # type: ignore[arg-type]
        task = asyncio.ensure_future(load.execute([single(ask(index)) for index in range(6)]))
        while len(load.run.answers) < 4:
            await asyncio.sleep(0)
        task.cancel()
        return await task

    result = asyncio.run(execute())
    assert (len(result.answers), result.num_interrupted, result.is_interrupted) == (4, 2, True)
    assert result.duration_s > 0


def test_an_error_in_making_requests_ends_the_run() -> None:
    def broken() -> Asks:
        yield ask(1)
        raise LookupError("no")

    with pytest.raises(LookupError):
        run(Echo(hangs_from=1), [Session(broken), single(ask(2)), single(ask(3))], Pace())
