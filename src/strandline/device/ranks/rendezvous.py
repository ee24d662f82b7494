"""Where the ranks of an engine meet; in a module that loads no tensor library."""

import shutil
from pathlib import Path
from typing import NamedTuple


class Rendezvous(NamedTuple):
    """Where the ranks of an engine find each other, and which of them a process is."""

    rank: int
    size: int
    meeting_file: str
    """In a directory of its own."""

    def remove(self) -> None:
        """Remove the rendezvous, if it is still there."""
        shutil.rmtree(Path(self.meeting_file).parent, ignore_errors=True)
