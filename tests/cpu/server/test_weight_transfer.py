"""Weights that a trainer sends to a server: over gloo, and in shared memory."""

import base64
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.server.conftest import VOCAB_SIZE
from tests.cpu.server.process import ServerProcess, running_server
from tests.cpu.server.test_admin import LONG, PROMPT, begin, generate, num_hit, tokens
from tests.cpu.server.trainer import Trainer, announced, bytes_of

FEW: Final = 40
"""Tokens of an answer that tells weights apart."""

NCCL: Final = ("--enable-admin-endpoints", "--weight-transfer-config", '{"backend": "nccl", "timeout_s": 20}')


@pytest.fixture(scope="module")
def receiving(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(bytes_dir, tmp_path_factory.mktemp("receiving") / "log", *NCCL) as server:
        yield server


@pytest.fixture(scope="module")
def weights(bytes_dir: Path) -> dict[str, Tensor]:
    """The weights that the server has started with."""
    return load_file(bytes_dir / "model.safetensors")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Other weights of the same model."""
    directory = save_tiny_model(tmp_path_factory.mktemp("others"), seed=2, vocab_size=VOCAB_SIZE)
    return load_file(directory / "model.safetensors")


@pytest.fixture(scope="module")
def answers(
    receiving: ServerProcess, weights: dict[str, Tensor], others: dict[str, Tensor]
) -> tuple[list[int], list[int]]:
    """What both weights answer; the server has the first ones afterwards."""
    trainer = Trainer(receiving)
    first = tokens(generate(receiving, FEW))
    trainer.update(others)
    second = tokens(generate(receiving, FEW))
    trainer.update(weights)
    assert tokens(generate(receiving, FEW)) == first != second
    return first, second


def test_sent_weights_answer_as_those_on_disk(
    receiving: ServerProcess, weights: dict[str, Tensor], others: dict[str, Tensor], tmp_path: Path
) -> None:
    trainer, before = Trainer(receiving), tokens(generate(receiving, FEW))
    assert num_hit(generate(receiving)) > 0
    trainer.update(others, weight_version="step-1")
    answer = generate(receiving, FEW)
    assert (num_hit(answer), answer["weight_version"]) == (0, "step-1")
    assert receiving.get("/weight_info").json() == {"weight_version": "step-1"}
    assert 'weight_version="step-1"} 1.0' in receiving.metrics()
    directory = save_tiny_model(tmp_path, seed=2, vocab_size=VOCAB_SIZE)
    assert receiving.post("/update_weights_from_disk", model_path=str(directory)).json()["success"]
    assert tokens(generate(receiving, FEW)) == tokens(answer) != before
    trainer.update(weights, weight_version="default")
    assert tokens(generate(receiving, FEW)) == before


def test_tensors_are_sent_one_by_one(
    receiving: ServerProcess, weights: dict[str, Tensor], others: dict[str, Tensor], answers: Any
) -> None:
    trainer = Trainer(receiving, packed=False)
    trainer.update({name: tensor.bfloat16() for name, tensor in others.items()})
    assert tokens(generate(receiving, FEW)) != answers[0]
    trainer.update(weights)
    assert tokens(generate(receiving, FEW)) == answers[0]
    assert receiving.post("/shutdown_weight_transfer_engine").status_code == 200
    assert receiving.post("/shutdown_weight_transfer_engine").status_code == 200


def test_announcement_is_repeated_by_leaving_it_out(
    receiving: ServerProcess, weights: dict[str, Tensor], others: dict[str, Tensor], answers: Any
) -> None:
    trainer = Trainer(receiving)
    for sent, fields in ((others, {}), (weights, {"names": [], "dtype_names": [], "shapes": []})):
        trainer.start()
        assert trainer.send(sent, **fields).status_code == 200
        assert trainer.finish().status_code == 200
    assert tokens(generate(receiving, FEW)) == answers[0]


def test_running_request_goes_on_with_sent_weights(
    receiving: ServerProcess, weights: dict[str, Tensor], others: dict[str, Tensor]
) -> None:
    trainer, old = Trainer(receiving), tokens(generate(receiving, LONG))
    with ThreadPoolExecutor(1) as pool:
        first = begin(receiving, pool, cache_salt="mixed")
        trainer.update(others)
        mixed = tokens(first.result())
    assert mixed not in (old, tokens(generate(receiving, LONG)))
    changed = next(index for index, (ours, theirs) in enumerate(zip(mixed, old, strict=True)) if ours != theirs)
    params = {"temperature": 0, "max_tokens": LONG - changed, "ignore_eos": True}
    known = [*PROMPT, *mixed[:changed]]
    answer = receiving.post("/inference/v1/generate", token_ids=known, sampling_params=params)
    assert tokens(answer.json()) == mixed[changed:]
    trainer.update(weights)


def test_sent_weights_are_sent_again_after_sleep(
    receiving: ServerProcess, weights: dict[str, Tensor], answers: Any
) -> None:
    trainer = Trainer(receiving)
    trainer.update(weights)
    receiving.post("/sleep?level=2")
    receiving.post("/wake_up?tags=weights")
    receiving.post("/wake_up")
    assert receiving.get("/is_sleeping").json() == {"is_sleeping": True}
    assert receiving.post("/inference/v1/generate", token_ids=PROMPT).status_code == 503
    trainer.update(weights)
    receiving.post("/wake_up")
    assert receiving.get("/is_sleeping").json() == {"is_sleeping": False}
    assert tokens(generate(receiving, FEW)) == answers[0]


WRONG = {
    "missing": lambda tensors: {name: tensor for name, tensor in tensors.items() if "norm" not in name},
    "unknown": lambda tensors: tensors | {"model.extra.weight": torch.zeros(4)},
    "misshapen": lambda tensors: {name: tensor[:-1] if "embed" in name else tensor for name, tensor in tensors.items()},
    "integers": lambda tensors: {name: tensor.int() if "embed" in name else tensor for name, tensor in tensors.items()},
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_weights_leave_the_old_ones(
    receiving: ServerProcess, others: dict[str, Tensor], answers: Any, kind: str
) -> None:
    trainer = Trainer(receiving)
    assert trainer.start().status_code == 200
    assert trainer.send(WRONG[kind](others)).status_code == 200
    answer = trainer.finish(weight_version="wrong")
    assert answer.status_code == 400, answer.text
    assert "embed_tokens" in answer.text or "norm" in answer.text or "extra" in answer.text
    assert receiving.get("/weight_info").json()["weight_version"] != "wrong"
    found = generate(receiving, FEW)
    assert tokens(found) == answers[0]
    assert trainer.finish().status_code == 400  # nothing of it is left


def test_lost_trainer_leaves_the_old_weights(
    receiving: ServerProcess, weights: dict[str, Tensor], others: dict[str, Tensor], answers: Any
) -> None:
    trainer = Trainer(receiving)
    trainer.start()
    half = dict(list(others.items())[: len(others) // 2])
    with ThreadPoolExecutor(1) as pool:
        receiving_half = pool.submit(receiving.post, "/update_weights", update_info=announced(half))
        first, *_ = half.values()
        trainer.group.broadcast([bytes_of(first).new_zeros(1)])  # too small: less than a pack
        del trainer.group, trainer.store
        answer = receiving_half.result()
    assert answer.status_code == 400
    assert "did not send" in answer.json()["error"]["message"]
    assert receiving.post("/finish_weight_update").status_code == 400
    assert tokens(generate(receiving, FEW)) == answers[0]
    Trainer(receiving).update(weights)
    assert tokens(generate(receiving, FEW)) == answers[0]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/init_weight_transfer_engine", {}, "init_info"),
        ("/init_weight_transfer_engine", {"init_info": {}}, "world_size"),
        ("/init_weight_transfer_engine", {"init_info": {"nccl_unique_id_b64": "AA=="}}, "nccl_unique_id_b64"),
        (
            "/init_weight_transfer_engine",
            {"init_info": {"master_address": "x", "master_port": 1, "rank_offset": 0, "world_size": 2}},
            "rank_offset",
        ),
        ("/update_weights", {}, "update_info"),
        ("/update_weights", {"update_info": []}, "update_info"),
        ("/update_weights", {"update_info": {"names": ["a"]}}, "dtype_names"),
        ("/update_weights", {"update_info": {"names": ["a"], "dtype_names": ["int3"], "shapes": [[1]]}}, "int3"),
        ("/update_weights", {"update_info": {"names": ["a"], "dtype_names": ["int8"], "shapes": [[-1]]}}, "shapes"),
        ("/update_weights", {"update_info": {"names": "a", "dtype_names": ["int8"], "shapes": [[1]]}}, "names"),
        ("/finish_weight_update", {"weight_version": ""}, "weight_version"),
        ("/finish_weight_update", {}, "start_weight_update"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
    ],
)
def test_wrong_calls_are_refused(
    receiving: ServerProcess, answers: Any, path: str, body: dict[str, Any], message: str
) -> None:
    if path == "/update_weights":
        receiving.post("/start_weight_update")
    answer = receiving.post(path, **body)
    assert answer.status_code == 400, answer.text
    assert message in answer.text
    if path == "/update_weights" and "update_info" in body:
        assert receiving.post("/finish_weight_update").status_code == 400
    assert tokens(generate(receiving)) == answers[0][:6]


def test_two_engines_of_two_ranks_receive(
    bytes_dir: Path, others: dict[str, Tensor], answers: Any, tmp_path: Path
) -> None:
    flags = (*NCCL, "--tensor-parallel-size", "2", "--data-parallel-size", "2")
    with running_server(bytes_dir, tmp_path / "log", *flags) as server:
        assert server.get("/get_world_size").json() == {"world_size": 4}
        assert server.get("/get_world_size?include_dp=false").json() == {"world_size": 2}
        Trainer(server).update(others)
        for salt in "abcd":
            assert tokens(generate(server, FEW, cache_salt=salt)) == answers[1]


def shared(tensors: dict[str, Tensor], directory: Path, *, packed: bool) -> dict[str, Any]:
    """Put tensors into files; return their handles as ``/update_weights`` takes them."""
    parts = [torch.cat([bytes_of(tensor) for tensor in tensors.values()])] if packed else list(tensors.values())
    handles = []
    for number, part in enumerate(parts):
        path = directory / str(number)
        path.write_bytes(bytes_of(part).numpy().tobytes())
        handles.append({"cpu": (str(path),)})
    pickled = base64.b64encode(pickle.dumps(handles[0] if packed else handles)).decode()
    sizes = {"tensor_sizes": [tensor.nbytes for tensor in tensors.values()]} if packed else {}
    return announced(tensors) | {"ipc_handles_pickled": pickled} | sizes


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code runs",)


def test_weights_in_shared_memory_are_taken(
    bytes_dir: Path, others: dict[str, Tensor], weights: dict[str, Tensor], answers: Any, tmp_path: Path
) -> None:
    flags = ("--enable-admin-endpoints", "--weight-transfer-config", '{"backend": "ipc"}')
    with running_server(bytes_dir, tmp_path / "log", *flags) as server:
        for packed, sent, expected in ((False, others, answers[1]), (True, weights, answers[0])):
            assert server.post("/init_weight_transfer_engine", init_info={"packed": packed}).status_code == 200
            server.post("/start_weight_update")
            update = server.post("/update_weights", update_info=shared(sent, tmp_path, packed=packed))
            assert update.status_code == 200, update.text
            assert server.post("/finish_weight_update").status_code == 200
            assert tokens(generate(server, FEW)) == expected
        wrong = [
            shared(others, tmp_path, packed=True) | {"tensor_sizes": [1] * len(others)},
            shared(others, tmp_path, packed=False) | {"ipc_handles_pickled": base64.b64encode(b"x").decode()},
            announced(others),
            announced(others) | {"ipc_handles_pickled": base64.b64encode(pickle.dumps([Evil()])).decode()},
            announced(others) | {"ipc_handles_pickled": base64.b64encode(pickle.dumps([{}] * len(others))).decode()},
            announced(others) | {"ipc_handles_pickled": base64.b64encode(pickle.dumps({"cpu": ("/none",)})).decode()},
        ]
        for info in wrong:
            server.post("/start_weight_update")
            assert server.post("/update_weights", update_info=info).status_code == 400
            assert server.post("/finish_weight_update").status_code == 400
        assert "code runs" not in (tmp_path / "log").read_text()
        assert tokens(generate(server, FEW)) == answers[0]


def test_without_the_flag_nothing_is_received(server: ServerProcess, bytes_dir: Path, tmp_path: Path) -> None:
    assert server.post("/start_weight_update").status_code == 404
    with running_server(bytes_dir, tmp_path / "log", "--enable-admin-endpoints") as closed:
        for path in ("/init_weight_transfer_engine", "/start_weight_update"):
            answer = closed.post(path, init_info={})
            assert answer.status_code == 400
            assert "--weight-transfer-config" in answer.text
