"""Finds what other engines have stored in an object store: a thread lists it now and then, and reads new headers.

The engine looks prefixes up in its own index, so no request waits for a listing. What is found is entered into the tier
between two steps, a few paths at a time, and what is gone is taken out of it. An engine that is idle does so, too: its
first request hits what others have stored meanwhile.
"""

import logging
import os
import time
from collections import deque
from contextlib import suppress
from itertools import count, islice
from threading import Event, Lock, Thread
from typing import Final, NamedTuple

from strandline.cache.tiers import Loads
from strandline.cache.tiers.known_paths import FoundPath, KnownPaths, LostPath
from strandline.clock import SYSTEM_CLOCK
from strandline.device.executor import ExecutorFacts
from strandline.device.stores.lower_stores import open_object_files
from strandline.errors import ConfigError, cause_of
from strandline.file_tiers import DISK, OBJECTS
from strandline.records.actions import FoundFile
from strandline.records.tier_stats import DirectoryUse
from strandline.transfer.disk_files import Header
from strandline.transfer.object_files import ObjectFiles
from strandline.transfer.shared_directory import SharedDirectory
from strandline.transfer.stored_files import SNAPSHOT, entry_of, joined

LOGGER: Final = logging.getLogger("strandline.object_store")
CLOSE_S: Final = 1.0
"""A listing that takes longer ends with the process."""
LOG_EVERY_S: Final = 60.0
"""Minimum interval between log messages about failed listings and reads."""
FIRST_ADDRESS: Final = 2**48
"""Addresses of what is found begin here; the numbers of what the engine stores itself stay below."""
MAX_PATHS: Final = 8
"""Most paths that enter or leave the tier between two steps: each takes time in proportion to its length."""
MAX_FILES: Final = 256
"""Most files that the store enters, and most that it forgets, between two steps."""
MEASURE_EVERY_S: Final = 5.0
"""Minimum interval between two measurements of a directory, which take as long as a listing of all folders."""
CATCH_UP_S: Final = 0.1
"""Longest time for which a request waits, after the engine was idle, for what has been found meanwhile."""
STEP_S: Final = 1e-6
"""The least difference of times of use that files keep."""


class Discovery(NamedTuple):
    """What listings have found. What is gone comes first."""

    lost: tuple[LostPath, ...] = ()
    gone: tuple[FoundFile, ...] = ()
    """Files that are gone, once the tier has lost all that they held."""
    files: tuple[FoundFile, ...] = ()
    paths: tuple[FoundPath, ...] = ()
    """Those that are whole now, of these files and earlier ones."""


