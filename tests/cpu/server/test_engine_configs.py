"""What each of a server's engines gets of its own."""

from typing import Any

import pytest

from strandline.config import EngineConfig
from strandline.errors import ConfigError
from strandline.server.engine_configs import engine_configs

EVENTS = {"enable_kv_cache_events": True}
TRANSFER = {"kv_connector": "SocketConnector", "kv_role": "kv_both"}


def configs(num_engines: int = 3, **options: Any) -> list[EngineConfig]:
    return engine_configs(EngineConfig(model="demo", data_parallel_size=num_engines, **options))


def test_engines_are_numbered_from_zero() -> None:
    assert [config.data_parallel_rank for config in configs()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("tcp://*:5557", ["tcp://*:5557", "tcp://*:5558", "tcp://*:5559"]),
        ("tcp://*:*", ["tcp://*:*"] * 3),
        ("ipc:///tmp/live", ["ipc:///tmp/live", "ipc:///tmp/live_dp1", "ipc:///tmp/live_dp2"]),
    ],
)
def test_event_endpoints_are_numbered(given: str, expected: list[str]) -> None:
    found = [config.kv_events for config in configs(kv_events_config={**EVENTS, "endpoint": given})]
    assert [events.endpoint for events in found if events is not None] == expected


def test_overlapping_event_ports_are_refused() -> None:
    apart = {**EVENTS, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5560"}
    found = [config.kv_events for config in configs(kv_events_config=apart)]
    assert [events.replay_endpoint for events in found if events is not None][-1] == "tcp://*:5562"
    with pytest.raises(ConfigError, match="at least 4 apart"):
        configs(4, kv_events_config=apart)


@pytest.mark.parametrize(
    ("endpoints", "kv_port", "first", "second", "port"),
    [
        (("tcp://127.0.0.1:47101", None), 47100, "endpoint", "kv_port", 47101),
        (("tcp://*:47101", None), 47100, "endpoint", "kv_port", 47101),
        (("tcp://*:47100", None), 47100, "endpoint", "kv_port", 47100),
        (("tcp://*:5557", "tcp://127.0.0.1:5558"), 0, "replay_endpoint", "endpoint", 5558),
        (("tcp://[::1]:5557", "tcp://*:5558"), 0, "replay_endpoint", "endpoint", 5558),
        (("tcp://*:5557", "tcp://LOCALHOST:47099"), 47100, "kv_port", "replay_endpoint", 47100),
    ],
)
def test_ports_of_events_and_transfers_may_not_meet(
    endpoints: tuple[str, str | None], kv_port: int, first: str, second: str, port: int
) -> None:
    live, replay = endpoints
    events = {**EVENTS, "endpoint": live, "replay_endpoint": replay}
    flags = {name: "--kv-transfer-config" if name == "kv_port" else "--kv-events-config" for name in (first, second)}
    message = (
        rf"{first} of {flags[first]} for engine \d and {second} of {flags[second]} for engine \d both use port {port}"
    )
    with pytest.raises(ConfigError, match=message):
        configs(2, kv_events_config=events, kv_transfer_config={**TRANSFER, "kv_port": kv_port})


@pytest.mark.parametrize(
    ("endpoints", "transfer"),
    [
        (("tcp://*:5557", "tcp://*:5559"), {"kv_port": 5561}),
        (("tcp://10.0.0.1:5557", "tcp://*:5558"), {"kv_port": 0}),
        (("tcp://10.0.0.1:5557", "tcp://127.0.0.1:5557"), {"kv_ip": "10.0.0.2", "kv_port": 5557}),
        (("tcp://*:5557", None), {"kv_port": 5557, "kv_role": "kv_consumer"}),
        (("tcp://*:*", "tcp://*:0"), {"kv_port": 0}),
    ],
)
def test_ports_on_other_machines_or_addresses_may_be_equal(
    endpoints: tuple[str, str | None], transfer: dict[str, Any]
) -> None:
    events = {**EVENTS, "endpoint": endpoints[0], "replay_endpoint": endpoints[1]}
    assert len(configs(2, kv_events_config=events, kv_transfer_config={**TRANSFER, **transfer})) == 2


def test_transfer_ports_and_ids_are_numbered() -> None:
    found = [x.kv_transfer for x in configs(kv_transfer_config={**TRANSFER, "kv_port": 9000, "engine_id": "a"})]
    assert [(x.kv_port, x.engine_id) for x in found if x is not None] == [(9000, "a"), (9001, "a_dp1"), (9002, "a_dp2")]
    found = [config.kv_transfer for config in configs(kv_transfer_config=TRANSFER)]
    assert [(x.kv_port, x.engine_id) for x in found if x is not None] == [(0, None)] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"kv_transfer_config": {**TRANSFER, "kv_port": 65534}},
        {"kv_events_config": {**EVENTS, "endpoint": "tcp://*:65534"}},
    ],
)
def test_ports_that_do_not_exist_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="engine 2 adds its number to port 65534"):
        configs(**options)


def test_disk_caches_are_separate_directories() -> None:
    found = [config.disk_cache for config in configs(disk_cache="/cache")]
    assert found == ["/cache", "/cache/engine-1", "/cache/engine-2"]


def test_a_rank_beyond_the_engines_is_refused() -> None:
    with pytest.raises(ConfigError, match="data_parallel_rank must be at least 0 and less than data_parallel_size 2"):
        EngineConfig(model="demo", data_parallel_size=2, data_parallel_rank=2)
