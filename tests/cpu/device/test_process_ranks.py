"""Processes of ranks leave NVLink multicast off, unless the user says otherwise."""

import os
from pathlib import Path

import pytest
import torch

from strandline.device.process_ranks import INTERFACES, WITHOUT_MULTICAST, ProcessRanks, RankPlace, _loopback


@pytest.mark.parametrize("is_set", [False, True])
def test_multicast_stays_off_unless_the_user_sets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_set: bool
) -> None:
    for name in INTERFACES:
        monkeypatch.setenv(name, _loopback())
    environment = {name: value for name, value in os.environ.items() if name not in WITHOUT_MULTICAST}
    monkeypatch.setattr(os, "environ", environment)
    if is_set:
        environment["NCCL_NVLS_ENABLE"] = "1"
    (tmp_path / "place").mkdir()
    ranks = ProcessRanks(RankPlace(0, 1, str(tmp_path / "place" / "meeting")), torch.device("cpu"))
    ranks.close()
    assert environment["NCCL_NVLS_ENABLE"] == str(int(is_set))
    assert environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
