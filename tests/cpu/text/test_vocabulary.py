"""What is loaded of a model for its texts."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from strandline.errors import ConfigError
from strandline.text.model_files import DEMO_DIRECTORY
from strandline.text.vocabulary import load_tokenizer
from tests.cpu.engine.tokenizers import byte_tokenizer

TEXT = "<|im_start|>user\n  Wie viel ist 12+30?\n\n\tπ ≈ 3.14 🙂<|im_end|>\n"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12 + 30?"}]
SETTINGS: dict[str, Any] = json.loads((DEMO_DIRECTORY / "tokenizer_config.json").read_text())
TEMPLATE: str = SETTINGS["chat_template"]

Write = Callable[..., Path]


@pytest.fixture(name="write")
def fixture_write(tmp_path: Path) -> Write:
    """Write a tokenizer's directory; settings that are ``...`` are left out."""

    def write(model: dict[str, Any] | None = None, **settings: Any) -> Path:
        shutil.copy(DEMO_DIRECTORY / "tokenizer.json", tmp_path)
        kept = {name: value for name, value in (SETTINGS | settings).items() if value is not ...}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(kept))
        if model is not None:
            (tmp_path / "config.json").write_text(json.dumps(model))
        return tmp_path

    return write


def check_equal(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.encode(TEXT)
    assert ids == other.encode(TEXT)
    assert tokenizer.decode(ids) == other.decode(ids) == TEXT
    assert tokenizer.special_tokens_map == other.special_tokens_map
    assert sorted(tokenizer.all_special_ids) == sorted(other.all_special_ids)
    assert tokenizer.added_tokens_decoder == other.added_tokens_decoder
    assert tokenizer.chat_template == other.chat_template
    if tokenizer.chat_template is not None:
        assert tokenizer.apply_chat_template(MESSAGES) == other.apply_chat_template(MESSAGES)


@pytest.fixture(scope="module", name="demo")
def fixture_demo() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_DIRECTORY)


def test_tokenizer_warns_of_no_limit_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        assert len(load_tokenizer(str(DEMO_DIRECTORY)).encode("word " * 9000)) > 8192
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tokenizer_class": "TokenizersBackend"},
        {"tokenizer_class": "UnheardOfTokenizer"},
        {"tokenizer_class": None},
        {"tokenizer_class": ...},
        {"extra_special_tokens": ["<|im_start|>"]},
        {"extra_special_tokens": {"image_token": "<|im_start|>"}},
        {"additional_special_tokens": ["<|im_start|>"]},
        {"added_tokens_decoder": {"2": {"content": "<|im_end|>", "special": True}}},
        {"chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TEMPLATE}]},
        {"chat_template": ...},
    ],
    ids=str,
)
def test_tokenizer_equals_transformers(write: Write, settings: dict[str, Any]) -> None:
    directory = write({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, **settings)
    check_equal(load_tokenizer(str(directory)), AutoTokenizer.from_pretrained(directory))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tokenizer_class": "Qwen2TokenizerFast"},
        {"tokenizer_class": "LlamaTokenizer"},
        {
            "tokenizer_class": "TikTokenTokenizer",
            "auto_map": {"AutoTokenizer": ["own.TikTokenTokenizer", None]},
        },
        {"tokenizer_class": 7},
        {"tokenizer_class": ["Qwen2Tokenizer"]},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "model",
    [
        None,
        {},
        {"model_type": "unheard_of"},
        {"model_type": "bailing_hybrid", "auto_map": {"AutoConfig": "configuration.Unheard"}},
        {"model_type": "llama", "hidden_size": "wide"},
        {"model_type": ["llama"], "tokenizer_class": "UnheardOfTokenizer"},
    ],
    ids=str,
)
def test_neither_model_nor_class_decides_about_tokens(
    write: Write, demo: Any, settings: dict[str, Any], model: dict[str, Any] | None
) -> None:
    check_equal(load_tokenizer(str(write(model, **settings))), demo)


