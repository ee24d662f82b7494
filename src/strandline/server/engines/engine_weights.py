"""The weights that each engine computes with: one that is restarted has the model's own, whatever the others have."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from strandline.errors import EngineError


class StaleWeightsError(EngineError):
    """No engine that runs has the weights that requests are to be answered with."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the served model."""

    epoch: str
    """The epoch of the cache that began with them, which tells them apart; "": the model's own."""
    version: str
    """Their name."""


OWN_WEIGHTS: Final = Weights("", "default")
"""Those that an engine starts with, named as in SGLang."""


class EngineWeights:
    """The weights that requests are answered with, and those of each engine.

    Args:
        num_engines: they all have the model's own.
    """

    def __init__(self, num_engines: int) -> None:
        self._wanted = OWN_WEIGHTS
        self._held = [OWN_WEIGHTS] * num_engines

    @property
    def versions(self) -> list[str]:
        """Names of the engines' weights, by number."""
        return [held.version for held in self._held]

    @property
    def version(self) -> str:
        """Name of the weights that requests are answered with; where no engine has them, of those of the first one."""
        return self._wanted.version if self._wanted in self._held else self._held[0].version

    def is_current(self, engine: int) -> bool:
        """Return whether an engine may answer requests."""
        return self._held[engine] == self._wanted

    def change(self, engines: Collection[int], weights: Weights) -> None:
        """Record that these engines have changed their weights; others may not answer requests until they do."""
        self._wanted = weights
        for engine in engines:
            self._held[engine] = weights

    def rename(self, version: str) -> None:
        """Rename the weights that requests are answered with."""
        renamed = replace(self._wanted, version=version)
        self._held = [renamed if held == self._wanted else held for held in self._held]
        self._wanted = renamed

    def restart(self, engine: int) -> None:
        """Record that an engine has exited: it is restarted with the model's own weights, if it is."""
        is_own = self._wanted.epoch == OWN_WEIGHTS.epoch
        self._held[engine] = self._wanted if is_own else OWN_WEIGHTS

    def why_stale(self) -> str:
        """Return what to say where all engines that run have other weights."""
        return (
            f"requests are to be answered with the weights {self._wanted.version!r}, which an engine that was "
            "restarted does not have: send them again, or POST /update_weights_from_disk"
        )
