"""The text part: conversion of requests into sequences for the core, and of the core's token events into outputs.

It checks requests, chooses seeds, splits a request into ``n`` sequences, and detokenizes. It holds no tensors and does
not call the core, so the offline ``Engine`` and a server in another process share it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from random import Random
from typing import Any, Final

from strandline.clock import SYSTEM_CLOCK, Clock
from strandline.errors import PromptTooLongError, RequestError
from strandline.ids import AUDIT_PREFIX, NO_TOKEN, RequestId
from strandline.records.adapters import adapter_of
from strandline.records.events import FinishReason, Limits, StepEvents, Submission, TokenEvent
from strandline.records.failures import OUTPUT_FAILED, failure_text
from strandline.records.pictures import PlacedPicture, with_virtual_ids
from strandline.records.plan import NewRequest
from strandline.records.reasoning_rules import ReasoningRules, ThinkingBudget
from strandline.records.sampling_params import MAX_LOGPROBS, SamplingParams
from strandline.records.transfer_params import TransferParams
from strandline.text.output_streams import OutputStream, RequestStream
from strandline.text.picture_names import PictureNames
from strandline.text.prompts import CONTEXT_LENGTH_IS
from strandline.text.remembered_answers import Recollection, RememberedAnswers
from strandline.text.structured import Grammars
from strandline.text.thinking import num_open_tokens

LOGGER: Final = logging.getLogger(__name__)
SEED_BITS: Final = 63


@dataclass(frozen=True, slots=True)
class CheckedParams:
    """Sampling parameters that can be served; ``Frontend.check_params`` makes them."""

    params: SamplingParams
    stop_ids: frozenset[int]
    """Tokens that end the output."""
    hidden_ids: frozenset[int] | None = None
    """Tokens that the text leaves out; None: the special ones, if ``skip_special_tokens`` is set."""
    reasoning: ReasoningRules | None = None
    """The rules of the reasoning, if it is parsed."""


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A prompt and parameters that can be served; ``Frontend.check`` makes it."""

    prompt_ids: tuple[int, ...]
    params: CheckedParams
    pictures: tuple[PlacedPicture, ...] = ()

    @property
    def cached_ids(self) -> Sequence[int]:
        """The prompt as caches name it."""
        spans = [span for span, _ in self.pictures]
        return with_virtual_ids(self.prompt_ids, spans) if spans else self.prompt_ids


