"""Requests for LoRA adapters: every session, a request or a conversation, names one of them as its model."""

from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import cycle, islice
from random import Random

from strandline.bench.serving.session import Asks, Session
from strandline.errors import ConfigError


def assign_adapters(sessions: Sequence[Session], options: Namespace, served: Collection[str]) -> list[Session]:
    """Return sessions that name the adapters of ``--lora-modules``; without any, the sessions as they are.

    Args:
        served: names of the server's models; empty: it does not say.

    Raises:
        ConfigError: the server does not serve an adapter.
    """
    names: list[str] = options.lora_modules
    missing = [name for name in names if served and name not in served]
    if missing:
        raise ConfigError(f"--lora-modules: the server serves {', '.join(served)}, not {missing[0]}")
    if not names:
        return list(sessions)
    rng = Random(f"adapters {options.seed}")
    in_turn = list(islice(cycle(names), len(sessions)))
    chosen = in_turn if options.lora_assignment == "round-robin" else rng.choices(names, k=len(sessions))
    return [_naming(session, name) for session, name in zip(sessions, chosen, strict=True)]


def _naming(session: Session, name: str) -> Session:
    def asks() -> Asks:
        inner = session.asks()
        try:
            ask = next(inner)
            while True:
                ask = inner.send((yield replace(ask, body={**ask.body, "model": name})))
        except StopIteration:
            return

    return replace(session, asks=asks)
