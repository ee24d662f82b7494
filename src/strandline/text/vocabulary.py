"""Loading of a model's tokenizer, end-of-sequence tokens and grammars.

transformers is imported by the functions that need it, so that importing the text part loads no tensor library.
"""

import logging
import sys
from codecs import BOM_UTF8
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from strandline.config import EngineConfig
from strandline.config_fields import Fields, read_vocab_size
from strandline.errors import ConfigError, cause_of
from strandline.model_config import read_json_object, read_model_config
from strandline.records.constraints import TokenMatcher
from strandline.records.events import Limits
from strandline.records.plan import NewRequest
from strandline.text.frontend import Frontend
from strandline.text.model_files import GENERATION_CONFIG, check_files, find_tokenizer, read_generation_config
from strandline.text.remembered_answers import RememberedAnswers
from strandline.text.stop_finder import TextStopFinder
from strandline.text.structured import Grammars
from strandline.text.thinking import BudgetMatcher

LOGGER: Final = logging.getLogger(__name__)

TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
SPECIAL_TOKENS: Final = "special_tokens_map.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
PROCESSOR_TEMPLATE: Final = "chat_template.json"
"""The chat template of models that also read images, as earlier releases of transformers wrote it."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokenizer and what depends on it."""

    tokenizer: Any | None
    eos_ids: frozenset[int]
    grammars: Grammars

    def matcher(self, new: NewRequest) -> TokenMatcher:
        """Return the matcher of a request with a grammar or a budget of reasoning.

        Raises:
            RequestError: the grammar cannot be compiled.
        """
        wanted = new.params.structured_outputs
        grammar = None if wanted is None else self.grammars.matcher(wanted, new.stop_ids)
        if grammar is not None and new.thinking is None:
            return grammar
        if new.thinking is None:
            raise ValueError(f"request {new.request_id!r} is not constrained")
        return BudgetMatcher(new.thinking, self.tokenizer, new.hidden_ids, grammar)

    def stop_finder(self, new: NewRequest) -> TextStopFinder:
        """Return what finds a request's stop strings in its output."""
        return TextStopFinder(self.tokenizer, new)


def load_vocabulary(config: EngineConfig) -> Vocabulary:
    """Load the tokenizer, unless it is to be skipped, and what depends on it.

    Raises:
        ConfigError: the model, its configuration or its tokenizer cannot be found or read.
    """
    directory = check_files(config)
    model_config = read_model_config(directory)
    text_config = model_config.text
    vocab_size = read_vocab_size(text_config)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.tokenizer or str(directory))
    if tokenizer is not None and len(tokenizer) > vocab_size:
        text = (
            "the tokenizer has %d tokens, the model %d: prompts with others are refused; --tokenizer names another one"
        )
        LOGGER.warning(text, len(tokenizer), vocab_size)
    eos_ids = find_eos_ids(directory, text_config, tokenizer, vocab_size)
    grammars = Grammars(lambda: (tokenizer, eos_ids), vocab_size)
    return Vocabulary(tokenizer, eos_ids, grammars)


def load_frontend(config: EngineConfig, limits: Limits, vocabulary: Vocabulary) -> Frontend:
    """Build the text part for a core with these limits."""
    tokenizer, max_bytes = vocabulary.tokenizer, config.remembered_bytes
    frontend = Frontend(
        limits,
        tokenizer=tokenizer,
        eos_ids=vocabulary.eos_ids,
        grammars=vocabulary.grammars,
        answers=RememberedAnswers(tokenizer, max_bytes) if tokenizer is not None else None,
        seed=config.seed,
        has_priorities=config.scheduling_policy == "priority",
    )
    if config.reasoning is not None:
        frontend.end_thinking_with(config.reasoning.reasoning_end_str)
    return frontend


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer from a directory or the hub; the model's configuration is not read where its files suffice.

    Raises:
        ConfigError: there is none.
    """
    directory = find_tokenizer(name)
    try:
        # Prompts are limited by max_model_len; the tokenizer would warn of its own limit.
        tokenizer = _load_class(directory)(directory, model_max_length=sys.maxsize, trust_remote_code=False)
    except Exception as error:
        reason = _why_no_tokenizer(directory, f"{type(error).__name__}: {cause_of(error)}")
        raise ConfigError(f"no tokenizer in {name}: {reason}; name one with --tokenizer") from error
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):  # what transformers makes of a directory without files of it
        reason = _why_no_tokenizer(directory, "its vocabulary is empty")
        raise ConfigError(f"no tokenizer in {name}: {reason}; name one with --tokenizer")
    if not tokenizer.chat_template and (directory / PROCESSOR_TEMPLATE).is_file():
        tokenizer.chat_template = read_json_object(directory / PROCESSOR_TEMPLATE).get("chat_template")
    if isinstance(tokenizer.chat_template, str):  # transformers keeps a byte order mark
        tokenizer.chat_template = tokenizer.chat_template.removeprefix("\ufeff")
    return tokenizer


def _why_no_tokenizer(directory: Path, fault: str) -> str:
    """Return why a directory has no tokenizer: the file that cannot be read or is missing, else the fault."""
    for path in (directory / TOKENIZER, directory / TOKENIZER_CONFIG, directory / SPECIAL_TOKENS):
        try:
            if path.is_file():
                if path.read_bytes().startswith(BOM_UTF8):
                    return f"{path} begins with a byte order mark, which its readers refuse; save it without one"
                read_json_object(path)
        except ConfigError as error:
            return str(error)
    try:
        if (directory / CHAT_TEMPLATE).is_file():
            (directory / CHAT_TEMPLATE).read_text("utf-8")
    except ValueError as error:
        return f"{directory / CHAT_TEMPLATE} cannot be read as text: {error}"
    return f"{TOKENIZER}: {fault}" if (directory / TOKENIZER).is_file() else f"{TOKENIZER} is missing ({fault})"


def _load_class(directory: Path) -> Callable[..., Any]:
    """Return what loads a directory's tokenizer.

    ``tokenizer.json`` says everything about the conversion of text to tokens. Classes of transformers would build some
    of it anew, and are chosen by names that differ from release to release. They are needed for older files alone.
    """
    import transformers

    if (directory / TOKENIZER).is_file():
        return transformers.PreTrainedTokenizerFast.from_pretrained
    settings = directory / TOKENIZER_CONFIG
    named = (read_json_object(settings) if settings.is_file() else {}).get("tokenizer_class")
    for name in (named, str(named).removesuffix("Fast")):
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerBase):
            return found.from_pretrained
    model = directory / "config.json"
    model_type = (read_json_object(model) if model.is_file() else {}).get("model_type")
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    return partial(AutoTokenizer.from_pretrained, tokenizer_type=model_type)


def find_eos_ids(directory: Path, text_config: Fields, tokenizer: Any | None, vocab_size: int) -> frozenset[int]:
    """Return the end-of-sequence tokens: the generation configuration's, else the model's, and the tokenizer's.

    Raises:
        ConfigError: one is not in the vocabulary.
    """
    own = Fields({"eos_token_id": getattr(tokenizer, "eos_token_id", None)}, "the tokenizer: ")
    generation = read_generation_config(directory)
    named = Fields(generation, f"{GENERATION_CONFIG}: ") if "eos_token_id" in generation else text_config
    return named.tokens("eos_token_id", vocab_size) | own.tokens("eos_token_id", vocab_size)
