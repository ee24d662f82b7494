"""Finds what other engines have stored in an object store: a thread lists it now and then, and reads new headers.

The engine looks prefixes up in its own index, so no request waits for a listing. What is found is entered into the tier
between two steps, a few paths at a time.
"""

import logging
import time
from itertools import count
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Final, NamedTuple

from strandline.cache.tiers import Loads
from strandline.cache.tiers.adoption import FoundPath, KnownPaths
from strandline.clock import SYSTEM_CLOCK
from strandline.device.executor import ExecutorFacts
from strandline.device.stores.lower_stores import open_object_files
from strandline.errors import ConfigError, cause_of
from strandline.file_tiers import DISK, OBJECTS
from strandline.records.actions import FoundFile
from strandline.records.kept import KeptBlocks, KeptSnapshot
from strandline.transfer.object_files import ObjectFiles
from strandline.transfer.shared_directory import SharedDirectory
from strandline.transfer.stored_files import joined, kept_of

LOGGER: Final = logging.getLogger("strandline.object_store")
MAX_SHARE: Final = 0.25
"""Share of the thread's time that listings may take: the next one of a large store comes later."""
USED: Final = float("inf")
"""Instead of the time when a file was written: it has been found, and is not read again."""
CLOSE_S: Final = 1.0
"""A listing that takes longer ends with the process."""
LOG_EVERY_S: Final = 60.0
"""Minimum interval between log messages about failed listings and reads."""
FIRST_ADDRESS: Final = 2**48
"""Addresses of what is found begin here; the numbers of what the engine stores itself stay below."""
MAX_PATHS: Final = 8
"""Most paths that enter the tier between two steps: each takes time in proportion to its length."""


class Discovery(NamedTuple):
    """What a listing has found."""

    files: tuple[FoundFile, ...]
    paths: list[FoundPath]
    """Those that are whole now, of these files and earlier ones."""


class ObjectCatalog:
    """What is found in an object store, for one thread to take.

    Args:
        files: files of the first rank; other ranks store the same under the same names.
        has_snapshots: whether prompts resume at snapshots alone.

    Raises:
        OSError: the first listing has failed.
    """

    def __init__(self, files: ObjectFiles | SharedDirectory, *, has_snapshots: bool) -> None:
        self._files = files
        self._known = KnownPaths(has_snapshots=has_snapshots)
        self._seen = dict[str, float]()
        """By name of each file: what is of no use, when it was written; else ``USED``."""
        self._unread = dict[str, int]()
        """By name of each file that could not be read: the number of the attempt. Others come first."""
        self._attempts = count()
        self._addresses = count(FIRST_ADDRESS)
        self._found: SimpleQueue[Discovery] = SimpleQueue()
        self._is_closed = Event()
        self._logged_s = float("-inf")
        self.refresh()
        self._thread = Thread(target=self._run, name="object catalog", daemon=True)
        self._thread.start()

    def refresh(self) -> None:
        """Look for files that were not there before; those that cannot be read now are found by a later call.

        Raises:
            OSError: the server does not answer, or refuses a listing.
        """
        modified_s = {each.name: each.modified_s for each in self._files.list()}
        # A file that has expired, or is of no use, is found again if it is written again.
        self._seen = {name: seen for name, seen in self._seen.items() if name in modified_s}
        names = [name for name, written_s in modified_s.items() if self._seen.get(name) not in (USED, written_s)]
        names.sort(key=lambda name: (self._unread.get(name, -1), name))
        self._unread = {name: self._unread[name] for name in names if name in self._unread}
        files, kept, now_s = list[FoundFile](), list[KeptBlocks | KeptSnapshot](), time.time()
        error: OSError | None = None
        for name, header in zip(names, self._files.headers(names), strict=False):
            if isinstance(header, OSError):
                error = header
                self._unread[name] = next(self._attempts)
                continue
            self._unread.pop(name, None)
            self._seen[name] = USED if header is not None else modified_s[name]
            if header is not None:
                addresses = [next(self._addresses) for _ in header.sizes]
                files.append(FoundFile(name, addresses[0], len(addresses)))
                kept.append(kept_of(header, addresses, max(now_s - modified_s[name], 0.0)))
        if files:
            paths = self._known.add(joined(kept))
            for start in range(0, max(len(paths), 1), MAX_PATHS):
                self._found.put(Discovery(() if start else tuple(files), paths[start : start + MAX_PATHS]))
        if error is not None:
            self._warn("some files of the %s could not be read; they are found later: %s", error)

    def _run(self) -> None:
        wait_s = self._files.refresh_s
        while not self._is_closed.wait(wait_s):
            start_s = SYSTEM_CLOCK()
            try:
                self.refresh()
            except OSError as error:
                self._warn("the %s could not be listed; what other engines store is found later: %s", error)
            except Exception:
                # The edge of the thread: it goes on.
                LOGGER.exception("what is in the %s could not be found", self._files.title)
            wait_s = max(self._files.refresh_s, (SYSTEM_CLOCK() - start_s) / MAX_SHARE)

    def _warn(self, text: str, error: OSError) -> None:
        """Log why something of the store is not found, but seldom."""
        if SYSTEM_CLOCK() >= self._logged_s + LOG_EVERY_S:
            self._logged_s = SYSTEM_CLOCK()
            LOGGER.warning(text, self._files.title, cause_of(error))

    def take(self) -> Discovery | None:
        """Return something that was found and has not been taken; None: nothing."""
        try:
            return self._found.get_nowait()
        except Empty:
            return None

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._files.close()


class Discoveries:
    """Enters what is found into the tier of an object store, between steps."""

    def __init__(self, catalog: ObjectCatalog, loads: Loads) -> None:
        self.catalog, self._loads = catalog, loads
        for found in iter(catalog.take, None):
            self._enter(found)

    def turn(self) -> None:
        """Enter a few paths, if there are new ones."""
        if (found := self.catalog.take()) is not None:
            self._enter(found)

    def _enter(self, found: Discovery) -> None:
        self._loads.adopt(OBJECTS.store, found.files, found.paths)

    def close(self) -> None:
        """Look for nothing more."""
        self.catalog.close()


def open_discoveries(facts: ExecutorFacts, snapshot_dtype: str, loads: Loads) -> Discoveries | None:
    """Return what enters what is found in an object store; None: there is none.

    Raises:
        ConfigError: the object store cannot be listed.
    """
    found, spec = facts.lower.files, facts.spec
    if found is None or found.tier == DISK or not loads.tiers:
        return None
    files = open_object_files(found.location, found.layout, spec, snapshot_dtype, found.num_blocks * spec.block_bytes)
    try:
        catalog = ObjectCatalog(files, has_snapshots=spec.stored_snapshots(snapshot_dtype).max_blocks > 0)
    except OSError as error:
        files.close()
        raise ConfigError(f"{OBJECTS.flag} {found.location} cannot be listed: {cause_of(error)}") from error
    return Discoveries(catalog, loads)
