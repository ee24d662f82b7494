"""Replicas of an engine behind one OpenAI-compatible endpoint, on Ray Serve. Needs ``pip install strandline[ray]``.

Deploy with ``serve run strandline.ray:build_app model=demo num_replicas=3``.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from strandline.errors import ConfigError


def build_app(arguments: Mapping[str, Any]) -> Any:
    """Return the application for ``serve run`` and ``serve deploy``.

    Args:
        arguments: the fields of ``strandline.ray.options.RayOptions``.

    Raises:
        ConfigError: one is unknown, or its value is out of range; or Ray is not installed.
    """
    if find_spec("ray") is None:
        raise ConfigError("Ray is not installed: pip install 'strandline[ray]'")
    from strandline.ray.app import deployments

    return deployments(arguments)
