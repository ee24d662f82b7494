"""Warm-up requests: run before the first real one, so that no kernel is compiled while a request waits.

Every kind of step is run once. A scheduler and a cache that are discarded afterwards plan the warm-up requests, which
run in the engine's own memory, empty then. Kernels are compiled by the number of rows of each kind, by the context
length and by the way tokens are chosen; so the requests differ in these. They pass through two layers of each
kind alone, which launch all kernels: the host takes longer to launch these steps than a GPU to run them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Final

from strandline.device.executor import Executor, LaunchedStep
from strandline.engine.requests.request import Request
from strandline.engine.scheduling.scheduler import Scheduler
from strandline.ids import RequestId
from strandline.picture_config import NUM_CHANNELS
from strandline.records.events import Submission
from strandline.records.pictures import Picture, PictureSpan, picture_digest
from strandline.records.plan import NewRequest, StepPlan
from strandline.records.sampling_params import SamplingParams

WHOLE_TOKENS: Final = 2000
"""A context that layers with an index of 2,048 tokens read whole."""

PROMPT_TOKENS: Final = (1, 2, 5, 16, 30, 40, 65, 150, 160, 256, 300, 600, WHOLE_TOKENS, 2100)
"""Some beyond every number of rows at which an operation switches kernels, and some multiples of 16."""

NUM_DECODES: Final = (0, 1, 5, 20, 70)
"""Sequences that decode in the same steps."""

NUM_ADAPTED_DECODES: Final = (0, 1, 5)
"""The same with adapters: also steps of three and four rows, whose products add what these change themselves."""

LONG_TOKENS: Final = 2100
"""A context whose keys are divided among as many programs as possible."""

SHORT_TOKENS: Final = 10

CONCURRENT_PROMPTS: Final = 17
"""More prompts than most steps compute at once."""

TWO_BLOCKS_TOKENS: Final = 100
"""A context that is divided among two programs."""

DECODED_TOKENS: Final = 64
"""Longest output of a request that decodes beside prompts: enough for the steps of all."""

FEWEST_DECODED_TOKENS: Final = 20
"""Shortest: every log is filled twice."""

PICTURE_COLUMNS: Final = 16
"""Tokens of a picture in a row."""

MAX_STEPS: Final = 4
"""Steps per prompt at most; prompts are shorter where steps are small."""

SAMPLERS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 100},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 1.0, "logprobs": 0, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {0: 1.0}, "min_tokens": 2},
    {"temperature": 0.0, "prompt_logprobs": 2},
)


class WarmUp:
    """Runs warm-up requests.

    Args:
        scheduler: to be discarded; its cache is as large as the engine's.
        max_model_len: the longest request, in tokens.
        takes_adapters: whether requests can name LoRA adapters.
    """

    def __init__(
        self, executor: Executor, scheduler: Scheduler, max_model_len: int, *, takes_adapters: bool = False
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._max_model_len = max_model_len
        self._in_flight: tuple[StepPlan, LaunchedStep] | None = None
        self._names = count()
        self._takes_adapters = takes_adapters
        self._adapter = ""
        """Adapter of the requests that are added."""

    def run(self) -> None:
        """Run all kinds of steps, and leave nothing behind in the executor."""
        self._executor.begin_warm_up()
        for contexts in (*map(_contexts, NUM_DECODES), [SHORT_TOKENS]):
            if len(contexts) < self._scheduler.max_num_seqs:
                self._prefill_beside(contexts)
        self._prefill_together()
        self._resume()
        self._sample()
        self._see()
        self._add(2 * self._scheduler.max_num_batched_tokens + 1, 1)
        self._run_until(lambda: not len(self._scheduler))
        if self._takes_adapters:
            self._adapt()
        self._executor.forget_requests()
        self._executor.end_warm_up()

    def _adapt(self) -> None:
        """Compute prompts and decode with an adapter that changes nothing."""
        self._adapter = self._executor.load_empty_adapter()
        for contexts in map(_contexts, NUM_ADAPTED_DECODES):
            if len(contexts) < self._scheduler.max_num_seqs:
                self._prefill_beside(contexts)
        self._executor.unload_adapter(self._adapter)
        self._adapter = ""

    def _prefill_beside(self, contexts: Sequence[int]) -> None:
        """Compute prompts of all lengths, one by one, beside sequences that decode after prompts of ``contexts``."""
        decoding = [self._add(length, DECODED_TOKENS) for length in contexts]
        self._run_until(lambda: all(request.output_ids for request in decoding))
        for num_tokens in PROMPT_TOKENS:
            prompt = self._add(num_tokens, 1)
            self._run_until(partial(_is_finished, prompt))
        self._run_until(lambda: all(len(request.output_ids) >= FEWEST_DECODED_TOKENS for request in decoding))
        self._settle()
        for request in decoding:
            request.max_total = min(request.max_total, request.num_tokens + 2)
        self._run_until(lambda: not len(self._scheduler))

    def _prefill_together(self) -> None:
        """Compute many prompts in one step: short ones, then with a long one, then as many tokens as fit."""
        most = self._scheduler.max_num_seqs
        full_tokens = max(1, self._scheduler.max_num_batched_tokens // most)
        for lengths in (
            [SHORT_TOKENS] * CONCURRENT_PROMPTS,
            [LONG_TOKENS] + [SHORT_TOKENS] * CONCURRENT_PROMPTS,
            [full_tokens] * most,
        ):
            for num_tokens in lengths:
                self._add(num_tokens, 1)
            self._run_until(lambda: not len(self._scheduler))

    def _resume(self) -> None:
        """Continue cached prompts, one that layers with an index read whole: by a few tokens, and by none."""
        for context in (LONG_TOKENS, WHOLE_TOKENS):
            for num_tokens in (context, context + 20, context + 20):
                self._add(num_tokens, 2, salt=f"resumed {context}")
                self._run_until(lambda: not len(self._scheduler))

    def _sample(self) -> None:
        """Choose tokens in every way, alone and next to each other."""
        for options in SAMPLERS:
            self._add(TWO_BLOCKS_TOKENS, 3, options)
            self._run_until(lambda: not len(self._scheduler))
        for options in SAMPLERS:
            self._add(TWO_BLOCKS_TOKENS, 3, options)
        self._run_until(lambda: not len(self._scheduler))

    def _see(self) -> None:
        """Compute a prompt with a picture, if the model reads any and the prompt is not too long."""
        config, num_tokens = self._executor.facts.picture_config, PICTURE_COLUMNS + 2
        if config is None or num_tokens > self._max_num_tokens or self._executor.facts.encoder_tokens < PICTURE_COLUMNS:
            return
        height, width = config.token_side, PICTURE_COLUMNS * config.token_side
        pixels = bytes(height * width * NUM_CHANNELS)
        picture = Picture(picture_digest(pixels, height, width), pixels, height, width, (width, height))
        self._submit(num_tokens, 2, picture=(PictureSpan(1, 1, PICTURE_COLUMNS, picture.digest), picture))
        self._run_until(lambda: not len(self._scheduler))

    @property
    def _max_num_tokens(self) -> int:
        """Maximum length of a prompt."""
        return max(1, min(self._max_model_len - 2, MAX_STEPS * self._scheduler.max_num_batched_tokens))

    def _add(
        self, num_tokens: int, max_tokens: int, options: Mapping[str, Any] | None = None, salt: str | None = None
    ) -> Request:
        """Queue a prompt of ``num_tokens``, as far as the model allows; without a salt it shares no prefix."""
        return self._submit(min(num_tokens, self._max_num_tokens), max_tokens, options, salt)

    def _submit(
        self,
        num_tokens: int,
        max_tokens: int,
        options: Mapping[str, Any] | None = None,
        salt: str | None = None,
        picture: tuple[PictureSpan, Picture] | None = None,
    ) -> Request:
        name = f"warm-up-{next(self._names)}"
        values = {"temperature": 0.0, **(options or {}), "max_tokens": max_tokens, "ignore_eos": True}
        new = NewRequest(
            RequestId(name), (0,) * num_tokens, SamplingParams(**values), 0, frozenset(), (), adapter=self._adapter
        )
        max_total = min(num_tokens + max_tokens, self._max_model_len)
        seen = [] if picture is None else [picture]
        pictures, pixels = tuple(span for span, _ in seen), {span.digest: pixels for span, pixels in seen}
        salt = name if salt is None else salt
        request = Request(Submission(new, max_total, salt, pictures=pictures, pixels=pixels))
        self._scheduler.add(request)
        return request

    def _run_until(self, is_done: Callable[[], bool]) -> None:
        """Run steps, each planned while the one before it runs where that is possible."""
        while len(self._scheduler) and not is_done():
            if not self._scheduler.can_run_ahead:
                self._settle()
            plan = self._scheduler.plan()
            if plan is None:
                self._settle()
                continue
            if not self._scheduler.drafts.can_launch_ahead:
                self._settle()
            launched = self._executor.launch(plan)
            self._settle()
            self._scheduler.advance(plan)
            self._in_flight = (plan, launched)
        if not len(self._scheduler):
            self._settle()

    def _settle(self) -> None:
        if self._in_flight is not None:
            plan, launched = self._in_flight
            self._in_flight = None
            self._scheduler.settle(plan, launched.result())


def _contexts(num_decodes: int) -> list[int]:
    """Return the contexts of sequences that decode: a long one, if there are any."""
    return [LONG_TOKENS, *[SHORT_TOKENS] * num_decodes][:num_decodes]


def _is_finished(request: Request) -> bool:
    return request.is_finished
