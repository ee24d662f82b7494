"""The documented deployment, made small enough for one machine."""

import re
from pathlib import Path
from typing import Any

import yaml

ROUTING = Path(__file__).parents[3] / "docs" / "routing.md"
HEADERS = {"Authorization": "Bearer change-me"}


def documented(app: str, port: int) -> dict[str, Any]:
    """Return the documented YAML for one engine on this machine, with as little memory as it needs.

    Args:
        app: the application's name.
    """
    [example] = re.findall(r"^```yaml\n(.*?)^```$", ROUTING.read_text(), re.MULTILINE | re.DOTALL)
    config: dict[str, Any] = yaml.safe_load(example)
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    [application] = config["applications"]
    application["name"] = app
    application["args"]["num_replicas"] = 1
    application["args"]["engine"] |= {"memory": "64MiB", "device": "cpu", "dtype": "float32"}
    application["args"]["replica"]["ray_actor_options"]["num_cpus"] = 0.1
    return config


def replica_processes(app: str) -> list[int]:
    """Return the ids of the processes that are replicas of the engine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text()
        except OSError:
            continue
        if command.startswith(f"ray::ServeReplica:{app}:Engine"):
            found.append(int(folder.name))
    return sorted(found)
