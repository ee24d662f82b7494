"""``LLM``: offline generation, with vLLM's names."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, starmap
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self
from weakref import finalize

from tqdm import tqdm

from strandline.config import EngineConfig
from strandline.engine.foreign_methods import foreign_method_error
from strandline.engine.interrupts import uninterrupted
from strandline.engine.offline_prompts import ParsedPrompt, Prompt, PromptReader, as_list
from strandline.engine.workers.workers import spawned_workers
from strandline.errors import ConfigError, RequestError
from strandline.pictures.loader import new_loader
from strandline.records.adapters import LoadedAdapter, LoRARequest, salt_with
from strandline.records.cache_questions import CacheQuestion
from strandline.records.control import (
    MEMORIES,
    Memory,
    PrepareWeights,
    ResetCache,
    Sleep,
    UseWeights,
    WakeUp,
    new_epoch,
)
from strandline.records.outputs import RequestOutput
from strandline.records.pictures import Picture
from strandline.records.sampling_params import SamplingParams
from strandline.text.cache_report import answer_data
from strandline.text.conversations import ChatRenderer
from strandline.text.frontend import CheckedParams, CheckedRequest
from strandline.text.model_files import default_sampling_params, find_model
from strandline.text.picture_placeholders import PicturePlaceholders
from strandline.text.prompts import check_text

if TYPE_CHECKING:
    from strandline.engine.core import EngineCore
    from strandline.engine.shared_engine import Inbox

LOGGER: Final = logging.getLogger("strandline.engine")

CONTENT_FORMATS: Final = ("auto", "string")

Message = Mapping[str, Any]
MakeBar = Callable[..., contextlib.AbstractContextManager["tqdm[Any]"]]


class LLM:
    """A model ready to generate.

    Several threads may call it: their requests run together. A process that is forked from its own may not.

    Args:
        model: a directory in the published layout, a hub name, or ``demo`` for the bundled model.
        options: fields of ``EngineConfig``: ``dtype``, ``max_model_len``, ``enable_prefix_caching``, …

    Raises:
        ConfigError: an option is unknown or wrong, or the model cannot be loaded.

    Example:
        >>> llm = LLM("demo")
        >>> [output] = llm.chat([{"role": "user", "content": "What is 2 + 3?"}])
        >>> output.outputs[0].text
        '2 + 3 = 5.'
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self.config = EngineConfig.from_options({"model": model, **options})
        if self.config.kv_transfer is not None:
            raise ConfigError("--kv-transfer-config is for servers: between calls, LLM would not answer other engines")
        if self.config.data_parallel_size > 1:
            raise ConfigError(
                f"LLM is one engine, and data_parallel_size is {self.config.data_parallel_size}: run 'strandline serve "
                "--data-parallel-size N' and send it the prompts, or a process with an LLM for each GPU "
                "(CUDA_VISIBLE_DEVICES)"
            )
        self._default_params = SamplingParams(**default_sampling_params(find_model(self.config.model)))
        self._pictures = new_loader(self.config, find_model(self.config.model))
        self._prompts = PromptReader(self.get_tokenizer, self._pictures)
        with spawned_workers(self.config.num_workers) as workers:
            # These load torch, which the workers do at the same time.
            from strandline.engine.loading import load_engine
            from strandline.engine.shared_engine import SharedEngine

            self.engine = load_engine(self.config, workers, progress=True)
        self._names = count()
        self._loras = dict[LoRARequest, LoadedAdapter]()
        self._renderers: dict[str | None, ChatRenderer] = {}
        self._shared = SharedEngine(self.engine)
        self._close: Callable[[], object] = partial(_close, self.engine.core, self._shared.process)
        if self.config.file_tier:
            # Also when the script ends, or is interrupted.
            self._close = finalize(self, _close, self.engine.core, self._shared.process)

    def close(self) -> None:
        """Release the device, after the running step; nothing can be generated afterwards.

        With ``disk_cache`` or ``object_store``, entries that are only in memory are written to it first, for at most
        20 s; Ctrl-C ends that. The same happens without this call when the interpreter exits.
        """
        with self._shared.exclusively() if self._shared.process == os.getpid() else contextlib.nullcontext():
            self._close()

    if not TYPE_CHECKING:  # checkers shall find unknown names

        def __getattr__(self, name: str) -> NoReturn:
            raise foreign_method_error(name)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be pickled or copied: it holds a model's memory; make one in each process")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get_tokenizer(self) -> Any:
        """Return the tokenizer.

        Raises:
            RequestError: the engine runs without one.
        """
        if self.engine.frontend.tokenizer is None:
            raise RequestError("there is no tokenizer: the engine was started with skip_tokenizer_init=True")
        return self.engine.frontend.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what the model's ``generation_config.json`` recommends."""
        return self._default_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | MakeBar = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts in one batch; return the outputs in the prompts' order.

        Args:
            prompts: one prompt or several. A prompt is a string, a list of token ids, or a mapping with
                ``prompt`` or ``prompt_token_ids``, and optionally ``cache_salt``, ``marks``: token positions where
                other prompts are likely to share its beginning, and ``multi_modal_data``: ``{"image": …}`` with a
                picture of Pillow, or a list of them, for each of the model's tokens that stand for one.
            sampling_params: parameters for all prompts, or one for each. None: the model's defaults.
            use_tqdm: show progress; or what makes the progress bar, called as ``tqdm`` is.
            lora_request: the LoRA adapter for all prompts, or one for each; it is loaded if it is not.
            priority: that of all prompts, or one for each. None: that of ``sampling_params``.

        Raises:
            RequestError: a prompt or parameter cannot be served; none is run.
        """
        self._shared.require_own_process()
        given = [(prompt, self._prompts.load_pictures(prompt)) for prompt in as_list(prompts)]
        with contextlib.ExitStack() as stack:
            with self._shared.exclusively():
                parsed = list(starmap(self._prompts.read, given))
                loras = _for_each(lora_request, len(parsed))
                parsed = [self._with_lora(prompt, lora) for prompt, lora in zip(parsed, loras, strict=True)]
                params = self._check_params(len(parsed), sampling_params, priority)
                check = self.engine.frontend.check
                requests = [
                    check(prompt.token_ids, each, prompt.pictures) for prompt, each in zip(parsed, params, strict=True)
                ]
                inbox: Inbox = {}
                names = [self._add(each, request, stack, inbox) for each, request in zip(parsed, requests, strict=True)]
            return self._run(names, inbox, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | MakeBar = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several together.

        Args:
            messages: one conversation (a list of messages with ``role`` and ``content``) or a list of them. Parts of
                a content may be pictures, as the server takes them, or ``{"type": "image", "image": …}`` of Pillow.
                ``cache_control`` on a message, on a text part of one or on a tool asks for a snapshot at its end.
            lora_request: the LoRA adapter for all conversations, or one for each; it is loaded if it is not.
            priority: that of all conversations, or one for each. None: that of ``sampling_params``.
            chat_template_content_format: ``auto`` or ``string``: the template gets texts, and parts where there are
                pictures.
            add_generation_prompt: begin an answer after the last message.
            chat_template_kwargs: additional variables of the template, such as ``enable_thinking``.
            continue_final_message: continue the last message, without repeating it; needs ``add_generation_prompt``
                to be False.
            cache_salt: conversations share cached prefixes, and recall answers, only of the same salt.

        Raises:
            RequestError: a conversation or parameter cannot be served; none is run.
        """
        if chat_template_content_format not in CONTENT_FORMATS:
            raise RequestError(
                f"chat_template_content_format must be one of {', '.join(CONTENT_FORMATS)}, as the template gets "
                f"texts; got {chat_template_content_format!r:.100}"
            )
        if isinstance(messages, str | Mapping):
            raise RequestError(
                f"messages must be a list of messages, or a list of such lists, got {messages!r:.100}", param="messages"
            )
        if not messages:
            raise RequestError("the conversation is empty; at least one message is needed")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [
            self.render(
                conversation,
                chat_template,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                cache_salt=cache_salt,
                continue_final_message=continue_final_message,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, priority=priority)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding the output so far after every step. Closing the iterator aborts."""
        self._shared.require_own_process()
        pictures = self._prompts.load_pictures(prompt)
        with contextlib.ExitStack() as stack:
            with self._shared.exclusively():
                parsed = self._with_lora(self._prompts.read(prompt, pictures), None)
                [params] = self._check_params(1, sampling_params)
                request = self.engine.frontend.check(parsed.token_ids, params, parsed.pictures)
                inbox: Inbox = {}
                self._add(parsed, request, stack, inbox)
            is_finished = False
            while not is_finished:
                with self._shared.exclusively():
                    outputs = [output.copy() for output in self._shared.step(inbox)]
                for output in outputs:
                    is_finished = output.finished
                    yield output

    def render(
        self,
        messages: Any,
        chat_template: str | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        continue_final_message: bool = False,
    ) -> Prompt:
        """Render a conversation with the chat template. An answer in it is encoded as it was generated, if it was.

        Raises:
            RequestError: the messages are malformed, or there is no template.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message needs add_generation_prompt=False; the output cannot also begin a message"
            )
        if not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt must be a string, got {cache_salt!r:.100}")
        check_text(cache_salt, "cache_salt")
        self._shared.require_own_process()
        pictures: list[Picture] = []
        if self._pictures is not None:
            placeholders = PicturePlaceholders()
            messages = placeholders.insert(messages, "messages")
            pictures = self._pictures.load(placeholders.references)
        with self._shared.exclusively():
            return self._rendered(
                messages,
                chat_template,
                pictures=pictures,
                salt=cache_salt,
                add_generation_prompt=add_generation_prompt,
                tools=tools or (),
                template_options=chat_template_kwargs,
                continue_final_message=continue_final_message,
            )

    def _rendered(self, messages: Any, chat_template: str | None, *, salt: str, **options: Any) -> Prompt:
        answers = self.engine.frontend.answers
        renderer = self._renderers.setdefault(
            chat_template,
            ChatRenderer(
                self.get_tokenizer(),
                chat_template,
                answers=answers,
                pictures=None if self._pictures is None else self._pictures.config,
            ),
        )
        chat = renderer.render(messages, salt=salt, **options)
        prompt = {"prompt": chat.text, "prompt_token_ids": chat.token_ids, "marks": chat.marks}
        if chat.pictures:
            prompt["pictures"] = chat.pictures
        if chat.recollection is not None:
            prompt["recollection"] = chat.recollection
        return {**prompt, "cache_salt": salt} if salt else prompt

    def explain(self, prompt: Prompt) -> dict[str, Any]:
        """Explain what a prompt would hit now, and why it would not hit more, without running or changing anything.

        Returns:
            The body of the server's ``/cache/explain``: ``account``, ``snapshots``, ``parting``, ``advice``, ….

        Raises:
            RequestError: the prompt could not be served.
        """
        self._shared.require_own_process()
        pictures = self._prompts.load_pictures(prompt)
        with self._shared.exclusively():
            return self._explained(self._with_lora(self._prompts.read(prompt, pictures), None))

    def _explained(self, parsed: ParsedPrompt) -> dict[str, Any]:
        frontend = self.engine.frontend
        frontend.check(parsed.token_ids, frontend.check_params(SamplingParams()), parsed.pictures)
        frontend.picture_names.note(parsed.pictures)
        tokenizer = frontend.tokenizer

        def text_of(tokens: Sequence[int]) -> str:
            if tokenizer is None:
                return " ".join(map(str, tokens))
            return frontend.picture_names.text_of(tokens, lambda ids: str(tokenizer.decode(ids)))

        recalled = parsed.recollection
        num_remembered = 0 if recalled is None else recalled.num_tokens
        question = CacheQuestion(parsed.salt, tokens=parsed.cached_ids, num_remembered=num_remembered)
        return answer_data(self.engine.core.watch.answer(question), text_of)

    # Control

    def sleep(self, level: int = 1) -> None:
        """Give back the memory of the cache, and on GPUs of the weights, until ``wake_up``.

        Calls that run in other threads, and streams that are continued before then, end with a ``RequestError``.

        Args:
            level: 1: weights stay in host memory; 2: they are read again.
        """
        if level not in (1, 2):
            raise RequestError(f"level must be 1 or 2, got {level!r:.100}")
        with self._shared.exclusively(), uninterrupted():
            self.engine.core.control.apply(Sleep(level))

    def wake_up(self, tags: Sequence[Memory] | None = None) -> None:
        """Take again what ``sleep`` gave back, or a part of it: ``weights`` or ``kv_cache``.

        Raises:
            RequestError: a tag is unknown.
            ConfigError: the weights cannot be read again.
            OutOfMemoryError: too little memory is free. The engine stays asleep; free memory, and call this again.
        """
        unknown = [tag for tag in tags or () if tag not in MEMORIES]
        if unknown or isinstance(tags, str):
            raise RequestError(f"tags must be a list of {', '.join(MEMORIES)}, got {tags!r:.100}")
        with self._shared.exclusively(), uninterrupted():
            self.engine.core.control.apply(WakeUp(tuple(MEMORIES if tags is None else tags)))

    def reset_prefix_cache(self) -> bool:
        """Drop all that is cached; return whether that was possible: nothing may run."""
        with self._shared.exclusively(), uninterrupted():
            return self.engine.core.control.apply(ResetCache(new_epoch(), forced=False))

    def update_weights_from_disk(self, model_path: str | os.PathLike[str]) -> None:
        """Compute with the weights of the same model in another directory; what is cached of others is never hit.

        Raises:
            ConfigError: they cannot be read, or are another model's. The weights are as before.
            OutOfMemoryError: too little memory is free for them. The weights are as before.
        """
        with self._shared.exclusively(), uninterrupted():
            self.engine.core.control.apply(PrepareWeights(os.fspath(model_path)))
            self.engine.core.control.apply(UseWeights(new_epoch()))

    # Parts

    def _with_lora(self, prompt: ParsedPrompt, request: LoRARequest | None) -> ParsedPrompt:
        """Return a prompt that an adapter computes, which is read if it is new."""
        if request is not None and request not in self._loras:
            self._loras[request] = self.engine.core.adapters.load(request.lora_name, request.lora_path)
        return replace(prompt, salt=salt_with(None if request is None else self._loras[request], prompt.salt))

    def _check_params(
        self,
        num_prompts: int,
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None = None,
    ) -> list[CheckedParams]:
        """Return checked parameters, one for each prompt."""
        check = self.engine.frontend.check_params
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams) and not isinstance(priority, Sequence):
            return [check(params if priority is None else replace(params, priority=priority))] * num_prompts
        if isinstance(params, SamplingParams):
            params = [params] * num_prompts
        given: Any = params
        if not isinstance(given, Sequence) or not all(isinstance(each, SamplingParams) for each in given):
            raise RequestError(f"sampling_params must be SamplingParams, or a list of them, got {params!r:.100}")
        if len(params) != num_prompts:
            raise RequestError(f"{num_prompts} prompts came with {len(params)} sampling parameters")
        if priority is None:
            return [check(each) for each in params]
        priorities = list(priority) if isinstance(priority, Sequence) else [priority] * num_prompts
        if len(priorities) != num_prompts:
            raise RequestError(f"{num_prompts} prompts came with {len(priorities)} priorities", param="priority")
        return [check(replace(each, priority=value)) for each, value in zip(params, priorities, strict=True)]

    def _add(self, prompt: ParsedPrompt, request: CheckedRequest, stack: contextlib.ExitStack, inbox: "Inbox") -> str:
        """Add a request of a call. It is aborted when the stack unwinds before it has finished."""
        name = str(next(self._names))
        self._shared.add(
            name,
            request,
            stack,
            inbox,
            prompt=prompt.text,
            salt=prompt.salt,
            marks=prompt.marks,
            recollection=prompt.recollection,
        )
        return name

    def _run(self, names: Sequence[str], inbox: "Inbox", *, use_tqdm: bool | MakeBar) -> list[RequestOutput]:
        self.engine.core.control.require_running()
        finished: dict[str, RequestOutput] = {}
        make_bar: MakeBar = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
        with make_bar(total=len(names), desc="Processed prompts", unit="request") as bar:
            while len(finished) < len(names):
                with self._shared.exclusively():
                    ended = [output for output in self._shared.step(inbox) if output.finished]
                finished.update((output.request_id, output) for output in ended)
                bar.update(len(ended))
        return [finished[name] for name in names]


def _for_each(
    requests: LoRARequest | Sequence[LoRARequest | None] | None, num_prompts: int
) -> list[LoRARequest | None]:
    """Return the adapter of each prompt. Raises ``RequestError``: their number is not that of the prompts."""
    loras = list(requests) if isinstance(requests, Sequence) else [requests] * num_prompts
    if len(loras) != num_prompts:
        raise RequestError(f"{num_prompts} prompts came with {len(loras)} LoRA requests")
    return loras


def _close(core: "EngineCore", process: int) -> None:
    if process != os.getpid():
        return  # a process that was forked from the engine's ends
    try:
        if (report := core.flush()) is not None:
            LOGGER.info("%s", report)
    except KeyboardInterrupt:
        LOGGER.info("interrupted; the remaining entries were not written")
    finally:
        core.close()
