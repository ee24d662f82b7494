"""A model's directory and its plain JSON files, which can be read without other libraries."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from strandline.config import EngineConfig
from strandline.errors import ConfigError, RequestError, cause_of
from strandline.file_forms import unread_weights
from strandline.json_options import read_json_option
from strandline.model_config import check_architecture, decode_floats, read_json_object
from strandline.records.sampling_params import SamplingParams

DEMO_MODEL: Final = "demo"
DEMO_DIRECTORY: Final = Path(__file__).parent.parent / "demo"
STRICT_TEMPLATE: Final = DEMO_DIRECTORY / "strict.jinja"
"""A chat template for the demo model that refuses what some agent models' templates do."""

TOKENIZER_FILES: Final = ("*.json", "*.jinja", "*.txt", "*.model")
"""Patterns of the files that a tokenizer may consist of, besides the model's configuration."""

GENERATION_CONFIG: Final = "generation_config.json"
GENERATION_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
OVERRIDES: Final = (*GENERATION_DEFAULTS, "presence_penalty", "frequency_penalty")
OVERRIDE_FLAG: Final = "--override-generation-config"


def check_files(config: EngineConfig) -> Path:
    """Return the model's directory; check the parts of it and of its tokenizer that need no library.

    Raises:
        ConfigError: there is no such model or tokenizer, or the model's architecture is not supported.
    """
    directory = find_model(config.model)
    check_architecture(directory)
    if config.tokenizer is not None and not Path(config.tokenizer).is_dir() and not _is_hub_name(config.tokenizer):
        raise ConfigError(f"--tokenizer {config.tokenizer!r} is neither a directory nor a hub name (owner/name)")
    return directory


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
    if (unread := unread_weights(path)) is not None:
        raise ConfigError(f"model {name!r} is no directory: {unread}")
    if not _is_hub_name(name):
        raise ConfigError(f"model {name!r} is neither 'demo', nor a directory, nor a hub name (owner/name)")
    return _fetch(name, (*TOKENIZER_FILES, "*.safetensors"), "model")


def find_drafter(name: str) -> Path:
    """Return the directory of a drafter: the demo model's, local, or downloaded from the hub.

    Raises:
        ConfigError: there is no such drafter.
    """
    return DEMO_DIRECTORY / "dflash" if name == DEMO_MODEL else find_model(name)


def find_tokenizer(name: str) -> Path:
    """Return the directory of a tokenizer: local, or downloaded from the hub.

    Raises:
        ConfigError: there is no such tokenizer.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not _is_hub_name(name):
        raise ConfigError(f"tokenizer {name!r} is neither a directory nor a hub name (owner/name)")
    return _fetch(name, TOKENIZER_FILES, "tokenizer")


def _is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _fetch(name: str, patterns: Sequence[str], what: str) -> Path:
    from huggingface_hub import snapshot_download  # takes longer to import than everything before it

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{what} {name!r} is no directory and cannot be fetched from the hub: {cause_of(error)}"
        ) from error


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Return ``generation_config.json``, or an empty dictionary.

    Raises:
        ConfigError: it is not a JSON object.
    """
    path = directory / GENERATION_CONFIG
    return decode_floats(read_json_object(path)) if path.is_file() else {}


def default_sampling_params(directory: Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what the model's ``generation_config.json`` recommends, as fields of ``SamplingParams``.

    Args:
        overrides: values that take precedence.

    Raises:
        ConfigError: it is not a JSON object, a value is out of range, or an override is unknown.
    """
    values = read_generation_config(directory)
    recommended = {name: values[name] for name in GENERATION_DEFAULTS if values.get(name) is not None}
    if values.get("do_sample") is False:
        recommended = {"temperature": 0.0}
    overrides = read_json_option(OVERRIDE_FLAG, overrides or {}, known=OVERRIDES, example='{"temperature": 0.7}')
    for source, given in ((GENERATION_CONFIG, recommended), (OVERRIDE_FLAG, overrides)):
        try:
            SamplingParams(**given)
        except RequestError as error:
            raise ConfigError(f"{source}: {error}") from error
    return {**recommended, **overrides}
