"""A bucket of an S3-compatible server: names, reads and writes, with errors as ``OSError``.

Credentials, region and endpoint come from the environment variables of AWS's own tools. Reads run in a loop of one
thread, many at a time.
"""

import asyncio
import os
import re
from collections.abc import Coroutine
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread, current_thread
from typing import Any, Final, NamedTuple, TypeVar

from strandline.errors import ConfigError
from strandline.file_tiers import read_bucket_url

ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""Environment variables that may name the server, the first one that is set."""
ENDPOINT: Final = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?(/[!-~]*)?")
"""The client does not report what else it cannot use: it panics."""
OUT_OF_RANGE: Final = "416 Range Not Satisfiable"
"""Error of reads that begin at the end of an object or after it."""
CONNECT_S: Final = 5
REQUEST_S: Final = 15
"""A request may take so long, of at most a part of 8 MiB."""
WAIT_S: Final = 30
"""A request has failed after this, whatever keeps the loop from saying so."""
MAX_RETRIES: Final = 2
RETRY_S: Final = 10
"""No request is sent again after so long."""
MAX_CAUSE_CHARACTERS: Final = 500
"""Longest cause in a message: it may quote a page of a proxy, or of a server that stores no objects."""
ERROR_BODY: Final = re.compile(r"<\?xml.*?<Code>(.*?)</Code>.*?(?:<Message>(.*?)</Message>.*|$)", re.DOTALL)

Result_t = TypeVar("Result_t")


class ObjectInfo(NamedTuple):
    """An object in a listing."""

    name: str
    num_bytes: int
    modified_s: float
    """When it was written, in seconds since 1970."""


class Bucket:
    """The objects of a bucket whose names begin with a prefix. Any thread may call.

    Args:
        url: ``s3://BUCKET/PREFIX``.

    Raises:
        ConfigError: the URL is wrong, or the package that speaks to servers is not installed.
    """

    def __init__(self, url: str) -> None:
        name, prefix = read_bucket_url(url)
        try:
            import obstore
            from obstore import exceptions, store
        except ImportError:
            raise ConfigError(
                "--object-store needs the package obstore; install it with: pip install 'strandline[s3]'"
            ) from None
        self._obstore, self._error = obstore, exceptions.BaseError
        endpoint = _endpoint(url)
        try:
            self._store = store.S3Store(
                name,
                prefix=prefix or None,
                endpoint=endpoint,
                client_options={
                    "allow_http": endpoint is not None and endpoint.startswith("http://"),
                    "connect_timeout": timedelta(seconds=CONNECT_S),
                    "timeout": timedelta(seconds=REQUEST_S),
                },
                retry_config={"max_retries": MAX_RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)},
            )
        except self._error as error:
            raise ConfigError(f"--object-store {url} cannot be used: {_cause(error)}") from error
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="object store", daemon=True)
        self._thread.start()

    def list(self, folder: str) -> list[ObjectInfo]:
        """Return the objects of a folder.

        Raises:
            OSError: the server does not answer, or refuses.
        """
        try:
            return [
                ObjectInfo(each["path"].removeprefix(f"{folder}/"), each["size"], each["last_modified"].timestamp())
                for some in self._obstore.list(self._store, folder, chunk_size=1000)
                for each in some
            ]
        except self._error as error:
            raise OSError(_cause(error)) from error

    async def read(self, name: str, start: int, end: int) -> tuple[bytes | memoryview, int]:
        """Return bytes of an object, as many of ``[start, end)`` as it has, and its size; of none, 0. In the loop.

        Raises:
            FileNotFoundError: there is no such object.
            OSError: the server does not answer, or refuses.
        """
        try:
            found = await self._obstore.get_async(self._store, name, options={"range": (start, end)})
            data, num_bytes = memoryview(await found.bytes_async()), found.meta["size"]
        except FileNotFoundError:
            raise FileNotFoundError(f"{name} is gone") from None
        except self._error as error:
            if OUT_OF_RANGE in str(error):
                return b"", 0
            raise OSError(_cause(error)) from error
        # The client does not compare what it gets with the range of the object that the answer names.
        if len(data) < (wanted := min(end, num_bytes) - start):
            raise OSError(f"the server sent {len(data):,} of {wanted:,} bytes of {name}")
        return data, num_bytes

    def write(self, name: str, data: bytes | bytearray) -> None:
        """Write an object: all of it or nothing.

        Raises:
            OSError: the server does not answer, or refuses.
        """
        try:
            self._obstore.put(self._store, name, data)
        except (self._error, FileNotFoundError) as error:
            raise OSError(_cause(error)) from error

    def begin(self, work: Coroutine[Any, Any, Result_t]) -> Future[Result_t]:
        """Begin something in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result_t]) -> Result_t:
        """Run something in the loop, and wait for it.

        Raises:
            TimeoutError: it takes too long.
        """
        future = self.begin(work)
        try:
            return future.result(WAIT_S)
        finally:
            future.cancel()

    def close(self) -> None:
        """End the thread, and what runs in the loop, unless that has been done."""
        if self._loop.is_closed():
            return
        if current_thread() is self._thread:  # the garbage collector ends what owns this
            self._loop.stop()
            return
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _endpoint(url: str) -> str | None:
    """Return the URL of the server; None: it is Amazon's.

    Args:
        url: URL of the object store, for errors.

    Raises:
        ConfigError: an environment variable has no URL.
    """
    for variable in ENDPOINTS:
        if endpoint := os.environ.get(variable):
            if ENDPOINT.fullmatch(endpoint) is None:
                raise ConfigError(
                    f"--object-store {url} cannot be used: the environment variable {variable} must be a URL such as "
                    f"http://127.0.0.1:9000, got {endpoint!r}"
                )
            return endpoint
    return None


async def _cancel_all() -> None:
    """Cancel all other tasks of the loop, and wait until they have ended."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _cause(error: Exception) -> str:
    """Return a message of the library in one line, without its debugging output and with the server's words."""
    text, _, details = str(error).partition("\n\nDebug source")
    if text.endswith("builder error"):  # which does not say that the machine has no certificates
        text = ": ".join([text, *re.findall(r'"(No .*?)"', details)])
    return " ".join(ERROR_BODY.sub(r"\1: \2", text).split())[:MAX_CAUSE_CHARACTERS]
