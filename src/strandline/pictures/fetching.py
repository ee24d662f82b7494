"""Fetching of pictures over http(s), from hosts that a server's operator has named.

The host's name is resolved once, and the connection goes to the resolved address: a name that resolves to another one
the next time gains nothing. Redirects are not followed, and proxies are not used.
"""

import http.client
import ipaddress
import socket
import ssl
from collections.abc import Collection
from contextlib import closing, suppress
from threading import Event, Timer
from typing import Final
from urllib.parse import SplitResult, urlsplit

from strandline.errors import RequestError

CONNECT_S: Final = 5.0
FETCH_S: Final = 20.0
"""How long a fetch takes at most."""
PIECE_BYTES: Final = 2**16
EMBEDS_IPV4: Final = ipaddress.ip_network("64:ff9b::/96")
"""Addresses of IPv6 that translators turn into those of IPv4."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def fetch(url: str, *, max_bytes: int, may_be_private: Collection[str] = ()) -> bytes:
    """Return what a server answers.

    Args:
        may_be_private: addresses that may be private if the URL names them themselves.

    Raises:
        RequestError: the address is private, the server does not answer with status 200, or answers too much.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme.lower() == "https" else 80)
        if not url.isascii() or any(ord(character) <= 0x20 for character in url):
            raise ValueError("it has spaces or characters beyond ASCII")
        raw = _connect(parts, host, port, may_be_private)
    except (ValueError, OSError) as error:
        raise RequestError(f"the picture cannot be fetched from {url[:100]!r}: {error}") from error
    connection = http.client.HTTPConnection(host, port)
    connection.sock = raw
    with closing(raw), closing(connection):
        is_late = Event()
        timer = Timer(FETCH_S, _interrupt, [raw, is_late])
        timer.start()
        try:
            data = _answer(connection, parts, max_bytes)
            if is_late.is_set():
                raise ValueError(f"it took more than {FETCH_S:g} s")
            return data
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RequestError(f"the picture cannot be fetched from {host!r}: {error}") from error
        finally:
            timer.cancel()


def _connect(parts: SplitResult, host: str, port: int, may_be_private: Collection[str]) -> socket.socket:
    """Return a connection to the first address of a host, which is public."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    address = str(found[0][4][0])
    if not is_public(address) and not (address in may_be_private and address == host):
        raise ValueError(f"{host!r} is at a private address")
    raw = socket.create_connection((address, port), timeout=CONNECT_S)
    if parts.scheme.lower() != "https":
        return raw
    try:
        return ssl.create_default_context().wrap_socket(raw, server_hostname=host)
    except BaseException:
        raw.close()
        raise


def _answer(connection: http.client.HTTPConnection, parts: SplitResult, max_bytes: int) -> bytes:
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection.request("GET", target, headers={"Accept": "image/*", "User-Agent": "strandline"})
    answer = connection.getresponse()
    if answer.status != http.client.OK:
        reason = "redirects are not followed" if 300 <= answer.status < 400 else "it did not answer with the file"
        raise ValueError(f"status {answer.status}: {reason}")
    data = bytearray()
    while piece := answer.read(PIECE_BYTES):
        data += piece
        if len(data) > max_bytes:
            raise ValueError(f"the file has more than {max_bytes:,} bytes")
    return bytes(data)


def _interrupt(raw: socket.socket, is_late: Event) -> None:
    """End a fetch that takes too long: what waits for the socket reads its end."""
    is_late.set()
    with suppress(OSError):
        raw.shutdown(socket.SHUT_RDWR)


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet, also one of IPv4 in another form."""
    ip: Address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in EMBEDS_IPV4:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast
