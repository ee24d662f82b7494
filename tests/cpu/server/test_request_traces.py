"""Spans of requests: their times, the cache's account, and the client's trace."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from strandline.errors import ConfigError
from strandline.ids import RequestId
from strandline.records.events import Admission
from strandline.records.plan import NewRequest
from strandline.records.sampling_params import SamplingParams
from strandline.server.config import ServerConfig
from strandline.server.observation import request_observers
from strandline.text.output_streams import RequestStream
from tests.cpu.server.process import ServerProcess, http_post, running_server

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from strandline.server.engines.request_traces import RequestTraces

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
PROMPT = "a prompt that no log and no span may contain"


class Collector(ThreadingHTTPServer):
    """Takes what is exported over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.service_names: set[str] = set()
        self.bodies = b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
            self.server.service_names.add(attributes["service.name"])
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def attributes(span: Any) -> Mapping[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        Thread(target=collector.serve_forever, daemon=True).start()
        yield collector
        collector.shutdown()


@pytest.fixture(scope="module")
def traced(bytes_dir: Path, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    """A server that has answered a prompt twice, the second time as a part of a client's trace, and has stopped."""
    log = tmp_path_factory.mktemp("traced") / "log"
    flags = ["--otlp-traces-endpoint", collector.url, "--log-format", "json", "--enable-log-requests"]
    with running_server(bytes_dir, log, *flags) as server:
        for headers in ({}, {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}):
            body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}
            assert http_post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
    return server


def test_request_continues_the_trace_of_its_client(traced: ServerProcess, collector: Collector) -> None:
    first, second = sorted(collector.named("llm_request"), key=lambda span: span.start_time_unix_nano)
    assert (second.trace_id.hex(), second.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert first.trace_id.hex() != TRACE_ID
    assert not first.parent_span_id
    assert collector.service_names == {"strandline"}


def test_phases_follow_each_other_inside_the_request(traced: ServerProcess, collector: Collector) -> None:
    for request in collector.named("llm_request"):
        parts = [span for span in collector.spans if span.parent_span_id == request.span_id]
        assert {span.trace_id for span in parts} == {request.trace_id}
        found = [(span.name, span.start_time_unix_nano, span.end_time_unix_nano) for span in parts]
        [first_token] = (times for times in found if times[0] == "first_token")
        times = [times for times in found if times is not first_token]
        assert [name for name, _, _ in times] == ["queue", "prefill", "decode"]
        assert first_token[1:] == (request.start_time_unix_nano, times[-1][1])
        ends = [request.start_time_unix_nano, *(end for _, _, end in times)]
        assert [start for _, start, _ in times] == pytest.approx(ends[:-1], abs=2000)
        assert ends == sorted(ends)
        assert ends[-1] == request.end_time_unix_nano
        [event] = request.events
        assert (event.name, event.time_unix_nano) == ("first_token", times[-1][1])


def test_spans_have_the_cache_account(traced: ServerProcess, collector: Collector) -> None:
    cold, warm = sorted(collector.named("llm_request"), key=lambda span: span.start_time_unix_nano)
    found = attributes(warm)
    assert found["strandline.cache.hit_tokens"] == found["gen_ai.usage.prompt_tokens"] == len(PROMPT)
    assert found["gen_ai.usage.completion_tokens"] == 3
    assert found["strandline.cache.snapshot_kind"] == "prompt_end"
    assert attributes(cold)["strandline.cache.missed_tokens.first_seen"] == len(PROMPT)


def test_log_is_json_with_a_line_for_each_request(traced: ServerProcess) -> None:
    lines = [json.loads(line) for line in traced.log().splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    cold, warm = (line for line in lines if line["logger"] == "strandline.server.requests")
    assert (cold["cache.hit_tokens"], warm["cache.hit_tokens"]) == (0, len(PROMPT))
    assert warm["finish_reasons"] == ["length"]
    assert 0 < warm["queue_s"] < warm["ttft_s"] < warm["e2e_s"]


def test_neither_logs_nor_spans_contain_prompts(traced: ServerProcess, collector: Collector) -> None:
    assert len(collector.bodies) > 0
    assert PROMPT not in traced.log()
    assert PROMPT.encode() not in collector.bodies


def test_load_has_a_span_between_queue_and_prefill() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    new = NewRequest(RequestId("r"), (1, 2), SamplingParams(), 0, frozenset(), ())
    stream = RequestStream("r", None, [new], None, arrival_s=1.0)
    traces = RequestTraces(provider, "tiny")
    traces.begin(stream)
    stream.note_admission(Admission(RequestId("r"), admitted_s=4.0, load_begun_s=2.0, load_ended_s=3.0))
    stream.note_token(lambda: 5.0)
    traces.end(stream, 0, 6.0)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    lengths_s = {name: round((span.end_time - span.start_time) / 1e9, 3) for name, span in spans.items()}
    phases = {"queue": 1.0, "load": 1.0, "prefill": 1.0, "first_token": 4.0, "decode": 1.0}
    assert lengths_s == {**phases, "llm_request": 5.0}
    assert spans["llm_request"].attributes["gen_ai.response.finish_reasons"] == ("abort",)


@pytest.mark.parametrize("endpoint", ["collector:4317", "ftp://collector", "http://", ""])
def test_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with (
        pytest.raises(ConfigError, match="--otlp-traces-endpoint must be a URL"),
        request_observers(ServerConfig(otlp_traces_endpoint=endpoint), "tiny"),
    ):
        pass


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "strandline.server.engines.request_traces", None)
    with (
        pytest.raises(ConfigError, match=r"pip install 'strandline\[otlp\]'"),
        request_observers(ServerConfig(otlp_traces_endpoint="http://127.0.0.1:4317"), "tiny"),
    ):
        pass


def test_nothing_is_imported_without_an_endpoint() -> None:
    program = (
        "import strandline.server.launch, sys; print([n for n in sys.modules if n.startswith('opentelemetry.sdk')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
