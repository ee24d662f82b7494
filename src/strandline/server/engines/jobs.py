"""Jobs: the requests of one HTTP request, and their outputs as they arrive."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

from strandline.errors import EngineError
from strandline.records.events import FinishReason
from strandline.records.outputs import RequestDelta
from strandline.server.engines.engine_link import EngineDeadError, RequestTimeoutError
from strandline.text.output_streams import RequestStream


class NoTokenError(EngineError):
    """No token could be sampled for a request."""


class OutputFailedError(EngineError):
    """An exception ended a single output."""


class Job:
    """One HTTP request: prompts with the same parameters. Leaving its context aborts what is unfinished.

    Args:
        close: aborts what is unfinished.
        timeout_s: None: no time limit.
        stream_interval: a burst comes with an output's first token, with as many tokens as this, and with its end.
    """

    def __init__(
        self,
        close: Callable[["Job"], None],
        streams: Sequence[RequestStream],
        timeout_s: float | None,
        stream_interval: int = 1,
    ) -> None:
        self.streams = list(streams)
        """One per prompt."""
        self._close = close
        self._stream_interval = stream_interval
        self._prompt_indices = {stream.request_id: index for index, stream in enumerate(streams)}
        self._waiting: asyncio.Future[None] | None = None
        self._dirty: dict[str, None] = {}
        self._failure: EngineError | None = None
        # One timer per job: a time limit on each wait would cost more than what arrives.
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._time_out, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._close(self)

    def note(self, request_id: str) -> None:
        """Record that a request has new output."""
        if self.streams[self._prompt_indices[request_id]].is_due(self._stream_interval):
            self._dirty[request_id] = None
            self._wake()

    def fail(self, reason: str) -> None:
        """Fail the job: an engine that runs a part of it has exited."""
        self._failure = EngineDeadError(reason)
        self._wake()

    async def bursts(self) -> AsyncIterator[list[tuple[int, RequestDelta]]]:
        """Yield the new outputs that have arrived, each with its prompt's index, until all are finished.

        Raises:
            EngineDeadError: the engine has exited.
            RequestTimeoutError: the job has timed out.
            NoTokenError: an output ended because no token could be sampled.
            OutputFailedError: an output ended by an exception.
        """
        num_unfinished = len(self.streams)
        while num_unfinished:
            await self._wait()
            dirty, self._dirty = self._dirty, {}
            burst = []
            for request_id in dirty:
                index = self._prompt_indices[request_id]
                delta = _checked(self.streams[index].take())
                num_unfinished -= delta.finished
                burst.append((index, delta))
            yield burst

    async def whole(self) -> list[RequestDelta]:
        """Wait for all outputs and return them, one delta per prompt. Raises as ``bursts``."""
        while not self.is_finished:
            await self._wait()
            self._dirty.clear()
        return [_checked(stream.take()) for stream in self.streams]

    @property
    def is_finished(self) -> bool:
        return all(stream.is_finished for stream in self.streams)

    async def _wait(self) -> None:
        """Wait until there is new output, or the job has failed."""
        if not self._dirty and self._failure is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if self._failure is not None:
            raise self._failure

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _time_out(self, timeout_s: float) -> None:
        if self.is_finished:  # its last output is on its way to the client
            return
        self._failure = RequestTimeoutError(
            f"the request took longer than {timeout_s:g} s; ask for fewer tokens or raise --request-timeout-s"
        )
        self._wake()


def _checked(delta: RequestDelta) -> RequestDelta:
    for output in delta.outputs:
        if output.finish_reason != FinishReason.ERROR:
            continue
        if output.stop_reason is not None:
            raise OutputFailedError(f"the output has failed and cannot be continued: {output.stop_reason}")
        raise NoTokenError(
            "no token could be sampled, as the logits have no finite maximum: every token is banned, a parameter is "
            "too extreme for this model, its grammar has become too complex, or the model's weights produce NaN"
        )
    return delta