class Frontend:
    """Keeps the outputs of all unfinished requests.

    Args:
        limits: limits of the core that will run the requests.
        tokenizer: a transformers tokenizer, or None to work with token ids only.
        eos_ids: tokens that end a request unless it sets ``ignore_eos``.
        grammars: grammars for the same tokenizer; created by default.
        answers: remembers the outputs of requests with a recollection; None: nothing does.
        seed: seed for requests without one.
        has_priorities: the core schedules requests by their priorities.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        tokenizer: Any | None = None,
        eos_ids: frozenset[int] = frozenset(),
        grammars: Grammars | None = None,
        answers: RememberedAnswers | None = None,
        seed: int = 0,
        has_priorities: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.grammars = grammars or Grammars(lambda: (tokenizer, eos_ids), limits.vocab_size)
        self.answers = answers
        self.picture_names = PictureNames()
        self._longest_token = max(map(len, tokenizer.get_vocab())) if tokenizer is not None else 0
        self.requests: dict[str, RequestStream] = {}
        self._outputs: dict[RequestId, OutputStream] = {}
        self._seeds = Random(seed)
        self._has_priorities = has_priorities
        self._clock = clock
        self._thinking_end_ids: tuple[int, ...] = ()

    def end_thinking_with(self, text: str) -> None:
        """Set the text that ends reasoning at its budget. Without it, requests with such a budget are refused."""
        if self.tokenizer is not None:
            self._thinking_end_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))

    @property
    def has_thinking_end(self) -> bool:
        return bool(self._thinking_end_ids)

    @property
    def max_characters(self) -> int:
        """Upper bound of a prompt's length: ``max_model_len`` longest tokens, doubled to allow for normalization."""
        return 2 * self.limits.max_model_len * self._longest_token

    def __len__(self) -> int:
        """Return the number of unfinished sequences."""
        return len(self._outputs)

    def check_params(self, params: SamplingParams) -> CheckedParams:
        """Check parameters once for all prompts that they are used with; compile the grammar, if there is one.

        Any thread may call it.

        Raises:
            RequestError: they cannot be served.
        """
        if params.structured_outputs is not None:
            self.grammars.check(params.structured_outputs)
        return self.check_values(params)

    def check_values(self, params: SamplingParams) -> CheckedParams:
        """Check parameters as ``check_params``, except the grammar."""
        vocab_size = self.limits.vocab_size
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
            for token in getattr(params, name) or ():
                if token >= vocab_size:
                    message = f"token {token} of {name} is not in the vocabulary [0, {vocab_size})"
                    raise RequestError(message, param=name)
        if params.priority and not self._has_priorities:
            raise RequestError(
                f"priority needs an engine with --scheduling-policy priority, got {params.priority}", param="priority"
            )
        if params.prompt_logprobs == -1:
            if vocab_size > MAX_LOGPROBS:
                raise RequestError(
                    f"prompt_logprobs -1 requests all {vocab_size} tokens of the vocabulary; at most {MAX_LOGPROBS} "
                    "of each position are returned",
                    param="prompt_logprobs",
                )
            params = replace(params, prompt_logprobs=vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > vocab_size:
                raise RequestError(f"{name} must be at most the {vocab_size} tokens of the vocabulary, got "
                                   f"{getattr(params, name)}")  # fmt: skip
        if self.tokenizer is None and (params.stop_strings or params.bad_words):
            raise RequestError("stop strings and bad_words need a tokenizer; the engine runs without one")
        if params.thinking_token_budget not in (None, -1) and not self.has_thinking_end:
            raise RequestError(
                "thinking_token_budget needs reasoning that is parsed: give --reasoning-parser, or --reasoning-config",
                param="thinking_token_budget",
            )
        stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.eos_ids)
        if params.structured_outputs is not None and not stop_ids:
            raise params.structured_outputs.fault(
                f"{params.structured_outputs.origin} needs a token that ends the output: the model names none, or "
                "ignore_eos is set; give stop_token_ids"
            )
        return CheckedParams(params.owned(), stop_ids)

    def check(
        self, prompt_ids: Sequence[int], params: CheckedParams, pictures: Sequence[PlacedPicture] = ()
    ) -> CheckedRequest:
        """Check a prompt.

        Raises:
            RequestError: it cannot be served.
        """
        vocab_size, max_model_len = self.limits.vocab_size, self.limits.max_model_len
        if not prompt_ids:
            raise RequestError("the prompt is empty; at least one token is needed", param="prompt")
        if len(prompt_ids) >= max_model_len:
            raise PromptTooLongError(
                f"the prompt is too long: it has {len(prompt_ids)} tokens, and {CONTEXT_LENGTH_IS} {max_model_len} "
                "tokens, at least one of them for output; shorten it, or raise --max-model-len if it is below the "
                "model's limit",
                num_tokens=len(prompt_ids),
                max_tokens=max_model_len - 1,
            )
        if set(map(type, prompt_ids)) != {int} or min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
            wrong = next(token for token in prompt_ids if type(token) is not int or not 0 <= token < vocab_size)
            raise RequestError(f"prompt token {wrong!r} is not in the vocabulary [0, {vocab_size})", param="prompt")
        most = self.limits.max_picture_tokens
        largest = max((span.num_tokens for span, _ in pictures), default=0)
        if largest > most:
            raise RequestError(f"a picture has {largest} tokens, and the engine encodes at most {most}")
        return CheckedRequest(tuple(prompt_ids), params, tuple(pictures))

    def open(
        self,
        request_id: str,
        request: CheckedRequest,
        *,
        prompt: str | None = None,
        salt: str = "",
        marks: tuple[int, ...] = (),
        transfer: TransferParams | None = None,
        recollection: Recollection | None = None,
    ) -> list[Submission]:
        """Start a request; return its sequences for the core.

        Args:
            prompt: the text of the prompt's tokens, to be returned with the output.
            salt: requests share cached prefixes only with requests of the same salt.
            marks: token positions up to which other prompts are likely to share this one's prefix.
            transfer: its transfer to or from another engine.
            recollection: what the prompt has to do with remembered answers; None: its outputs are not remembered.

        Raises:
            RequestError: the id, or that of one of its outputs, is in use or reserved; nothing has changed.
        """
        if request_id.startswith(AUDIT_PREFIX):
            raise RequestError(f"request id {request_id!r} is reserved: {AUDIT_PREFIX!r} begins those of audits")
        names = _output_names(request_id, request.params.params.n)
        taken = next((name for name in (request_id, *names) if name in self.requests or name in self._outputs), None)
        if taken is not None:
            raise RequestError(f"request id {taken!r} is in use by an unfinished request")
        submissions = self._submissions(names, request, salt, marks, transfer, recollection)
        news = [submission.new for submission in submissions]
        params, arrival_s = request.params, self._clock()
        stream = RequestStream(
            request_id, prompt, news, self.tokenizer, arrival_s, params.hidden_ids, params.reasoning, recollection
        )
        self.requests[request_id] = stream
        self.picture_names.note(request.pictures)
        self._outputs.update((output.request_id, output) for output in stream.outputs)
        return submissions

    def _submissions(
        self,
        names: Sequence[RequestId],
        request: CheckedRequest,
        salt: str,
        marks: tuple[int, ...],
        transfer: TransferParams | None,
        recollection: Recollection | None,
    ) -> list[Submission]:
        prompt_ids, params, stop_ids = request.prompt_ids, request.params.params, request.params.stop_ids
        max_total = self.limits.max_model_len
        if params.max_tokens is not None:
            max_total = min(max_total, len(prompt_ids) + max(params.max_tokens, 1))
        seed = self._seeds.getrandbits(SEED_BITS) if params.seed is None else params.seed
        bad_words_ids = self._encode_bad_words(params)
        thinking = self._thinking_budget(prompt_ids, request.params)
        hidden_ids = request.params.hidden_ids if params.stop_strings or thinking is not None else None
        reasoning = request.params.reasoning if params.stop_strings else None
        adapter = adapter_of(salt)
        num_remembered, comes_back = (0, False) if recollection is None else (recollection.num_tokens, True)
        submissions: list[Submission] = []
        spans = tuple(span for span, _ in request.pictures)
        pixels = {picture.digest: picture for _, picture in request.pictures}
        for index, name in enumerate(names):
            wrapped = _wrap_seed(seed + index)
            new = NewRequest(
                name, prompt_ids, params, wrapped, stop_ids, bad_words_ids, hidden_ids, reasoning, thinking, adapter
            )
            submissions.append(
                Submission(new, max_total, salt, marks, transfer, num_remembered, comes_back, spans, pixels)
            )
            if transfer is not None and transfer.is_remote_decode:
                transfer = None  # what the first output keeps has the prompt of all
            if params.prompt_logprobs is not None and params.max_tokens != 0:
                params = replace(params, prompt_logprobs=None)  # of the first output; the others share its prompt
        return submissions

    def _thinking_budget(self, prompt_ids: Sequence[int], checked: CheckedParams) -> ThinkingBudget | None:
        """Return the budget of the outputs' reasoning; None: they have none, or their structure has no reasoning."""
        params, rules = checked.params, checked.reasoning
        max_tokens, structure = params.thinking_token_budget, params.structured_outputs
        if max_tokens is None or max_tokens < 0:
            return None
        is_parsed_and_open = rules is not None and rules.is_open
        if structure is not None and structure.after is None and not is_parsed_and_open:
            return None
        num_open = num_open_tokens(prompt_ids, self.tokenizer)
        if rules is None:
            rules = ReasoningRules(is_open=num_open is not None)
        return ThinkingBudget(max_tokens, self._thinking_end_ids, rules, (num_open or 0) if rules.is_open else 0)

    def _encode_bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of the banned words, at the start of a text and after a space."""
        if not params.bad_words or self.tokenizer is None:
            return ()
        forms = [form for word in params.bad_words for form in (word, " " + word.lstrip())]
        encoded = (self.tokenizer.encode(form, add_special_tokens=False) for form in forms)
        return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))

    def close(self, request_id: str) -> list[RequestId]:
        """Drop a request; return its unfinished sequences, for the core to end. Unknown ids are ignored."""
        stream = self.requests.pop(request_id, None)
        if stream is None:
            return []
        unfinished = [output for output in stream.outputs if not output.is_finished]
        for output in unfinished:
            self._remember(output)  # a client that leaves may send back what it got
            del self._outputs[output.request_id]
        return [output.request_id for output in unfinished]

    def abort(self, request_id: str) -> list[RequestId]:
        """End a request with what it has so far; return its unfinished sequences, for the core to end."""
        stream = self.requests[request_id]
        unfinished = [output for output in stream.outputs if not output.is_finished]
        names = self.close(request_id)
        for output in unfinished:
            output.abort()
        stream.times.finished_s = self._clock()
        return names

    def _remember(self, output: OutputStream) -> None:
        """Remember an output, whether or not it is complete."""
        recollection = output.request.recollection
        if self.answers is not None and recollection is not None:
            self.answers.add(recollection.key, output.generated_ids)

    def take(self, events: StepEvents) -> tuple[list[RequestStream], list[RequestId]]:
        """Add a step's events to their outputs.

        Events of sequences that are closed or stopped are ignored, since the core may run ahead.

        Returns:
            The requests with new tokens, which are dropped here once finished; and the sequences that ended here, at a
            stop string or with an error, and that the core still has to end.
        """
        outputs = self._outputs
        touched: dict[str, RequestStream] = {}
        stopped: list[RequestId] = []
        failed: list[TokenEvent] = []
        for name, handed_over in events.handed_over:
            if name in outputs:
                outputs[name].request.handed_over = handed_over
        for admission in events.admissions:
            if admission.request_id in outputs:
                outputs[admission.request_id].request.note_admission(admission)
        for name, start, entries in events.prompts:
            try:
                if name in outputs:
                    outputs[name].request.put_prompt_logprobs(start, entries)
            except Exception as error:
                LOGGER.exception(OUTPUT_FAILED)
                failed.append(TokenEvent(name, NO_TOKEN, None, FinishReason.ERROR, failure_text(error), None))
        for event in chain(failed, events.tokens):
            output = outputs.get(event.request_id)
            if output is None:
                continue
            request = output.request
            touched[request.request_id] = request
            try:
                must_end = output.append(event)
            except Exception as error:
                LOGGER.exception(OUTPUT_FAILED)
                output.fail(failure_text(error))
                must_end = True
            if must_end:
                stopped.append(event.request_id)
            if output.is_finished:
                self._remember(output)
                del outputs[event.request_id]
                if request.is_finished:
                    del self.requests[request.request_id]
            request.note_token(self._clock)
        return list(touched.values()), stopped


def _output_names(request_id: str, num_outputs: int) -> list[RequestId]:
    """Return the ids of a request's sequences."""
    if num_outputs == 1:
        return [RequestId(request_id)]
    return [RequestId(f"{request_id}#{index}") for index in range(num_outputs)]


def _wrap_seed(seed: int) -> int:
    """Wrap an integer into the range of int64."""
    return (seed + 2**63) % 2**64 - 2**63
