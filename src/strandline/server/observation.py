"""The observers of requests that flags ask for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from strandline.errors import ConfigError
from strandline.server.config import ServerConfig
from strandline.server.engines.request_observers import FinishedRequests, RequestObserver


@contextmanager
def request_observers(server: ServerConfig, model_name: str) -> Iterator[Sequence[RequestObserver]]:
    """Yield the observers; export the last traces on exit.

    Raises:
        ConfigError: traces cannot be exported.
    """
    logged: list[RequestObserver] = [FinishedRequests()] if server.enable_log_requests else []
    if server.otlp_traces_endpoint is None:
        yield logged
        return
    try:
        from strandline.server.engines.request_traces import RequestTraces, new_provider

        traces = RequestTraces(new_provider(server.otlp_traces_endpoint), model_name)
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry: pip install 'strandline[otlp]' ({error})"
        ) from error
    try:
        yield [*logged, traces]
    finally:
        traces.close()
