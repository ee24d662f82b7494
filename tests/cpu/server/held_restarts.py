"""The command line, with engines that are restarted once a file exists; the file is the first argument.

What a server says while an engine is gone can then be read, however long that takes.
"""

import asyncio
import runpy
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from strandline.server.engines import supervisor

LOOK_S: Final = 0.02


def main() -> None:
    """Run the command line."""
    may_restart, restarted = Path(sys.argv.pop(1)), supervisor.engine_process

    @asynccontextmanager
    async def wait_and_restart(*arguments: Any) -> AsyncIterator[Any]:
        while not may_restart.exists():
            await asyncio.sleep(LOOK_S)
        async with restarted(*arguments) as started:
            yield started

    supervisor.engine_process = wait_and_restart  # not that of launch, which starts engines first
    runpy.run_module("strandline", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
