"""The tiers below the device whose files outlive the process: a directory, and a bucket or directory that is shared."""

import re
from dataclasses import dataclass, replace
from typing import Final

from strandline.errors import ConfigError

_SEGMENT: Final = r"(?!\.{1,2}(?:/|$))[^/\x00-\x1f\x7f]+"
_BUCKET_URL: Final = re.compile(rf"s3://([A-Za-z0-9][A-Za-z0-9._-]*)(?:/+(?:({_SEGMENT}(?:/{_SEGMENT})*)/*)?)?")

_DIRECTORY_URL: Final = re.compile(r"file://(/[^\x00-\x1f\x7f]+)")


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
OBJECTS: Final = FileTier(
    "objects", "object store", "--object-store", "s3://BUCKET/PREFIX or file:///DIR", "1TiB", 0.02
)


SHARED_DIRECTORY: Final = replace(OBJECTS, latency_s=0.0)
"""A directory instead of a bucket."""


def shared_directory(url: str) -> str | None:
    """Return the directory that an object store is in; None: it is in a bucket."""
    match = _DIRECTORY_URL.fullmatch(url)
    return None if match is None else match[1]


def read_bucket_url(url: str) -> tuple[str, str]:
    """Return the bucket of an object store, and what the names of the objects in it begin with.

    Raises:
        ConfigError: it is no such URL.
    """
    match = _BUCKET_URL.fullmatch(url)
    if match is None:
        raise ConfigError(f"{OBJECTS.flag} must be s3://BUCKET, s3://BUCKET/PREFIX or file:///DIR, got {url!r}")
    return match[1], match[2] or ""
