"""Limits of API keys, on a simulated clock and at a server."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from strandline.errors import ConfigError
from strandline.ids import RequestId
from strandline.records.account import Account
from strandline.records.events import Limits, StepEvents, TokenEvent
from strandline.records.messages import Stepped
from strandline.records.sampling_params import SamplingParams
from strandline.server.config import ServerConfig
from strandline.server.engines.engine_client import EngineClient, QueueFullError
from strandline.server.engines.engine_link import EngineLink
from strandline.server.engines.metrics import Metrics
from strandline.server.engines.prompt import Prompt
from strandline.server.engines.request_observers import finish_reasons
from strandline.server.engines.tenants import CURRENT_TENANT, KEYLESS, KeyLimits, RateLimitError, Tenant
from strandline.server.http.gate import OWNER
from strandline.server.http.quotas import Quotas
from strandline.text.frontend import Frontend
from strandline.text.output_streams import RequestStream
from tests.cpu.server.core_loop import new_heartbeat
from tests.cpu.server.process import ServerProcess, http_post, running_server
from tests.cpu.server.test_queue import SilentCore

FILE = """
[fast]
key = "fast-key"
weight = 2

[slow]
key = "slow-key"
max-requests-per-minute = 2

[other]
key = "other-key"

[frugal]
key = "frugal-key"
max-tokens-per-minute = 10
"""


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def begin(tenant: Tenant) -> bool:
    """Return whether a request may begin."""
    try:
        tenant.begin_request()
    except RateLimitError:
        return False
    return True


def test_requests_of_a_minute_may_come_at_once() -> None:
    clock = Clock()
    tenant = Tenant(limits=KeyLimits(max_requests_per_minute=6), clock=clock)
    assert [begin(tenant) for _ in range(8)] == [True] * 6 + [False] * 2
    with pytest.raises(RateLimitError, match=r"max-requests-per-minute 6; try again in 10.0 s") as caught:
        tenant.begin_request()
    clock.now_s += caught.value.retry_after_s
    assert [begin(tenant) for _ in range(2)] == [True, False]
    clock.now_s += 1000
    assert [begin(tenant) for _ in range(8)] == [True] * 6 + [False] * 2


def test_cached_tokens_do_not_count_and_outputs_do() -> None:
    clock = Clock()
    tenant = Tenant(limits=KeyLimits(max_tokens_per_minute=600), clock=clock)
    tenant.take_prompt(500)
    with pytest.raises(RateLimitError, match=r"max-tokens-per-minute 600; try again in 10.0 s"):
        tenant.take_prompt(200)
    tenant.settle(50, num_hit=450)  # 500 are left
    tenant.take_prompt(500)
    tenant.settle(60, num_hit=0)
    with pytest.raises(RateLimitError, match=r"try again in 6.0 s"):
        tenant.begin_request()
    clock.now_s += 6
    tenant.begin_request()


def test_prompt_longer_than_a_minutes_tokens_needs_a_full_bucket() -> None:
    clock = Clock()
    tenant = Tenant(limits=KeyLimits(max_tokens_per_minute=60), clock=clock)
    tenant.take_prompt(180)
    with pytest.raises(RateLimitError, match=r"try again in 180.0 s"):
        tenant.take_prompt(100)
    clock.now_s += 180
    tenant.take_prompt(100)


def test_requests_at_once_are_limited_until_one_ends() -> None:
    tenant = Tenant("id", KeyLimits(max_concurrent_requests=2), name="team")
    assert [begin(tenant) for _ in range(3)] == [True, True, False]
    tenant.end_request()
    assert [begin(tenant) for _ in range(2)] == [True, False]
    with pytest.raises(
        RateLimitError, match="the API key 'team' has 2 unfinished requests; max-concurrent-requests is 2"
    ):
        tenant.begin_request()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\nkey = 1", r"\[a\] needs a key that is a text"),
        ("[a]\nkey = ' '", r"\[a\] needs a key that is a text"),
        ("[a]\nkey = 'x'\n[b]\nkey = 'x'", "has the same key twice"),
        ("[a]\nkey = 'x'\nweight = 0", "weight must be above 0"),
        ("[a]\nkey = 'x'\nweight = nan", "weight must be above 0"),
        ("[a]\nkey = 'x'\nrpm = 1", "unknown field 'rpm'"),
        ("[a]\nkey = 'x'\nmax-requests-per-minute = 0", "max-requests-per-minute must be a whole number"),
        ("[a]\nkey = 'x'\nmax-requests-per-minute = true", "max-requests-per-minute must be a whole number"),
        ("a = 1", "'a' must be a table"),
        ("", "has no keys"),
        ("[a", "cannot be read"),
    ],
)
def test_malformed_file_of_keys_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"--api-keys-file.*{message}"):
        ServerConfig(api_keys_file=str(file)).key_salts()


def test_flags_are_defaults_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRANDLINE_API_KEY", raising=False)
    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    config = ServerConfig(api_keys_file=str(file), api_key=("other",), max_requests_per_minute=7)
    tenants = {tenant.name: tenant for tenant in config.tenants().values()}
    assert {name: each.limits.max_requests_per_minute for name, each in tenants.items()} == {
        "fast": 7, "slow": 2, "other": 7, "frugal": 7, "": 7,
    }  # fmt: skip
    assert tenants["fast"].weight == 2
    with pytest.raises(ConfigError, match="--max-tokens-per-minute must be a whole number of at least 1, got 0"):
        ServerConfig(max_tokens_per_minute=0)


@pytest.fixture(scope="module")
def limited(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("limited")
    (directory / "keys.toml").write_text(FILE)
    flags = ["--api-keys-file", str(directory / "keys.toml")]
    with running_server(bytes_dir, directory / "log", *flags) as server:
        yield server


def ask(server: ServerProcess, key: str, path: str = "/v1/completions", **fields: object) -> httpx.Response:
    body = {"prompt": "x", "max_tokens": 1, **fields}
    return http_post(server.url + path, json=body, headers={"Authorization": f"Bearer {key}"})


def test_limit_is_named_with_the_time_to_wait(limited: ServerProcess) -> None:
    assert [ask(limited, "slow-key").status_code for _ in range(2)] == [200, 200]
    refused = ask(limited, "slow-key")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "'slow' has used up its limit, max-requests-per-minute 2" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["Retry-After"]) <= 30
    assert ask(limited, "slow-key", "/tokenize").status_code == 200


def test_prompt_beyond_the_tokens_left_is_a_429(limited: ServerProcess) -> None:
    assert ask(limited, "frugal-key", prompt="123456789012").status_code == 200
    answer = ask(limited, "frugal-key", prompt="1234")
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "max-tokens-per-minute 10" in answer.json()["error"]["message"]
    assert ask(limited, "fast-key", prompt="1234").status_code == 200


def test_request_runs_until_its_response_ends() -> None:
    tenant = Tenant("id", KeyLimits(max_concurrent_requests=1))
    may_end = asyncio.Event()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        assert CURRENT_TENANT.get() is tenant
        await may_end.wait()

    async def ask_thrice() -> list[int]:
        statuses = []

        async def send(message: Message) -> None:
            statuses.append(message.get("status", 0))

        async def receive() -> Message:
            return {}

        quotas = Quotas(answer, {"id": tenant})
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], OWNER: "id"}
        first = asyncio.ensure_future(quotas(scope, receive, send))
        await asyncio.sleep(0)
        await quotas(scope, receive, send)
        may_end.set()
        await first
        await quotas(scope, receive, send)
        return [status for status in statuses if status]

    assert asyncio.run(ask_thrice()) == [429]


def test_key_leaves_room_in_the_queue_for_others() -> None:
    core: Any = SilentCore()
    frontend = Frontend(Limits(vocab_size=10, max_model_len=100))
    client = EngineClient(
        [EngineLink(core, frontend.limits, new_heartbeat())], frontend, Metrics("t"), max_unfinished=5
    )
    params = frontend.check_params(SamplingParams(n=2))
    CURRENT_TENANT.set(Tenant("a", has_peers=True))
    client.submit("first", [Prompt([1])], params)
    with pytest.raises(QueueFullError, match="2 outputs of this API key run and wait already, and 3 more may"):
        client.submit("second", [Prompt([1])], params)
    CURRENT_TENANT.set(Tenant("b", has_peers=True))
    client.submit("third", [Prompt([1])], params)
    CURRENT_TENANT.set(KEYLESS)


class Ends:
    """Records how requests end."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[str], int, float | None]] = []

    def begin(self, stream: RequestStream) -> None:
        """Record nothing yet."""

    def end(self, stream: RequestStream, engine: int, now_s: float) -> None:
        self.seen.append((finish_reasons(stream), stream.num_output_tokens, stream.times.first_token_s))


