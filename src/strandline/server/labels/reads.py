"""Label reads: log-probabilities of given tokens after each of several prompts, which are run in one burst.

Prompts of a burst that share a prefix wait for the one that computes it: 200 questions about a text cost one prefill of
the text, and 200 short ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request

from strandline.errors import RequestError
from strandline.records.outputs import Logprob
from strandline.records.sampling_params import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from strandline.server.engines.prompt import Prompt
from strandline.server.http.request_ids import unique_id
from strandline.server.labels.questions import SPELLINGS, YES_OR_NO, Question, Reading
from strandline.server.requests.service import Salt, Service
from strandline.server.requests.usage_and_logprobs import Json, usage
from strandline.text.conversations import RenderedEndings
from strandline.text.output_streams import RequestStream

Entry = Mapping[int, Logprob]


class LabelReads:
    """What a request reads, and on whose behalf.

    Args:
        model: model that the request names.
        salt: salt of the request.
    """

    def __init__(self, service: Service, model: str | None, salt: Salt, *, priority: int | None = None) -> None:
        self.service = service
        self.name = unique_id()
        self.streams: Sequence[RequestStream] = ()
        """Those of the prompts that have been read."""
        self._salt, self._priority = salt, priority or 0

    @classmethod
    def of(cls, service: Service, request: Request, body: Any) -> "LabelReads":
        """Return those of a body with a model and a salt.

        Raises:
            UnknownModelError: the model is not served.
        """
        service.require_model(body.model)
        salt = partial(service.salt_of, request, body.cache_salt, body.model)
        return cls(service, body.model, salt, priority=body.priority)

    async def read(self, prompts: Sequence[list[int]], label_ids: Sequence[int]) -> list[Entry]:
        """Return the log-probabilities of tokens after each prompt, and that of the most likely token.

        Raises:
            RequestError: there are no prompts or too many, or one cannot be served; or there are too many tokens.
        """
        if len(label_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise RequestError(
                f"{len(label_ids)} label tokens are read at once, at most {MAX_LOGPROB_TOKEN_IDS} can be"
            )
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            logprobs=0,
            logprob_token_ids=list(label_ids),
            ignore_eos=True,
            detokenize=False,
            priority=self._priority,
        )
        checked = await self.service.check(params)
        shared = _num_shared(prompts)
        given = [Prompt(prompt, marks=(shared,) if 0 < shared < len(prompt) else ()) for prompt in prompts]
        with self.service.submit(f"read-{self.name}", given, checked, self._salt) as job:
            deltas = await job.whole()
        self.streams = job.streams
        entries = [delta.outputs[0].logprobs for delta in deltas]
        return [entry[0] for entry in entries if entry]

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], questions: Sequence[Question], options: Mapping[str, Any] | None
    ) -> list[Reading]:
        """Return the answers to questions about a conversation, which end its last message. Raises as ``judge``."""
        yes_or_no = await self.yes_or_no()
        questions = [replace(question, yes_or_no=yes_or_no) for question in questions]
        endings = ["\n\n" + question.prompt for question in questions]
        return await self.judge(messages, endings, [question.labels for question in questions], options)

    async def yes_or_no(self) -> Sequence[str]:
        """Return what the model's tokens for yes and no are called; raises a RequestError without a tokenizer."""
        tokenizer = self.service.tokenizer

        def find() -> Sequence[str]:
            lengths = ([len(tokenizer.encode(word, add_special_tokens=False)) for word in pair] for pair in SPELLINGS)
            return next((pair for pair, found in zip(SPELLINGS, lengths, strict=False) if found == [1, 1]), YES_OR_NO)

        return await self.service.in_thread(find)

    async def judge(
        self,
        messages: Sequence[Mapping[str, Any]],
        endings: Sequence[str],
        labels: Sequence[Sequence[str]],
        options: Mapping[str, Any] | None,
    ) -> list[Reading]:
        """Read labels after a conversation with each of several endings of its last message.

        Args:
            labels: labels of each ending.
            options: variables of the chat template.

        Raises:
            RequestError: the model opens its answers with reasoning, has no token for a label; or as ``read``.
        """
        service = self.service

        def work() -> RenderedEndings:
            return service.renderer.render_endings(
                messages,
                endings,
                template_options={"enable_thinking": False, **(options or {})},
                max_characters=service.client.frontend.max_characters,
            )

        with service.client.expect(len(endings)):
            num_characters = sum(len(str(message["content"])) for message in messages) + sum(map(len, endings))
            rendered = await service.in_thread(work, num_characters)
            if service.output_format.opens_reasoning(rendered.closing):
                raise RequestError("the model's prompts open its reasoning although thinking is off: no label follows")
            names = dict.fromkeys(label for each in labels for label in each)
            ids = {label: self._label_id(rendered.closing, label) for label in names}
        entries = await self.read([rendered.head_ids + tail for tail in rendered.tails_ids], list(ids.values()))
        return [_reading(entry, [ids[label] for label in each]) for entry, each in zip(entries, labels, strict=True)]

    def _label_id(self, closing: str, label: str) -> int:
        """Return the token of a label at the beginning of an answer.

        Raises:
            RequestError: the label is not one token there.
        """
        tokenizer = self.service.tokenizer
        before = tokenizer.encode(closing, add_special_tokens=False)
        token_ids = tokenizer.encode(closing + label, add_special_tokens=False)
        if token_ids[:-1] != before:
            raise RequestError(f"the model has no single token for the label {label!r}, with which answers would begin")
        return int(token_ids[-1])

    def usage(self, *, with_account: bool) -> Json:
        """Count the tokens of all prompts."""
        return usage(self.streams, is_batch=True, with_account=with_account)


def _num_shared(prompts: Sequence[list[int]]) -> int:
    """Return how many tokens all of several prompts begin with; 0 of a single one."""
    if len(prompts) < 2:
        return 0
    first, last = min(prompts), max(prompts)  # what these share, all between them do
    pairs = enumerate(zip(first, last, strict=False))
    return next((index for index, (ours, theirs) in pairs if ours != theirs), min(len(first), len(last)))


def _reading(entry: Entry, label_ids: Sequence[int]) -> Reading:
    likeliest = min(entry, key=lambda token: entry[token].rank)
    return Reading([entry[token].logprob for token in label_ids], likeliest in label_ids)
