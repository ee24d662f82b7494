"""A trainer that sends weights to a server as vLLM's trainers do, over gloo."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import httpx
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from tests.cpu.server.process import ServerProcess

Tensors = Mapping[str, Tensor]


def announced(tensors: Tensors) -> dict[str, Any]:
    """Describe tensors as ``/update_weights`` takes it."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def packs(tensors: Iterable[Tensor], limit: int) -> Iterable[Tensor]:
    """Yield the bytes of tensors, joined until they are more than the limit."""
    pack: list[Tensor] = []
    for tensor in tensors:
        pack.append(bytes_of(tensor))
        if sum(map(len, pack)) > limit:
            yield torch.cat(pack)
            pack = []
    if pack:
        yield torch.cat(pack)


def open_group(store: c10d.TCPStore, size: int) -> Any:
    """Open the trainer's end of a group, at a store of its own."""
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=60)
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    group = gloo(c10d.PrefixStore("gloo", store), 0, size, options)
    group.allreduce([torch.zeros(1)]).wait()
    return group


def open_store(port: int, size: int) -> c10d.TCPStore:
    timeout = timedelta(seconds=60)
    return c10d.TCPStore("127.0.0.1", port, size, is_master=True, timeout=timeout, wait_for_workers=False)


class Trainer:
    """The trainer's end of a group: rank 0, which has the store."""

    def __init__(self, server: ServerProcess, *, packed: bool = True, buffer_bytes: int = 4096) -> None:
        self._server, self._limit = server, buffer_bytes if packed else -1
        size = 1 + server.get("/get_world_size").json()["world_size"]
        self.store = open_store(0, size)
        info = {
            "master_address": "127.0.0.1",
            "master_port": self.store.port,
            "rank_offset": 1,
            "world_size": size,
            "packed": packed,
            "packed_buffer_size_bytes": buffer_bytes,
        }
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(server.post, "/init_weight_transfer_engine", init_info=info)
            self.group = open_group(self.store, size)
            assert joining.result().json() == {"message": "Weight transfer initialized"}

    def start(self) -> httpx.Response:
        return self._server.post("/start_weight_update")

    def send(self, tensors: Tensors, **changes: Any) -> httpx.Response:
        """Send tensors; return what the server answers."""
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(self._server.post, "/update_weights", update_info=announced(tensors) | changes)
            for pack in packs(tensors.values(), self._limit):
                self.group.broadcast([pack]).wait()
            return receiving.result()

    def finish(self, **fields: Any) -> httpx.Response:
        return self._server.post("/finish_weight_update", **fields)

    def update(self, tensors: Tensors, **fields: Any) -> None:
        """Send all weights, in two calls."""
        assert self.start().json() == {"message": "Weight update started"}
        names = list(tensors)
        for part in (names[: len(names) // 2], names[len(names) // 2 :]):
            answer = self.send({name: tensors[name] for name in part})
            assert answer.json() == {"message": "Weights updated"}, answer.text
        answer = self.finish(**fields)
        assert answer.json() == {"message": "Weight update finished"}, answer.text
