"""Weights that change on a GPU: in place, with graphs, quantised, from memory that is shared, and over NCCL."""

import base64
import ctypes
import pickle
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import reduce_tensor

from strandline import LLM, SamplingParams
from strandline.device.steps.step_in_flight import StepInFlight
from strandline.device.weights.model_memory import tensors_of
from strandline.models.storage.conversion import convert
from strandline.records.control import Action, BeginWeights, JoinTrainer, PrepareWeights, ReceiveWeights, UseWeights
from strandline.records.plan import StepResult
from strandline.records.weight_transfer import SentTensors, TransferGroup
from tests.cpu.engine.tiny import save_tiny_model

PROMPT = list(range(90))
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "vocab_size": 512}
OPTIONS: dict[str, Any] = {"memory": "64MiB", "device": "cuda", "skip_tokenizer_init": True, "max_num_seqs": 8}
PORT = 29654
"""A store listens on it in a test without packing; with packing, on the next one: tests may run at the same time."""


class ncclUniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("models")
    old, new = (save_tiny_model(directory / str(seed), seed=seed, **SIZES) for seed in (1, 2))
    return old, new


def answer(llm: LLM) -> list[int]:
    [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids


def expected(directory: Path) -> list[int]:
    with LLM(str(directory), **OPTIONS) as llm:
        return answer(llm)


def apply(llm: LLM, *actions: Action) -> None:
    for action in actions:
        llm.engine.core.control.apply(action)


def sent(directory: Path, handles: str | None = None) -> SentTensors:
    tensors = load_file(directory / "model.safetensors")
    dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values())
    shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
    return SentTensors(tuple(tensors), dtypes, shapes, handles=handles)


def test_weights_change_in_place_and_graphs_stay(models: tuple[Path, Path]) -> None:
    with LLM(str(models[0]), **OPTIONS) as llm:
        before = answer(llm)
        runner: Any = llm.engine.core.executor.runner  # type: ignore[attr-defined]
        graphs, addresses = runner._graphs, [tensor.data_ptr() for tensor in tensors_of(runner.model)]
        llm.update_weights_from_disk(str(models[1]))
        assert answer(llm) == expected(models[1]) != before
        assert runner._graphs is graphs
        assert [tensor.data_ptr() for tensor in tensors_of(runner.model)] == addresses
        llm.sleep(2)
        llm.update_weights_from_disk(str(models[0]))
        llm.wake_up(["kv_cache"])
        assert answer(llm) == before


@pytest.mark.parametrize("format", ["fp8", "nvfp4", "int4"])
def test_plain_weights_are_quantised_as_those_before(models: tuple[Path, Path], tmp_path: Path, format: str) -> None:
    for source, name in zip(models, ("old", "new"), strict=True):
        convert(source, tmp_path / name, format)
    with LLM(str(tmp_path / "old"), **OPTIONS) as llm:
        before = answer(llm)
        llm.update_weights_from_disk(str(models[1]))
        assert answer(llm) == expected(tmp_path / "new") != before


def share(directory: Path, pipe: Any) -> None:
    tensors = [tensor.cuda() for tensor in load_file(directory / "model.safetensors").values()]
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    handles = [{uuid: reduce_tensor(tensor)[1]} for tensor in tensors]
    pipe.send(base64.b64encode(pickle.dumps(handles)).decode())
    pipe.recv()


def test_weights_come_from_another_processs_memory(models: tuple[Path, Path]) -> None:
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=share, args=(models[1], theirs))
    process.start()
    with LLM(str(models[0]), **OPTIONS, weight_transfer_config={"backend": "ipc"}) as llm:
        received = ReceiveWeights((sent(models[1], ours.recv()),))
        apply(llm, JoinTrainer(TransferGroup()), BeginWeights(), received, PrepareWeights(None), UseWeights("e1"))
        ours.send(None)
        assert answer(llm) == expected(models[1])
    process.join()


def broadcast(directory: Path, port: int, packed: Sequence[bool]) -> None:
    """Send weights as vLLM's trainers do: rank 0 on the second GPU."""
    from torch._C import _distributed_c10d as c10d

    nccl, comm = ctypes.CDLL("libnccl.so.2"), ctypes.c_void_p()
    unique_id = ncclUniqueId()
    assert nccl.ncclGetUniqueId(ctypes.byref(unique_id)) == 0
    timeout = timedelta(seconds=60)
    store = c10d.TCPStore("127.0.0.1", port, 2, is_master=True, timeout=timeout, wait_for_workers=False)
    store.set("broadcast_from/0/0", pickle.dumps(unique_id))  # type: ignore[arg-type]
    torch.cuda.set_device(1)
    assert nccl.ncclCommInitRank(ctypes.byref(comm), 2, unique_id, 0) == 0
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    one = torch.zeros(1, device="cuda")
    address = ctypes.c_void_p(one.data_ptr())
    assert nccl.ncclAllReduce(address, address, ctypes.c_size_t(1), 7, 0, comm, stream) == 0
    loaded = load_file(directory / "model.safetensors").values()
    tensors = [tensor.cuda().view(-1).view(torch.uint8) for tensor in loaded]
    for part in [torch.cat(tensors)] if packed[0] else tensors:
        address = ctypes.c_void_p(part.data_ptr())
        assert nccl.ncclBroadcast(address, address, ctypes.c_size_t(part.numel()), 1, 0, comm, stream) == 0
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="the trainer needs a GPU of its own")
@pytest.mark.parametrize("packed", [True, False])
def test_weights_come_over_nccl(models: tuple[Path, Path], *, packed: bool) -> None:
    port = PORT + packed
    process = get_context("spawn").Process(target=broadcast, args=(models[1], port, [packed]))
    process.start()
    with LLM(str(models[0]), **OPTIONS, weight_transfer_config={"backend": "nccl"}) as llm:
        group = JoinTrainer(TransferGroup("127.0.0.1", port, 1, 2, packed))
        received = ReceiveWeights((sent(models[1]),))
        apply(llm, group, BeginWeights(), received, PrepareWeights(None), UseWeights("e1"))
        assert answer(llm) == expected(models[1])
    process.join()


def test_graphs_record_the_same_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    directory = save_tiny_model(tmp_path, **SIZES, **experts, shared_expert_intermediate_size=128)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, returns_routed_experts=True)
    routed, read = bytearray(), StepInFlight.result

    def noted(step: StepInFlight) -> StepResult:
        found = read(step)
        for start, rows, token_bytes in found.routed.values():
            routed[start * token_bytes :] = rows
        return found

    monkeypatch.setattr(StepInFlight, "result", noted)
    seen = []
    for eager in (True, False):
        with LLM(str(directory), **OPTIONS, enable_return_routed_experts=True, enforce_eager=eager) as llm:
            for _ in range(2):  # without a hit, and with one
                routed.clear()
                [output] = llm.generate([PROMPT], params, use_tqdm=False)
                seen.append((output.outputs[0].token_ids, bytes(routed)))
    assert len(seen[0][1]) == (len(PROMPT) + 23) * 3 * 2
    assert seen == [seen[0]] * 4
