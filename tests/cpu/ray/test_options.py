"""The arguments of ``build_app``, from the command line and from YAML."""

from typing import Any

import pytest

from strandline.errors import ConfigError
from strandline.ray.options import read_options


def test_arguments_of_the_command_line_are_strings() -> None:
    options = read_options({"model": "demo", "num_replicas": "3"})
    assert (options.engine_config.model, options.num_replicas) == ("demo", 3)


def test_options_of_engine_and_server_are_passed_on() -> None:
    options = read_options({"engine": {"memory": "1GiB"}, "server": {"api_key": ["k"]}, "router": "random"})
    assert options.engine_config.memory == "1GiB"
    assert options.server_config.api_key == ["k"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"modle": "demo"}, "did you mean 'model'"),
        ({"num_replicas": 0}, "at least 1"),
        ({"num_ingresses": "many"}, "whole number"),
        ({"router": "best"}, "no router"),
        ({"engine": {"model": "demo"}}, "outside of engine"),
        ({"engine": {"kv_events_config": "{}"}}, "kv_events_config"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(given)


def test_unknown_option_of_the_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'api_key'"):
        _ = read_options({"server": {"api_keys": []}}).server_config
