"""Questions about one text, of which only the first token of each answer is read.

    python benchmarks/label_reads.py --model demo --device cpu
    python benchmarks/label_reads.py --model benchmarks/configs/qwen3.5-35b-a3b --load-format dummy --tokens 8000

With ``t`` the time of the text and one question, none of it cached, and ``q`` the time of all questions when the text
is cached, questions about a new text should take about ``t + q``: the text is computed once, whichever question comes
first. The last column is the time of the questions about a new text, divided by that sum. Tokens are random; times are
medians of ``--repeats`` after one that is not measured, in seconds; on a CPU, of computing on all cores.
"""

import argparse
import platform
import time
from collections.abc import Sequence
from datetime import date
from random import Random
from statistics import median

import torch

from strandline import LLM, SamplingParams

RNG = Random(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default=None)
    parser.add_argument("--memory", help="of the cache, such as 20GiB; default: the engine's")
    parser.add_argument("--tokens", type=int, default=7900, help="of the text")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--question-tokens", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    given = {"device": options.device, "memory": options.memory}
    llm = LLM(
        options.model,
        load_format=options.load_format,
        skip_tokenizer_init=True,
        **{name: value for name, value in given.items() if value is not None},
    )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and options.device != "cpu" else "CPU"
    print(f"{date.today()} · {options.model} · {device} · {platform.platform()} · torch {torch.__version__}")
    times = [measure(llm, options) for _ in range(1 + options.repeats)][1:]
    one, cached, new = (median(column) for column in zip(*times, strict=True))
    print(f"| {options.tokens:,} tokens and one question | {options.questions} questions, cached | new | ratio |")
    print("| --- | --- | --- | --- |")
    print(f"| {one:.3f} | {cached:.3f} | {new:.3f} | {new / (one + cached):.2f} |")


def measure(llm: LLM, options: argparse.Namespace) -> tuple[float, float, float]:
    """Return the times of one question about a new text, and of all about a cached and about a new one."""
    texts = [tokens(options.tokens) for _ in range(2)]
    questions = [[tokens(options.question_tokens) for _ in range(options.questions)] for _ in range(2)]
    one = read(llm, texts[0], questions[0][:1])
    return one, read(llm, texts[0], questions[0]), read(llm, texts[1], questions[1])


def read(llm: LLM, text: Sequence[int], questions: Sequence[Sequence[int]]) -> float:
    """Return how long questions take, as the server asks them."""
    params = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=[1, 2], detokenize=False)
    marks = (len(text),)
    prompts = [{"prompt_token_ids": [*text, *question], "marks": marks} for question in questions]
    is_cpu = llm.engine.core.executor.facts.device_type == "cpu"
    clock = time.process_time if is_cpu else time.perf_counter
    start_s = clock()
    llm.generate(prompts, params, use_tqdm=False)
    return clock() - start_s


def tokens(number: int) -> list[int]:
    """Return random tokens."""
    return [RNG.randrange(300, 4000) for _ in range(number)]


if __name__ == "__main__":
    main()
