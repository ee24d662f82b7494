"""The logs of all processes of a server: their level, and their format, lines of text or of JSON."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

from strandline.env import read_log_format, read_log_level

LOG_FORMATS: Final = ("text", "json")
LOG_LEVELS: Final = ("info", "warning", "error")


def configure_log(prefix: str = "", fields: dict[str, Any] | None = None, *, least: int = logging.WARNING) -> None:
    """Have this process log to standard error, in the format and from the level on that the environment names.

    Args:
        least: level below which nothing is logged in any case.
        prefix: begins each line of text.
        fields: are in each line of JSON.
    """
    handler = logging.StreamHandler(sys.stderr)
    is_json = read_log_format() == "json"
    handler.setFormatter(JsonFormatter(fields or {}) if is_json else logging.Formatter(f"{prefix}%(message)s"))
    logging.basicConfig(handlers=[handler])
    wanted = logging.getLevelNamesMapping()[read_log_level().upper()]
    logging.getLogger("strandline").setLevel(max(least, wanted))


class JsonFormatter(logging.Formatter):
    """Formats each record as an object in one line: time, level, logger, message, and what a record adds in ``fields``.

    Args:
        fields: are in each line.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
