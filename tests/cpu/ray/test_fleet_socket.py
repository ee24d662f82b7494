"""Sequences whose replica dies run anew on another one, and the client gets every token once."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import msgspec
import pytest

from strandline.errors import EngineError
from strandline.ids import NO_TOKEN, RequestId
from strandline.ray.calls import End, Run
from strandline.ray.fleet import Fleet
from strandline.ray.fleet_socket import MAX_ATTEMPTS, FleetSocket, ReplicaLostError
from strandline.records.events import FinishReason, PromptLogprobs, StepEvents, Submission, TokenEvent
from strandline.records.messages import ENCODER, FROM_CORE, TO_CORE, AskStats, Finish, Stepped, Submit
from strandline.records.plan import NewRequest, TokenLogprobs
from strandline.records.sampling_params import SamplingParams
from strandline.routing.names import make_router

NUM_TOKENS = 6


def submission(name: str, prompt: tuple[int, ...] = (1, 2, 3)) -> Submission:
    new = NewRequest(RequestId(name), prompt, SamplingParams(), 0, frozenset(), ())
    return Submission(new, max_total=len(prompt) + NUM_TOKENS, salt="s")


def token(name: str, place: int, offset: int = 0) -> TokenEvent:
    finish = FinishReason.LENGTH if place == NUM_TOKENS - 1 else None
    return TokenEvent(RequestId(name), 100 + place + offset, None, finish, None, None)


class Replicas:
    """Replicas that sample 100, 101, … for every sequence.

    Args:
        lives: number of tokens after which the replica dies, for each attempt; in further ones it lives.
        offset: added to the tokens of all attempts but the first.
    """

    def __init__(self, *lives: int, offset: int = 0) -> None:
        self.lives = list(lives)
        self.offset = offset
        self.runs: list[Run] = []
        self.ended: list[End] = []
        self.num_open = 0
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    def submitted(self, attempt: int) -> list[str]:
        """Return the sequences of an attempt."""
        message = TO_CORE.decode(self.runs[attempt].submit)
        assert isinstance(message, Submit)
        return [each.new.request_id for each in message.submissions]

    async def run(self, call: Run) -> AsyncGenerator[str | bytes, None]:
        self.runs.append(call)
        attempt = len(self.runs) - 1
        offset = self.offset if attempt else 0
        names = self.submitted(attempt)
        self.num_open += 1
        try:
            yield f"replica {attempt}"
            prompts = [PromptLogprobs(RequestId(names[0]), 0, [TokenLogprobs(2, -1.0, 1, (), (), ())] * 2)]
            for index in range(NUM_TOKENS):
                if attempt < len(self.lives) and index == self.lives[attempt]:
                    raise ReplicaLostError("died")
                await self.may_go_on.wait()
                tokens = [token(name, index, offset) for name in names]
                yield msgspec.msgpack.encode(StepEvents(tokens=tokens, prompts=prompts if index == 0 else []))
        finally:
            self.num_open -= 1

    async def end(self, call: End) -> None:
        self.ended.append(call)


async def received(socket: FleetSocket, num_ends: int) -> StepEvents:
    """Return all that comes until the given number of sequences has ended."""
    events = StepEvents()
    while sum(each.finish_reason is not None for each in events.tokens) < num_ends:
        async with asyncio.timeout(5):
            message = FROM_CORE.decode(await socket.recv())
        assert isinstance(message, Stepped)
        events.tokens.extend(message.events.tokens)
        events.prompts.extend(message.events.prompts)
    return events


def fleet() -> Fleet:
    return Fleet(make_router("random"))


def answer(replicas: Callable[[], Replicas], names: list[str], num_ends: int) -> tuple[Replicas, StepEvents]:
    """Submit sequences of one prompt; return the replicas and what came back."""

    async def run() -> tuple[Replicas, StepEvents]:
        made = replicas()
        socket = FleetSocket(made, fleet())
        socket.send(ENCODER.encode(Submit([submission(name) for name in names])))
        events = await received(socket, num_ends)
        await asyncio.sleep(0)
        assert made.num_open == 0
        return made, events

    return asyncio.run(run())


def tokens_of(events: StepEvents, name: str) -> list[int]:
    return [each.token_id for each in events.tokens if each.request_id == name]


WHOLE = [100 + place for place in range(NUM_TOKENS)]


@pytest.mark.parametrize("lives", [(), (0,), (3,), (5,), (0, 0, 0), (4, 2), (2, 4)])
def test_every_token_comes_once_whatever_dies(lives: tuple[int, ...]) -> None:
    replicas, events = answer(lambda: Replicas(*lives), ["x", "y"], 2)
    assert tokens_of(events, "x") == tokens_of(events, "y") == WHOLE
    assert len(events.prompts) == 1
    assert len(replicas.runs) == len(lives) + 1
    assert {(run.request_id, run.salt) for run in replicas.runs} == {("x", "s")}


def test_replica_that_continues_differently_ends_the_output() -> None:
    _, events = answer(lambda: Replicas(3, offset=7), ["x"], 1)
    assert tokens_of(events, "x") == [*WHOLE[:3], NO_TOKEN]
    assert events.tokens[-1].finish_reason == FinishReason.ERROR
    assert "continues differently" in str(events.tokens[-1].stop_reason)


def test_replicas_that_all_die_end_the_outputs_with_an_error() -> None:
    replicas, events = answer(lambda: Replicas(*[1] * MAX_ATTEMPTS), ["x", "y"], 2)
    assert len(replicas.runs) == MAX_ATTEMPTS
    assert [each.finish_reason for each in events.tokens[-2:]] == [FinishReason.ERROR] * 2


def test_call_that_ends_early_is_made_again() -> None:
    class Short(Replicas):
        async def run(self, call: Run) -> AsyncGenerator[str | bytes, None]:
            index = 0
            async with aclosing(super().run(call)) as items:
                async for item in items:
                    yield item
                    index += 1
                    if len(self.runs) == 1 and index == 3:
                        return

    _, events = answer(Short, ["x"], 1)
    assert tokens_of(events, "x") == WHOLE


def with_paused(check: Callable[[FleetSocket, Replicas], Awaitable[None]]) -> None:
    """Run a check on two sequences of one prompt whose replica has said its name and no token."""

    async def run() -> None:
        replicas = Replicas(4)
        replicas.may_go_on.clear()
        socket = FleetSocket(replicas, fleet())
        socket.send(ENCODER.encode(Submit([submission("x"), submission("y")])))
        while not replicas.num_open:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        await check(socket, replicas)

    asyncio.run(run())


def test_ending_all_sequences_ends_the_call() -> None:
    async def check(socket: FleetSocket, replicas: Replicas) -> None:
        socket.send(ENCODER.encode(Finish([RequestId("x"), RequestId("y")])))
        for _ in range(5):
            await asyncio.sleep(0)
        assert replicas.num_open == 0

    with_paused(check)


def test_sequence_that_was_ended_is_not_run_again() -> None:
    async def check(socket: FleetSocket, replicas: Replicas) -> None:
        socket.send(ENCODER.encode(Finish([RequestId("x")])))
        replicas.may_go_on.set()
        events = await received(socket, 1)
        assert tokens_of(events, "y") == WHOLE
        assert tokens_of(events, "x") == []
        assert replicas.submitted(1) == ["y"]
        assert replicas.ended == [End("replica 0", (RequestId("x"),))]

    with_paused(check)


def test_questions_about_one_engine_are_refused() -> None:
    async def run() -> None:
        with pytest.raises(EngineError, match="AskStats"):
            FleetSocket(Replicas(), fleet()).send(ENCODER.encode(AskStats()))

    asyncio.run(run())


def test_prompts_of_one_message_are_routed_apart() -> None:
    async def run() -> None:
        replicas = Replicas()
        socket = FleetSocket(replicas, fleet())
        batch = [submission("x"), submission("y"), submission("z", (7, 8))]
        socket.send(ENCODER.encode(Submit(batch)))
        events = await received(socket, 3)
        assert [replicas.submitted(0), replicas.submitted(1)] == [["x", "y"], ["z"]]
        assert tokens_of(events, "z") == WHOLE

    asyncio.run(run())
