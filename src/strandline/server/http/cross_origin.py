"""What web pages of other origins may do (CORS), as configured."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ORIGIN: Final = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@\\]+")
TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
"""A name of a method or header field."""


@dataclass(frozen=True, slots=True)
class CrossOrigin:
    """What pages of other origins may do; all lists take ``*`` for any."""

    origins: Sequence[str]
    with_credentials: bool
    methods: Sequence[str]
    headers: Sequence[str]
