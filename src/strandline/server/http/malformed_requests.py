"""Responses to what is not an HTTP request, and warnings about it, which clients cannot fill the log with."""

import logging
import sys
from collections.abc import Sequence
from http import HTTPStatus
from time import monotonic
from typing import Final

import h11

from strandline.server.http.error_responses import error_body

LOGGER: Final = logging.getLogger("strandline.server")
LOG_INTERVAL_S: Final = 60.0
FIRST_BYTES: Final = 2
"""How many bytes of a connection are enough to recognise TLS."""
TLS_HANDSHAKE: Final = b"\x16\x03"
UVICORNS_WARNINGS: Final = (
    "Invalid HTTP request received.",
    "Unsupported upgrade request.",
    "No supported WebSocket library detected.",
)
"""How warnings begin that each request can cause: clients written in Java offer HTTP/2 in all of theirs."""


def drop_uvicorns_warnings() -> None:
    """Leave out of uvicorn's log what every request can cause."""
    logger = logging.getLogger("uvicorn.error")
    if _is_logged not in logger.filters:
        logger.addFilter(_is_logged)


def _is_logged(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(UVICORNS_WARNINGS)


class MalformedRequests:
    """Error responses to what is not an HTTP request, and at most one warning a minute."""

    def __init__(self) -> None:
        self._log_again_at_s = 0.0
        self._num_unlogged = 0

    def response_to(self, first_bytes: bytes, client: str | None) -> Sequence[h11.Event]:
        """Return the response to what h11 refuses, and log the reason. Call it while h11's error is being handled.

        Args:
            first_bytes: the first ``FIRST_BYTES`` bytes that the connection received.
            client: address of the client; None: unknown.
        """
        error, status = sys.exception(), 400
        if isinstance(error, h11.RemoteProtocolError):
            status = error.error_status_hint
        reason = str(error)
        if first_bytes == TLS_HANDSHAKE:
            reason = "it begins TLS, and this server has no --ssl-certfile; use http:// or add that flag"
        self._warn(client, reason)
        body = error_body("", status, f"this is not a valid HTTP request: {reason}")
        length = str(len(body))
        headers = [("content-type", "application/json"), ("content-length", length), ("connection", "close")]
        head = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase)
        return head, h11.Data(data=body), h11.EndOfMessage()

    def _warn(self, client: str | None, reason: str) -> None:
        now_s = monotonic()
        if now_s < self._log_again_at_s:
            self._num_unlogged += 1
            return
        others = f"; {self._num_unlogged} more since the last such warning" if self._num_unlogged else ""
        LOGGER.warning("invalid HTTP request from %s: %s%s", client or "an unknown address", reason, others)
        self._log_again_at_s, self._num_unlogged = now_s + LOG_INTERVAL_S, 0
