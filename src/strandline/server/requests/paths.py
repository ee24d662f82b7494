"""Paths that requests name."""

from pathlib import Path


def resolved(text: str) -> Path | None:
    """Return the path that a request names, without links; None: no file can have it."""
    try:
        path = Path(text).resolve()
        path.exists()  # raises if it is too long
    except (OSError, RuntimeError, ValueError):  # it is too long, a link leads to itself, or it has a NUL or surrogates
        return None
    return path
