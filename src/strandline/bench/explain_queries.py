"""``strandline explain``: why a request missed what it missed, on a running server or in a replayed trace."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Final, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request as HTTPRequest
from urllib.request import urlopen

from strandline.bench.explain_text import MEANINGS, lines
from strandline.bench.load_notes import LoadNote, LoadNotes
from strandline.bench.replay import Replay
from strandline.bench.replay_setup import ReplaySetup
from strandline.bench.replica import Machine, Replica
from strandline.cache.inspection.explanation import explain_admission, tier_tokens
from strandline.cache.inspection.lookups import Lookup
from strandline.errors import ConfigError, EngineError
from strandline.records.account import Account, Reason
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
    memory: str
    policy: str
    setup: ReplaySetup

    def __post_init__(self) -> None:
        if self.request is not None and self.request < 1:
            raise ConfigError(f"--request must be at least 1, got {self.request}")


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
        raise ConfigError(f"cannot query {url}: {reason}; is the server running? Name another with --url") from error


def _told(error: HTTPError) -> str:
    """Return the server's answer."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {error.code}"


# In a replay


class StartedRequest(NamedTuple):
    """A request of a replay when it starts."""

    account: Account
    loads: tuple[LoadNote, ...]
    """The loads that it waited for. What they brought may have been evicted again before it started."""

    @property
    def loaded_tokens(self) -> int:
        """Tokens that it hits because they were loaded."""
        num_tokens = end = 0
        for load in sorted(self.loads, key=lambda load: load.start):
            if load.end <= self.account.hit:
                num_tokens += max(load.end - max(load.start, end), 0)
                end = max(end, load.end)
        return num_tokens


class ExplainedReplay(Replay):
    """A replay that notes each request's lookup and loads, and explains one at the moment when it starts."""

    def __init__(self, machine: Machine, policy_name: str, wanted: int | None) -> None:
        super().__init__(machine, policy_name)
        for replica in self.replicas:
            replica.load_notes = LoadNotes(replica.cache, replica.scheduler)
        self.started: list[StartedRequest] = []
        """Requests in the order of their start."""
        self.answer: CacheAnswer | None = None
        self.resting: Mapping[str, int] = {}
        """Tokens of the explained prompt that rest in each tier, and were not loaded."""
        self._wanted = wanted

    def _count(self, replica: Replica, plan: StepPlan) -> None:
        super()._count(replica, plan)
        for new in plan.new:
            request = replica.running[new.request_id].request
            if request.account is None or replica.load_notes is None:
                raise EngineError(f"request {new.request_id} starts without an account")
            self.started.append(StartedRequest(request.account, replica.load_notes.take(new.request_id)))
            if len(self.started) == self._wanted:
                prompt = request.tokens.slice(0, request.num_prompt_tokens)
                lookup = Lookup(new.request_id, request.salt, 0.0, request.account)
                block_bytes = self.machine.spec.block_bytes
                explanation = explain_admission(replica.cache, lookup, prompt, block_bytes=block_bytes)
                self.answer = CacheAnswer(explanation=explanation)
                self.resting = tier_tokens(replica.cache, prompt, request.salt)


def explain_in_trace(question: TraceQuestion, *, as_json: bool) -> int:
    """Replay a trace, print the explanation of one of its requests, or which missed most, and return 0.

    Raises:
        ConfigError: there is no such trace, geometry, policy or request, or a size is none or too small.
    """
    machine = question.setup.machine(question.memory)
    replay = ExplainedReplay(machine, question.policy, question.request)
    replay.run(question.setup.lanes(question.trace))
    num_requests = len(replay.started)
    if question.request is None:
        _list(replay.started, as_json=as_json, has_tiers=bool(machine.host_bytes or machine.disk_bytes))
        return 0
    if replay.answer is None:
        raise ConfigError(f"--request {question.request}: the trace has requests 1 to {num_requests:,}")
    loads = replay.started[question.request - 1].loads
    data = answer_data(replay.answer, lambda _: None) | {"loads": _load_data(loads), "resting": replay.resting}
    _print(data, f"request {question.request:,} of {num_requests:,}", as_json=as_json)
    return 0


def _load_data(loads: Sequence[LoadNote]) -> list[dict[str, Any]]:
    return [
        {"store": load.store, "start": load.start, "end": load.end, "tokens": load.num_tokens}
        | {"bytes": load.num_bytes, "seconds": load.seconds}
        for load in loads
    ]


def _list(started: Sequence[StartedRequest], *, as_json: bool, has_tiers: bool) -> None:
    """Print the requests that missed most of what had been there to hit; with tiers, how much each loaded, too."""
    ranked = sorted(enumerate(started, 1), key=lambda item: -_avoidable(item[1].account))[:MAX_LISTED]
    if as_json:
        rows = [{"request": number, **account_data(x.account), "loads": _load_data(x.loads)} for number, x in ranked]
        print(json.dumps(rows))
        return
    loaded = f" {'loaded':>9}" if has_tiers else ""
    print(f"{'request':>9} {'tokens':>9} {'hit':>9}{loaded} {'avoidable':>10}  mostly")
    for number, request in ranked:
        account = request.account
        misses = [miss for miss in account.misses if miss.reason not in NEW]
        worst = max(misses, key=lambda miss: miss.num_tokens, default=None)
        described = "" if worst is None else f"{worst.reason}: {MEANINGS[worst.reason]}"
        loaded = f" {request.loaded_tokens:>9,}" if has_tiers else ""
        print(f"{number:>9,} {account.queried:>9,} {account.hit:>9,}{loaded} {_avoidable(account):>10,}  {described}")


def _avoidable(account: Account) -> int:
    return sum(miss.num_tokens for miss in account.misses if miss.reason not in NEW)
