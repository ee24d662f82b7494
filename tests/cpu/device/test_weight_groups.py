"""What a trainer publishes at its store, and shares of its memory, is read without running any of its code."""

import base64
import ctypes
import pickle
from typing import Any

import pytest
import torch

from strandline.device.weights.shared_handles import read_handles
from strandline.device.weights.weight_groups import join_group, read_unique_id
from strandline.errors import ConfigError


class ncclUniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit",)


def test_unique_ids_are_read_as_vllm_pickles_them() -> None:
    sent = ncclUniqueId((ctypes.c_byte * 128)(*range(-64, 64)))
    assert bytes(read_unique_id(pickle.dumps(sent))) == bytes(sent)


@pytest.mark.parametrize("data", [b"", b"x", pickle.dumps(Evil()), pickle.dumps("id"), pickle.dumps(ncclUniqueId)])
def test_other_things_are_no_unique_ids(data: bytes) -> None:
    with pytest.raises(ConfigError, match="no unique id"):
        read_unique_id(data)


def test_handles_name_tensors_types_alone() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    storages = (type(weight.untyped_storage()), type(weight._typed_storage()))  # the latter in what torch shares
    arguments = (torch.Tensor, type(weight), weight.size(), torch.bfloat16, *storages, b"handle", 7, True, None)
    pickled = base64.b64encode(pickle.dumps([{"GPU-1": arguments}])).decode()
    assert read_handles(pickled) == [{"GPU-1": arguments}]
    for wrong in (Evil(), torch.zeros(1), torch.load, print):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_handles(base64.b64encode(pickle.dumps(wrong)).decode())


def test_trainers_that_do_not_come_are_named() -> None:
    with pytest.raises(ConfigError, match=r"rank 1 of 2 did not meet the trainer at 127\.0\.0\.1:1"):
        join_group(("127.0.0.1", 1), 1, 2, torch.device("cpu"), 0.5)
