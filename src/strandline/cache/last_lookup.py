"""The last lookup in a tree, remembered until the tree changes.

A request is looked up several times: to rank it in the queue, to find a leader, to find what tiers have of it, and when
it is admitted. Comparing all its tokens each time would cost more than all else in its admission.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

Root_t = TypeVar("Root_t")
Answer_t = TypeVar("Answer_t")


class LastLookup(Generic[Root_t, Answer_t]):
    """Looks up prompts; remembers the last answer.

    Args:
        look_up: returns what a tree has of a prompt, by its root and the encoded tokens. Changes nothing.
    """

    def __init__(self, look_up: Callable[[Root_t, bytearray], Answer_t]) -> None:
        self.look_up = look_up
        self.asked: tuple[Root_t, bytearray] | None = None
        """The root and the prompt of the last lookup. A prompt only grows."""
        self._valid_for: tuple[int, int] | None = None
        """Revision of the tree and length of the prompt for which the answer holds."""
        self._answer: Answer_t

    def find(self, root: Root_t, data: bytearray, revision: int) -> Answer_t:
        """Return what a tree has of a prompt.

        Args:
            revision: number of changes to the trees.
        """
        valid_for, asked = (revision, len(data)), self.asked
        if asked is None or asked[0] is not root or asked[1] is not data or self._valid_for != valid_for:
            self._answer = self.look_up(root, data)
            self.asked, self._valid_for = (root, data), valid_for
        return self._answer
