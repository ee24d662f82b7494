"""The tiers below the device whose files outlive the process: a directory, and a bucket that engines share."""

import re
from dataclasses import dataclass
from typing import Final

from strandline.errors import ConfigError

_SEGMENT: Final = r"(?!\.{1,2}(?:/|$))[^/\x00-\x1f\x7f]+"
_BUCKET_URL: Final = re.compile(rf"s3://([A-Za-z0-9][A-Za-z0-9._-]*)(?:/+(?:({_SEGMENT}(?:/{_SEGMENT})*)/*)?)?")


@dataclass(frozen=True, slots=True)
class FileTier:
    """A kind of tier in files. An engine has at most one."""

    store: str
    """The name of its store in actions and figures."""
    title: str
    """What messages call it."""
    flag: str
    """The flag that says where it is. The one that says its size ends in ``-size``."""
    placeholder: str
    """Stands for the flag's value in messages."""
    default_size: str
    """Its size, or as much of it as an engine uses, if none is given."""
    latency_s: float
    """Until the first byte of a file comes, which small loads wait for as well."""

    @property
    def size_flag(self) -> str:
        """The flag that says its size."""
        return f"{self.flag}-size"


@dataclass(frozen=True, slots=True)
class ChosenTier:
    """The tier in files that an engine has."""

    kind: FileTier
    location: str
    """A directory or a URL."""
    size: str | int
    """Its size, or as much of it as the engine uses."""


DISK: Final = FileTier("disk", "disk cache", "--disk-cache", "DIR", "100GiB", 0.0)
OBJECTS: Final = FileTier("objects", "object store", "--object-store", "s3://BUCKET/PREFIX", "1TiB", 0.02)


def read_bucket_url(url: str) -> tuple[str, str]:
    """Return the bucket of an object store, and what the names of the objects in it begin with.

    Raises:
        ConfigError: it is no such URL.
    """
    match = _BUCKET_URL.fullmatch(url)
    if match is None:
        raise ConfigError(f"{OBJECTS.flag} must be s3://BUCKET or s3://BUCKET/PREFIX, got {url!r}")
    return match[1], match[2] or ""
