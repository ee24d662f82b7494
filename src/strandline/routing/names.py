"""Routers by name."""

from collections.abc import Callable, Mapping
from typing import Final

from strandline.errors import ConfigError
from strandline.routing.baselines import AnyReplica, BlindRouter, FewerOfTwo, LongestMatch, NextReplica
from strandline.routing.router import Router
from strandline.routing.snapshot_router import SnapshotRouter

ROUTERS: Final[Mapping[str, Callable[[], Router]]] = {
    "strandline": SnapshotRouter,
    "prefix-tree": lambda: BlindRouter(LongestMatch()),
    "power-of-two": lambda: BlindRouter(FewerOfTwo()),
    "round-robin": lambda: BlindRouter(NextReplica()),
    "random": lambda: BlindRouter(AnyReplica()),
}


def make_router(name: str) -> Router:
    """Return a router without replicas.

    Raises:
        ConfigError: none is called so.
    """
    if name not in ROUTERS:
        raise ConfigError(f"no router named {name!r}; known are {', '.join(ROUTERS)}")
    return ROUTERS[name]()
