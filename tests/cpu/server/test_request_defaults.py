"""Defaults of requests that flags set: variables of the chat template, and sampling parameters."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strandline.cli import build_parser
from strandline.errors import ConfigError
from strandline.server.config import ServerConfig
from strandline.server.requests.service import Service
from strandline.text.frontend import Frontend, Limits
from strandline.text.model_files import GENERATION_CONFIG, default_sampling_params
from tests.cpu.engine.tokenizers import byte_tokenizer

USER = {"role": "user", "content": "x"}


def rendered(defaults: dict[str, Any], **given: Any) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }} {{ mood }} {{ enable_thinking }}"
    client: Any = SimpleNamespace(frontend=Frontend(Limits(256, 64), tokenizer=tokenizer))
    service = Service(client, ["x"], template_defaults=defaults)
    return asyncio.run(service.render([USER], template_options=given)).text or ""


def test_request_overrides_single_variables_of_the_template() -> None:
    defaults = {"mood": "calm", "enable_thinking": False}
    assert rendered(defaults) == "x calm False"
    assert rendered(defaults, enable_thinking=True) == "x calm True"


def test_flag_takes_a_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    flag = "--default-chat-template-kwargs"
    options = build_parser().parse_args(["serve", flag, '{"mood": "calm"}'])
    assert options.default_chat_template_kwargs == {"mood": "calm"}
    for wrong in ("calm", '["calm"]'):
        with pytest.raises(SystemExit):
            build_parser().parse_args(["serve", flag, wrong])
        assert "must be a JSON object" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [{"tokenize": True}, ["mood"]])
def test_wrong_variables_of_the_template_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="--default-chat-template-kwargs"):
        ServerConfig(default_chat_template_kwargs=wrong)


@pytest.mark.parametrize("model", [{"temperature": 0.3, "top_k": 20}, {"do_sample": False}, {}])
def test_sampling_parameters_override_those_of_the_model(tmp_path: Path, model: dict[str, Any]) -> None:
    (tmp_path / GENERATION_CONFIG).write_text(json.dumps(model))
    expected = {"temperature": 0.7, "presence_penalty": 1.5} | ({"top_k": 20} if model.get("top_k") else {})
    assert default_sampling_params(tmp_path, {"temperature": 0.7, "presence_penalty": 1.5}) == expected


@pytest.mark.parametrize(("wrong", "why"), [({"temperature": "hot"}, "must be a number"), ({"tmp": 1}, "unknown")])
def test_wrong_sampling_parameters_are_refused(tmp_path: Path, wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"--override-generation-config.*{why}"):
        default_sampling_params(tmp_path, wrong)
