"""What follows each request of the engines from its submission to its end: logs and traces."""

from typing import Any, Protocol

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