@pytest.mark.parametrize("by_id", [False, True])
def test_aborted_requests_are_observed_and_settled_once(by_id: bool) -> None:
    frontend, ends, tenant = (
        Frontend(Limits(10, 100)),
        Ends(),
        Tenant("a", KeyLimits(max_tokens_per_minute=20), clock=Clock()),
    )
    core: Any = SilentCore()
    link = EngineLink(core, frontend.limits, new_heartbeat())
    client = EngineClient([link], frontend, Metrics("t"), max_unfinished=5, observers=[ends])
    hit = Account(8, 6, 6, None, ())

    async def abort_two() -> None:
        CURRENT_TENANT.set(tenant)
        receiving = asyncio.ensure_future(client.receive(link))
        job = client.submit("job", [Prompt([1] * 8), Prompt([2] * 8)], frontend.check_params(SamplingParams()))
        token = TokenEvent(RequestId("job-0"), 3, None, None, None, hit)
        core.say(Stepped(StepEvents([token, token._replace(account=None)])))
        await anext(job.bursts())
        if by_id:
            assert client.abort(["job"]) == 2
        client.close(job)
        receiving.cancel()

    asyncio.run(abort_two())
    [(reasons, num_tokens, first_token_s), never_begun] = ends.seen
    assert (reasons, num_tokens, never_begun) == (["abort"], 2, (["abort"], 0, None))
    assert first_token_s is not None
    tenant.take_prompt(20 - 8 - 8 + 6 - 2)
    with pytest.raises(RateLimitError):
        tenant.take_prompt(1)
