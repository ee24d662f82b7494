"""A line in the log for each finished request: lengths and times, and no text of the prompt or the answer."""

import logging
from typing import Any, Final

from strandline.server.engines.request_observer import cache_fields, finish_reasons
from strandline.text.output_streams import RequestStream

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
