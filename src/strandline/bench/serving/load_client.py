"""Client of OpenAI-compatible servers: streamed requests with timestamps."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Final, Self

import httpx
import msgspec

from strandline.bench.serving.options import Target
from strandline.bench.serving.session import Answer, Ask
from strandline.bench.serving.stream_transport import StreamTransport
from strandline.errors import ConfigError

TIMEOUT_S: Final = 6 * 3600.0
CONNECT_TIMEOUT_S: Final = 60.0
READY_POLL_S: Final = 0.5
METRICS_TIMEOUT_S: Final = 10.0
MAX_ERROR_CHARACTERS: Final = 500


class Delta(msgspec.Struct):
    """Text and token ids that a chat chunk adds."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    """A piece of an output."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    def said(self) -> str:
        """Return the piece's text."""
        delta = self.delta
        return self.text or "" if delta is None else delta.content or delta.reasoning_content or delta.reasoning or ""

    def is_token(self) -> bool:
        """Whether the piece represents a token, unlike the first piece of a chat, with the role, and the last.

        A completion's piece may be without text: a token that is part of a character.
        """
        return bool(self.said() or self.token_ids) or (self.text is not None and self.finish_reason is None)


class PromptDetails(msgspec.Struct):
    """Prompt figures of the usage."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Counts of tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Piece(msgspec.Struct):
    """The data of one event."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


PIECES: Final = msgspec.json.Decoder(Piece)
ENCODER: Final = msgspec.json.Encoder()


class ServerUnderLoad:
    """Sends requests over persistent connections. Use it as an async context.

    Args:
        transport: what carries the requests; None: a ``StreamTransport``.
    """

    def __init__(
        self,
        target: Target,
        clock: Callable[[], float] = time.perf_counter,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.target = target
        self._clock = clock
        # A proxy between would be measured too: the environment's is not used.
        self._http = httpx.AsyncClient(
            headers={"Accept-Encoding": "identity", **target.headers},
            timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
            transport=transport or StreamTransport(),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    def body(self, ask: Ask) -> bytes:
        """Return the request's body."""
        names = ("messages", "max_completion_tokens") if self.target.is_chat else ("prompt", "max_tokens")
        return ENCODER.encode({**self.target.body, names[0]: ask.prompt, names[1]: ask.max_tokens, **ask.body})

    async def send(self, ask: Ask) -> Answer:
        """Send a request and return its answer. Errors are recorded in the answer's ``error``."""
        body = self.body(ask)
        answer = Answer()
        answer.start_s = start = self._clock()
        headers = {"Content-Type": "application/json"}
        try:
            async with self._http.stream("POST", self.target.url, content=body, headers=headers) as response:
                if response.status_code == httpx.codes.OK:
                    await self._take(answer, response)
                else:
                    text = (await response.aread()).decode(errors="replace")
                    answer.error = f"HTTP {response.status_code}: {text[:MAX_ERROR_CHARACTERS]}"
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        except msgspec.MsgspecError as error:
            answer.error = f"the stream holds what is no piece of an answer: {error}"
        answer.latency_s = self._clock() - start
        if not answer.error and not answer.ttft_s:
            answer.ttft_s = answer.latency_s
        return answer

    async def _take(self, answer: Answer, response: httpx.Response) -> None:
        last_s = answer.start_s
        texts: list[str] = []
        is_done = num_pieces = 0
        stream = response.stream
        assert isinstance(stream, httpx.AsyncByteStream)
        # Not by ``aiter_raw``, which takes a fifth of the CPU time of a token, and does nothing that is needed here.
        async for data in _events(aiter(stream)):
            now_s = self._clock()
            if data == b"[DONE]":
                is_done = True
                continue
            piece = PIECES.decode(data)
            if piece.error is not None:
                answer.error = str(piece.error)[:MAX_ERROR_CHARACTERS]
                return
            if piece.usage is not None:
                _count(answer, piece.usage)
            for choice in piece.choices:
                is_done = is_done or choice.finish_reason is not None
                if not choice.is_token():
                    continue
                if num_pieces:
                    answer.gaps_s.append(now_s - last_s)
                else:
                    answer.ttft_s = now_s - answer.start_s
                num_pieces += 1
                last_s = now_s
                texts.append(choice.said())
                answer.token_ids += choice.token_ids or []
        answer.text = "".join(texts)
        answer.output_tokens = answer.output_tokens or len(answer.token_ids) or num_pieces
        if not is_done:
            answer.error = "the stream ended before the answer did"

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the server responds; do not wait if the timeout is 0.

        Raises:
            ConfigError: it does not within that time.
        """
        deadline_s = self._clock() + timeout_s
        while timeout_s > 0:
            try:
                await self._http.get(self.target.base_url + "/v1/models", timeout=READY_POLL_S)
                return
            except httpx.HTTPError as error:
                if self._clock() > deadline_s:
                    raise ConfigError(f"{self.target.base_url} does not answer within {timeout_s:g} s") from error
                await asyncio.sleep(READY_POLL_S)

    async def models(self) -> list[dict[str, Any]]:
        """Return the descriptions of the models that are served; none if the server has no such list.

        Raises:
            ConfigError: the server cannot be reached, or rejects the request.
        """
        url = self.target.base_url + "/v1/models"
        try:
            response = await self._http.get(url)
            if response.status_code == httpx.codes.NOT_FOUND:
                return []
            response.raise_for_status()
            cards: list[dict[str, Any]] = response.json()["data"]
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"cannot query {url}: {text}; is the server running? Name another with --base-url"
            ) from error
        return cards

    async def metrics(self) -> str:
        """Return the server's metrics in Prometheus' text format; "" if it has none."""
        try:
            response = await self._http.get(self.target.base_url + "/metrics", timeout=METRICS_TIMEOUT_S)
        except httpx.HTTPError:
            return ""
        return response.text if response.status_code == httpx.codes.OK else ""


def _count(answer: Answer, usage: Usage) -> None:
    answer.prompt_tokens, answer.output_tokens = usage.prompt_tokens, usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        answer.cached_tokens = usage.prompt_tokens_details.cached_tokens


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events; other fields and comments are left out."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()
