"""What the application asks of Ray."""

from typing import Any

import pytest

from strandline.records.messages import FLUSH_S

pytest.importorskip("ray", reason="needs strandline[ray]")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


def reserved(**given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what an engine and an ingress reserve."""
    from strandline.ray import build_app  # it imports Ray, which warns

    ingress = build_app(given)._bound_deployment
    engine = ingress.init_args[0]._bound_deployment
    return engine.ray_actor_options, ingress.ray_actor_options


def test_the_documented_command_finds_room_on_two_cores() -> None:
    engine, ingress = reserved(model="demo", num_replicas="3")
    assert 3 * engine["num_cpus"] + ingress["num_cpus"] <= 2


def test_given_options_of_ray_take_the_place_of_ours() -> None:
    engine, _ = reserved(replica={"ray_actor_options": {"num_cpus": 4, "num_gpus": 1}})
    assert (engine["num_cpus"], engine["num_gpus"]) == (4, 1)


def test_replicas_with_a_disk_cache_have_time_to_flush() -> None:
    from strandline.ray import build_app

    def grace_s(**given: Any) -> float:
        engine = build_app(given)._bound_deployment.init_args[0]._bound_deployment
        return float(engine._deployment_config.graceful_shutdown_timeout_s)

    assert grace_s(engine={"disk_cache": "cache"}) >= grace_s() + FLUSH_S
    assert grace_s(engine={"disk_cache": "cache"}, replica={"graceful_shutdown_timeout_s": 7}) == 7
