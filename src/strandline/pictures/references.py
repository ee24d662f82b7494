"""References to pictures in requests: data in a URL, addresses on the web, and files.

Nothing but data is read unless the server's operator has allowed it.
"""

import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from strandline.errors import RequestError
from strandline.pictures.fetching import fetch

MAX_FILE_BYTES: Final = 32 * 2**20
"""Largest file of a picture."""


@dataclass(frozen=True, slots=True)
class MediaAccess:
    """What requests may refer to besides data that they carry."""

    domains: Sequence[str] = ()
    """Hosts from which pictures may be fetched."""
    directory: str | None = None
    """Where files may be read; None: nowhere."""

    def read(self, url: str) -> bytes:
        """Return the bytes of a picture's file.

        Raises:
            RequestError: the reference is malformed, not allowed, or leads nowhere.
        """
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return _decode_data(url)
        if scheme in ("http", "https"):
            return self._fetch(url)
        if scheme == "file":
            return self._read_file(url)
        raise RequestError(
            f"a picture must be a data: URL such as data:image/png;base64,…, or an http(s) address that the server may "
            f"fetch, got {url[:80]!r}"
        )

    def _fetch(self, url: str) -> bytes:
        allowed = [name.lower().rstrip(".") for name in self.domains]
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise RequestError(f"the picture's address is malformed: {error}") from error
        if "@" in parts.netloc:
            raise RequestError("a picture's address may have no user name or password")
        host = (parts.hostname or "").lower().rstrip(".")
        if host not in allowed:
            raise RequestError(
                f"pictures are not fetched from {host[:100]!r}: send the data in the request, or start the server with "
                "--allowed-media-domains"
            )
        return fetch(url, max_bytes=MAX_FILE_BYTES, may_be_private=allowed)

    def _read_file(self, url: str) -> bytes:
        if self.directory is None:
            raise RequestError(
                "files are not read: send the data in the request, or start the server with --allowed-local-media-path"
            )
        root = Path(self.directory).resolve()
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path)).resolve()
            is_allowed = parts.netloc in ("", "localhost") and path.is_relative_to(root) and path.is_file()
        except (OSError, ValueError, RuntimeError):
            # Python 3.11 and 3.12 raise a RuntimeError if links form a loop.
            path, is_allowed = root, False
        if not is_allowed:
            raise RequestError("there is no such file below the directory of --allowed-local-media-path")
        try:
            with path.open("rb") as file:
                return _checked(file.read(MAX_FILE_BYTES + 1))
        except OSError as error:
            raise RequestError(f"the picture's file cannot be read: {error.strerror}") from error


def _decode_data(url: str) -> bytes:
    """Return the bytes in a ``data:`` URL. Its media type says nothing that the data do not."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise RequestError(f"a picture's data must be in base64: data:image/png;base64,…, got {url[:60]!r}")
    return decode_base64(body)


def decode_base64(text: str) -> bytes:
    """Return the bytes of a picture in base64.

    Raises:
        RequestError: it is not base64, or too long.
    """
    if len(text) > MAX_FILE_BYTES * 4 // 3 + 4096:
        raise RequestError(f"a picture's file may have at most {MAX_FILE_BYTES:,} bytes")
    text = unquote(text) if "%" in text else text
    try:
        data = binascii.a2b_base64("".join(text.split()), strict_mode=True)
    except (ValueError, binascii.Error) as error:
        raise RequestError(f"the picture's data are not base64: {error}") from error
    return _checked(data)


def _checked(data: bytes) -> bytes:
    if len(data) > MAX_FILE_BYTES:
        raise RequestError(f"a picture's file may have at most {MAX_FILE_BYTES:,} bytes")
    if not data:
        raise RequestError("the picture's file is empty")
    return data
