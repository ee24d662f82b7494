"""The engine: requests in, steps, outputs out. Synchronous; one step per call.

A bad request raises where it is added and touches nothing else. An error inside a step is ours and ends the
engine: a doubtful state is never served.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch

from strandline.cache import PrefixCache
from strandline.cache.invariants import check
from strandline.clock import SYSTEM_CLOCK, Clock
from strandline.config import EngineConfig
from strandline.engine.collector import Collector
from strandline.engine.outputs import RequestOutput
from strandline.engine.plan import NewRequest, StepPlan, StepResult
from strandline.engine.request import FinishReason, Request
from strandline.engine.runner import LanguageModel, Runner
from strandline.engine.sampling_params import SamplingParams
from strandline.engine.scheduler import Scheduler
from strandline.engine.sizing import choose_max_model_len, choose_memory_bytes
from strandline.env import is_cache_debugged
from strandline.errors import ConfigError, RequestError
from strandline.ids import RequestId

SEED_BITS = 63


class Engine:
    """Runs requests on one model.

    Args:
        model: loaded weights on ``device``.
        config: limits and memory.
        tokenizer: a transformers tokenizer, or None to work with token ids alone.
        eos_ids: tokens that end a request unless it says ``ignore_eos``.

    Raises:
        ConfigError: the memory does not hold one request of ``max_model_len`` tokens.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig,
        *,
        tokenizer: Any | None = None,
        eos_ids: frozenset[int] = frozenset(),
        device: torch.device | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.vocab_size = model.vocab_size
        device = device or torch.device("cpu")
        spec = model.spec
        num_slabs = choose_memory_bytes(config, device) // spec.slab_bytes
        self.max_model_len = choose_max_model_len(config, spec, model.max_position, num_slabs)
        self.cache = PrefixCache(num_slabs, spec.blocks_per_slab, enabled=config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.cache, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        )
        self._is_debugged = is_cache_debugged()
        self.runner = Runner(model, num_slabs, device, poison=self._is_debugged)
        self._collectors: dict[str, Collector] = {}
        self._collector_of: dict[RequestId, Collector] = {}
        self._seeds = Random(config.seed)
        self._clock = clock

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        salt: str = "",
    ) -> None:
        """Queue a request.

        Args:
            prompt: the text behind ``prompt_ids``, to be handed back with the output.
            salt: requests share cached prefixes only with requests of the same salt.

        Raises:
            RequestError: the prompt or a parameter cannot be served; nothing has changed.
        """
        self.check_request(prompt_ids, params)
        if request_id in self._collectors:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request")
        requests = self._make_requests(request_id, list(prompt_ids), params, salt)
        for request in requests:
            self.scheduler.add(request)
        collector = Collector(request_id, prompt, requests, self.tokenizer, self._clock())
        self._collectors[request_id] = collector
        self._collector_of.update((request.request_id, collector) for request in requests)

    def check_request(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise a RequestError if such a request cannot be served."""
        if not prompt_ids:
            raise RequestError("the prompt is empty; at least one token is needed")
        for token in prompt_ids:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise RequestError(f"prompt token {token!r} is not in the vocabulary [0, {self.vocab_size})")
        if len(prompt_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens; with at least one token of output it must stay within "
                f"max_model_len {self.max_model_len}"
            )
        named = [*(params.stop_token_ids or ()), *(params.logit_bias or ())]
        for token in named:
            if token >= self.vocab_size:
                raise RequestError(f"token {token} of the sampling parameters is not in [0, {self.vocab_size})")
        if self.tokenizer is None and (params.stop_strings or params.bad_words):
            raise RequestError("stop strings and bad_words need a tokenizer; the engine runs without one")

    def _make_requests(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams, salt: str
    ) -> list[Request]:
        room = self.max_model_len if params.max_tokens is None else len(prompt_ids) + params.max_tokens
        seed = self._seeds.getrandbits(SEED_BITS) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.eos_ids)
        bad_words_ids = self._encode_bad_words(params)
        requests: list[Request] = []
        for index in range(params.n):
            name = request_id if params.n == 1 else f"{request_id}#{index}"
            new = NewRequest(RequestId(name), prompt_ids, params, _wrap_seed(seed + index), stop_ids, bad_words_ids)
            requests.append(Request(new, max_total=min(room, self.max_model_len), salt=salt))
            if params.prompt_logprobs is not None:
                params = replace(params, prompt_logprobs=None)  # of the first output; the others share its prompt
        return requests

    def _encode_bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of the banned words, at the start of a text and after a space."""
        if not params.bad_words or self.tokenizer is None:
            return ()
        forms = [form for word in params.bad_words for form in (word, " " + word.lstrip())]
        encoded = (self.tokenizer.encode(form, add_special_tokens=False) for form in forms)
        return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))

    def abort(self, request_id: str) -> None:
        """End a request and free what it holds. Unknown ids are ignored."""
        collector = self._collectors.pop(request_id, None)
        if collector is None:
            return
        for name in collector.streams:
            self.scheduler.finish(RequestId(name), FinishReason.ABORT)
            del self._collector_of[RequestId(name)]

    @property
    def has_unfinished(self) -> bool:
        return bool(self._collectors)

    # Steps

    def step(self) -> list[RequestOutput]:
        """Run one step; return the outputs so far of every request that got a token."""
        plan = self.scheduler.plan()
        if plan is None:
            return []
        result = self.runner.run(plan)
        advanced = self.scheduler.commit(plan, result)
        outputs = self._collect(plan, result, advanced)
        if self._is_debugged:
            check(self.cache)
        return outputs

    def _collect(self, plan: StepPlan, result: StepResult, advanced: list[Request]) -> list[RequestOutput]:
        for index, entries in result.prompt_logprobs.items():
            sequence = plan.sequences[index]
            self._collector_of[sequence.request_id].put_prompt_logprobs(sequence.start, entries)
        indices = [index for index, token in enumerate(result.token_ids) if token is not None]
        touched: dict[str, Collector] = {}
        for index, request in zip(indices, advanced, strict=True):
            collector = self._collector_of[request.request_id]
            touched[collector.request_id] = collector
            stream = collector.streams[request.request_id]
            stop = stream.append(request.output_ids[-1], result.logprobs.get(index))
            if stop is not None:
                self._end_by_stop(request, stop)
            collector.note_token(self._clock)
        return [self._output(collector) for collector in touched.values()]

    def _end_by_stop(self, request: Request, stop: str) -> None:
        """A stop string wins over any other reason to end at the same token."""
        self.scheduler.finish(request.request_id, FinishReason.STOP, stop)
        request.finish_reason, request.stop_reason = FinishReason.STOP, stop

    def _output(self, collector: Collector) -> RequestOutput:
        if collector.is_finished:
            del self._collectors[collector.request_id]
            for name in collector.streams:
                del self._collector_of[RequestId(name)]
        return collector.output()

    # Reading

    def describe(self) -> list[str]:
        """Say in a few lines what the cache has room for."""
        spec = self.runner.arena.spec
        total = self.cache.arena.num_slabs * spec.slab_bytes
        return [
            f"cache: {total / 2**20:,.0f} MiB for blocks and snapshots together, prefix caching "
            + ("on" if self.cache.enabled else "off"),
            f"block: {spec.block_bytes / 2**10:,.0f} KiB for 64 tokens; snapshot: {spec.slab_bytes / 2**10:,.0f} KiB; "
            f"a snapshot takes the room of {spec.blocks_per_slab} blocks",
            f"longest request: {self.max_model_len:,} tokens; shortest prefix that can hit: 1 token",
        ]


def _wrap_seed(seed: int) -> int:
    """Bring any integer into the range of int64."""
    return (seed + 2**63) % 2**64 - 2**63


def resolve_device(name: str) -> torch.device:
    """Return the device that a configuration names.

    Raises:
        ConfigError: it is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no GPU; use device='cpu' or 'auto'")
    return torch.device(name)
