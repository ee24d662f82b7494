"""Gathers what the steps produce into what users get: text, log-probabilities, finish reasons."""

from collections.abc import Callable, Sequence
from typing import Any

from strandline.engine.detokenizer import Detokenizer
from strandline.engine.outputs import CompletionOutput, Logprob, RequestOutput, RequestTimes
from strandline.engine.plan import TokenLogprobs
from strandline.engine.request import Request


class OutputStream:
    """One output of a request as it grows."""

    def __init__(self, request: Request, tokenizer: Any | None) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, request.params) if tokenizer and request.params.detokenize else None
        self._logprobs: list[dict[int, Logprob]] | None = [] if request.params.logprobs is not None else None
        self._cumulative = 0.0

    def append(self, token: int, logprobs: TokenLogprobs | None) -> str | None:
        """Take in a token; return the stop string that it completes, if any."""
        if logprobs is not None and self._logprobs is not None:
            self._cumulative += logprobs.logprob
            self._logprobs.append(decode_logprobs(logprobs, self._tokenizer))
        if self._detokenizer is None:
            return None
        request = self.request
        return self._detokenizer.append(token, may_stop=len(request.output_ids) > request.params.min_tokens)

    def output(self, index: int) -> CompletionOutput:
        """Return the output so far, or whole if the request has finished."""
        request = self.request
        if request.is_finished and self._detokenizer is not None:
            self._detokenizer.finish()
        return CompletionOutput(
            index=index,
            text=self._detokenizer.text if self._detokenizer is not None else "",
            token_ids=list(request.output_ids),
            cumulative_logprob=self._cumulative if self._logprobs is not None else None,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=request.finish_reason.value if request.finish_reason and request.is_finished else None,
            stop_reason=request.stop_reason,
        )


class Collector:
    """All outputs of one user's request."""

    def __init__(
        self, request_id: str, prompt: str | None, requests: Sequence[Request], tokenizer: Any | None, arrival_s: float
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.streams = {request.request_id: OutputStream(request, tokenizer) for request in requests}
        self.times = RequestTimes(arrival_s)
        self._tokenizer = tokenizer
        first = requests[0]
        self._first = first
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if first.params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * first.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return all(stream.request.is_finished for stream in self.streams.values())

    def put_prompt_logprobs(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Take in the log-probabilities of the prompt's tokens from ``start + 1`` on."""
        if self._prompt_logprobs is not None:
            for position, entry in enumerate(entries, start + 1):
                self._prompt_logprobs[position] = decode_logprobs(entry, self._tokenizer)

    def note_token(self, clock: Callable[[], float]) -> None:
        """Keep the times of the first token and of the end."""
        if self.times.first_token_s is None:
            self.times.first_token_s = clock()
        if self.is_finished:
            self.times.finished_s = clock()

    def output(self) -> RequestOutput:
        """Return the request's outputs so far."""
        account = self._first.account
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._first.prompt_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[stream.output(index) for index, stream in enumerate(self.streams.values())],
            finished=self.is_finished,
            num_cached_tokens=account.hit if account else 0,
            cache_account=account,
            times=self.times,
        )


def decode_logprobs(entry: TokenLogprobs, tokenizer: Any | None) -> dict[int, Logprob]:
    """Return vLLM's form: the token itself, then the likeliest, by token id."""

    def text(token: int) -> str | None:
        return tokenizer.decode([token]) if tokenizer is not None else None

    found = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
    for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
        found.setdefault(token, Logprob(logprob, rank, text(token)))
    return found
