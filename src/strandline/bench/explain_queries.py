"""``strandline explain``: why a request missed what it missed, on a running server or in a replayed trace."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import Request as HTTPRequest
from urllib.request import urlopen

from strandline.bench.explain_text import MEANINGS, lines
from strandline.bench.known_models import cost_model, geometry
from strandline.bench.replay import Replay
from strandline.bench.replica import Machine, Replica
from strandline.bench.synthetic import SYNTHETIC, synthetic_lanes
from strandline.bench.traces import read_trace
from strandline.cache import Account, Reason
from strandline.cache.explanation import explain_lookup
from strandline.cache.lookups import Lookup
from strandline.config import parse_bytes
from strandline.errors import ConfigError, EngineError
from strandline.records.cache_questions import CacheAnswer
from strandline.records.plan import StepPlan
from strandline.text.cache_report import account_data, answer_data

TIMEOUT_S: Final = 30.0
CONVERSATION: Final = frozenset({"messages", "tools", "chat_template_kwargs", "add_generation_prompt"})
MAX_LISTED: Final = 20
NEW: Final = frozenset({Reason.FIRST_SEEN, Reason.DIVERGED, Reason.REPEATED})
"""Reasons that no cache could help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerQuestion:
    """A question to a running server: exactly one of the first four fields is set."""

    request_id: str | None = None
    prompt: str | None = None
    tokens: list[int] | None = None
    conversation: Mapping[str, Any] | None = None
    """Messages, perhaps tools and options of the template, as in a body of the chat API."""
    salt: str | None = None
    url: str = "http://127.0.0.1:8000"
    api_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceQuestion:
    """Which request of a replay to explain."""

    trace: str
    request: int | None
    """Counted from 1 in the order in which they start; None lists those that missed most of what was known."""
    geometry: str
    memory: str
    policy: str
    max_sessions: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("--request", self.request), ("--max-sessions", self.max_sessions)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")


def explain_on_server(question: ServerQuestion, *, as_json: bool) -> int:
    """Ask, print the answer, and return 0.

    Raises:
        ConfigError: the question is not one, the server cannot be reached, or it refuses.
    """
    data = _ask(question)
    subject = f"request {data['request_id']}" if data["request_id"] else "the prompt"
    _print(data, subject, as_json=as_json)
    return 0


def _print(data: Mapping[str, Any], subject: str, *, as_json: bool) -> None:
    print(json.dumps(data, ensure_ascii=False) if as_json else "\n".join(lines(data, subject)))


def _ask(question: ServerQuestion) -> dict[str, Any]:
    given: list[dict[str, Any]] = [
        {"request_id": question.request_id},
        {"prompt": question.prompt},
        {"prompt": question.tokens},
        {name: value for name, value in (question.conversation or {}).items() if name in CONVERSATION},
    ]
    bodies = [body for body in given if any(value is not None for value in body.values())]
    if len(bodies) != 1:
        raise ConfigError("name one thing to explain: a request's id, --prompt, --prompt-file, --tokens or --messages")
    [body] = bodies
    if question.salt is not None:
        body["cache_salt"] = question.salt
    headers = {"Content-Type": "application/json"}
    if question.api_key:
        headers["Authorization"] = f"Bearer {question.api_key}"
    if not question.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http:// or https://, got {question.url!r}")
    url = question.url.rstrip("/").removesuffix("/v1") + "/cache/explain"
    try:
        request = HTTPRequest(url, json.dumps(body).encode(), headers)
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            data: dict[str, Any] = json.load(answer)
            return data
    except HTTPError as error:
        raise ConfigError(f"{url}: {_told(error)}") from error
    except (URLError, HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"{url} cannot be asked: {reason}; name the server with --url") from error


def _told(error: HTTPError) -> str:
    """Return the server's answer."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {error.code}"


# In a replay


class ExplainedReplay(Replay):
    """A replay that notes each request's lookup, and explains one at the moment when it starts."""

    def __init__(self, machine: Machine, policy_name: str, wanted: int | None) -> None:
        super().__init__(machine, policy_name)
        self.accounts: list[Account] = []
        """Requests in the order of their start."""
        self.answer: CacheAnswer | None = None
        self._wanted = wanted

    def _count(self, replica: Replica, plan: StepPlan) -> None:
        super()._count(replica, plan)
        for new in plan.new:
            request = replica.running[new.request_id].request
            if request.account is None:
                raise EngineError(f"request {new.request_id} starts without an account")
            self.accounts.append(request.account)
            if len(self.accounts) == self._wanted:
                prompt = request.tokens.slice(0, request.num_prompt_tokens)
                lookup = Lookup(new.request_id, "", 0.0, request.account)
                block_bytes = self.machine.spec.block_bytes
                self.answer = CacheAnswer(
                    explanation=explain_lookup(replica.cache, lookup, prompt, block_bytes=block_bytes)
                )


def explain_in_trace(question: TraceQuestion, *, as_json: bool) -> int:
    """Replay a trace, print the explanation of one of its requests, or which missed most, and return 0.

    Raises:
        ConfigError: there is no such trace, geometry, policy or request.
    """
    replay = _replay(question)
    num_requests = len(replay.accounts)
    if question.request is None:
        _list(replay.accounts, as_json=as_json)
        return 0
    if replay.answer is None:
        raise ConfigError(f"--request {question.request}: the trace has requests 1 to {num_requests:,}")
    data = answer_data(replay.answer, lambda _: None)
    _print(data, f"request {question.request:,} of {num_requests:,}", as_json=as_json)
    return 0


def _replay(question: TraceQuestion) -> ExplainedReplay:
    spec = geometry(question.geometry)
    memory_bytes = parse_bytes(question.memory)
    num_slabs = memory_bytes // spec.slab_bytes
    if num_slabs < 6:
        raise ConfigError(
            f"memory of {memory_bytes:,} bytes is {num_slabs} slots of {question.geometry}; give 6 or more"
        )
    is_named = question.trace in SYNTHETIC or not Path(question.trace).exists()
    lanes = (
        synthetic_lanes(question.trace)[: question.max_sessions]
        if is_named
        else read_trace(question.trace, max_sessions=question.max_sessions)
    )
    machine = Machine(spec, cost_model(question.geometry), memory_bytes)
    replay = ExplainedReplay(machine, question.policy, question.request)
    replay.run(lanes)
    return replay


def _list(accounts: Sequence[Account], *, as_json: bool) -> None:
    """Print the requests that missed most of what had been there to hit."""
    ranked = sorted(enumerate(accounts, 1), key=lambda item: -_avoidable(item[1]))[:MAX_LISTED]
    if as_json:
        print(json.dumps([{"request": number, **account_data(account)} for number, account in ranked]))
        return
    print(f"{'request':>9} {'tokens':>9} {'hit':>9} {'avoidable':>10}  mostly")
    for number, account in ranked:
        misses = [miss for miss in account.misses if miss.reason not in NEW]
        worst = max(misses, key=lambda miss: miss.num_tokens, default=None)
        described = "" if worst is None else f"{worst.reason}: {MEANINGS[worst.reason]}"
        print(f"{number:>9,} {account.queried:>9,} {account.hit:>9,} {_avoidable(account):>10,}  {described}")


def _avoidable(account: Account) -> int:
    return sum(miss.num_tokens for miss in account.misses if miss.reason not in NEW)
