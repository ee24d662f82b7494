"""Reasoning as ``encrypted_content``, which clients that store nothing send back with the next request.

The text is signed, not secret: the response has it as ``content``, too. The signature is of the client's API key, so
that any server with that key reads it, also after a restart, and text of others is recognized.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from hashlib import blake2s
from hmac import compare_digest
from typing import Final

PREFIX: Final = "sl1."
SIGNATURE_BYTES: Final = 16


class ReasoningSeal:
    """Signs and reads reasoning.

    Args:
        owner: who may read it: a digest of an API key; empty: all clients of servers without keys.
    """

    def __init__(self, owner: str) -> None:
        self._key = blake2s(owner.encode(), person=b"reason").digest()

    def seal(self, text: str) -> str:
        """Return a text in the form of ``encrypted_content``."""
        data = text.encode(errors="replace")
        return PREFIX + urlsafe_b64encode(self._signature(data) + data).decode()

    def unseal(self, sealed: str) -> str | None:
        """Return the text; None if another server, or a server for another key, has written it."""
        if not sealed.startswith(PREFIX):
            return None
        try:
            signed = urlsafe_b64decode(sealed[len(PREFIX) :].encode())
        except (Error, ValueError):
            return None
        signature, data = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        return data.decode() if compare_digest(signature, self._signature(data)) else None

    def _signature(self, data: bytes) -> bytes:
        return blake2s(data, key=self._key, digest_size=SIGNATURE_BYTES).digest()
