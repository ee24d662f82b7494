"""Pictures through the engine: encoding, first tokens with and without a hit, an agent that looks at screenshots.

    python benchmarks/pictures.py --model benchmarks/configs/qwen3.5-35b-a3b-vision
    python benchmarks/pictures.py --model benchmarks/configs/tiny-qwen3.5-vision --only first,agent --repeats 3

First: a screenshot of 1,280 × 720 pixels and 2,000 tokens, then 100 more tokens about it; and text of the same lengths.
Agent: ``--turns`` of a new screenshot and 200 tokens after a system prompt of 4,000, and answers of 50; the time to the
first token of each turn, and what was hit. Encode: pictures of several sizes, alone and eight at once; how much longer
they take than text of their length. Weights are random. All times are in milliseconds, medians of ``--repeats`` after
one that is not measured. Figures are printed as they come: a run that is ended early has those before it.
"""

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from itertools import count
from random import Random
from statistics import median

import torch

from strandline import LLM, SamplingParams
from strandline.ids import RequestId
from strandline.records.account import Account
from strandline.records.events import Submission
from strandline.records.pictures import Picture, PictureSpan, picture_digest
from strandline.records.plan import NewRequest

say = partial(print, flush=True)

SIDE = 32
"""Pixels of a token's side."""

SCREENSHOT = (704, 1280)
"""Height and width of 1,280 × 720 pixels as they are scaled."""

SIZES = ((256, 256), (480, 640), SCREENSHOT, (1088, 1920), (1536, 2720))
FEW = 8
"""Pictures that are encoded together."""

Parts = Sequence[list[int] | Picture]
NAMES = count()
RNG = Random(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="benchmarks/configs/qwen3.5-35b-a3b-vision")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--only", default="first,agent,encode")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--turns", type=int, default=20, help="of the agent")
    parser.add_argument("--memory", help="of the cache, such as 20GiB; default: the engine's")
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--enforce-eager", action="store_true")
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    say(f"{date.today()} · {device} · torch {torch.__version__} · Python {platform.python_version()} · {options.model}")
    parts: dict[str, Callable[[LLM, int], None]] = {
        "first": measure_first_tokens,
        "agent": partial(measure_agent, options.turns),
        "encode": measure_encoding,
    }
    with LLM(
        options.model,
        load_format=options.load_format,
        skip_tokenizer_init=True,
        memory=options.memory,
        max_model_len=options.max_model_len,
        tensor_parallel_size=options.tensor_parallel_size,
        enforce_eager=options.enforce_eager,
    ) as llm:
        for line in llm.engine.describe():
            say(f"  {line}")
        for name in options.only.split(","):
            parts[name](llm, options.repeats)


def new_picture(height: int, width: int) -> Picture:
    pixels = RNG.randbytes(height * width * 3)
    return Picture(picture_digest(pixels, height, width), pixels, height, width, (width, height))


def words(num_tokens: int) -> list[int]:
    """Return tokens of text, without those about pictures."""
    return [RNG.randrange(1000, 4000) for _ in range(num_tokens)]


def num_tokens_of(picture: Picture) -> int:
    return picture.height * picture.width // SIDE**2


