"""Socket of an engine client to a fleet of replicas, which the client uses as one engine.

The sequences of a prompt run on one replica. If it dies, they are restarted on another one: with the same seeds the
output is the same, so the tokens that the client already has are skipped, and it sees only a delay. If a token differs,
for example because of rounding on other hardware, the output ends with an error.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, Protocol

import msgspec

from strandline.errors import EngineError
from strandline.ids import NO_TOKEN, RequestId
from strandline.ray.calls import End, Run
from strandline.ray.fleet import Fleet
from strandline.records.events import FinishReason, PromptLogprobs, StepEvents, Submission, TokenEvent
from strandline.records.messages import ENCODER, TO_CORE, Finish, Stepped, Submit
from strandline.records.pictures import with_virtual_ids
from strandline.records.tokens import encode

LOGGER: Final = logging.getLogger("strandline.ray")
STEP_EVENTS: Final = msgspec.msgpack.Decoder(StepEvents)
MAX_ATTEMPTS: Final = 5


class ReplicaLostError(EngineError):
    """The replica that ran a call has died."""


class Replicas(Protocol):
    """Calls to replicas."""

    def run(self, call: Run) -> AsyncGenerator[str | bytes, None]:
        """Run sequences on one replica, as ``EngineReplica.run``.

        Raises:
            ReplicaLostError: the replica has died. The call can be made again.
        """

    async def end(self, call: End) -> None:
        """End sequences on the replica that runs them."""


@dataclass(slots=True)
class _Output:
    """The part of a sequence that the client has."""

    token_ids: list[int] = field(default_factory=list)
    num_replayed: int = 0
    """Number of these tokens that the current attempt has sampled too."""
    num_prompt_entries: int = 0

    def is_new(self, event: TokenEvent) -> bool:
        """Return whether a token is new to the client, and count it.

        Raises:
            EngineError: it is not the token that an earlier attempt has sampled here.
        """
        self.num_replayed += 1
        if self.num_replayed > len(self.token_ids):
            self.token_ids.append(event.token_id)
            return True
        if self.token_ids[self.num_replayed - 1] != event.token_id:
            raise EngineError("the replica has died, and another one continues differently")
        return False

    def is_new_entry(self, entry: PromptLogprobs) -> bool:
        """Return whether log-probabilities of the prompt are new to the client, and count them."""
        if entry.start < self.num_prompt_entries:
            return False
        self.num_prompt_entries = entry.start + len(entry.entries)
        return True


class FleetSocket:
    """Sends and receives like the socket to one engine."""

    def __init__(self, replicas: Replicas, fleet: Fleet) -> None:
        self._replicas = replicas
        self._fleet = fleet
        self._received: asyncio.Queue[bytes] = asyncio.Queue()
        self._calls: dict[RequestId, _Call] = {}

    def send(self, data: bytes) -> None:
        """Run or end sequences.

        Raises:
            EngineError: the message is another one, which a single engine answers.
        """
        match TO_CORE.decode(data):
            case Submit() as message:
                for _, group in groupby(message.complete(), key=lambda each: (each.new.prompt_ids, each.pictures)):
                    call = _Call(self._replicas, self._fleet, list(group), self._deliver)
                    self._calls.update(dict.fromkeys(call.names, call))
                    call.start()
            case Finish(names):
                for name in names:
                    if (ended := self._calls.pop(name, None)) is not None:
                        ended.end(name)
            case other:
                raise EngineError(f"several engines do not answer {type(other).__name__}")

    async def recv(self) -> bytes:
        """Return the next message."""
        return await self._received.get()

    def _deliver(self, events: StepEvents) -> None:
        for token in events.tokens:
            if token.finish_reason is not None:
                self._calls.pop(token.request_id, None)
        self._received.put_nowait(ENCODER.encode(Stepped(events)))


class _Call:
    """The sequences of one prompt, on the replica that runs them.

    Args:
        deliver: takes messages for the client.
    """

    def __init__(self, replicas: Replicas, fleet: Fleet, submissions: list[Submission], deliver: Any) -> None:
        self._replicas = replicas
        self._fleet = fleet
        self._submissions = submissions
        self._deliver = deliver
        self._outputs = {submission.new.request_id: _Output() for submission in submissions}
        """Outputs of unfinished sequences."""
        self._replica: str | None = None
        self._request_id = submissions[0].new.request_id
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Future[None]] = set()

    @property
    def names(self) -> Iterable[RequestId]:
        """Return the unfinished sequences."""
        return self._outputs.keys()

    def start(self) -> None:
        """Begin to run."""
        self._task = asyncio.ensure_future(self._run())

    def end(self, name: RequestId) -> None:
        """End a sequence."""
        self._outputs.pop(name, None)
        if not self._outputs and self._task is not None:
            self._task.cancel()
        elif self._replica is not None:
            ending = asyncio.ensure_future(self._replicas.end(End(self._replica, (name,))))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _run(self) -> None:
        reason = ""
        try:
            for attempt in range(1, MAX_ATTEMPTS + 1):
                try:
                    await self._attempt()
                    return
                except ReplicaLostError as error:
                    LOGGER.warning("request %s, attempt %d: %s", self._request_id, attempt, error)
                    reason = str(error)
            self._fail(f"{MAX_ATTEMPTS} replicas have died: {reason}")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # Outermost handler of the task: an unanswered output would wait forever.
            LOGGER.exception("request %s", self._request_id)
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            self._fleet.finish(self._request_id)

    async def _attempt(self) -> None:
        """Run the unfinished sequences on one replica, to their end."""
        unfinished = [each for each in self._submissions if each.new.request_id in self._outputs]
        first = unfinished[0]
        submit = ENCODER.encode(Submit.of(unfinished))
        for output in self._outputs.values():
            output.num_replayed = 0
        self._replica = None
        prompt_ids = with_virtual_ids(first.new.prompt_ids, first.pictures)
        call = Run(self._request_id, encode(prompt_ids), first.salt, submit)
        async with aclosing(self._replicas.run(call)) as items:
            async for item in items:
                if isinstance(item, str):
                    self._replica = item
                else:
                    self._take(STEP_EVENTS.decode(item))
        if self._outputs:
            raise ReplicaLostError("the replica has ended the call")

    def _take(self, events: StepEvents) -> None:
        prompts = [e for e in events.prompts if (o := self._outputs.get(e.request_id)) and o.is_new_entry(e)]
        tokens = list(self._new_tokens(events.tokens))
        if events.tokens:
            self._fleet.begin(self._request_id)
        if prompts or tokens:
            self._deliver(StepEvents(tokens=tokens, prompts=prompts))

    def _new_tokens(self, events: Iterable[TokenEvent]) -> Iterator[TokenEvent]:
        for event in events:
            output = self._outputs.get(event.request_id)
            if output is not None and output.is_new(event):
                yield event
            if event.finish_reason is not None:
                self._outputs.pop(event.request_id, None)

    def _fail(self, reason: str) -> None:
        """End all outputs that are unfinished with an error."""
        names, self._outputs = list(self._outputs), {}
        failed = [TokenEvent(name, NO_TOKEN, None, FinishReason.ERROR, reason, None) for name in names]
        if failed:
            self._deliver(StepEvents(tokens=failed))
