"""The epoch of the cache, which salts begin with: requests of different epochs share no prefix, in any tier."""

from uuid import uuid4

from strandline.records.adapters import with_epoch


class CacheEpoch:
    """The epoch of a server's engines; the first one has no name, and adds nothing to salts."""

    def __init__(self) -> None:
        self.name = ""

    def begin(self) -> str:
        """Begin another epoch, in which nothing that is cached so far is hit; return its name."""
        self.name = uuid4().hex
        return self.name

    def salt(self, salt: str) -> str:
        """Return a salt in this epoch, whatever epoch it has been in."""
        return with_epoch(salt, self.name) if self.name else salt
