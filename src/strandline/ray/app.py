"""The Ray Serve application: an ingress for HTTP and text, and replicas that run engines."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict, replace
from typing import Any, Final

import msgspec
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from strandline.config import EngineConfig
from strandline.ray.calls import End, Run
from strandline.ray.engine_replica import EngineReplica
from strandline.ray.fleet import fleet_named
from strandline.ray.fleet_socket import FleetSocket, ReplicaLostError
from strandline.ray.options import RayOptions, read_options
from strandline.records.events import Limits
from strandline.server.app import build_app
from strandline.server.app_options import AppOptions
from strandline.server.config import ServerConfig
from strandline.server.engines.engine_client import EngineClient
from strandline.server.engines.engine_link import EngineLink
from strandline.server.engines.metrics import Metrics
from strandline.server.http.request_ids import ANTHROPIC_HEADER
from strandline.server.launch import make_service, read_template
from strandline.text.model_files import default_sampling_params, find_model
from strandline.text.vocabulary import load_frontend, load_vocabulary

ENGINE_CPUS: Final = 0.5
INGRESS_CPUS: Final = 0.25
"""Default CPU reservation of an ingress, so that three engines fit on two cores."""
FLUSH_GRACE_S: Final = 60.0
"""Default shutdown timeout of a replica whose cache outlives it: its requests finish, then it flushes."""
STATS_PERIOD_S: Final = 1.0
"""Interval at which Ray Serve queries the replicas' event endpoints: the longest delay for a new replica."""


class Handle:
    """Calls to the replicas through Ray."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def run(self, call: Run) -> AsyncGenerator[str | bytes, None]:
        """Run sequences on the replica that the router chooses. Raises as ``Replicas.run``."""
        stream = self._handle.options(method_name="run", stream=True).remote(call)
        try:
            async for item in stream:
                yield item
        except RayActorError as error:
            raise ReplicaLostError(f"its replica has died: {type(error).__name__}") from error
        finally:
            stream.cancel()

    async def end(self, call: End) -> None:
        """End sequences on a replica. If it has died, they have ended."""
        try:
            await self._handle.options(method_name="end").remote(call)
        except RayActorError:
            return


class NeverHangs:
    """A hang detector that never reports one: Ray Serve checks the replicas' health."""

    def find_hang(self) -> str | None:
        """Return None."""
        return None


_APPS: Final[list[ASGIApp]] = []
"""The application of this process, once it is built."""


def current_app() -> ASGIApp:
    """Return the application that this process's ingress has built."""
    return _APPS[-1]


class Ingress:
    """Serves HTTP, renders and tokenizes prompts once, and converts tokens to text."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, handle: DeploymentHandle, engine: EngineConfig, server: ServerConfig, fleet: str, router: str
    ) -> None:
        template = read_template(server.chat_template)
        defaults = default_sampling_params(find_model(engine.model), server.override_generation_config)
        vocabulary = load_vocabulary(engine)
        limits = msgspec.msgpack.decode(await handle.limits.remote(), type=Limits)
        # Each call brings its pictures: any replica may run it.
        limits = replace(limits, asks_for_pictures=False)
        names = server.served_model_name or (engine.model_name,)
        self._client = EngineClient(
            [EngineLink(FleetSocket(Handle(handle), fleet_named(fleet, router)), limits, NeverHangs())],
            load_frontend(engine, limits, vocabulary),
            Metrics(names[0]),
            max_unfinished=server.max_queue,
            timeout_s=server.request_timeout_s,
            stream_interval=server.stream_interval,
        )
        self._receiving = asyncio.ensure_future(self._client.receive(self._client.engines[0]))
        service = make_service(self._client, engine, server, template, defaults)
        options = AppOptions(
            api_keys=server.key_salts(),
            tenants=server.tenants(),
            allowed_hosts=server.allowed_hosts or ("*",),
            max_body_bytes=server.body_limit(has_pictures=service.pictures is not None),
            cache_page="off",
            cross_origin=server.cross_origin(),
            ping_interval_s=server.stream_ping_interval_s,
            flags={**asdict(engine), **server.shown()},
            id_headers=(ANTHROPIC_HEADER,),  # Ray's proxy gives responses the other one
        )
        app = build_app(service, options)
        _APPS.append(app)

    def check_health(self) -> None:
        """Raise an error if the receiver has stopped."""
        if self._receiving.done():
            self._receiving.result()


def deployments(arguments: Mapping[str, Any]) -> serve.Application:
    """Return the application. Arguments and errors are those of ``strandline.ray.build_app``."""
    options = read_options(arguments)
    replicas = _replicas(options).bind(options.engine_config)
    ingress = serve.deployment(
        serve.ingress(current_app)(Ingress),
        name="Ingress",
        num_replicas=options.num_ingresses,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        max_ongoing_requests=options.server_config.max_queue,
    )
    return ingress.bind(replicas, options.engine_config, options.server_config, FLEET, options.router)


FLEET: Final = "engines"


def _replicas(options: RayOptions) -> serve.Deployment:
    scale = {} if "autoscaling_config" in options.replica else {"num_replicas": options.num_replicas}
    router = RequestRouterConfig(
        request_router_class="strandline.ray.request_router:FleetRequestRouter",
        request_router_kwargs={"fleet": FLEET, "router": options.router},
        request_routing_stats_period_s=STATS_PERIOD_S,
    )
    reserved = {"ray_actor_options": {"num_cpus": ENGINE_CPUS}}
    grace = {"graceful_shutdown_timeout_s": FLUSH_GRACE_S} if options.engine_config.file_tier else {}
    more = {"max_ongoing_requests": options.server_config.max_queue, **reserved, **grace, **scale, **options.replica}
    return serve.deployment(EngineReplica, name="Engine", request_router_config=router, **more)
