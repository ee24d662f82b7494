"""TRL's own client trains against a server: it samples, sends weights, and the reward rises.

TRL opens its group and packs tensors with functions of vLLM, which need a GPU; here gloo stands for these alone.
"""

import importlib
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.cpu.engine.tokenizers import byte_tokenizer
from tests.cpu.server.conftest import VOCAB_SIZE
from tests.cpu.server.process import ServerProcess, running_server
from tests.cpu.server.test_weight_transfer import NCCL
from tests.cpu.server.trainer import open_group, open_store, packs

pytest.importorskip("trl", reason="TRL is not installed: pip install --no-deps trl")

PROMPT = byte_tokenizer().encode("weights")
PACK_BYTES = 2**30
"""What vLLM packs by default."""


def trainer_init(info: dict[str, Any]) -> SimpleNamespace:
    """Return the trainer's end of a group, as vLLM's function of this name does over NCCL."""
    store = open_store(info["master_port"], info["world_size"])
    return SimpleNamespace(gloo=open_group(store, info["world_size"]), group=SimpleNamespace(store=store, socket=None))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def broadcast(
    iterator: Iterator[tuple[str, Tensor]],
    group: SimpleNamespace,
    src: int,
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor],
) -> None:
    for pack in packs(map(post_iter_func, iterator), PACK_BYTES):
        group.gloo.broadcast([pack]).wait()


@pytest.fixture
def vllm_client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return TRL's module, with the functions of vLLM that it imports."""
    importlib.import_module("trl.generation")
    functions = {
        "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1"},
        "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": trainer_init},
        "vllm.distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer": broadcast},
    }
    for path, members in functions.items():
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
        vars(sys.modules[path]).update(members)
    utils = importlib.import_module("trl.import_utils")
    monkeypatch.setattr(utils, "is_vllm_available", lambda min_version=None: True)
    return importlib.import_module("trl.generation.vllm_client")


@pytest.fixture
def trl_server(bytes_dir: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(bytes_dir, tmp_path / "log", *NCCL) as server:
        yield server


def test_trls_client_raises_the_reward(vllm_client: Any, trl_server: ServerProcess, bytes_dir: Path) -> None:
    client = vllm_client.VLLMClient(base_url=trl_server.url, group_port=free_port())
    client.init_communicator(torch.device("cuda"))  # which is not touched
    model = AutoModelForCausalLM.from_pretrained(bytes_dir, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    rewards = []
    for step in range(5):
        options = {"seed": step, "ignore_eos": True}
        sampled = client.generate([PROMPT], n=32, max_tokens=12, temperature=1.0, logprobs=0, generation_kwargs=options)
        assert sampled["prompt_ids"] == [PROMPT]
        ids_NT = torch.tensor(sampled["completion_ids"])
        reward_N = (ids_NT < VOCAB_SIZE // 2).float().mean(dim=1)
        rewards.append(float(reward_N.mean()))
        whole_NT = torch.cat((torch.tensor([PROMPT] * len(ids_NT)), ids_NT), dim=1)
        logprobs_NTV = model(whole_NT, use_cache=False).logits[:, len(PROMPT) - 1 : -1].log_softmax(-1)
        logprobs_NT = logprobs_NTV.gather(-1, ids_NT.unsqueeze(-1)).squeeze(-1)
        sampled_NT = torch.tensor(sampled["logprobs"]).squeeze(-1)
        torch.testing.assert_close(sampled_NT, logprobs_NT.detach(), rtol=1e-3, atol=1e-3)  # of the same weights
        advantage_N = (reward_N - reward_N.mean()) / (reward_N.std() + 1e-4)
        loss = -((logprobs_NT - logprobs_NT.detach()).exp() * advantage_N.unsqueeze(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        client.update_model_params(model)
        client.reset_prefix_cache()
    assert rewards[-1] > rewards[0] + 0.1, rewards
    client.close_communicator()


def test_trls_client_groups_updates_and_scores_sequences(
    vllm_client: Any, trl_server: ServerProcess, bytes_dir: Path
) -> None:
    client = vllm_client.VLLMClient(base_url=trl_server.url, group_port=free_port())
    client.init_communicator(torch.device("cuda"))
    model = AutoModelForCausalLM.from_pretrained(bytes_dir, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    with client.weight_update():
        for name, parameter in model.named_parameters():
            client.update_named_param(name, parameter.data)
    sequence = [*PROMPT, *range(10)]
    scored = client.get_sequence_logprobs([sequence], [len(PROMPT)], top_logprobs=4)
    with torch.no_grad():
        logits_TV = model(torch.tensor([sequence]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    expected_T4 = logits_TV.log_softmax(-1).topk(4).values
    torch.testing.assert_close(torch.tensor(scored["logprobs"][0]), expected_T4, rtol=1e-3, atol=1e-3)
    client.close_communicator()
