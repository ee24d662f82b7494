"""What files are that should hold a model and do not: pointers, web pages, weights in formats that are not read."""

from pathlib import Path
from typing import Final

from strandline.errors import cause_of

BEGINNINGS: Final = (
    (
        b"version https://git-lfs",
        "it is a pointer of Git LFS, not the file itself: run 'git lfs pull' there",
    ),
    (b"<!doctype html", "it is a web page, not the file itself: download it again"),
    (b"<html", "it is a web page, not the file itself: download it again"),
    (b"gguf", "it is a GGUF file"),
)
"""How such files begin, in lower case, and the reason that errors give."""

UNREAD_WEIGHTS: Final = {
    "*.gguf": "GGUF files are not read; name a directory with the model's *.safetensors, as published",
    "*.bin": "PyTorch's files are not read, as they may run code; name a directory with *.safetensors",
    "*.pt": "PyTorch's files are not read, as they may run code; name a directory with *.safetensors",
    "*.pth": "PyTorch's files are not read, as they may run code; name a directory with *.safetensors",
}
"""Weights by the patterns of their names, and what to do instead."""


def why_unreadable(path: Path, error: Exception) -> str:
    """Return why a file cannot be read: what it is instead, if its beginning shows that, else what its reader says."""
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip().lower()
    except OSError:
        return cause_of(error)
    if not start:
        return "it is empty"
    return next((text for beginning, text in BEGINNINGS if start.startswith(beginning)), cause_of(error))


def unread_weights(path: Path) -> str | None:
    """Return what errors say about weights in another format, in a directory or at a path; None: there are none."""
    for pattern, text in UNREAD_WEIGHTS.items():
        files = [path] if path.is_file() and path.match(pattern) else sorted(path.glob(pattern))
        if files:
            return f"{files[0].name}: {text}"
    return None
