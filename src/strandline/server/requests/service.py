"""State and work shared by all endpoints: the engine client, the model's names and defaults, tokenization, templates.

Tokenization and templates run in a thread, one at a time, so that they do not block streams. Long texts have a separate
thread and grammars are compiled on trial in other processes, so that neither blocks short texts.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from fastapi import Request

from strandline.errors import RequestError
from strandline.kv_transfer_config import KVTransferConfig
from strandline.pictures.loader import PictureLoader, RefusedPictures
from strandline.reasoning_config import CLOSE
from strandline.records.adapters import salt_with
from strandline.records.pictures import Picture
from strandline.records.sampling_params import SamplingParams, StructuredOutputsParams
from strandline.records.transfer_params import NAME as TRANSFER_PARAMS
from strandline.records.transfer_params import TransferParams, read_transfer_params
from strandline.server.engines.engine_client import EngineClient
from strandline.server.engines.jobs import Job
from strandline.server.engines.prompt import Prompt
from strandline.server.http.error_responses import UnknownModelError
from strandline.server.http.gate import salt_of
from strandline.server.requests.adapters import Adapters
from strandline.server.requests.callable_tools import CallableTools
from strandline.server.requests.output_parser import REASONING_FIELDS, OutputFormat
from strandline.server.requests.request_bodies import Truncation
from strandline.server.requests.response_store import ResponseStore
from strandline.server.requests.structured_fields import binds_whole_answer
from strandline.server.requests.tools import Toolbox
from strandline.specs import RoutingShape
from strandline.text.client_telemetry import TelemetryFilter
from strandline.text.conversations import ChatRenderer
from strandline.text.frontend import CheckedParams
from strandline.text.picture_placeholders import PicturePlaceholders
from strandline.text.prompts import check_length, check_text, encode_text

T = TypeVar("T")
TryGrammar = Callable[[StructuredOutputsParams], Awaitable[None]]
Salt = Callable[[], str]
"""Returns a request's salt (``Service.salt_of``) at the moment of the call."""

LONG_CHARACTERS: Final = 64 * 1024
PICTURES_AT_ONCE: Final = 2
"""Pictures of a request that are loaded at the same time: the others wait, and leave threads to other requests."""