class ObjectCatalog:
    """What is in an object store, and what of that is new or gone, for one thread to take.

    Its size depends on the number of files that are there, however long nothing is taken.

    Args:
        files: files of the first rank; other ranks store the same under the same names.
        has_snapshots: whether prompts resume at snapshots alone.

    Raises:
        OSError: the first listing has failed.
    """

    def __init__(self, files: ObjectFiles | SharedDirectory, *, has_snapshots: bool) -> None:
        self._files = files
        self._known = KnownPaths(has_snapshots=has_snapshots)
        self._found: dict[str, FoundFile] = {}
        """By name."""
        self._names: dict[int, str] = {}
        """Their names, by first address."""
        self._useless: dict[str, float] = {}
        """By name of each file that is of no use: when it was written."""
        self._unread: dict[str, int] = {}
        """By name of each file that could not be read: the number of the attempt. Others come first."""
        self._used_s: dict[str, float] = {}
        """By name of each file: when it was used last, at the last listing."""
        self.use: DirectoryUse | None = None
        """What a directory held when it was last measured."""
        self._measured_s = float("-inf")
        self._attempts = count()
        self._addresses = count(FIRST_ADDRESS)
        self._lost: deque[LostPath] = deque()
        self._gone: deque[FoundFile] = deque()
        self._entering: dict[str, FoundFile] = {}
        """Those found that have not been taken."""
        self._lock = Lock()
        """Guards what is to be taken, and what is known while it changes: ``refresh`` alone adds and forgets."""
        self._refreshing = Lock()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = Event()
        self._logged_s = float("-inf")
        self._stamp = files.stamp()
        self.refresh()
        self._thread = Thread(target=self._run, name="object catalog", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Return how many files and paths are known or wait to be taken."""
        with self._lock:
            pending = len(self._lost) + len(self._gone) + len(self._entering)
            return len(self._known) + len(self._found) + len(self._useless) + len(self._unread) + pending

    def fileno(self) -> int:
        """Return a file descriptor that is readable when there is something to take."""
        return self._news

    def refresh(self) -> None:
        """Look for files that are new or gone; those that cannot be read now are found by a later call.

        Any thread may call.

        Raises:
            OSError: the server does not answer, or refuses a listing.
        """
        with self._refreshing:
            self._refresh()

    def _refresh(self) -> None:
        modified_s = {each.name: each.modified_s for each in self._files.list()}
        self._forget([name for name in self._found if name not in modified_s])
        # A file that is of no use is read again if it is written again.
        self._useless = {name: seen for name, seen in self._useless.items() if name in modified_s}
        is_old = self._found.keys() | {name for name, seen in self._useless.items() if seen == modified_s[name]}
        names = sorted(modified_s.keys() - is_old, key=lambda name: (self._unread.get(name, -1), name))
        self._unread = {name: self._unread[name] for name in names if name in self._unread}
        error: OSError | None = None
        for name, header in zip(names, self._files.headers(names), strict=False):
            if isinstance(header, OSError):
                error = header
                self._unread[name] = next(self._attempts)
                continue
            self._unread.pop(name, None)
            self._useless.pop(name, None)
            if header is None:
                self._useless[name] = modified_s[name]
            else:
                self._enter(name, header, max(time.time() - modified_s[name], 0.0))
        with self._lock:
            if self._lost or self._gone or self._entering or self._known.num_new:
                os.eventfd_write(self._news, 1)
        self._use_beginnings(modified_s)
        if SYSTEM_CLOCK() >= self._measured_s + MEASURE_EVERY_S:
            self.use, self._measured_s = self._files.measure(), SYSTEM_CLOCK()
        if error is not None:
            self._warn("some files of the %s could not be read; they are found later: %s", error)

    def _enter(self, name: str, header: Header, idle_s: float) -> None:
        addresses = [next(self._addresses) for _ in header.sizes]
        found = FoundFile(name, addresses[0], len(addresses))
        with self._lock:
            self._found[name] = self._entering[name] = found
            self._names[found.first_address] = name
            self._known.add(joined([entry_of(header, addresses, idle_s)]))

    def _forget(self, names: list[str]) -> None:
        """Forget files that are gone."""
        # Blocks first: what follows them is lost with them. One at a time, so that the engine need not wait for all.
        for name in sorted(names, key=lambda name: name.endswith(SNAPSHOT)):
            with self._lock:
                found = self._found.pop(name)
                del self._names[found.first_address]
                if (lost := self._known.forget(found.first_address)) is not None:
                    self._lost.append(lost)
                if self._entering.pop(name, None) is None:
                    self._gone.append(found)

    def _use_beginnings(self, used_s: dict[str, float]) -> None:
        """Set the last uses of files to those of what continues them, without which that would be of no use.

        Args:
            used_s: the last use of each file, by name.
        """
        changed = [name for name in self._found if used_s[name] != self._used_s.get(name)]
        # The latest first: what comes before several is set once.
        for name in sorted(changed, key=used_s.__getitem__, reverse=True):
            last_s = used_s[name]
            for address in self._known.before(self._found[name].first_address):
                before = self._names[address]
                if used_s[before] > last_s:
                    break
                used_s[before] = last_s = last_s + STEP_S
                self._files.set_used(before, last_s)
        self._used_s = used_s

    def _run(self) -> None:
        stamp, last_s, wait_s = self._stamp, SYSTEM_CLOCK(), self._files.look_s
        while not self._is_closed.wait(wait_s):
            start_s, last, stamp = SYSTEM_CLOCK(), stamp, self._files.stamp()
            if stamp == last and start_s < last_s + self._files.refresh_s:
                continue
            try:
                self.refresh()
            except OSError as error:
                self._warn("the %s could not be listed; what other engines store is found later: %s", error)
            except Exception:
                # The edge of the thread: it goes on.
                LOGGER.exception("what is in the %s could not be found", self._files.title)
            last_s = SYSTEM_CLOCK()
            wait_s = max(self._files.look_s, (last_s - start_s) / self._files.max_share)

    def _warn(self, text: str, error: OSError) -> None:
        """Log why something of the store is not found, but seldom."""
        if SYSTEM_CLOCK() >= self._logged_s + LOG_EVERY_S:
            self._logged_s = SYSTEM_CLOCK()
            LOGGER.warning(text, self._files.title, cause_of(error))

    def take(self) -> Discovery | None:
        """Return something that was found and has not been taken; None: nothing."""
        with self._lock:
            lost = tuple(self._lost.popleft() for _ in range(min(len(self._lost), MAX_PATHS)))
            if self._lost:
                return Discovery(lost)
            gone = tuple(self._gone.popleft() for _ in range(min(len(self._gone), MAX_FILES)))
            files = tuple(islice(self._entering.values(), MAX_FILES))
            for found in files:
                del self._entering[found.name]
            # Paths name addresses of any files.
            paths = () if self._entering else tuple(self._known.take(MAX_PATHS))
            if lost or gone or files or paths:
                return Discovery(lost, gone, files, paths)
            with suppress(BlockingIOError):
                os.eventfd_read(self._news)
            return None

    def close(self) -> None:
        """End the thread."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._files.close()
            os.close(self._news)


class Discoveries:
    """Enters what is found into the tier of an object store, and takes out what is gone, between steps."""

    def __init__(self, catalog: ObjectCatalog, loads: Loads) -> None:
        self.catalog, self._loads = catalog, loads
        self._left: Discovery | None = None
        """What the last turn did not finish, as it evicts more than one turn may."""
        self.turn(float("inf"))

    def fileno(self) -> int:
        """Return a file descriptor that is readable when ``turn`` has work."""
        return self.catalog.fileno()

    def turn(self, limit_s: float = 0.0) -> None:
        """Enter or take out a few paths, if some are new or gone, and further ones until a limit."""
        end_s = SYSTEM_CLOCK() + limit_s
        while (found := self._left or self.catalog.take()) is not None:
            self._left = self._enter(found)
            if SYSTEM_CLOCK() >= end_s:
                return

    def _enter(self, found: Discovery) -> Discovery | None:
        """Take out what is lost, then enter what is new; return what is left for another turn."""
        if found.lost or found.gone:
            left = self._loads.forget(OBJECTS.store, found.gone, found.lost)
            if left:
                return found._replace(lost=tuple(left))
        if found.files or found.paths:
            self._loads.adopt(OBJECTS.store, found.files, found.paths)
        return None

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
