"""Writing the parts of an event stream to its connection directly.

A part that is sent as a message passes a dozen calls of the application's layers, which do not look into it, and h11's
checks of a body: an eighth of the HTTP process's work on a token.
"""

from collections.abc import Callable
from time import monotonic
from typing import Final

from strandline.server.http.response_parts import MAX_PART_BYTES

STREAM_WRITER: Final = "strandline.stream_writer"
"""The scope's field for the connection's ``StreamWriter``; missing: parts are sent as ASGI messages alone."""


class StreamWriter:
    """Writes parts of responses, between their heads and their last parts, which are sent as ASGI messages.

    A response must have no ``Content-Length``, so that its body is chunked, its request must be of HTTP/1.1 and not
    ``HEAD``, and no middleware may change or delay the messages.

    Args:
        write: writes to the connection.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self.is_ready = True
        """False: the connection is full or lost."""
        self.last_s = 0.0
        """When the last part was written, on the event loop's clock."""

    def write(self, part: bytes) -> bool:
        """Write a part; return False if it has to be sent as a message: it is large, or the connection not ready."""
        if not self.is_ready or not 0 < len(part) <= MAX_PART_BYTES:
            return False
        self._write(b"%x\r\n%b\r\n" % (len(part), part))
        self.last_s = monotonic()
        return True
