"""Endpoints for weights that change: read from disk, or sent by a trainer; names are vLLM's and SGLang's."""

from typing import Annotated, Any

from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from strandline.errors import RequestError
from strandline.records.control import BeginWeights, JoinTrainer, LeaveTrainer, ReceiveWeights
from strandline.records.weight_transfer import SentTensors, TransferGroup
from strandline.server.engines.engine_client import EngineClient
from strandline.server.engines.engine_control import EngineControl
from strandline.server.http.sse import json_response
from strandline.server.requests.paths import resolved
from strandline.server.requests.request_bodies import Strings, check_extra

VERSION_CHARACTERS = 256
Version = Annotated[str, Field(min_length=1, max_length=VERSION_CHARACTERS)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class WeightsBody(BaseModel):
    """Body of ``/update_weights_from_disk``."""

    model_config = ConfigDict(strict=True, extra="allow")

    model_path: str
    weight_version: Version | None = None
    abort_all_requests: bool = False
    keep_pause: bool = False
    """Run no step until ``/resume``."""
    flush_cache: bool = True


class VersionBody(BaseModel):
    """Body of ``/update_weight_version``."""

    model_config = ConfigDict(strict=True, extra="allow")

    new_version: Version
    abort_all_requests: bool = False


class InitInfo(BaseModel):
    """A trainer's group, and how it packs tensors."""

    model_config = ConfigDict(strict=True, extra="allow")

    master_address: str = ""
    master_port: Annotated[int, Field(ge=0, lt=65536)] = 0
    rank_offset: Count = 1
    world_size: Count = 0
    packed: bool = False
    packed_buffer_size_bytes: Count = 2**30


class InitBody(BaseModel):
    """Body of ``/init_weight_transfer_engine``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    init_info: InitInfo


class StartBody(BaseModel):
    """Body of ``/start_weight_update``."""

    model_config = ConfigDict(strict=True, extra="allow")


class UpdateInfo(BaseModel):
    """Tensors that are sent next."""

    model_config = ConfigDict(strict=True, extra="allow")

    names: Strings = []
    dtype_names: Strings = []
    shapes: list[list[Count]] = []
    packed: bool | None = None
    ipc_handles_pickled: str | None = None
    tensor_sizes: list[Count] | None = None


class UpdateBody(BaseModel):
    """Body of ``/update_weights``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    update_info: UpdateInfo | list[UpdateInfo]
    """One for all ranks of the server, or one for each."""


class FinishBody(BaseModel):
    """Body of ``/finish_weight_update``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    weight_version: Version | None = None


WEIGHTS_WITHOUT_EFFECT = frozenset({"load_format", "is_async", "torch_empty_cache", "recapture_cuda_graph"})
PACKING_WITHOUT_EFFECT = frozenset({"packed_num_buffers"})
"""How many packs the trainer has under way."""
NOT_SERVED: dict[str, tuple[Any, ...]] = {"nccl_unique_id_b64": (), "ipc_handles": ()}
"""Groups without a store, and handles that JSON cannot hold."""
OTHER_FORMATS: dict[str, tuple[Any, ...]] = {"is_checkpoint_format": (True,)}
"""Tensors are those of published files."""


def add_weights(app: FastAPI, client: EngineClient, control: EngineControl, guard: list[Any], num_ranks: int) -> None:
    """Add the endpoints.

    Args:
        guard: what each request has to pass.
        num_ranks: ranks of each engine.
    """
    _add_reading(app, client, control, guard)
    _add_receiving(app, control, guard)

    @app.get("/get_world_size", dependencies=guard)
    async def get_world_size(include_dp: bool = True) -> Response:
        return json_response({"world_size": num_ranks * (len(client.engines) if include_dp else 1)})


def _add_reading(app: FastAPI, client: EngineClient, control: EngineControl, guard: list[Any]) -> None:
    @app.post("/update_weights_from_disk", dependencies=guard)
    async def update_weights_from_disk(body: WeightsBody) -> Response:
        check_extra(body.model_extra, {}, WEIGHTS_WITHOUT_EFFECT)
        if not body.flush_cache:
            raise RequestError("flush_cache must be true: entries of other weights are never hit", param="flush_cache")
        path = resolved(body.model_path)
        if path is None or not path.is_dir():
            raise RequestError(f"there is no directory {body.model_path[:200]!r}", param="model_path")
        version = body.weight_version or control.weight_version
        directory, aborts = str(path), body.abort_all_requests
        number = await control.update_weights(directory, version, aborts=aborts, stays_paused=body.keep_pause)
        return json_response(
            {"success": True, "message": f"the weights are {directory}", "num_paused_requests": number}
        )

    @app.post("/update_weight_version", dependencies=guard)
    async def update_weight_version(body: VersionBody) -> Response:
        check_extra(body.model_extra, {}, ())
        if body.abort_all_requests:
            client.abort()
        client.name_weights(body.new_version)
        version = control.weight_version
        return json_response({"success": True, "new_version": version, "weight_version": version})

    @app.get("/weight_info", dependencies=guard)
    async def weight_info() -> Response:
        return json_response({"weight_version": control.weight_version})


def _add_receiving(app: FastAPI, control: EngineControl, guard: list[Any]) -> None:
    @app.post("/init_weight_transfer_engine", dependencies=guard)
    async def init_weight_transfer_engine(body: InitBody) -> Response:
        check_extra(body.init_info.model_extra, NOT_SERVED, PACKING_WITHOUT_EFFECT)
        await control.exchange_weights(JoinTrainer(_group(body.init_info)))
        return json_response({"message": "Weight transfer initialized"})

    @app.post("/shutdown_weight_transfer_engine", dependencies=guard)
    async def shutdown_weight_transfer_engine() -> Response:
        await control.exchange_weights(LeaveTrainer())
        return json_response({"message": "Weight transfer shut down"})

    @app.post("/start_weight_update", dependencies=guard)
    async def start_weight_update(body: StartBody | None = None) -> Response:
        check_extra(None if body is None else body.model_extra, OTHER_FORMATS, ())
        await control.exchange_weights(BeginWeights())
        return json_response({"message": "Weight update started"})

    @app.post("/update_weights", dependencies=guard)
    async def update_weights(body: UpdateBody) -> Response:
        infos = body.update_info if isinstance(body.update_info, list) else [body.update_info]
        if not infos:
            raise RequestError("update_info is empty", param="update_info")
        for info in infos:
            check_extra(info.model_extra, NOT_SERVED, PACKING_WITHOUT_EFFECT)
        await control.exchange_weights(ReceiveWeights(tuple(map(_sent, infos))))
        return json_response({"message": "Weights updated"})

    @app.post("/finish_weight_update", dependencies=guard)
    async def finish_weight_update(body: FinishBody | None = None) -> Response:
        given = None if body is None else body.weight_version
        await control.update_weights(None, given or control.weight_version)
        return json_response({"message": "Weight update finished"})


def _group(info: InitInfo) -> TransferGroup:
    return TransferGroup(
        info.master_address,
        info.master_port,
        info.rank_offset,
        info.world_size,
        info.packed,
        info.packed_buffer_size_bytes,
    )


def _sent(info: UpdateInfo) -> SentTensors:
    return SentTensors(
        tuple(info.names),
        tuple(info.dtype_names),
        tuple(map(tuple, info.shapes)),
        info.packed,
        info.ipc_handles_pickled,
        tuple(info.tensor_sizes or ()),
    )
