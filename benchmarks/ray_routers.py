"""Hit tokens of conversations on real replicas of the demo model on Ray Serve, router by router.

``python benchmarks/ray_routers.py [TRACE]`` with a trace of text; without one, conversations that the demo model knows.
Each router gets new replicas. Needs ``pip install strandline[ray]``.
"""

import argparse
import asyncio
import gzip
import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx

from strandline.routing.names import ROUTERS

APP = "routers"
Session = Sequence[str]
"""The prompts of a session, one after the other."""


def conversations(num: int, num_turns: int) -> list[Session]:
    """Return conversations that share a system prompt, each turn repeating those before it."""
    # Without a space at the end: it would be a token of its own, which the next turn does not have.
    system = "You are a helpful assistant." + " Be brief and friendly, and say when you do not know." * 4
    return [
        [
            system + "".join(f" User {index} asks question {turn} about Rome. Answer {turn}." for turn in range(num))
            for num in range(1, num_turns + 1)
        ]
        for index in range(num)
    ]


def text_sessions(trace: Path) -> list[Session]:
    """Return the prompts of each session of a trace of text, in the order of their times."""
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as lines:
        rows = sorted((json.loads(line) for line in lines), key=lambda row: float(row["timestamp"]))
    sessions: dict[str, list[str]] = {}
    for row in rows:
        sessions.setdefault(str(row["session_id"]), []).append(row["input"])
    return list(sessions.values())


@contextmanager
def ray_serve() -> Iterator[str]:
    """Run Ray and Ray Serve on this machine; yield the address of its HTTP server."""
    import ray
    from ray import serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


def deploy(app_name: str, **arguments: Any) -> None:
    """Deploy replicas of the demo model, or change those that are deployed by that name."""
    from ray import serve

    from strandline.ray import build_app

    engine = {"device": "cpu", "dtype": "float32", "memory": "256MiB", **arguments.pop("engine", {})}
    serve.run(build_app({"num_replicas": 3, "engine": engine, **arguments}), name=app_name, route_prefix="/")


@dataclass(slots=True)
class Totals:
    """What a router's requests hit."""

    requests: list[tuple[int, int]] = field(default_factory=list)
    """Prompt tokens of each one, and how many of them it hit; in the order of their ends."""

    @property
    def prompt_tokens(self) -> int:
        return sum(num_prompt for num_prompt, _ in self.requests)

    @property
    def hit_tokens(self) -> int:
        return sum(num_hit for _, num_hit in self.requests)


async def send(url: str, sessions: Sequence[Session], salt: str, max_tokens: int = 8) -> Totals:
    """Send all sessions at once, the prompts of each one after the other; return what they hit."""
    totals = Totals()

    async def run(client: httpx.AsyncClient, session: Session) -> None:
        for prompt in session:
            body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "cache_salt": salt}
            answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
            usage = answer["usage"]
            totals.requests.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))

    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=64)) as client:
        await asyncio.gather(*(run(client, session) for session in sessions))
    return totals


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", help="a trace of text; default: synthetic conversations")
    parser.add_argument("--sessions", type=int, default=12, help="number of sessions (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--memory", default="256MiB", help="of each replica (default: %(default)s)")
    parser.add_argument("--router", default=",".join(ROUTERS), help="default: %(default)s")
    options = parser.parse_args()
    sessions = conversations(options.sessions, 8)
    if options.trace is not None:
        sessions = text_sessions(Path(options.trace))[: options.sessions]
    with ray_serve() as url:
        for router in options.router.split(","):
            deploy(APP, router=router, num_replicas=options.replicas, engine={"memory": options.memory})
            start_s = perf_counter()
            totals = asyncio.run(send(url, sessions, router))
            share = totals.hit_tokens / totals.prompt_tokens
            print(
                f"{router:<13} {len(totals.requests):>5,} requests, {totals.prompt_tokens:>9,} prompt tokens, "
                f"{totals.hit_tokens:>9,} hit ({share:.1%}), {perf_counter() - start_s:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
