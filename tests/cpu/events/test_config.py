"""``--kv-events-config``: vLLM's fields and defaults."""

import json
from typing import Any

import pytest

from strandline.config import EngineConfig
from strandline.errors import ConfigError
from strandline.kv_events_config import KVEventsConfig, read_kv_events_config


def test_json_and_mapping_are_the_same() -> None:
    fields: dict[str, Any] = {"enable_kv_cache_events": True, "endpoint": "ipc:///tmp/live", "topic": "a", "hwm": 10}
    assert read_kv_events_config(json.dumps(fields)) == read_kv_events_config(fields) == KVEventsConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "is_published"),
    [
        ({}, False),
        ({"enable_kv_cache_events": True}, True),
        ({"enable_kv_cache_events": True, "publisher": "null"}, False),
        ({"enable_kv_cache_events": True, "publisher": "zmq"}, True),
        ({"publisher": "zmq"}, False),
    ],
)
def test_events_are_published_if_enabled_and_not_null(fields: dict[str, Any], is_published: bool) -> None:
    assert read_kv_events_config(fields).is_published == is_published
    assert (EngineConfig(model="demo", kv_events_config=fields).kv_events is not None) == is_published


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "must be JSON"),
        ("[]", "must be a mapping"),
        ({"enabled": True}, "unknown field 'enabled'"),
        ({"enable_kv_cache_events": "yes"}, "true or false"),
        ({"publisher": "kafka"}, "one of null, zmq"),
        ({"endpoint": None}, "endpoint must be a string"),
        ({"replay_endpoint": 5558}, "replay_endpoint must be a string"),
        ({"buffer_steps": 0}, "buffer_steps must be a whole number"),
        ({"hwm": True}, "hwm must be a whole number"),
        ({"max_queue_size": 1.5}, "max_queue_size must be a whole number"),
    ],
)
def test_wrong_values_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="demo", kv_events_config=value)


def test_events_need_the_cache() -> None:
    with pytest.raises(ConfigError, match="drop --no-enable-prefix-caching"):
        EngineConfig(model="demo", kv_events_config={"enable_kv_cache_events": True}, enable_prefix_caching=False)
