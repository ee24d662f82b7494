"""Streams of a request's outputs: text, tokens, log-probabilities, finish reasons.

A stream accumulates output until it is taken. Taken after every step, it yields deltas; taken when the request has
finished, it yields the whole output.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from strandline.records.account import Account
from strandline.records.events import Admission, FinishReason, SpeculationStats, TokenEvent
from strandline.records.outputs import (
    CompletionOutput,
    Logprob,
    OutputDelta,
    RequestDelta,
    RequestOutput,
    RequestTimes,
)
from strandline.records.plan import NewRequest, TokenLogprobs
from strandline.records.reasoning_rules import ReasoningRules
from strandline.text.detokenizer import Detokenizer
from strandline.text.remembered_answers import Recollection
from strandline.text.token_bytes import TokenBytes


class OutputStream:
    """One output of a request."""

    def __init__(
        self,
        new: NewRequest,
        request: "RequestStream",
        index: int,
        tokenizer: Any | None,
        hidden_ids: frozenset[int] | None,
        reasoning: ReasoningRules | None,
    ) -> None:
        params = new.params
        self.request_id = new.request_id
        self.request = request
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.speculation = SpeculationStats()
        self._index = index
        self._stop_reason: int | str | None = None
        self._is_end_taken = False
        self._min_tokens = params.min_tokens
        self._is_mute = params.max_tokens == 0
        self._tokenizer = tokenizer
        is_decoded = tokenizer is not None and params.detokenize
        self._detokenizer = Detokenizer(tokenizer, params, hidden_ids, reasoning) if is_decoded else None
        self._token_ids: list[int] = []
        self.generated_ids = array("I")
        """All tokens so far, for the memory of answers; empty if the request has none."""
        self._logprobs: list[dict[int, Logprob]] | None = [] if params.logprobs is not None else None
        self._token_spans: list[tuple[int, int] | None] = []
        self._spans_end = 0
        """The character at which the last token ends; counted only if log-probabilities are requested."""
        self._cumulative = 0.0
        self._routed = bytearray()

    def routed_experts(self, token_bytes: int) -> bytes:
        """Return the experts of all tokens that were computed: of the prompt, and of the output except its last one.

        Args:
            token_bytes: size of what is recorded of a token.
        """
        num_tokens = len(self.request.prompt_ids) + self.num_tokens - 1
        return bytes(self._routed[: num_tokens * token_bytes])

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def is_due(self, interval: int) -> bool:
        """Whether there is a first token, as many tokens as the interval, or the end, that has not been taken."""
        num_new = len(self._token_ids)
        return num_new >= interval or num_new == self.num_tokens > 0 or (self.is_finished and not self._is_end_taken)

    @property
    def wants_logprobs(self) -> bool:
        return self._logprobs is not None

    def append(self, event: TokenEvent) -> bool:
        """Add a token; return whether the sequence has ended here and the core must still end it.

        A token that completes a stop string ends the output; this takes precedence over other reasons.
        """
        if event.account is not None:
            self.request.note_account(self, event.account)
        if event.hidden_state is not None:
            self.request.hidden_state = event.hidden_state
        if event.speculation is not None:
            self.speculation = event.speculation
        if event.routed is not None:
            start, experts, token_bytes = event.routed
            self._routed[start * token_bytes :] = experts
        if event.finish_reason is FinishReason.ERROR:
            self._end(FinishReason.ERROR, event.stop_reason)
            return True
        if self._is_mute:  # the core samples one token even if none was requested
            self._end(FinishReason.LENGTH, None)
            return False
        self._token_ids.append(event.token_id)
        if self.request.recollection is not None:
            self.generated_ids.append(event.token_id)
        self.num_tokens += 1
        stop = None
        if self._detokenizer is not None:
            stop = self._detokenizer.append(event.token_id, may_stop=self.num_tokens > self._min_tokens)
        if self._logprobs is not None:
            span = self._next_span(event.token_id)
            if event.logprobs is not None:
                self._cumulative += event.logprobs.logprob
                self._logprobs.append(decode_logprobs(event.logprobs, self._tokenizer, self.request.token_bytes))
                self._token_spans.append(span)
        if stop is not None:
            self._end(FinishReason.STOP, stop)
        elif event.finish_reason is not None:
            self._end(event.finish_reason, event.stop_reason)
        return stop is not None and event.finish_reason is None

    def _next_span(self, token: int) -> tuple[int, int] | None:
        """Return the characters that the last token has added; None: it is no part of the text."""
        if self._detokenizer is None:
            return None
        start = self._spans_end
        end = max(self._detokenizer.num_characters, start)  # a stop string may have made the text shorter
        self._spans_end = end
        return None if end == start and self._detokenizer.leaves_out(token) else (start, end)

    def fail(self, text: str) -> None:
        """End the output with an error, whatever state an exception has left it in."""
        if self.finish_reason is None:
            self.request.num_unfinished -= 1
        self.finish_reason, self._stop_reason = FinishReason.ERROR, text

    def abort(self) -> None:
        """End the output with what it has."""
        self._end(FinishReason.ABORT, None)

    def _end(self, finish_reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finish_reason, self._stop_reason = finish_reason, stop_reason
        self.request.num_unfinished -= 1
        if self._detokenizer is not None:
            self._detokenizer.finish()

    def take(self) -> OutputDelta:
        """Return the new output since the last call."""
        token_ids, self._token_ids = self._token_ids, []
        logprobs, token_spans = self._logprobs, self._token_spans
        if logprobs is not None:
            self._logprobs, self._token_spans = [], []
        is_end = self.finish_reason is not None and not self._is_end_taken
        self._is_end_taken = self._is_end_taken or is_end
        text, marks = self._detokenizer.take() if self._detokenizer is not None else ("", ())
        return OutputDelta(
            index=self._index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            num_tokens=self.num_tokens,
            cumulative_logprob=self._cumulative if logprobs is not None else None,
            finish_reason=self.finish_reason.value if is_end and self.finish_reason is not None else None,
            stop_reason=self._stop_reason if is_end else None,
            speculation=self.speculation,
            call_marks=marks,
            token_spans=token_spans,
        )


class RequestStream:
    """All outputs of one user's request."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        news: Sequence[NewRequest],
        tokenizer: Any | None,
        arrival_s: float,
        hidden_ids: frozenset[int] | None = None,
        reasoning: ReasoningRules | None = None,
        recollection: Recollection | None = None,
    ) -> None:
        self.request_id = request_id
        self.recollection = recollection
        """What its prompt has to do with remembered answers; None: its answers are not remembered."""
        self.prompt = prompt
        self.prompt_ids = news[0].prompt_ids
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.outputs = [
            OutputStream(new, self, index, tokenizer, hidden_ids, reasoning) for index, new in enumerate(news)
        ]
        self.num_unfinished = len(self.outputs)
        self.times = RequestTimes(arrival_s)
        self.account: Account | None = None
        """Account of the first output's lookup; the others share its prompt."""
        self.hidden_state: bytes | None = None
        """Final hidden state of the prompt's last token, float32 of the machine; None: not requested."""
        self.handed_over: dict[str, Any] | None = None
        """Parameters for another engine to continue the request (``kv_transfer_params``); None: not requested or
        held."""
        self._tokenizer = tokenizer
        params = news[0].params
        wants_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        self.token_bytes = TokenBytes(tokenizer) if tokenizer is not None and wants_logprobs else None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(self.prompt_ids)

    @property
    def is_finished(self) -> bool:
        return self.num_unfinished == 0

    def is_due(self, interval: int) -> bool:
        """Whether an output has a first token, as many as the interval, or its end, that has not been taken."""
        return interval == 1 or any(output.is_due(interval) for output in self.outputs)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all outputs so far."""
        return sum(output.num_tokens for output in self.outputs)

    @property
    def speculation(self) -> SpeculationStats:
        """The drafts of all outputs that have ended."""
        return sum((output.speculation for output in self.outputs), SpeculationStats())

    def note_account(self, output: OutputStream, account: Account) -> None:
        """Record the account of the first output's lookup."""
        if output is self.outputs[0]:
            self.account = account

    def note_admission(self, admission: Admission) -> None:
        """Record when an output was admitted, if it is the first one of the request."""
        times = self.times
        if times.admitted_s is None:
            times.admitted_s = admission.admitted_s
            times.load_begun_s, times.load_ended_s = admission.load_begun_s, admission.load_ended_s

    def put_prompt_logprobs(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Add the log-probabilities of the prompt's tokens from ``start + 1`` on."""
        if self.prompt_logprobs is not None:
            for position, entry in enumerate(entries, start + 1):
                self.prompt_logprobs[position] = decode_logprobs(entry, self._tokenizer, self.token_bytes)

    def note_token(self, clock: Callable[[], float]) -> None:
        """Record the times of the first token and of the end."""
        if self.times.first_token_s is None:
            self.times.first_token_s = clock()
        if not self.num_unfinished:
            self.times.finished_s = clock()

    def take(self) -> RequestDelta:
        """Return the new output of all sequences since the last call."""
        return RequestDelta([output.take() for output in self.outputs], self.is_finished, self.account)

    def empty_output(self) -> RequestOutput:
        """Return an output to be extended by all deltas of this stream."""
        wants_logprobs = self.outputs[0].wants_logprobs
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_ids),
            prompt_logprobs=self.prompt_logprobs,
            outputs=[
                CompletionOutput(index, "", [], None, [] if wants_logprobs else None)
                for index in range(len(self.outputs))
            ],
            finished=False,
            num_cached_tokens=0,
            cache_account=None,
            times=self.times,
        )


def decode_logprobs(
    entry: TokenLogprobs, tokenizer: Any | None, token_bytes: TokenBytes | None = None
) -> dict[int, Logprob]:
    """Return vLLM's format: by token id, the token itself, then those reported with it."""

    def decoded(token: int, logprob: float, rank: int) -> Logprob:
        text = tokenizer.decode([token]) if tokenizer is not None else None
        return Logprob(logprob, rank, text, token_bytes[token] if token_bytes is not None else None)

    found = {entry.token_id: decoded(entry.token_id, entry.logprob, entry.rank)}
    reported = zip(entry.reported_ids, entry.reported_logprobs, entry.reported_ranks, strict=True)
    for token, logprob, rank in reported:
        if token not in found:
            found[token] = decoded(token, logprob, rank)
    return found
