"""What the engines of a server were asked to do, so that an engine that is restarted can do it again."""

from dataclasses import dataclass, field

from strandline.records.control import MEMORIES, Action, Memory, Pause, ResetCache, Sleep, new_epoch


@dataclass(slots=True)
class EngineState:
    """The lasting effects of pauses, sleep and resets, set before engines are asked: one may be restarted meanwhile."""

    is_paused: bool = False
    given_back: set[Memory] = field(default_factory=set)
    """Memory that the engines do not have."""
    being_taken: Memory | None = None
    """The part of ``given_back`` that the engines are taking again; None: they are taking none."""
    sleep_level: int = 0
    """How the weights were given back, if they were."""
    was_reset: bool = False
    """Whether the cache was reset since the start, also by a change of weights."""

    def actions(self) -> list[Action]:
        """Return what brings an engine that has just started into this state."""
        actions = list[Action]()
        if self.was_reset:
            # What it has found in files may be older than that.
            actions.append(ResetCache(new_epoch(), forced=True))
        if self.is_paused:
            actions.append(Pause(None))
        if given_back := self.given_back - {self.being_taken}:
            # Not all of it, to take a part again: that would fail if another process took the memory in between.
            actions.append(Sleep(self.sleep_level, tuple(memory for memory in MEMORIES if memory in given_back)))
        return actions
