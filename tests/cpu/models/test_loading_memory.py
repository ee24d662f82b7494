"""Loading quantised weights takes the memory of the model and of one published tensor, and no copy in another dtype.

Storages are counted from the operation that makes them until they are freed. Files are mapped into memory, so that what
is read of them is copied here, as a device would.
"""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from strandline.kernels.rowwise.quantized_rows import GROUP
from strandline.models.model_options import ModelOptions
from strandline.models.storage import coded_storage, codes, stored_rows
from strandline.models.storage import fp8 as fp8_reader
from strandline.models.storage.weights_files import WeightsFile
from strandline.models.weights import load_model
from tests.cpu.engine.test_bits import MIXTURE, WIDE
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.models import four_bit, fp8
from tests.cpu.models.storage.test_four_bit_storage import KEPT
from tests.cpu.models.storage.test_quantization import block_config, blocks_of
from tests.cpu.models.test_weights import unfuse_experts

MODELS: dict[str, dict[str, Any]] = {
    "dense": {**WIDE, "intermediate_size": 1024, "tie_word_embeddings": True},
    "experts": {**WIDE, **MIXTURE, "moe_intermediate_size": 256},
}

CHUNK_ELEMENTS = 2**12
"""Elements that are computed at a time; many, where models are not tiny."""

UNPACKED = 8
"""Bytes beside the model for a byte of a published tensor in 4 bits: a byte for each code, several times."""

ROW_BYTES = 64
"""For each row of a tensor: its number, several times."""


class LiveBytes(TorchDispatchMode):
    """Counts bytes of storages that operations inside make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self._counted: set[int] = set()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        number, num_bytes = storage._cdata, storage.nbytes()
        if number not in self._counted:
            self._counted.add(number)
            self.live += num_bytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, number, num_bytes)

    def _free(self, number: int, num_bytes: int) -> None:
        self._counted.remove(number)
        self.live -= num_bytes


@pytest.fixture(params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    source = fp8.change_tensors(save_tiny_model(tmp_path / "source", **MODELS[request.param]), unfuse_experts)
    return fp8.convert(source, tmp_path, block_config(128, 128), block=blocks_of(128, 128))[0]


@pytest.fixture(params=MODELS)
def in_4_bits(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    source = fp8.change_tensors(save_tiny_model(tmp_path / "source", **MODELS[request.param]), unfuse_experts)
    return four_bit.convert(source, tmp_path, KEPT["awq"])[0]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> LiveBytes:
    """Count, also what is read of files."""
    get = WeightsFile.get

    def get_copy(*arguments: Any) -> Tensor:
        with _disable_current_modes():
            mapped = get(*arguments)
        return mapped.clone()

    monkeypatch.setattr(WeightsFile, "get", get_copy)
    for module in (fp8_reader, codes, coded_storage, stored_rows):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", CHUNK_ELEMENTS)
    return LiveBytes()


def test_storages_are_counted_while_they_live() -> None:
    with LiveBytes() as counted:
        first = torch.zeros(100)
        view = first[:50]
        second = first + 1
        del first, second
        assert (counted.live, counted.peak) == (400, 800)
        del view
        assert counted.live == 0


def test_weights_that_stay_take_their_bytes_and_one_tensor(directory: Path, counted: LiveBytes) -> None:
    published = load_file(directory / "model.safetensors").values()
    with counted:
        model: Any = load_model(directory, ModelOptions(dtype=torch.float32, keeps_quantized=True))
    assert len(model.weights_report.stored) == model.weights_report.num_quantized > 10
    num_bytes = sum(tensor.nbytes for tensor in published)
    # A rotary table and the like come on top; in bfloat16, most weights would take twice as much.
    assert 0.9 * num_bytes < counted.live < 1.2 * num_bytes
    largest = max(tensor.nbytes + ROW_BYTES * len(tensor) for tensor in published)
    # Until all is loaded the host has a scale for every row and group.
    row_scales = 4 * num_bytes // GROUP
    assert counted.peak - counted.live <= largest + row_scales + 4 * CHUNK_ELEMENTS


def test_weights_in_4_bits_take_their_bytes_and_one_tensor(in_4_bits: Path, counted: LiveBytes) -> None:
    published = load_file(in_4_bits / "model.safetensors").values()
    with counted:
        model: Any = load_model(in_4_bits, ModelOptions(dtype=torch.float32, keeps_quantized=True))
    assert len(model.weights_report.stored) == model.weights_report.num_quantized > 10
    num_bytes = sum(tensor.nbytes for tensor in published)
    # Zero points take a byte, and rows are padded to blocks of inputs.
    assert 0.9 * num_bytes < counted.live < 1.3 * num_bytes
    packed = [tensor for tensor in published if tensor.dtype == torch.int32]
    largest = max(tensor.nbytes for tensor in packed) * UNPACKED + ROW_BYTES * max(map(len, packed)) * 8
    assert counted.peak - counted.live <= largest + 16 * CHUNK_ELEMENTS


def test_dequantised_weights_take_their_bytes_and_one_tensor(directory: Path, counted: LiveBytes) -> None:
    published = load_file(directory / "model.safetensors")
    with counted:
        model: Any = load_model(directory, ModelOptions(dtype=torch.float32))
    assert len(model.weights_report.stored) == 0
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert weights <= counted.live < 1.2 * weights
    # One tensor as it is published and in float32, or one that is published so.
    sizes = [tensor.nbytes * (5 if tensor.dtype == torch.float8_e4m3fn else 1) for tensor in published.values()]
    rows = max(len(tensor) for tensor in published.values())
    assert counted.peak - counted.live <= max(sizes) + ROW_BYTES * rows + 16 * CHUNK_ELEMENTS
