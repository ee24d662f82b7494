"""What the server refuses before anything is loaded: addresses and chat templates."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from strandline.errors import ConfigError
from strandline.server.launch import listen, read_template
from strandline.text.prompts import why_no_chat

TEMPLATE = "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"


@pytest.mark.parametrize("host", ["999.1.1.1", "192.0.2.7", "2001:db8::1", "a..b"])
def test_address_of_another_machine_is_refused_by_its_flag(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {host}:0: .*; choose another --host$"):
        listen(host, 0)


def test_template_comes_from_its_file_or_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    assert read_template(str(file)) == read_template(TEMPLATE) == TEMPLATE
    assert read_template(None) is None


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages", "{% nothing %}"])
def test_template_with_syntax_error_is_refused(template: str, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(f"\n{template}")
    with pytest.raises(ConfigError, match="--chat-template has a syntax error in line 1: "):
        read_template(template)
    with pytest.raises(ConfigError, match="--chat-template has a syntax error in line 2: "):
        read_template(str(file))


def test_template_that_is_neither_file_nor_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--chat-template 'nowhere' is neither a file nor a template"):
        read_template("nowhere")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="bytes' is not UTF-8: 'utf-8' codec"):
        read_template(str(tmp_path / "bytes"))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (TEMPLATE, None),
        (None, "the model has no chat template: give one with --chat-template"),
        ("{% for %}", "the model's chat template has a syntax error in line 1: .*; --chat-template names another one"),
        ({"default": TEMPLATE, "tool_use": "\n{{ x"}, "the model's chat template has a syntax error in line 2"),
    ],
    ids=["good", "none", "broken", "one broken of two"],
)
def test_why_a_model_cannot_chat_is_known_at_start(template: object, reason: str | None) -> None:
    found = why_no_chat(SimpleNamespace(chat_template=template))
    assert found is None if reason is None else re.match(reason, found or "")
