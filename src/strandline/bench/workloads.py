"""Workloads on raw token ids, from a seed: conversations, shared prefixes, plain batches.

Every workload runs against an ``LLM`` and reports the same figures, so that cache modes compare line by line.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from statistics import fmean

from strandline.engine.llm import LLM
from strandline.records.outputs import RequestOutput
from strandline.records.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Report:
    """Measurements of one run of a workload."""

    prompt_tokens: int
    hit_tokens: int
    output_tokens: int
    wall_s: float
    mean_ttft_s: float
    outputs: tuple[tuple[int, ...], ...]
    """Token ids of every output, in a fixed order, to compare runs by."""

    @property
    def hit_share(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens served per second."""
        return (self.prompt_tokens + self.output_tokens) / self.wall_s


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Conversations that share a system prompt and grow turn by turn; turn ``t`` of all conversations is one batch."""

    num_conversations: int = 8
    num_turns: int = 6
    system_tokens: int = 700
    user_tokens: tuple[int, int] = (150, 250)
    output_tokens: int = 48
    seed: int = 0

    def run(self, llm: LLM) -> Report:
        """Run all turns, greedy, outputs of a fixed length."""
        rng = Random(self.seed)
        vocab_size = llm.engine.vocab_size
        system = _draw(rng, vocab_size, self.system_tokens)
        histories = [list(system) for _ in range(self.num_conversations)]
        params = SamplingParams(temperature=0, max_tokens=self.output_tokens, ignore_eos=True)
        outputs: list[RequestOutput] = []
        with stopwatch() as elapsed:
            for _ in range(self.num_turns):
                for history in histories:
                    history.extend(_draw(rng, vocab_size, rng.randint(*self.user_tokens)))
                turn = llm.generate([list(history) for history in histories], params, use_tqdm=False)
                for history, output in zip(histories, turn, strict=True):
                    history.extend(output.outputs[0].token_ids)
                outputs += turn
        return report_of(outputs, elapsed())


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Requests that share a prefix and differ after it, ``concurrency`` at a time."""

    num_requests: int = 32
    prefix_tokens: int = 1000
    suffix_tokens: int = 200
    output_tokens: int = 16
    concurrency: int = 1
    seed: int = 0

    def run(self, llm: LLM) -> Report:
        """Run all requests, greedy, outputs of a fixed length."""
        rng = Random(self.seed)
        vocab_size = llm.engine.vocab_size
        prefix = _draw(rng, vocab_size, self.prefix_tokens)
        prompts = [prefix + _draw(rng, vocab_size, self.suffix_tokens) for _ in range(self.num_requests)]
        params = SamplingParams(temperature=0, max_tokens=self.output_tokens, ignore_eos=True)
        outputs: list[RequestOutput] = []
        with stopwatch() as elapsed:
            for first in range(0, len(prompts), self.concurrency):
                outputs += llm.generate(prompts[first : first + self.concurrency], params, use_tqdm=False)
        return report_of(outputs, elapsed())


@dataclass(frozen=True, slots=True)
class Batch:
    """Unrelated prompts, all at once: plain prefill and decode."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    seed: int = 0

    def run(self, llm: LLM) -> Report:
        """Run all requests together, greedy, outputs of a fixed length."""
        rng = Random(self.seed)
        prompts = [_draw(rng, llm.engine.vocab_size, self.prompt_tokens) for _ in range(self.num_requests)]
        params = SamplingParams(temperature=0, max_tokens=self.output_tokens, ignore_eos=True)
        with stopwatch() as elapsed:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        return report_of(outputs, elapsed())


def _draw(rng: Random, vocab_size: int, count: int) -> list[int]:
    return rng.choices(range(vocab_size), k=count)


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds since the block was entered, up to its end."""
    start = time.perf_counter()
    end: list[float] = []
    try:
        yield lambda: (end[0] if end else time.perf_counter()) - start
    finally:
        end.append(time.perf_counter())


def report_of(outputs: Sequence[RequestOutput], wall_s: float) -> Report:
    """Sum up outputs that took ``wall_s`` seconds together."""
    return Report(
        prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        hit_tokens=sum(output.num_cached_tokens for output in outputs),
        output_tokens=sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
        wall_s=wall_s,
        mean_ttft_s=fmean(output.times.ttft_s or 0.0 for output in outputs),
        outputs=tuple(tuple(completion.token_ids) for output in outputs for completion in output.outputs),
    )
