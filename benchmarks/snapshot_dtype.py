"""The demo model's exam with snapshots that have rested in host memory in fewer bits.

    python benchmarks/snapshot_dtype.py --per-kind 34 --rests 1 8

Without a cache every prompt is computed whole. Otherwise it is sent in pieces that end at random tokens; after each,
all that the device holds is evicted to host memory, so that the next piece, and the whole prompt at last, resumes from
a snapshot that has rested there. Printed for each dtype: right answers, the share of prompt tokens that was hit,
replies that differ from those without a cache, and how far log-probabilities of the same tokens are off up to the first
token that differs.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import Any

from strandline import LLM, SamplingParams
from strandline.bench.evaluate import make_suite, score
from strandline.bench.exam import BATCH, ONE_TOKEN, token_counter
from strandline.cache.evict_all import evict_all
from strandline.demo.tasks import KINDS, Task
from strandline.specs import SNAPSHOT_DTYPES

ANSWER = SamplingParams(temperature=0, max_tokens=64, logprobs=0)


@dataclass
class Replies:
    """The replies to all tasks."""

    texts: list[str] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    num_prompt: int = 0
    num_hit: int = 0

    def differences(self, other: "Replies") -> list[float]:
        """Return how far log-probabilities of the same tokens are off, up to the first token that differs."""
        found = []
        for mine, theirs, scores, their_scores in zip(
            self.tokens, other.tokens, self.logprobs, other.logprobs, strict=True
        ):
            for token, their_token, logprob, their_logprob in zip(mine, theirs, scores, their_scores, strict=False):
                if token != their_token:
                    break
                found.append(abs(logprob - their_logprob))
        return found


def take(llm: LLM, suite: Sequence[Task], num_rests: int) -> Replies:
    """Answer all tasks; each prompt's state rests ``num_rests`` times on its way."""
    rng = Random(0)
    replies = Replies()
    for first in range(0, len(suite), BATCH):
        rendered: list[Any] = [llm.render(task.messages) for task in suite[first : first + BATCH]]
        prompts = [prompt["prompt_token_ids"] for prompt in rendered]
        cuts = [sorted(rng.sample(range(1, len(ids)), num_rests)) for ids in prompts]
        for piece in range(num_rests):
            pieces = [ids[: cut[piece]] for ids, cut in zip(prompts, cuts, strict=True)]
            llm.generate(pieces, ONE_TOKEN, use_tqdm=False)
            evict_all(llm.engine.core.cache)
            llm.engine.core.executor.carry_out(llm.engine.core.cache.take_actions())
        for output in llm.generate(prompts, ANSWER, use_tqdm=False):
            reply = output.outputs[0]
            replies.texts.append(reply.text)
            replies.tokens.append(list(reply.token_ids))
            rows = zip(reply.token_ids, reply.logprobs or [], strict=True)
            replies.logprobs.append([row[token].logprob for token, row in rows])
            replies.num_prompt += len(output.prompt_token_ids)
            replies.num_hit += output.num_cached_tokens
    return replies


def line(name: str, suite: Sequence[Task], mine: Replies, whole: Replies) -> str:
    """Return a row of a Markdown table."""
    right = {kind: [0, 0] for kind in KINDS}
    for task, text in zip(suite, mine.texts, strict=True):
        right[task.kind][0] += score(task, text)
        right[task.kind][1] += 1
    scores = " | ".join(f"{correct} / {count}" for correct, count in right.values())
    other = sum(text != theirs for text, theirs in zip(mine.texts, whole.texts, strict=True))
    off = mine.differences(whole)
    return f"| {name} | {scores} | {mine.num_hit / mine.num_prompt:.1%} | {other} | {fmean(off):.1e} | {max(off):.1e} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--per-kind", type=int, default=34)
    parser.add_argument("--rests", type=int, nargs="+", default=[1, 8], help="how often a prompt's state rests")
    options = parser.parse_args()
    settings = {"model": options.model, "dtype": options.dtype, "memory": "256MiB", "seed": 0}
    cold = LLM(**settings, enable_prefix_caching=False)
    suite = make_suite(1, options.per_kind, count=token_counter(cold))
    whole = take(cold, suite, 0)
    print(
        "| snapshots | "
        + " | ".join(KINDS)
        + " | prompt hit | other replies | mean and | largest difference |\n"
        + "| --- " * (len(KINDS) + 5)
        + "|"
    )
    print(line("cache off", suite, whole, whole), flush=True)
    for num_rests in options.rests:
        for dtype in SNAPSHOT_DTYPES:
            llm = LLM(**settings, host_memory="2GiB", snapshot_dtype=dtype)
            found = take(llm, suite, num_rests)
            if llm.engine.core.cache.stats().loads.num_done < len(suite) * num_rests * 0.9:
                raise SystemExit("too few prompts have resumed from host memory")
            print(line(f"{dtype}, rested {num_rests}×", suite, found, whole), flush=True)


if __name__ == "__main__":
    main()
