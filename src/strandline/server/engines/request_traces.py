"""OpenTelemetry spans of requests; imported only if they are exported, as OpenTelemetry is optional.

A request's span begins with its submission and has the names and attributes that vLLM gives it. The spans in it, of the
queue, loads, prefill, the first token and decode, are made from the engine's times when the request ends.
"""

import os
import threading
import time
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from strandline.clock import SYSTEM_CLOCK
from strandline.env import read_otlp_protocol
from strandline.errors import ConfigError
from strandline.server.engines.request_observers import cache_fields, finish_reasons
from strandline.text.output_streams import RequestStream

GRPC: Final = "grpc"
HTTP: Final = "http/protobuf"
STOP_S: Final = 5.0
"""How long a server that stops tries to export the last spans."""


class RequestTraces:
    """Makes the spans of requests.

    Args:
        provider: exports them.
        model_name: an attribute of each.
    """

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("strandline")
        self._model_name = model_name
        self._parents: dict[str, Context] = {}

    def begin(self, stream: RequestStream) -> None:
        """Remember the client's trace context, which the request's span continues."""
        self._parents[stream.request_id] = get_current()

    def end(self, stream: RequestStream, engine: int, now_s: float) -> None:
        """Export the spans of a request."""
        start_ns = time.time_ns() - int(SYSTEM_CLOCK() * 1e9)

        def at(seconds: float) -> int:
            return start_ns + int(seconds * 1e9)

        times = stream.times
        span = self._tracer.start_span(
            "llm_request",
            context=self._parents.pop(stream.request_id, None),
            kind=trace.SpanKind.SERVER,
            attributes=_attributes(stream, self._model_name, engine, now_s),
            start_time=at(times.arrival_s),
        )
        if times.first_token_s is not None:
            span.add_event("first_token", timestamp=at(times.first_token_s))
        if "error" in finish_reasons(stream):
            span.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(span, Context())
        for name, begin_s, end_s in _phases(stream, now_s):
            self._tracer.start_span(name, context=inside, start_time=at(begin_s)).end(at(end_s))
        span.end(at(now_s))

    def close(self) -> None:
        """Export the last spans, for a limited time."""
        # In a thread, as an exporter tries again for longer than a server that stops may take.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(STOP_S)


def _phases(stream: RequestStream, now_s: float) -> list[tuple[str, float, float]]:
    """Return the phases of a request, each with its beginning and end. What is not known is left out.

    All but one follow each other: the wait for the first token covers those before it.
    """
    times, phases = stream.times, []
    queued_until_s = times.load_begun_s or times.admitted_s
    if queued_until_s is not None:
        phases.append(("queue", times.arrival_s, queued_until_s))
    if times.load_begun_s is not None and times.load_ended_s is not None:
        phases.append(("load", times.load_begun_s, times.load_ended_s))
    if times.admitted_s is not None and times.first_token_s is not None:
        phases.append(("prefill", times.admitted_s, times.first_token_s))
    if times.first_token_s is not None:
        phases.append(("first_token", times.arrival_s, times.first_token_s))
        phases.append(("decode", times.first_token_s, now_s))
    return phases


def _attributes(stream: RequestStream, model_name: str, engine: int, now_s: float) -> dict[str, Any]:
    times = stream.times
    found: dict[str, Any] = {
        "gen_ai.request.id": stream.request_id,
        "gen_ai.request.n": len(stream.outputs),
        "gen_ai.response.model": model_name,
        "gen_ai.response.finish_reasons": finish_reasons(stream),
        "gen_ai.usage.prompt_tokens": len(stream.prompt_ids),
        "gen_ai.usage.completion_tokens": stream.num_output_tokens,
        "gen_ai.latency.time_in_queue": times.queue_s,
        "gen_ai.latency.time_to_first_token": times.ttft_s,
        "gen_ai.latency.time_in_model_prefill": times.prefill_s,
        "gen_ai.latency.e2e": now_s - times.arrival_s,
        "strandline.engine": engine,
        **{f"strandline.cache.{name}": value for name, value in cache_fields(stream).items()},
    }
    return {name: value for name, value in found.items() if value is not None}


def new_provider(endpoint: str) -> TracerProvider:
    """Return a provider that exports to a collector. OpenTelemetry's own variables configure what is not given.

    Raises:
        ConfigError: the endpoint or the protocol is not one, or the protocol's exporter is not installed.
    """
    resource = Resource.create({} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "strandline"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
    return provider


def _exporter(endpoint: str) -> SpanExporter:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("grpc", "http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint must be a URL such as http://collector:4317 or http://collector:4318/v1/traces, "
            f"got {endpoint!r:.200}"
        )
    protocol = read_otlp_protocol() or (HTTP if parts.path.strip("/") else GRPC)
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        exporter: SpanExporter = GrpcExporter(endpoint=parts.netloc, insecure=parts.scheme != "https")
        return exporter
    if protocol == HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces")
    raise ConfigError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL must be {GRPC} or {HTTP}, got {protocol!r:.200}")
