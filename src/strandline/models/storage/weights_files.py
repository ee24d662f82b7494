"""The files of published weights: one, or shards with an index."""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
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
from strandline.file_forms import unread_weights, why_unreadable
from strandline.picture_config import PREPROCESSOR_CONFIG, PROCESSOR_CONFIG
from strandline.text_input import read_text

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
SHARD: Final = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
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
    _renamed: Mapping[str, str] | None = None
    """Names in the file by those that they have here; None: the same ones."""
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
        names = self._opened.keys() if self._renamed is None else self._renamed
        return [name for name in names if name not in self._left_out]

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
        tensor: Tensor = self._opened.get_tensor(self._published(name))
        return tensor

    def _slice(self, name: str) -> Any:
        return self._opened.get_slice(self._published(name))

    def _published(self, name: str) -> str:
        return name if self._renamed is None else self._renamed[name]


def open_files(directory: Path, stack: ExitStack) -> list[WeightsFile]:
    """Open the weights files of a directory until the stack is closed.

    Raises:
        WeightsError: there is none, or one is missing or no safetensors file, or two have the same tensor, and no index
            says which of them is read.
    """
    files = [WeightsFile(path, stack.enter_context(_open(path))) for path in _find_files(directory)]
    paths_of = dict[str, list[Path]]()
    for file in files:
        for name in file.names():
            paths_of.setdefault(name, []).append(file.path)
    repeated = {name: paths for name, paths in paths_of.items() if len(paths) > 1}
    if not repeated:
        return files
    index = directory / INDEX_NAME
    chosen = {name: directory / shard for name, shard in _read_index(index).items()} if index.is_file() else {}
    for name, paths in repeated.items():
        if chosen.get(name) not in paths:
            found = " and ".join(path.name for path in paths)
            raise WeightsError(f"{directory}: {name} is in {found}, and no {INDEX_NAME} says which of them is read")
    return [
        file.without([name for name in file.names() if name in repeated and chosen[name] != file.path])
        for file in files
    ]


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
        shards = [path for path in weights if SHARD.fullmatch(path.name)]
        _require_all_shards(directory, shards)
        return shards or weights
    names = sorted(set(_read_index(index).values()))
    for name in names:
        if not (directory / name).is_file():
            raise WeightsError(f"{directory / name} is missing: {INDEX_NAME} names it, one of {len(names)} files")
    return [directory / name for name in names]


def _read_index(path: Path) -> dict[str, str]:
    """Return the name of the file that holds each tensor.

    Raises:
        WeightsError: it is not an index, or names no files.
    """
    try:
        shard_of = json.loads(read_text(path))["weight_map"]
        if not shard_of or not all(isinstance(shard, str) for shard in shard_of.values()):
            raise ValueError("weight_map must map tensors to names of files")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} is not an index of weights files: {error!r}") from error
    return dict(shard_of)


def _require_all_shards(directory: Path, shards: list[Path]) -> None:
    """Raise a WeightsError if there are fewer shards than their names say; no index names the others."""
    numbers = dict[tuple[str, str], set[int]]()
    for match in filter(None, (SHARD.fullmatch(path.name) for path in shards)):
        prefix, number, total = match.groups()
        numbers.setdefault((prefix, total), set()).add(int(number))
    for (prefix, total), found in numbers.items():
        if len(found) < int(total):
            missing = next(number for number in range(1, int(total) + 1) if number not in found)
            raise WeightsError(f"{directory}: file {missing} of {prefix}-…-of-{total}.safetensors is missing")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        reason = why_unreadable(path, error)
        raise WeightsError(f"{path} is not a safetensors file, or is truncated: {reason}") from error
