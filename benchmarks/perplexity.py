"""Perplexity of a model and of a changed one (quantised, in another dtype) on the same texts, and the difference.

    python benchmarks/perplexity.py demo build/demo-fp8
    python benchmarks/perplexity.py MODEL OTHER --text a.txt b.txt --dtype bfloat16
    python benchmarks/perplexity.py demo demo --kv-cache-dtype fp8
    python benchmarks/perplexity.py MODEL-FP8 MODEL-FP8 --dequantize first --text a.txt

``--kv-cache-dtype`` is that of the second model; the first keeps keys and values in the dtype of activations. Weights
that are published in FP8 stay so where the device multiplies them (a line at start says it); ``--dequantize first``
compares the weights' own numbers with products in FP8.

Texts are cut into rows of ``--row-tokens``; the first token of a row is not predicted. Without ``--text`` the texts are
conversations of the demo model's held-out tasks, with their right replies. Besides the perplexities the mean and the
largest difference of a token's log-probability are printed.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from strandline import LLM, SamplingParams
from strandline.bench.evaluate import make_suite
from strandline.config import KV_CACHE_DTYPES

SCORED = SamplingParams(max_tokens=0, prompt_logprobs=0)


@dataclass(frozen=True)
class Comparison:
    """What changed from the first model to the second."""

    num_tokens: int
    perplexity: float
    other_perplexity: float
    mean_difference: float
    """Mean difference of log-probabilities, second less first."""
    largest_difference: float

    def __str__(self) -> str:
        change = self.other_perplexity / self.perplexity - 1
        return (
            f"{self.num_tokens:,} tokens: perplexity {self.perplexity:.4f} and {self.other_perplexity:.4f} "
            f"({change:+.2%}); log-probabilities differ by {self.mean_difference:+.5f} on average, "
            f"{self.largest_difference:.4f} at most"
        )


def compare(logprobs: Sequence[float], other: Sequence[float]) -> Comparison:
    """Compare the log-probabilities of the same tokens."""
    differences = [b - a for a, b in zip(logprobs, other, strict=True)]
    largest = max(map(abs, differences))
    return Comparison(
        len(differences), math.exp(-fmean(logprobs)), math.exp(-fmean(other)), fmean(differences), largest
    )


def make_rows(llm: LLM, texts: Sequence[str], row_tokens: int) -> list[list[int]]:
    """Return the texts' tokens in rows."""
    tokenizer = llm.get_tokenizer()
    rows = []
    for text in texts or demo_texts(llm):
        ids = tokenizer.encode(text, add_special_tokens=False)
        rows += [ids[start : start + row_tokens] for start in range(0, len(ids), row_tokens)]
    return [row for row in rows if len(row) > 1]


def demo_texts(llm: LLM, per_kind: int = 30) -> list[str]:
    """Return held-out conversations with their replies."""
    tokenizer = llm.get_tokenizer()
    texts = []
    for task in make_suite(0, per_kind):
        messages = [*task.messages, {"role": "assistant", "content": task.reply}]
        texts.append(tokenizer.apply_chat_template(messages, tokenize=False))
    return texts


def score(llm: LLM, rows: Sequence[Sequence[int]]) -> list[float]:
    """Return the log-probability of every token but the rows' first."""
    found = []
    for output in llm.generate([list(row) for row in rows], SCORED):
        entries = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
        found += [entry[token].logprob for token, entry in entries if entry is not None]
    return found


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("other")
    parser.add_argument("--text", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="of the second model")
    parser.add_argument("--dequantize", choices=["none", "first", "both"], default="none", help="weights in FP8")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    texts = [path.read_text() for path in options.text]
    rows: list[list[int]] = []
    scores = []
    second = {"kv_cache_dtype": options.kv_cache_dtype, "dequantize": options.dequantize == "both"}
    for model, changes in ((options.model, {"dequantize": options.dequantize != "none"}), (options.other, second)):
        llm = LLM(model=model, dtype=options.dtype, enable_prefix_caching=False, **changes)
        rows = rows or make_rows(llm, texts, options.row_tokens)
        scores.append(score(llm, rows))
        del llm
    comparison = compare(*scores)
    print(json.dumps(asdict(comparison)) if options.json else comparison)


if __name__ == "__main__":
    main()
