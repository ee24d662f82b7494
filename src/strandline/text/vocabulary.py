"""Finds a model's directory and loads what is known of its tokens without its weights.

Tokenizer, end-of-sequence tokens, grammars, and the sampling defaults of ``generation_config.json``.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from transformers import AutoConfig, AutoTokenizer
from transformers.configuration_utils import PretrainedConfig

from strandline.config import EngineConfig
from strandline.errors import ConfigError
from strandline.records.events import Limits
from strandline.text.frontend import Frontend
from strandline.text.structured import Grammars

DEMO_MODEL: Final = "demo"
DEMO_DIRECTORY: Final = Path(__file__).parent.parent / "demo"

GENERATION_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def find_model(name: str) -> Path:
    """Return the directory of a model: the bundled one, a local one, or one of the hub, fetched if need be.

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
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {name!r} is no directory and cannot be fetched from the hub: {error}") from error


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What is known of a model's tokens without its weights."""

    tokenizer: Any | None
    eos_ids: frozenset[int]
    grammars: Grammars


def load_vocabulary(config: EngineConfig) -> Vocabulary:
    """Load the tokenizer, if there is to be one, and what goes with it.

    Raises:
        ConfigError: there is no such model, or its configuration or tokenizer do not allow it.
    """
    directory = find_model(config.model)
    model_config = read_model_config(directory)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.tokenizer or str(directory))
    eos_ids = find_eos_ids(directory, model_config, tokenizer)
    grammars = Grammars(lambda: (tokenizer, eos_ids), model_config.get_text_config().vocab_size)
    return Vocabulary(tokenizer, eos_ids, grammars)


def load_frontend(config: EngineConfig, limits: Limits, vocabulary: Vocabulary) -> Frontend:
    """Build the text part for a core with these limits."""
    return Frontend(
        limits,
        tokenizer=vocabulary.tokenizer,
        eos_ids=vocabulary.eos_ids,
        grammars=vocabulary.grammars,
        seed=config.seed,
    )


def read_model_config(directory: Path) -> PretrainedConfig:
    """Read ``config.json``.

    Raises:
        ConfigError: it is missing or transformers does not understand it.
    """
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} has no config.json: is it a model's directory in the published layout?")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{directory / 'config.json'} cannot be read: {error}") from error
    return config


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer from a directory or the hub.

    Raises:
        ConfigError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"no tokenizer in {name}: {error}; name one with tokenizer=…, or set skip_tokenizer_init=True to work "
            "with token ids alone"
        ) from error


def find_eos_ids(directory: Path, model_config: PretrainedConfig, tokenizer: Any | None) -> frozenset[int]:
    """Return the end-of-sequence tokens: the generation configuration's, else the model's, and the tokenizer's."""
    text_config = model_config.get_text_config()
    named = read_generation_config(directory).get("eos_token_id", getattr(text_config, "eos_token_id", None))
    ids = set(named) if isinstance(named, list) else {named}
    if tokenizer is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(token for token in ids if token is not None)


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