def test_tokenizer_loads_beside_a_broken_configuration(write: Write, demo: Any) -> None:
    (write() / "config.json").write_text("{")
    check_equal(load_tokenizer(str(write())), demo)


def test_tokenizer_json_alone_is_enough(write: Write, demo: Any) -> None:
    directory = write()
    (directory / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(str(directory))
    assert tokenizer.encode(TEXT) == demo.encode(TEXT)
    assert tokenizer.chat_template is None


def test_special_tokens_are_read_from_a_map_of_their_own(write: Write, demo: Any) -> None:
    directory = write(eos_token=..., pad_token=...)
    named = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "pad_token": "<|endoftext|>"}
    (directory / "special_tokens_map.json").write_text(json.dumps(named))
    check_equal(load_tokenizer(str(directory)), demo)


def test_template_files_are_read(write: Write, demo: Any) -> None:
    directory = write(chat_template=...)
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    check_equal(load_tokenizer(str(directory)), demo)
    (directory / "chat_template.jinja").write_text("{{ 'first' }}")
    assert load_tokenizer(str(directory)).chat_template == "{{ 'first' }}"


def test_the_tokenizers_own_template_comes_before_a_processors(write: Write, demo: Any) -> None:
    directory = write()
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 'other' }}"}))
    check_equal(load_tokenizer(str(directory)), demo)


@pytest.mark.parametrize(
    ("settings", "model"),
    [
        ({"tokenizer_class": "Qwen2Tokenizer"}, {"model_type": "unheard_of"}),
        ({"tokenizer_class": "Qwen2TokenizerFast"}, None),
        ({"tokenizer_class": ...}, {"model_type": "qwen3"}),
    ],
    ids=str,
)
def test_vocabularies_of_older_files_are_read_by_the_class_named(
    write: Write, settings: dict[str, Any], model: dict[str, Any] | None
) -> None:
    directory = write(model, **settings)
    serialized = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text(json.dumps(serialized["model"]["vocab"]))
    merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in serialized["model"]["merges"])
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    tokenizer = load_tokenizer(str(directory))
    assert type(tokenizer).__name__ == "Qwen2Tokenizer"
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer in"),
        ({"config.json": {"model_type": "qwen3_5"}}, r"no tokenizer in .*: tokenizer\.json is missing"),
        ({"tokenizer_config.json": {"tokenizer_class": "UnheardOfTokenizer"}}, "no tokenizer in"),
        ({"tokenizer_config.json": ["a list"], "config.json": {}}, "must be a JSON object"),
        ({"tokenizer.json": {"model": 3}}, "no tokenizer in"),
        ({"tokenizer.json": 3}, r"tokenizer\.json must be a JSON object, got 3; name one with --tokenizer"),
        ({"tokenizer.json": {}}, r"tokenizer\.json: KeyError: 'added_tokens'; name one with --tokenizer"),
    ],
    ids=str,
)
def test_directories_without_a_tokenizer_are_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message) as raised:
        load_tokenizer(str(tmp_path))
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("special_tokens_map.json", b"[]", r"special_tokens_map\.json must be a JSON object, got \[\]"),
        ("special_tokens_map.json", b"{", r"special_tokens_map\.json cannot be read as JSON"),
        ("tokenizer_config.json", b"\xef\xbb\xbf{}", r"tokenizer_config\.json begins with a byte order mark"),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja cannot be read as text"),
    ],
)
def test_broken_files_beside_a_tokenizer_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"no tokenizer in .*{message}"):
        load_tokenizer(str(tmp_path))


def test_template_has_no_byte_order_mark(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8-sig")
    assert load_tokenizer(str(tmp_path)).chat_template == "{{ messages }}"


def test_a_name_of_neither_directory_nor_hub_is_refused() -> None:
    with pytest.raises(ConfigError, match="'nowhere' is neither a directory nor a hub name"):
        load_tokenizer("nowhere")
