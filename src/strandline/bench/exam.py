"""``strandline eval``: scores a model on held-out tasks in every cache mode.

A cache that returns a wrong state shows as wrong answers. The modes: ``off``; ``on``; and ``resumed``, in which every
prompt is first sent truncated at a random token, so that the whole prompt resumes from there.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

from tqdm import tqdm

from strandline.bench.evaluate import make_suite, score
from strandline.bench.log_once import log_once
from strandline.config import without_cache
from strandline.demo.tasks import KINDS, Task
from strandline.engine.llm import LLM
from strandline.engine.loading import LOGGER
from strandline.records.sampling_params import SamplingParams

MODES = ("off", "on", "resumed")
GREEDY = SamplingParams(temperature=0, max_tokens=64)
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
BATCH = 16


@dataclass(frozen=True, slots=True)
class Result:
    """One mode's replies, in the suite's order."""

    replies: tuple[str, ...]
    hit_share: float

    def correct(self, suite: Sequence[Task], kind: str) -> int:
        """Count the right answers to tasks of a kind."""
        return sum(score(task, reply) for task, reply in zip(suite, self.replies, strict=True) if task.kind == kind)


def run_evaluation(engine_options: Mapping[str, Any], *, per_kind: int, seed: int) -> int:
    """Score a model in every mode and print the table; return 0 if all modes score the same, else 1."""
    suite: list[Task] = []
    results: dict[str, Result] = {}
    with log_once(LOGGER.name):
        for mode in MODES:
            cached = {**engine_options, "enable_prefix_caching": True}
            with LLM(**(without_cache(engine_options) if mode == "off" else cached)) as llm:
                suite = suite or make_suite(seed, per_kind, count=token_counter(llm))
                results[mode] = take(llm, suite, mode)
    print("\n".join(table(suite, results)))
    scores = [[result.correct(suite, kind) for kind in KINDS] for result in results.values()]
    return 0 if all(row == scores[0] for row in scores) else 1


def take(llm: LLM, suite: Sequence[Task], mode: str) -> Result:
    """Answer all tasks, ``BATCH`` at a time."""
    rng = Random(0)
    replies: list[str] = []
    num_prompt = num_hit = 0
    with tqdm(total=len(suite), desc=f"cache {mode}", unit="task") as bar:
        for first in range(0, len(suite), BATCH):
            prompts: list[Any] = [llm.render(task.messages) for task in suite[first : first + BATCH]]
            if mode == "resumed":
                cut = [prompt["prompt_token_ids"] for prompt in prompts]
                llm.generate([ids[: rng.randint(1, len(ids))] for ids in cut], ONE_TOKEN, use_tqdm=False)
            outputs = llm.generate(prompts, GREEDY, use_tqdm=lambda **_: nullcontext(bar))
            replies += [output.outputs[0].text for output in outputs]
            num_prompt += sum(len(output.prompt_token_ids) for output in outputs)
            num_hit += sum(output.num_cached_tokens for output in outputs)
    return Result(tuple(replies), num_hit / num_prompt)


def table(suite: Sequence[Task], results: Mapping[str, Result]) -> list[str]:
    """Return the lines of the table: per mode the score of each kind, the share hit, and replies that differ."""
    lines = [f"{'cache':<10}" + "".join(f"{kind:>20}" for kind in KINDS) + f"{'prompt hit':>13}{'changed replies':>18}"]
    first = next(iter(results.values()))
    for mode, result in results.items():
        cells = []
        for kind in KINDS:
            total = sum(task.kind == kind for task in suite)
            correct = result.correct(suite, kind)
            cells.append(f"{f'{correct} / {total} ({correct / total:.1%})':>20}")
        differ = sum(mine != theirs for mine, theirs in zip(result.replies, first.replies, strict=True))
        lines.append(f"{mode:<10}" + "".join(cells) + f"{result.hit_share:>13.1%}{differ:>18}")
    return lines


def token_counter(llm: LLM) -> Callable[[str], int]:
    """Return a function that counts a text's tokens with the model's tokenizer."""
    tokenizer = llm.get_tokenizer()
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))
