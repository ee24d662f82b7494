"""Host names in requests and flags, and the names that always refer to this machine."""

import re
from ipaddress import ip_address
from typing import Final

IPV6: Final = rb"\[([0-9a-f]*:[0-9a-f:.]*)\]"
NAME: Final = rb"([0-9a-z_-]+(?:\.[0-9a-z_-]+)*)\.?"
HOST: Final = re.compile(rb"(?:%s|%s)(?::([0-9]{1,5}))?" % (IPV6, NAME), re.IGNORECASE)
MAX_PORT: Final = 65535


def parse_host(field: bytes) -> str | None:
    """Return the name or address in a ``Host`` field, in lower case and without brackets; None if it is malformed."""
    found = HOST.fullmatch(field)
    if found is None or int(found[3] or 0) > MAX_PORT:
        return None
    return (found[1] or found[2]).decode().lower()


def is_local(name: str) -> bool:
    """Return whether a name or address is a loopback one, without a DNS lookup."""
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
