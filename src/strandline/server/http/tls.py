"""TLS: a server's key and certificate, the certificates that clients need, and reading all of them again."""

import asyncio
import logging
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from strandline.errors import ConfigError, cause_of

LOGGER: Final = logging.getLogger("strandline.server")
LOOK_S: Final = 1.0
"""How often files are checked for changes."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a server that speaks TLS, as the flags name them."""

    certfile: str
    """The server's certificate, followed by those between it and the authority's."""
    keyfile: str | None = None
    """None: the key is in ``certfile``."""
    ca_certs: str | None = None
    """The authorities that sign clients' certificates."""
    cert_reqs: int = ssl.CERT_NONE
    """Whether clients need a certificate: ``ssl.CERT_NONE``, ``CERT_OPTIONAL`` or ``CERT_REQUIRED``."""

    @property
    def names(self) -> Sequence[str]:
        """The paths of all files."""
        return [name for name in (self.certfile, self.keyfile, self.ca_certs) if name is not None]

    def context(self) -> ssl.SSLContext:
        """Read the files.

        Raises:
            ConfigError: one cannot be read, or the key does not belong to the certificate.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A resumed session would bring back a client whose authority has been removed since.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
        try:
            # An empty password, as otherwise OpenSSL would ask for that of an encrypted key on the terminal.
            context.load_cert_chain(self.certfile, self.keyfile, password="")
        except (OSError, ValueError) as error:
            names = " and ".join(name for name in (self.certfile, self.keyfile) if name is not None)
            raise ConfigError(
                f"--ssl-certfile, --ssl-keyfile: cannot use {names}: {cause_of(error)}; they must be a certificate "
                "and its key, in PEM format and not encrypted"
            ) from error
        context.verify_mode = ssl.VerifyMode(self.cert_reqs)
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except (OSError, ValueError) as error:
                raise ConfigError(f"--ssl-ca-certs: cannot use {self.ca_certs}: {cause_of(error)}") from error
        return context


class RefreshedContext:
    """A TLS context whose new connections use the files' latest content that is valid.

    Raises:
        ConfigError: as ``TlsFiles.context``.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._seen = self._look()
        self._latest = files.context()
        self.context = files.context()
        # Called in every handshake, also without a server name. The context that it sets replaces this one's
        # certificate and authorities together, so no connection sees the one without the other.
        self.context.sni_callback = self._use_latest

    def _use_latest(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._latest

    async def refresh_forever(self) -> None:
        """Check the files for changes until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.refresh()

    def refresh(self) -> None:
        """Read the files again if any has changed. Files that are not valid together are not used."""
        if (seen := self._look()) == self._seen:
            return
        self._seen = seen
        try:
            self._latest = self._files.context()
        except ConfigError as error:
            LOGGER.warning("TLS files have changed and are not used until they change again: %s", error)
        else:
            LOGGER.info("TLS files have changed: new connections use %s", ", ".join(self._files.names))

    def _look(self) -> list[tuple[int, int, int] | None]:
        """Return what changes with the files: of each, None if it is missing."""
        return [_signature(name) for name in self._files.names]


def _signature(name: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
