"""Gathers what the steps produce into what users get: text, log-probabilities, finish reasons."""

from collections.abc import Callable, Sequence
from typing import Any

from strandline.cache import Account
from strandline.records.events import FinishReason, TokenEvent
from strandline.records.outputs import CompletionOutput, Logprob, RequestOutput, RequestTimes
from strandline.records.plan import NewRequest, TokenLogprobs
from strandline.text.detokenizer import Detokenizer


class OutputStream:
    """One output of a request as it grows."""

    def __init__(self, new: NewRequest, collector: "Collector", tokenizer: Any | None) -> None:
        params = new.params
        self.request_id = new.request_id
        self.collector = collector
        self.is_finished = False
        self.token_ids: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._min_tokens = params.min_tokens
        self._is_mute = params.max_tokens == 0
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, params) if tokenizer and params.detokenize else None
        self._logprobs: list[dict[int, Logprob]] | None = [] if params.logprobs is not None else None
        self._cumulative = 0.0

    def append(self, event: TokenEvent) -> bool:
        """Take in a token; return whether it completes a stop string. That wins over any other reason to end."""
        if event.account is not None:
            self.collector.note_account(self, event.account)
        if self._is_mute:  # the core samples one token all the same, which nobody asked for
            self._end(FinishReason.LENGTH, None)
            return False
        token_ids = self.token_ids
        token_ids.append(event.token_id)
        if event.logprobs is not None and self._logprobs is not None:
            self._cumulative += event.logprobs.logprob
            self._logprobs.append(decode_logprobs(event.logprobs, self._tokenizer))
        stop = None
        if self._detokenizer is not None:
            stop = self._detokenizer.append(event.token_id, may_stop=len(token_ids) > self._min_tokens)
        if stop is not None:
            self._end(FinishReason.STOP, stop)
        elif event.finish_reason is not None:
            self._end(event.finish_reason, event.stop_reason)
        return stop is not None

    def _end(self, finish_reason: FinishReason, stop_reason: int | str | None) -> None:
        self.is_finished = True
        self._finish_reason, self._stop_reason = finish_reason, stop_reason
        self.collector.num_unfinished -= 1
        if self._detokenizer is not None:
            self._detokenizer.finish()

    def output(self, index: int) -> CompletionOutput:
        """Return the output so far."""
        return CompletionOutput(
            index=index,
            text=self._detokenizer.text if self._detokenizer is not None else "",
            token_ids=list(self.token_ids),
            cumulative_logprob=self._cumulative if self._logprobs is not None else None,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=self._finish_reason.value if self._finish_reason is not None else None,
            stop_reason=self._stop_reason,
        )


class Collector:
    """All outputs of one user's request."""

    def __init__(
        self, request_id: str, prompt: str | None, news: Sequence[NewRequest], tokenizer: Any | None, arrival_s: float
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.streams = [OutputStream(new, self, tokenizer) for new in news]
        self.num_unfinished = len(self.streams)
        self.times = RequestTimes(arrival_s)
        self._tokenizer = tokenizer
        self._account: Account | None = None
        self._prompt_ids = news[0].prompt_ids
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if news[0].params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(self._prompt_ids)

    @property
    def is_finished(self) -> bool:
        return self.num_unfinished == 0

    def note_account(self, stream: OutputStream, account: Account) -> None:
        """Keep what the lookup of the first output found; the others share its prompt."""
        if stream is self.streams[0]:
            self._account = account

    def put_prompt_logprobs(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Take in the log-probabilities of the prompt's tokens from ``start + 1`` on."""
        if self._prompt_logprobs is not None:
            for position, entry in enumerate(entries, start + 1):
                self._prompt_logprobs[position] = decode_logprobs(entry, self._tokenizer)

    def note_token(self, clock: Callable[[], float]) -> None:
        """Keep the times of the first token and of the end."""
        if self.times.first_token_s is None:
            self.times.first_token_s = clock()
        if not self.num_unfinished:
            self.times.finished_s = clock()

    def output(self) -> RequestOutput:
        """Return the request's outputs so far."""
        account = self._account
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[stream.output(index) for index, stream in enumerate(self.streams)],
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