@dataclass(frozen=True, slots=True)
class Service:
    """One served model."""

    client: EngineClient
    model_names: Sequence[str]
    """The first one appears in responses."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that the model recommends."""
    chat_template: str | None = None
    """Replaces the tokenizer's own."""
    output_format: OutputFormat = field(default_factory=OutputFormat)
    """Formats of the model's tool calls and reasoning."""
    reasoning_fields: Sequence[str] = REASONING_FIELDS["both"]
    """Fields of chat completions' messages that hold the reasoning."""
    parse_special_tokens: bool = False
    """Parse control tokens in user and tool messages."""
    keep_client_telemetry: bool = False
    """Keep known telemetry of clients in system messages."""
    template_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template for requests that do not set them."""
    kv_transfer: KVTransferConfig | None = None
    """Transfer of prefixes between engines; None: off."""
    pictures: PictureLoader | RefusedPictures | None = None
    """Loads pictures; None: the model reads none."""
    try_grammar: TryGrammar | None = None
    """Compiles a grammar before it is sent to the engine (``GrammarTrials.check``); by default a thread does."""
    adapters: Adapters = field(default_factory=Adapters)
    """LoRA adapters, which requests name as models."""
    responses: ResponseStore = field(default_factory=lambda: ResponseStore(0))
    """Responses that later requests continue."""
    created_s: int = field(default_factory=lambda: int(time.time()))
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "tokenizer"))
    _long_thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "long texts"))
    _renderers: list[ChatRenderer] = field(default_factory=list)
    callable_tools: CallableTools = field(default_factory=CallableTools)
    _hidden_ids: dict[bool, frozenset[int] | None] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer.

        Raises:
            RequestError: the server runs without one.
        """
        if self.client.frontend.tokenizer is None:
            raise RequestError("the server runs without a tokenizer: send token ids")
        return self.client.frontend.tokenizer

    @property
    def renderer(self) -> ChatRenderer:
        """Return the renderer of conversations. Raises as ``tokenizer``."""
        if not self._renderers:
            self._renderers.append(
                ChatRenderer(
                    self.tokenizer,
                    self.chat_template,
                    parse_special_tokens=self.parse_special_tokens,
                    tool_calls=self.output_format.tool_calls,
                    answers=self.client.frontend.answers,
                    telemetry=None if self.keep_client_telemetry else TelemetryFilter(),
                    pictures=None if self.pictures is None else self.pictures.config,
                )
            )
        return self._renderers[0]

    @property
    def routing_shape(self) -> RoutingShape | None:
        """The experts of a token that answers have; None: the engine does not record them."""
        return self.client.frontend.limits.routing_shape

    def require_model(self, name: str | None) -> None:
        """Raise an UnknownModelError unless the name is served, or None."""
        if name is not None and name not in self.model_names and self.adapters.get(name) is None:
            served = (*self.model_names, *(adapter.name for adapter in self.adapters))
            raise UnknownModelError(f"the model {name[:200]!r} does not exist; served: {', '.join(served)}")

    def name_of(self, model: str | None) -> str:
        """Return what answers call the model that a request names, also after its adapter was unloaded."""
        return self.model_names[0] if model is None or model in self.model_names else model

    def salt_of(self, request: Request, given: str | None, model: str | None) -> str:
        """Return the salt of a request: the prefixes of its model's LoRA adapter and of its key, and its own.

        Raises:
            UnknownModelError: the model is not served, or not any more.
        """
        self.require_model(model)
        return salt_with(self.adapters.get(model), salt_of(request, given))

    def submit(
        self,
        name: str,
        prompts: Sequence[Prompt],
        params: CheckedParams,
        salt: Salt,
        transfer: TransferParams | None = None,
    ) -> Job:
        """Start a job with the salt of this moment: an adapter may have been replaced while prompts were prepared.

        Raises: as ``EngineClient.submit`` and ``salt_of``.
        """
        return self.client.submit(name, prompts, params, salt(), transfer)

    async def in_thread(self, work: Callable[[], T], num_characters: int = 0) -> T:
        """Run work in a thread.

        Args:
            num_characters: length of the text; long texts have a separate thread.
        """
        thread = self._thread if num_characters <= LONG_CHARACTERS else self._long_thread
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    async def bind(self, params: SamplingParams, toolbox: Toolbox, prompt: Prompt) -> CheckedParams:
        """Constrain an answer to the required calls, after the model's reasoning; check the parameters.

        Raises:
            RequestError: the parameters, or the requested structure, cannot be served.
        """
        text = prompt.text or ""
        reasoning_end = CLOSE if self.output_format.opens_reasoning(text, prompt.continued) else None
        structure = params.structured_outputs
        is_whole = structure is not None and binds_whole_answer(structure)
        if toolbox.choice in ("required", "named"):
            if structure is not None and is_whole:
                raise RequestError(
                    f"tool_choice {toolbox.choice!r} and {structure.origin} cannot be combined", param="tool_choice"
                )
            params = replace(params, structured_outputs=await self._calls(toolbox, reasoning_end))
        elif structure is not None and not is_whole and toolbox.schemas and self.output_format.tool_calls != "none":
            await self.try_structure(structure)  # its faults are not those of tools
            params = replace(params, structured_outputs=await self._calls(toolbox, reasoning_end, structure))
        elif structure is not None and reasoning_end is not None:
            params = replace(params, structured_outputs=replace(structure, after=reasoning_end))
        checked = await self.check(params)
        with_tools = toolbox.schemas is not None
        reasoning = self.output_format.reasoning_rules(text, with_tools=with_tools, continued=prompt.continued)
        return replace(checked, hidden_ids=self.hidden_ids(params, with_tools=with_tools), reasoning=reasoning)

    async def _calls(
        self, toolbox: Toolbox, reasoning_end: str | None, structure: StructuredOutputsParams | None = None
    ) -> StructuredOutputsParams:
        """Return the structure of an answer that calls tools.

        Args:
            structure: the answer may have it instead.

        Raises:
            RequestError: no tool can be called.
        """
        parser, tag = self.output_format.tool_calls, self.client.frontend.grammars.tag
        if toolbox.is_parallel and not await self.in_thread(lambda: self.renderer.takes_parallel_calls):
            toolbox = replace(toolbox, is_parallel=False)  # the next turn could not be rendered

        async def calls_of(schemas: Mapping[str, Any]) -> StructuredOutputsParams:
            instead = "" if structure is None else "@body"
            grammar = await asyncio.to_thread(toolbox.grammar, schemas, parser, tag, reasoning_end, instead=instead)
            if structure is None:
                return StructuredOutputsParams(grammar=grammar, origin="tools")
            return replace(structure, calls=grammar, origin="tools")

        async def check(schemas: Mapping[str, Any]) -> None:
            await self.try_structure(await calls_of(schemas))

        if parser == "none":
            return await calls_of({})
        return await calls_of(await self.callable_tools.accepted(toolbox.callable_schemas, check))

    def hidden_ids(self, params: SamplingParams, *, with_tools: bool) -> frozenset[int] | None:
        """Return the special tokens to leave out of an answer's text, if its parsers need some of them; else None."""
        tokenizer = self.client.frontend.tokenizer
        if tokenizer is None or not params.skip_special_tokens:
            return None
        if with_tools not in self._hidden_ids:
            special = {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special}
            hidden = special.keys() - {
                id for id, text in special.items() if text in self.output_format.tags(with_tools=with_tools)
            }
            self._hidden_ids[with_tools] = frozenset(hidden) if len(hidden) < len(special) else None
        return self._hidden_ids[with_tools]

    async def check(self, params: SamplingParams) -> CheckedParams:
        """Check parameters and compile the grammar, if any, on trial.

        Raises:
            RequestError: they cannot be served.
            EngineError: the grammar cannot be tried, or was not compiled in time.
        """
        if params.structured_outputs is not None:
            await self.try_structure(params.structured_outputs)
        return self.client.frontend.check_values(params)

    async def try_structure(self, structure: StructuredOutputsParams) -> None:
        """Compile a grammar on trial. Raises as ``check``."""
        if self.try_grammar is not None:
            await self.try_grammar(structure)
        else:
            await asyncio.to_thread(self.client.frontend.grammars.check, structure)

    def transfer_params(self, value: Mapping[str, Any] | None, num_prompts: int = 1) -> TransferParams | None:
        """Return a request's transfer to or from another engine; None: there is none.

        Raises:
            RequestError: the server's role does not allow it, or it may not fetch from that host.
        """
        params = read_transfer_params(value)
        if params is None:
            return None
        config = self.kv_transfer
        is_served = config is not None and (config.is_producer if params.is_remote_decode else config.is_consumer)
        if config is None or not is_served:
            role = "kv_producer" if params.is_remote_decode else "kv_consumer"
            raise RequestError(
                f"{TRANSFER_PARAMS} needs a server with --kv-transfer-config in the role {role} or kv_both"
            )
        if params.is_remote_prefill and not config.may_fetch_from(params.host):
            raise RequestError(
                f"{TRANSFER_PARAMS}: remote_host {params.host!r:.100} is not among the peers of --kv-transfer-config"
            )
        if num_prompts > 1:
            raise RequestError(f"{TRANSFER_PARAMS} needs one prompt, got {num_prompts}")
        return params

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, truncation: Truncation | None = None
    ) -> Prompt:
        """Return a text as a prompt."""
        tokenizer = self.tokenizer
        if truncation is None:
            check_length(text, self.client.frontend.max_characters)

        def work() -> list[int]:
            return encode_text(tokenizer, text, add_special_tokens=add_special_tokens)

        ids = await self.in_thread(work, len(text))
        return await self._truncated(Prompt(ids, text), truncation)

    async def _truncated(self, prompt: Prompt, truncation: Truncation | None) -> Prompt:
        """Return a prompt with as many tokens as a truncation leaves of it."""
        if truncation is None or len(prompt.token_ids) <= truncation.max_tokens:
            return prompt
        if prompt.pictures:
            raise RequestError(
                f"a prompt with pictures is not truncated; it has {len(prompt.token_ids)} tokens, and "
                f"{truncation.max_tokens} are asked for"
            )
        ids = truncated_ids(prompt.token_ids, truncation)
        num_dropped = len(prompt.token_ids) - len(ids) if truncation.from_left else 0
        marks = tuple(mark - num_dropped for mark in prompt.marks if 0 < mark - num_dropped <= len(ids))
        # The answer to a truncated conversation is not remembered: its key is the whole one.
        return Prompt(ids, await self.decode(ids), marks, continued=prompt.continued)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        vocab_size, tokenizer = self.client.frontend.limits.vocab_size, self.tokenizer
        wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise RequestError(f"token {wrong} is not in the vocabulary [0, {vocab_size})")
        text: str = await self.in_thread(lambda: tokenizer.decode(token_ids), len(token_ids))
        return text

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
        salt: str | None = "",
        continue_final_message: bool = False,
        truncation: Truncation | None = None,
        placeholders: PicturePlaceholders | None = None,
    ) -> Prompt:
        """Return a conversation as a prompt.

        Args:
            placeholders: placeholders of pictures in the messages; None: they have the pictures themselves.
            continue_final_message: as in ``ChatRenderer.render``.
            salt: as in ``ChatRenderer.render``.
        """
        check_text(salt or "", "cache_salt")
        renderer = self.renderer
        if placeholders is None and (placeholders := self.picture_placeholders()) is not None:
            messages = placeholders.insert(messages, "messages")
        pictures = await self.load(placeholders)

        def work() -> Prompt:
            chat = renderer.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                template_options={**self.template_defaults, **(template_options or {})},
                max_characters=self.client.frontend.max_characters if truncation is None else None,
                salt=salt,
                continue_final_message=continue_final_message,
                pictures=pictures,
            )
            return Prompt(chat.token_ids, chat.text, chat.marks, chat.recollection, chat.continued, chat.pictures)

        return await self._truncated(await self.in_thread(work, _num_characters(messages)), truncation)

    def picture_placeholders(self) -> PicturePlaceholders | None:
        """Return placeholders for the pictures of a request; None: the model reads none."""
        return None if self.pictures is None else PicturePlaceholders()

    async def load(self, placeholders: PicturePlaceholders | None) -> list[Picture]:
        """Load the pictures that placeholders stand for.

        Raises:
            RequestError: one cannot be loaded; the error has its path.
        """
        if placeholders is None or self.pictures is None or not placeholders.references:
            return []
        loader, turn = self.pictures, asyncio.Semaphore(PICTURES_AT_ONCE)
        loader.check_number(len(placeholders.references))

        async def load(reference: Any, path: str) -> Picture:
            async with turn:
                try:
                    return await asyncio.wrap_future(loader.submit(reference))
                except RequestError as error:
                    raise RequestError(f"{path}: {error}", param="messages") from error

        try:
            async with asyncio.TaskGroup() as group:
                loading = [
                    group.create_task(load(*each))
                    for each in zip(placeholders.references, placeholders.paths, strict=True)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in loading]


def truncated_ids(token_ids: list[int], truncation: Truncation) -> list[int]:
    """Return the tokens that a truncation leaves."""
    return token_ids[-truncation.max_tokens :] if truncation.from_left else token_ids[: truncation.max_tokens]


def _num_characters(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the approximate length of a conversation. Malformed parts do not count."""
    contents = [message.get("content") for message in messages]
    parts = [
        part.get("text")
        for content in contents
        if isinstance(content, list)
        for part in content
        if isinstance(part, Mapping)
    ]
    return sum(len(text) for text in (*contents, *parts) if isinstance(text, str))
