"""Where prompts leave the index, and the deepest snapshot before that.

A request is looked up several times: to compare it with others that wait, to find somebody to follow, and when it is
admitted; mostly nothing has changed in between. To compare all its tokens each time would cost more than the rest of
its admission, so the last answer is kept, for as long as the index stays as it was.
"""

from strandline.cache.memory import CacheMemory
from strandline.cache.tree import Run, Snapshot, Walk, deepest_snapshot, walk


class Finder:
    """Walks the index, but not twice in a row for the same tokens."""

    def __init__(self, memory: CacheMemory) -> None:
        self._memory = memory
        self._asked: tuple[int, int] | None = None
        """Revision of the index, and length of the prompt, that the last answer holds for."""
        self.last: tuple[Run, bytearray] | None = None
        """The root and the prompt that were asked about last. A prompt only ever grows."""
        self._answer: tuple[Walk, Snapshot | None]

    def find(self, root: Run, data: bytearray) -> tuple[Walk, Snapshot | None]:
        """Return how far ``data`` follows the index, and the deepest snapshot on the way. Changes nothing."""
        asked = (self._memory.revision, len(data))
        last = self.last
        if last is None or last[0] is not root or last[1] is not data or self._asked != asked:
            end = walk(root, data)
            self._answer = end, deepest_snapshot(end, data)
            self.last, self._asked = (root, data), asked
        return self._answer
