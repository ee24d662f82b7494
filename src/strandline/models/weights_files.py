"""The files of published weights: one, or shards with an index."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor
from xxhash import xxh3_64_digest

from strandline.errors import WeightsError

INDEX_NAME: Final = "model.safetensors.index.json"
PIECE_BYTES: Final = 16 << 20
"""Bytes of a file that a thread reads at a time for the model's fingerprint."""
MAX_THREADS: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class WeightsFile:
    """An open file. Tensors are read on demand."""

    path: Path
    _opened: Any

    def names(self) -> list[str]:
        """Return the names of its tensors."""
        names: list[str] = self._opened.keys()
        return names

    def shape(self, name: str) -> list[int]:
        """Return a tensor's shape; does not read it."""
        shape: list[int] = self._opened.get_slice(name).get_shape()
        return shape

    def dtype(self, name: str) -> str:
        """Return safetensors' name of a tensor's dtype; does not read the tensor."""
        return str(self._opened.get_slice(name).get_dtype())

    def get(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Read a tensor, or the part of it that ``index`` is: a range of each of its first dimensions."""
        tensor: Tensor = self._opened.get_slice(name)[index] if index else self._opened.get_tensor(name)
        return tensor


def open_files(directory: Path, stack: ExitStack) -> list[WeightsFile]:
    """Open the weights files of a directory until the stack is closed: those its index names, else all.

    Raises:
        WeightsError: there is none, or one is missing or no safetensors file.
    """
    return [WeightsFile(path, stack.enter_context(_open(path))) for path in _find_files(directory)]


def fingerprint(directory: Path) -> str:
    """Return a digest of a model's configuration and of checksums of all its weights.

    Threads read the files, which are in the system's memory then, about as fast as it is read.

    Raises:
        WeightsError: as ``open_files``.
    """
    digest = blake2b(digest_size=16)
    config = directory / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        for checksum in threads.map(_checksum, _pieces(_find_files(directory))):
            digest.update(checksum)
    return digest.hexdigest()


def _pieces(paths: list[Path]) -> Iterator[tuple[Path, int]]:
    """Yield files and places in them."""
    for path in paths:
        yield from ((path, start) for start in range(0, path.stat().st_size, PIECE_BYTES))


def _checksum(piece: tuple[Path, int]) -> bytes:
    """Return the size and the checksum of a piece."""
    path, start = piece
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        data = file.read(PIECE_BYTES)
    return len(data).to_bytes(4, "little") + xxh3_64_digest(data)


def _find_files(directory: Path) -> list[Path]:
    """Return the weights files of a directory: those its index names, else all."""
    index = directory / INDEX_NAME
    if not index.is_file():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"{directory} holds no *.safetensors; --load-format dummy runs on random weights")
        return files
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is not an index of weights files: {error!r}") from error
    for shard in shards:
        if not (directory / shard).is_file():
            raise WeightsError(f"{directory / shard} is missing: {INDEX_NAME} names it, one of {len(shards)} files")
    return [directory / shard for shard in shards]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is not a safetensors file, or is truncated: {error}") from error
