"""Text that users give to commands, and that commands print: files, arguments and standard streams.

Files are UTF-8 whatever the locale. Prompts in arguments and standard input have the locale's encoding, but UTF-8 where
that is ASCII, which UTF-8 contains. Files and standard input may begin with a byte order mark and have line ends of any
system.
"""

import json
import os
import sys
from codecs import lookup
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import TextIOWrapper, UnsupportedOperation
from pathlib import Path
from typing import IO, Any, Final

ENCODING: Final = "utf-8-sig"
"""UTF-8 whose byte order mark, if there is one, is left out."""


def read_text(path: str | Path) -> str:
    """Return a file's text.

    Raises:
        OSError: it cannot be read.
        UnicodeDecodeError: it is not UTF-8.
    """
    return Path(path).read_text(encoding=ENCODING)


def json_lines(lines: Iterable[str]) -> Iterator[Any]:
    r"""Yield the values of JSON lines, without blank lines.

    Args:
        lines: split at ``\n`` alone: ``str.splitlines`` also splits at characters that JSON texts may contain.
    """
    return (json.loads(line) for line in lines if line.strip())


def read_stdin() -> str:
    """Return all of standard input.

    Raises:
        UnicodeDecodeError: it is not text.
    """
    return sys.stdin.read().encode(errors="surrogateescape").decode()


def argument_text(argument: str) -> str:
    """Return a text that is an argument, read as UTF-8 if its bytes are no text in the locale's encoding.

    Not for names of files: Python decodes such bytes to surrogates, and opens files by these.
    """
    try:
        argument.encode()
    except UnicodeEncodeError:
        try:
            return os.fsencode(argument).decode()
        except UnicodeError:
            return argument
    return argument


def open_standard_streams() -> None:
    """Let the standard streams transfer every text, whatever the locale.

    Streams that the parent process has closed are opened on the null device: they read as empty, and what is written is
    discarded. Otherwise a file that is opened later takes such a stream's descriptor, and child processes write to it.

    Bytes of standard input that are no text become surrogates, which are refused later; characters that standard output
    has no bytes for are written as escapes, as they are on standard error.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their descriptors
        if getattr(sys, name) is None:
            setattr(sys, name, _null_stream(mode))
    if isinstance(sys.stdin, TextIOWrapper):
        name = lookup(sys.stdin.encoding).name
        encoding = ENCODING if name in ("ascii", "utf-8") else name
        with suppress(UnsupportedOperation):  # a part of it has been read: the rest stays as the caller set it up
            sys.stdin.reconfigure(encoding=encoding, errors="surrogateescape", newline=None)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _null_stream(mode: str) -> IO[str]:
    """Open the null device at the lowest free descriptor, for child processes too, and return it as a stream."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    os.set_inheritable(descriptor, True)
    return open(descriptor, mode, encoding="utf-8", errors="backslashreplace")
