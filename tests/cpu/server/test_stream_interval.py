"""``--stream-interval``: tokens of a stream come together, but for the first and the last."""

import json
from pathlib import Path

import pytest

from strandline.errors import ConfigError
from strandline.server.config import ServerConfig
from tests.cpu.server.process import running_server

INTERVAL = 4


def test_tokens_between_first_and_last_come_together(bytes_dir: Path, tmp_path: Path) -> None:
    with running_server(bytes_dir, tmp_path / "log", "--stream-interval", str(INTERVAL)) as server:
        fields = {"prompt": "x", "max_tokens": 16, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
        with server.stream(**fields) as data:
            chunks = [json.loads(each) for each in data if each != "[DONE]"]
        whole = server.post("/v1/completions", **fields).json()
    tokens = [chunk["choices"][0]["token_ids"] for chunk in chunks]
    assert len(tokens) > 2
    assert all(len(each) >= INTERVAL for each in tokens[1:-1])
    assert [token for each in tokens for token in each] == whole["choices"][0]["token_ids"]


@pytest.mark.parametrize("value", [0, -1])
def test_interval_is_a_number_of_tokens(value: int) -> None:
    with pytest.raises(ConfigError, match="--stream-interval must be at least 1"):
        ServerConfig(stream_interval=value)
