"""The configuration of reasoning budgets: names and meanings are vLLM's."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from strandline.errors import ConfigError
from strandline.json_options import read_json_option

OPEN: Final = "<think>"
CLOSE: Final = "</think>"
FLAG: Final = "--reasoning-config"
EXAMPLE: Final = '{"reasoning_end_str": "\\n\\nI have to answer now.\\n</think>\\n\\n"}'
END: Final = re.compile(rf"(?s:.*){CLOSE}[ \n]{{0,4}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningConfig:
    """What ends reasoning that has used up its budget.

    Raises:
        ConfigError: a value does not fit the parsers of reasoning.
    """

    reasoning_start_str: str = OPEN
    reasoning_end_str: str = CLOSE
    """May say why the reasoning ends, before the closing tag."""

    def __post_init__(self) -> None:
        start: object = self.reasoning_start_str
        if not isinstance(start, str) or start.strip() != OPEN:
            raise ConfigError(f"{FLAG}: reasoning_start_str must be {OPEN!r}, got {start!r}")
        end: object = self.reasoning_end_str
        if not isinstance(end, str) or not END.fullmatch(end) or end.count(CLOSE) > 1 or OPEN in end:
            raise ConfigError(
                f"{FLAG}: reasoning_end_str must end with {CLOSE}, and at most 4 spaces or line breaks after it, and "
                f"hold no other such tag; got {end!r}"
            )


def read_reasoning_config(value: str | Mapping[str, Any]) -> ReasoningConfig:
    """Read the configuration from a mapping, or from JSON.

    Raises:
        ConfigError: the value is not a mapping, a field is unknown, or a value does not fit.
    """
    known = (field.name for field in fields(ReasoningConfig))
    return ReasoningConfig(**read_json_option(FLAG, value, known=known, example=EXAMPLE))