def answer(llm: LLM, parts: Parts, num_tokens: int) -> tuple[float, list[int], Account]:
    """Return the time to the first token of an answer, the answer, and the account of its prompt."""
    config = llm.engine.core.executor.facts.picture_config
    assert config is not None
    token_ids, spans, pixels = list[int](), list[PictureSpan](), dict[bytes, Picture]()
    for part in parts:
        if isinstance(part, Picture):
            token_ids.append(config.start_token_id)
            spans.append(PictureSpan(len(token_ids), part.height // SIDE, part.width // SIDE, part.digest))
            pixels[part.digest] = part
            token_ids += [*[config.image_token_id] * num_tokens_of(part), config.end_token_id]
        else:
            token_ids += part
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    new = NewRequest(RequestId(f"{next(NAMES)}"), tuple(token_ids), params, 0, frozenset(), ())
    core, tokens, first_s, account = llm.engine.core, list[int](), 0.0, Account.not_asked(0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    core.add(Submission(new, len(token_ids) + num_tokens, pictures=tuple(spans), pixels=pixels))
    while core.has_unfinished:
        for event in core.step().tokens:
            first_s = first_s or time.perf_counter() - start_s
            tokens.append(event.token_id)
            account = event.account or account
    return first_s * 1e3, tokens, account


def measure_first_tokens(llm: LLM, repeats: int) -> None:
    found: dict[str, list[float]] = {"cold picture": [], "cold text": [], "next about it": [], "next of text": []}
    for repeat in range(1 + repeats):
        picture, prompt, more = new_picture(*SCREENSHOT), words(2000), words(100)
        for kind, part in (("picture", picture), ("text", words(num_tokens_of(picture) + 2))):
            cold_ms, said, _ = answer(llm, [prompt, part], 8)
            next_ms, _, account = answer(llm, [prompt, part, said, more], 1)
            assert account.hit > account.queried - len(more) - 9
            found[f"cold {kind}"].append(cold_ms)
            found["next about it" if kind == "picture" else "next of text"].append(next_ms)
        say(f"  {repeat} of {repeats}: " + ", ".join(f"{name} {times[-1]:.1f}" for name, times in found.items()))
    for name, times in found.items():
        say(f"first token, {name}: {median(times[1:]):.1f} ms")
    for picture_name, text_name in (("cold picture", "cold text"), ("next about it", "next of text")):
        ratio = median(found[picture_name][1:]) / median(found[text_name][1:])
        say(f"first token, {picture_name} / {text_name}: {ratio:.2f}")


def measure_agent(num_turns: int, llm: LLM, repeats: int) -> None:
    for kind in ("screenshots", "text of their length"):
        times, num_hit, num_queried = list[float](), 0, 0
        for repeat in range(1 + repeats):
            first, *later = run_agent(llm, num_turns, kind)
            say(
                f"  {repeat} of {repeats}: first tokens of {kind} " + " ".join(f"{ms:.0f}" for ms, _ in (first, *later))
            )
            if repeat:
                times += [ms for ms, _ in later]
                num_hit += sum(account.hit for _, account in later)
                num_queried += sum(account.queried for _, account in later)
        say(
            f"agent with {kind}: {median(times):.1f} ms to the first token from the second turn on, "
            f"{num_hit / num_queried:.1%} hit"
        )


def run_agent(llm: LLM, num_turns: int, kind: str) -> list[tuple[float, Account]]:
    """Return the time to the first token and the account of each turn."""
    turns, parts = list[tuple[float, Account]](), list[list[int] | Picture]()
    parts.append(words(4000))
    for _ in range(num_turns):
        picture = new_picture(*SCREENSHOT)
        parts += [picture if kind == "screenshots" else words(num_tokens_of(picture) + 2), words(200)]
        first_ms, said, account = answer(llm, parts, 50)
        parts.append(said)
        turns.append((first_ms, account))
    return turns


def measure_encoding(llm: LLM, repeats: int) -> None:
    for height, width in SIZES:
        for num_pictures in (1, FEW):
            times = list[float]()
            for _ in range(1 + repeats):
                pictures = [new_picture(height, width) for _ in range(num_pictures)]
                num_words = sum(num_tokens_of(picture) + 2 for picture in pictures)
                seen_ms, *_ = answer(llm, [words(20), *pictures], 1)
                read_ms, *_ = answer(llm, [words(20 + num_words)], 1)
                times.append((seen_ms - read_ms) / num_pictures)
            encoded_ms = median(times[1:])
            say(
                f"encode {width}x{height}, {num_pictures} at once: {encoded_ms:.1f} ms more than text, per picture; "
                f"{1e3 / max(encoded_ms, 1e-3):.0f} a second"
            )


if __name__ == "__main__":
    main()
