"""``--kv-transfer-config``: vLLM's fields, and which hosts requests may name."""

import json
from typing import Any

import pytest

from strandline.config import EngineConfig
from strandline.errors import ConfigError
from strandline.kv_transfer_config import KVTransferConfig, read_kv_transfer_config

BOTH: dict[str, Any] = {"kv_connector": "SocketConnector", "kv_role": "kv_both"}
NIXL: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def test_json_and_mapping_are_the_same() -> None:
    fields: dict[str, Any] = {**BOTH, "kv_ip": "10.0.0.1", "kv_connector_extra_config": {"lease_s": 3}}
    assert read_kv_transfer_config(json.dumps(fields)) == read_kv_transfer_config(fields) == KVTransferConfig(**fields)
    assert read_kv_transfer_config(fields).lease_s == 3


@pytest.mark.parametrize(
    ("role", "is_producer", "is_consumer"),
    [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)],
)
def test_roles_say_who_gives_and_who_takes(role: str, is_producer: bool, is_consumer: bool) -> None:
    config = EngineConfig(model="demo", kv_transfer_config={**BOTH, "kv_role": role}).kv_transfer
    assert config is not None
    assert (config.is_producer, config.is_consumer) == (is_producer, is_consumer)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "must be JSON"),
        ({"kv_role": "kv_both"}, "kv_connector is missing"),
        ({**BOTH, "kv_rank": 0}, "unknown field 'kv_rank'"),
        ({**BOTH, "kv_connector": "LMCacheConnectorV1"}, "kv_connector must be one of SocketConnector, NixlConnector"),
        ({**BOTH, "kv_connector_extra_config": {"backends": ["UCX"]}}, "backends is for NixlConnector"),
        ({**NIXL, "kv_connector_extra_config": {"backends": []}}, "at least one"),
        ({**NIXL, "kv_connector_extra_config": {"backends": "UCX"}}, "backends must be a list of names"),
        ({**BOTH, "kv_role": "both"}, "kv_role must be one of"),
        ({**BOTH, "kv_ip": "0.0.0.0"}, "set it to an address of this machine"),
        ({**BOTH, "kv_ip": 4}, "kv_ip must be a string"),
        ({**BOTH, "kv_port": 70000}, "kv_port must be a port"),
        ({**BOTH, "kv_connector_extra_config": {"lease": 1}}, "unknown field 'lease'"),
        ({**BOTH, "kv_connector_extra_config": {"lease_s": 0}}, "lease_s must be a number of seconds"),
        ({**BOTH, "kv_connector_extra_config": {"timeout_s": True}}, "timeout_s must be a number of seconds"),
        ({**BOTH, "kv_connector_extra_config": {"peers": "all"}}, "peers must be a list"),
        ({**BOTH, "kv_connector_extra_config": 5}, "must be a mapping"),
    ],
)
def test_wrong_values_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="demo", kv_transfer_config=value)


@pytest.mark.parametrize(("extra", "backends"), [({}, ("UCX",)), ({"backends": ["LIBFABRIC"]}, ("LIBFABRIC",))])
def test_nixl_takes_its_backends_as_in_vllm(extra: dict[str, Any], backends: tuple[str, ...]) -> None:
    assert tuple(KVTransferConfig(**NIXL, kv_connector_extra_config=extra).backends) == backends


@pytest.mark.parametrize("options", [{"distributed_executor_backend": "mp"}, {"tensor_parallel_size": 2}])
def test_nixl_needs_the_memory_in_the_process_itself(options: dict[str, Any]) -> None:
    assert EngineConfig(model="demo", kv_transfer_config=BOTH, **options).kv_transfer is not None
    with pytest.raises(ConfigError, match="use SocketConnector"):
        EngineConfig(model="demo", kv_transfer_config=NIXL, **options)


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"mamba_cache_mode": "none"}])
def test_hand_over_needs_the_cache(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="hands over what the cache holds"):
        EngineConfig(model="demo", kv_transfer_config=BOTH, **options)


@pytest.mark.parametrize(
    ("peers", "host", "may"),
    [
        (None, "127.0.0.1", True),
        (None, "localhost", True),
        (None, "10.0.0.1", False),
        (["10.0.0.0/8"], "10.1.2.3", True),
        (["10.0.0.0/8"], "127.0.0.1", False),
        (["prefill-*.local"], "prefill-3.local", True),
        (["*"], "anything", True),
    ],
)
def test_requests_may_name_the_configured_peers_alone(peers: list[str] | None, host: str, may: bool) -> None:
    extra = {} if peers is None else {"peers": peers}
    assert KVTransferConfig(**BOTH, kv_connector_extra_config=extra).may_fetch_from(host) is may
