"""A replica's disk cache: entries that are only in memory are written when the replica ends in order."""

import asyncio
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import pytest

from strandline.config import EngineConfig
from strandline.ids import RequestId
from strandline.ray.calls import Run
from strandline.records.events import StepEvents, Submission, TokenEvent
from strandline.records.messages import ENCODER, Submit
from strandline.records.plan import NewRequest
from strandline.records.sampling_params import SamplingParams
from strandline.records.tokens import encode
from tests.cpu.engine.tiny import save_tiny_model

if TYPE_CHECKING:
    from strandline.ray.engine_replica import EngineReplica

pytest.importorskip("ray", reason="needs strandline[ray]")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

NAME = RequestId("x")
PROMPT = tuple(1 + index % 40 for index in range(100))
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(autouse=True)
def _outside_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    from strandline.ray import engine_replica  # it imports Ray, which warns

    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="replica"))
    monkeypatch.setattr(engine_replica.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(engine_replica, "get_node_ip_address", lambda: "127.0.0.1")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("replicas")
    options = {"device": "cpu", "memory": "16MiB", "disk_cache": str(folder / "cache")}
    return EngineConfig.from_options({"model": str(save_tiny_model(folder / "model")), **options})


async def start(config: EngineConfig) -> "EngineReplica":
    from strandline.ray.engine_replica import EngineReplica

    replica = EngineReplica.__new__(EngineReplica)
    await EngineReplica.__init__(replica, config)  # type: ignore[misc]  # as Ray Serve awaits it
    return replica


async def answer(replica: "EngineReplica") -> list[TokenEvent]:
    """Return the tokens that follow the prompt."""
    new = NewRequest(NAME, PROMPT, PARAMS, 0, frozenset(), ())
    submit = ENCODER.encode(Submit([Submission(new, max_total=len(PROMPT) + 4)]))
    items = [item async for item in replica.run(Run(NAME, encode(PROMPT), "", submit))]
    return [token for item in items[1:] for token in msgspec.msgpack.decode(item, type=StepEvents).tokens]


def test_a_new_replica_hits_what_an_ended_one_left(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = []

    async def answer_and_end() -> list[TokenEvent]:
        replicas.append(await start(config))
        tokens = await answer(replicas[-1])
        await replicas[-1].__del__()
        return tokens

    cold, warm = (asyncio.run(answer_and_end()) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.delattr(type(replicas[0]), "__del__")  # Python would call it, and not await it
        replicas.clear()
        gc.collect()
    assert [token.token_id for token in warm] == [token.token_id for token in cold]
    hits = [tokens[0].account.hit for tokens in (cold, warm) if tokens[0].account is not None]
    assert hits == [0, len(PROMPT)]
    [directory] = Path(str(config.disk_cache)).glob("[0-9]*/")
    assert directory.name == "0"
