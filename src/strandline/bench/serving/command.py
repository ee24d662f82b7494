"""``strandline bench serve``: load a server, print the table, write the result."""

import asyncio
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Final
from uuid import uuid4

from tqdm import tqdm

from strandline.bench.serving.acceptance import acceptance_figures, read_draft_counts
from strandline.bench.serving.adapters import assign_adapters
from strandline.bench.serving.datasets import make_sessions
from strandline.bench.serving.figures import Figures, figures_of
from strandline.bench.serving.load import Load, Run
from strandline.bench.serving.load_client import ServerUnderLoad
from strandline.bench.serving.maker import Maker
from strandline.bench.serving.options import Pace, base_url, pace_of, target_of, wanted_of
from strandline.bench.serving.prompt_vocabulary import load_vocabulary
from strandline.bench.serving.report import write_report
from strandline.bench.serving.result import record, save, table, warnings
from strandline.bench.serving.session import Session
from strandline.env import read_client_key
from strandline.errors import ConfigError
from strandline.records.tokens import TOKEN_BYTES

INTERRUPTED: Final = 130
DEFAULT_WARM_UP_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of a run and the options that produced them."""

    run: Run
    model: str
    tokenizer: str | None
    num_skipped: int
    drafts: Figures
    """Acceptance of the server's drafts during the run; empty: there were none, or it is not reported."""


def run_serving_benchmark(options: Namespace) -> int:
    """Run a benchmark; return 0, 1 when a request failed, or 130 when Ctrl-C ended it.

    Raises:
        ConfigError: a flag is wrong, a file is missing, or the server cannot be reached.
    """
    pace, wanted = pace_of(options), wanted_of(options)
    measured = asyncio.run(_measure(options, pace))
    run, figures = measured.run, figures_of(measured.run, wanted) | measured.drafts
    print("\n".join(table(figures, pace, wanted)))
    for line in warnings(figures, measured.num_skipped):
        print(f"note: {line}", file=sys.stderr)
    data = record(options, measured.model, measured.tokenizer, figures)
    if options.save_result or options.append_result:
        print(f"result: {save(options, data)}", file=sys.stderr)
    if options.html:
        write_report(Path(options.html), [data], "Serving benchmark")
        print(f"report: {options.html}", file=sys.stderr)
    if run.is_interrupted:
        return INTERRUPTED
    return 1 if figures["failed"] or not figures["completed"] else 0


async def _measure(options: Namespace, pace: Pace) -> Measured:
    salt = uuid4().hex if options.cache_salt == "random" else options.cache_salt
    async with ServerUnderLoad(target_of(options, read_client_key(), salt)) as server:
        await server.wait_until_ready(options.ready_check_timeout_sec)
        cards = await server.models()
        model, tokenizer = _names(options, cards)
        server.target = replace(server.target, body={**server.target.body, "model": model})
        vocabulary = load_vocabulary(tokenizer, options.vocab_size)
        max_model_len = next((card.get("max_model_len") for card in cards if card.get("id") == model), None)
        maker = Maker(vocabulary, options, is_chat=server.target.is_chat, max_model_len=max_model_len)
        sessions = assign_adapters(make_sessions(maker), options, [str(card["id"]) for card in cards])
        await _warm_up(server, maker, sessions)
        before = read_draft_counts(await server.metrics())
        with tqdm(total=_expected(sessions, options), unit="request", disable=options.disable_tqdm) as bar:
            run = await Load(server, pace, vocabulary, lambda answer: bar.update()).execute(sessions)
        drafts = acceptance_figures(before, read_draft_counts(await server.metrics()))
    return Measured(run, model, tokenizer, maker.num_skipped, drafts)


def _names(options: Namespace, cards: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """Return the model's name in requests, and where its tokenizer is; the server's first model if none is named."""
    served = cards[0]["id"] if cards else None
    model = options.served_model_name or options.model or served
    if model is None:
        raise ConfigError(f"{base_url(options)} does not say which models it serves; name one with --model")
    names = dict.fromkeys(str(card["id"]) for card in cards)
    if names and model not in names:
        raise ConfigError(
            f"{base_url(options)} serves {', '.join(names)}, not {model}; name one of these with --model, or with "
            "--served-model-name if the tokenizer has another name"
        )
    is_sized = options.vocab_size is not None
    return model, options.tokenizer or (None if is_sized else options.model or served)


async def _warm_up(server: ServerUnderLoad, maker: Maker, sessions: Sequence[Session]) -> None:
    """Send requests as long as the first, with separate tokens, so that the run cannot hit them.

    Raises:
        ConfigError: one fails.
    """
    if not maker.options.num_warmups:
        return
    first = next(sessions[0].asks(), None)
    num_tokens = DEFAULT_WARM_UP_TOKENS if first is None or first.tokens is None else len(first.tokens) // TOKEN_BYTES
    max_tokens = 1 if first is None else first.max_tokens
    maker.num_skipped = 0
    rng = Random(f"warm-up {maker.options.seed}")
    at_once = asyncio.Semaphore(maker.options.max_concurrency or maker.options.num_warmups)

    async def send() -> None:
        ask = maker.of_tokens(maker.vocabulary.draw(rng, num_tokens), max_tokens)
        async with at_once:
            answer = await server.send(ask)
        if answer.error:
            raise ConfigError(f"a warm-up request failed: {answer.error}")

    await asyncio.gather(*(send() for _ in range(maker.options.num_warmups)))


def _expected(sessions: Sequence[Session], options: Namespace) -> int | None:
    """Return the expected number of requests; None if it depends on the trace."""
    if options.dataset_name == "trace":
        return None
    return int(options.num_prompts) if options.dataset_name == "multi-turn" else len(sessions)
