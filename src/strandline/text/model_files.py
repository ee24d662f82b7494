"""A model's directory and the files in it that are plain JSON: no library is needed to read them."""

import json
from pathlib import Path
from typing import Any, Final

from strandline.errors import ConfigError

DEMO_MODEL: Final = "demo"
DEMO_DIRECTORY: Final = Path(__file__).parent.parent / "demo"

GENERATION_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def find_model(name: str) -> Path:
    """Return the directory of a model: bundled, local, or downloaded from the hub.

    Raises:
        ConfigError: there is no such model.
    """
    if name == DEMO_MODEL:
        return DEMO_DIRECTORY
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    is_hub_name = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if not is_hub_name:
        raise ConfigError(f"model {name!r} is neither 'demo', nor a directory, nor a hub name (owner/name)")
    return _fetch(name)


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download  # takes longer to import than everything before it

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {name!r} is no directory and cannot be fetched from the hub: {error}") from error


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Return ``generation_config.json``, or an empty dictionary.

    Raises:
        ConfigError: it is not JSON.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return values


def default_sampling_params(directory: Path) -> dict[str, Any]:
    """Return what the model's ``generation_config.json`` recommends, as fields of ``SamplingParams``.

    Raises:
        ConfigError: it is not JSON.
    """
    values = read_generation_config(directory)
    if values.get("do_sample") is False:
        return {"temperature": 0.0}
    return {name: values[name] for name in GENERATION_DEFAULTS if values.get(name) is not None}
