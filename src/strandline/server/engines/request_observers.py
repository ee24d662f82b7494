"""Observers follow each request of the engines from its submission to its end: the log of finished requests, and traces
(``request_traces.py``).
"""

import logging
from typing import Any, Final, Protocol

from strandline.text.output_streams import RequestStream


class RequestObserver(Protocol):
    """Follows requests. It is called in the event loop, and must not block."""

    def begin(self, stream: RequestStream) -> None:
        """Record a submitted request, in the context of the HTTP request."""

    def end(self, stream: RequestStream, engine: int, now_s: float) -> None:
        """Record the end of a request: an output without a finish reason was aborted."""


def finish_reasons(stream: RequestStream) -> list[str]:
    """Return why each output ended."""
    return [str(output.finish_reason or "abort") for output in stream.outputs]


def cache_fields(stream: RequestStream) -> dict[str, Any]:
    """Return the cache's account of a request, by name; empty before the first token."""
    account = stream.account
    if account is None:
        return {}
    missed: dict[str, int] = {}
    for miss in account.misses:
        missed[miss.reason] = missed.get(miss.reason, 0) + miss.num_tokens
    return {
        "queried_tokens": account.queried,
        "hit_tokens": account.hit,
        "kv_tokens": account.kv_tokens,
        **({} if account.snapshot_kind is None else {"snapshot_kind": str(account.snapshot_kind)}),
        **{f"missed_tokens.{reason}": count for reason, count in missed.items()},
    }


LOGGER: Final = logging.getLogger("strandline.server.requests")


class FinishedRequests:
    """Logs requests when they end."""

    def begin(self, stream: RequestStream) -> None:
        """Log nothing yet."""

    def end(self, stream: RequestStream, engine: int, now_s: float) -> None:
        """Log a request, with all values as fields of the record for logs in JSON."""
        fields = _fields(stream, engine, now_s)
        first = "no first token" if fields["ttft_s"] is None else f"first token after {fields['ttft_s']:.3f} s"
        LOGGER.info(
            "%s: %s; prompt of %d tokens, %d cached; %d tokens generated; %s, end after %.3f s",
            stream.request_id,
            ", ".join(fields["finish_reasons"]),
            fields["prompt_tokens"],
            fields.get("cache.hit_tokens", 0),
            fields["completion_tokens"],
            first,
            fields["e2e_s"],
            extra={"fields": fields},
        )


def _fields(stream: RequestStream, engine: int, now_s: float) -> dict[str, Any]:
    times = stream.times
    return {
        "request_id": stream.request_id,
        "engine": engine,
        "finish_reasons": finish_reasons(stream),
        "prompt_tokens": len(stream.prompt_ids),
        "completion_tokens": stream.num_output_tokens,
        "queue_s": times.queue_s,
        "load_s": times.load_s,
        "prefill_s": times.prefill_s,
        "ttft_s": times.ttft_s,
        "e2e_s": now_s - times.arrival_s,
        **{f"cache.{name}": value for name, value in cache_fields(stream).items()},
    }
