"""Lines that clients write into system prompts for their vendor's servers, without a meaning for the model.

They differ between requests of one conversation, so a prompt that begins with one shares no prefix with the next.
"""

import logging
import re
from collections.abc import Sequence
from typing import Final

from strandline.text.chat_messages import SYSTEM_ROLES, MarkedMessage

LOGGER: Final = logging.getLogger("strandline.server")

TELEMETRY: Final = re.compile(r"^[ \t]*x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE)
"""Claude Code's first line, with a checksum of the first question or of the request."""


class TelemetryFilter:
    """Drops known telemetry from system messages, and logs that once."""

    def __init__(self) -> None:
        self._is_logged = False

    def drop(self, messages: Sequence[MarkedMessage]) -> list[MarkedMessage]:
        """Return messages without telemetry; a system message of nothing else is left out."""
        found = []
        for entry in messages:
            if entry.role not in SYSTEM_ROLES or TELEMETRY.search(entry.content) is None:
                found.append(entry)
                continue
            plain = entry.without(TELEMETRY)
            if plain.content.strip():
                found.append(plain)
            if not self._is_logged:
                self._is_logged = True
                LOGGER.warning(
                    "a client's x-anthropic-billing-header is left out of prompts: it changes with every request, so "
                    "no prefix would hit; --keep-client-telemetry keeps it"
                )
        return found
