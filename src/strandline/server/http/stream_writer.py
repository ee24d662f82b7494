"""Writing the parts of an event stream to its connection directly.

A part that is sent as a message passes a dozen calls of the application's layers, which do not look into it, and h11's
checks of a body: an eighth of the HTTP process's work on a token.
"""

from time import monotonic
from typing import Any, Final

from strandline.server.http.response_parts import MAX_PART_BYTES

STREAM_WRITER: Final = "strandline.stream_writer"
"""The scope's field for the request's ``StreamWriter``; missing: parts are sent as ASGI messages alone."""


class StreamWriter:
    """Writes parts of one response, between its head and its last part, which are sent as ASGI messages.

    The response must have no ``Content-Length``, so that its body is chunked, and the request must be of HTTP/1.1 and
    not ``HEAD``.

    Args:
        cycle: uvicorn's request and response.
    """

    def __init__(self, cycle: Any) -> None:
        self._cycle, self._flow = cycle, cycle.flow
        self._write = cycle.transport.write
        self.last_s = 0.0
        """When the last part was written, on the event loop's clock."""

    def write(self, part: bytes) -> bool:
        """Write a part; return False if it has to be sent as a message: it is large, or the connection full or lost."""
        if self._flow.write_paused or self._cycle.disconnected or not 0 < len(part) <= MAX_PART_BYTES:
            return False
        self._write(b"%x\r\n%b\r\n" % (len(part), part))
        self.last_s = monotonic()
        return True
