"""The arguments of ``build_app``, from the command line and from YAML."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from strandline.errors import ConfigError
from strandline.ray.options import RayOptions, read_options

ROUTING = Path(__file__).parents[3] / "docs" / "routing.md"


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
        ({"engine": {"data_parallel_size": 2}}, "set num_replicas"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(given)


def test_documented_deployment_is_valid() -> None:
    [example] = re.findall(r"^```yaml\n(.*?)^```$", ROUTING.read_text(), re.MULTILINE | re.DOTALL)
    [application] = yaml.safe_load(example)["applications"]
    options = read_options(application["args"])
    assert application["import_path"] == "strandline.ray:build_app"
    assert options.engine_config.max_num_seqs == 64
    assert options.server_config.salt_per_key


def test_documented_arguments_are_all_there_are() -> None:
    named = re.findall(r"^\| `(\w+)` \|", ROUTING.read_text(), re.MULTILINE)
    assert named == [each.name for each in fields(RayOptions)]


def test_unknown_option_of_the_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'api_key'"):
        _ = read_options({"server": {"api_keys": []}}).server_config
