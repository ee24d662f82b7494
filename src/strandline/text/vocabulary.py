"""Loads the tokenizer, end-of-sequence tokens and grammars of a model.

transformers is imported by the functions that need it, so that importing the text part loads no tensor library.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strandline.config import EngineConfig
from strandline.errors import ConfigError
from strandline.records.events import Limits
from strandline.text.frontend import Frontend
from strandline.text.model_files import find_model, read_generation_config
from strandline.text.structured import Grammars

if TYPE_CHECKING:
    from transformers.configuration_utils import PretrainedConfig


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokenizer and what depends on it."""

    tokenizer: Any | None
    eos_ids: frozenset[int]
    grammars: Grammars


def load_vocabulary(config: EngineConfig) -> Vocabulary:
    """Load the tokenizer, unless it is to be skipped, and what depends on it.

    Raises:
        ConfigError: the model, its configuration or its tokenizer cannot be found or read.
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


def read_model_config(directory: Path) -> "PretrainedConfig":
    """Read ``config.json``.

    Raises:
        ConfigError: it is missing or transformers does not understand it.
    """
    from transformers import AutoConfig

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
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"no tokenizer in {name}: {error}; name one with tokenizer=…, or set skip_tokenizer_init=True to work "
            "with token ids alone"
        ) from error


def find_eos_ids(directory: Path, model_config: "PretrainedConfig", tokenizer: Any | None) -> frozenset[int]:
    """Return the end-of-sequence tokens: the generation configuration's, else the model's, and the tokenizer's."""
    text_config = model_config.get_text_config()
    named = read_generation_config(directory).get("eos_token_id", getattr(text_config, "eos_token_id", None))
    ids = set(named) if isinstance(named, list) else {named}
    if tokenizer is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(token for token in ids if token is not None)
