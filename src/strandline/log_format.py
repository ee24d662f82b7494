"""The format of the logs of all processes of a server: lines of text, or of JSON."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

from strandline.env import read_log_format

LOG_FORMATS: Final = ("text", "json")


def configure_log(prefix: str = "", fields: dict[str, Any] | None = None) -> None:
    """Have this process log to standard error, in the format that the environment names.

    Args:
        prefix: begins each line of text.
        fields: are in each line of JSON.
    """
    handler = logging.StreamHandler(sys.stderr)
    is_json = read_log_format() == "json"
    handler.setFormatter(JsonFormatter(fields or {}) if is_json else logging.Formatter(f"{prefix}%(message)s"))
    logging.basicConfig(handlers=[handler])


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
