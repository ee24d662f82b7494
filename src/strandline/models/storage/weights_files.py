"""The files of published weights: one, or shards with an index."""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor
from xxhash import xxh3_64_digest

from strandline.errors import WeightsError
from strandline.file_forms import unread_weights, why_unreadable
from strandline.picture_config import PREPROCESSOR_CONFIG, PROCESSOR_CONFIG
from strandline.text_input import read_text

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
SHARD: Final = re.compile(r".*-\d+-of-\d+\.safetensors")
OTHER_FILES: Final = re.compile("(adapter|consolidated|optimizer|scheduler|training)[._-]")
"""Matches names of files that adapters, other loaders and trainers put next to a model's weights."""

PIECE_BYTES: Final = 16 << 20
"""Bytes of a file that a thread reads at a time for the model's fingerprint."""
MAX_THREADS: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class WeightsFile:
    """An open file. Tensors are read on demand."""

    path: Path
    _opened: Any
    _renamed: Mapping[str, str] = field(default_factory=dict)
    """Names in the file by those that differ from them here."""
    _left_out: frozenset[str] = frozenset()

    def renamed(self, names: Mapping[str, str]) -> "WeightsFile":
        """Return the file with other names for its tensors: maps these names to those in the file."""
        own = set(self.names())
        return WeightsFile(self.path, self._opened, {new: name for new, name in names.items() if name in own})

    def without(self, names: Collection[str]) -> "WeightsFile":
        """Return the file without some of its tensors."""
        return WeightsFile(self.path, self._opened, self._renamed, frozenset(names))

    def names(self) -> list[str]:
        """Return the names of its tensors."""
        names: list[str] = self._opened.keys()
        return [name for name in list(self._renamed) or names if name not in self._left_out]

    def shape(self, name: str) -> list[int]:
        """Return a tensor's shape; does not read it."""
        shape: list[int] = self._slice(name).get_shape()
        return shape

    def dtype(self, name: str) -> str:
        """Return safetensors' name of a tensor's dtype; does not read the tensor."""
        return str(self._slice(name).get_dtype())

    def get(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Read a tensor, or the part of it that ``index`` is: a range of each of its first dimensions."""
        if index:
            part: Tensor = self._slice(name)[index]
            return part
        tensor: Tensor = self._opened.get_tensor(self._renamed.get(name, name))
        return tensor

    def _slice(self, name: str) -> Any:
        return self._opened.get_slice(self._renamed.get(name, name))


def open_files(directory: Path, stack: ExitStack) -> list[WeightsFile]:
    """Open the weights files of a directory until the stack is closed.

    Raises:
        WeightsError: there is none, or one is missing or no safetensors file.
    """
    return [WeightsFile(path, stack.enter_context(_open(path))) for path in _find_files(directory)]


def fingerprint(directory: Path) -> str:
    """Return a digest of a model's configuration, also of its pictures, and of checksums of all its weights.

    Threads read the files, which are in the system's memory then, about as fast as it is read.

    Raises:
        WeightsError: as ``open_files``.
    """
    digest = blake2b(digest_size=16)
    for name in ("config.json", PREPROCESSOR_CONFIG, PROCESSOR_CONFIG):
        if (directory / name).is_file():
            digest.update((directory / name).read_bytes())
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        for checksum in threads.map(_checksum, _pieces(_find_files(directory))):
            digest.update(checksum)
    return digest.hexdigest()


def _pieces(paths: list[Path]) -> Iterator[tuple[Path, int]]:
    """Yield files and offsets in them."""
    for path in paths:
        yield from ((path, start) for start in range(0, path.stat().st_size, PIECE_BYTES))


def _checksum(piece: tuple[Path, int]) -> bytes:
    """Return the size and the checksum of a piece."""
    path, start = piece
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        data = file.read(PIECE_BYTES)
    return len(data).to_bytes(4, "little") + xxh3_64_digest(data)


def list_unread(directory: Path) -> list[str]:
    """Return the names of the safetensors files in a directory that are no weights of the model."""
    read = _find_files(directory)
    return [path.name for path in sorted(directory.glob("*.safetensors")) if path not in read]


def _find_files(directory: Path) -> list[Path]:
    """Return the weights files of a directory: those its index names, or the one that needs none, or shards, or all."""
    index = directory / INDEX_NAME
    if not index.is_file():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            instead = unread_weights(directory) or "--load-format dummy runs on random weights"
            raise WeightsError(f"{directory} holds no *.safetensors; {instead}")
        if directory / SINGLE_NAME in files:
            return [directory / SINGLE_NAME]
        weights = [path for path in files if not OTHER_FILES.match(path.name)]
        if not weights:
            raise WeightsError(f"{directory} holds no model: {', '.join(path.name for path in files)} are not one")
        return [path for path in weights if SHARD.fullmatch(path.name)] or weights
    try:
        shards = sorted(set(json.loads(read_text(index))["weight_map"].values()))
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
        reason = why_unreadable(path, error)
        raise WeightsError(f"{path} is not a safetensors file, or is truncated: {reason}") from error
