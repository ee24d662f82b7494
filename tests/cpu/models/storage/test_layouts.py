"""A format of codes is its rows: one that no source file names is recognised, loaded and multiplied."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strandline.config_fields import Fields
from strandline.kernels.gemm.formats.coded import CodedFormat, draw_bits
from strandline.kernels.gemm.formats.mxfp8 import LAUNCHES, pack_bytes, unpack_bytes
from strandline.model_config import ModelConfig
from strandline.models.layers.feed_forward.experts import Experts
from strandline.models.storage import layouts, quantization_config
from strandline.models.storage.layouts import (
    AWQ,
    EXPONENTS,
    GPTQ,
    LAYOUTS,
    MXFP8_LAYOUT,
    NVFP4_COMPRESSED,
    NVFP4_MODELOPT,
    PACKED_COMPRESSED,
    Bytes,
    Layout,
)
from strandline.models.storage.quantization_config import read_schemes
from strandline.models.storage.quantizers import QUANTIZERS, quantizer_of
from strandline.models.weights import FillOptions
from tests.cpu.models import families, microscaled
from tests.cpu.models.fp8 import Tensors, change_tensors
from tests.cpu.models.quantized import assert_same_weights, check, load, logits, values_of
from tests.cpu.models.storage.test_stored_formats import SIZES
from tests.cpu.models.test_weights import unfuse_experts

ROOT = Path(__file__).parents[4]
SOURCE = ROOT / "src/strandline"

STEP = 2.0**-6
"""Least distance of numbers."""

MXINT8 = CodedFormat(
    name="MXINT8",
    functions="microscaled_triton",
    bits=8,
    pack=pack_bytes,
    unpack=unpack_bytes,
    numbers=lambda codes: codes.view(torch.int8).float() * STEP,
    draw=draw_bits,
    random_std=74 * STEP,
    launches=LAUNCHES,
)
"""Integers, of the specification of microscaling formats."""

LAYOUT = Layout(
    kind="MXINT8",
    format=MXINT8,
    group=64,
    scale_dtypes=EXPONENTS,
    bytes=Bytes("I8", 1, 1, lambda codes: codes),
    scales=("_exponents",),
    quant_method="mxint8",
)


def write(name: str, weight: Tensor, tensors: Tensors) -> Tensor:
    """Add the tensors of a weight, and return what they stand for."""
    groups = weight.float().unflatten(-1, (-1, LAYOUT.group))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=1e-30)))
    numbers = (groups / torch.exp2(exponent)[..., None] / STEP).round().clamp(-127, 127)
    tensors |= {name: numbers.to(torch.int8).flatten(-2), f"{name}_exponents": (exponent + 127).to(torch.uint8)}
    return (numbers * STEP * torch.exp2(exponent)[..., None]).flatten(-2)


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return a model in this format, and what it stands for."""
    monkeypatch.setitem(quantization_config.METHODS, "mxint8", LAYOUT)
    monkeypatch.setitem(microscaled.WAYS, "mxint8", (write, {"quant_method": "mxint8"}))
    sizes = {**SIZES, "hidden_size": 64, "moe_intermediate_size": 64}
    source = change_tensors(families.save("qwen3_5_moe", tmp_path, **sizes), unfuse_experts)
    return microscaled.convert(source, tmp_path, "mxint8", multiple=LAYOUT.group)


def test_rows_are_all_that_loading_needs(published: tuple[Path, Path]) -> None:
    directory, plain = published
    model: Any = check(directory)
    assert_same_weights(model, load(plain, keeps_quantized=False))
    assert_same_weights(load(directory, keeps_quantized=False), load(plain, keeps_quantized=False))
    experts = [part.up for module in model.modules() if isinstance(module, Experts) for part in module.parts]
    assert {up.format for up in experts} == {MXINT8}


def test_random_weights_need_no_more(published: tuple[Path, Path]) -> None:
    directory, _ = published
    model = load(directory, FillOptions(load_format="dummy"), keeps_quantized=True)
    assert bool(logits(model).isfinite().all())
    spread = values_of(model.decoder.layers[0].mixer.in_proj.weight).std() * model.embedding_size**0.5
    assert 0.5 < float(spread) < 1.5


def test_only_rows_and_quantisers_import_formats_of_layouts() -> None:
    modules = "|".join({layout.format.name.lower() for layout in LAYOUTS})
    importing = re.compile(rf"formats\.({modules}) import|formats import .*\b({modules})\b")
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if importing.search(path.read_text())}
    outside = {name for name in found if not name.startswith("kernels/gemm/formats/")}
    assert outside == {"models/storage/layouts.py", "models/storage/quantizers.py"}


def test_documentation_names_every_layout_and_written_format() -> None:
    page = (ROOT / "docs/quantization.md").read_text()
    names = [name for layout in LAYOUTS for name in announcements(layout)]
    names += [packing.name for packing in (PACKED_COMPRESSED, GPTQ, AWQ)] + list(QUANTIZERS)
    assert [name for name in names if not re.search(rf"`[^`]*\b{re.escape(name)}\b[^`]*`", page)] == []


def announcements(layout: Layout) -> list[str]:
    """Return what configurations say of a layout."""
    return [name for name in (layout.quant_method, layout.compressed, *layout.algorithms) if name is not None]


def test_configurations_announce_every_layout_in_one_way_only() -> None:
    assert all(map(announcements, LAYOUTS))
    announced = [name for layout in LAYOUTS for name in announcements(layout)]
    assert len(set(announced)) == len(announced)
    assert tuple(value for value in vars(layouts).values() if isinstance(value, Layout)) == LAYOUTS


def test_what_writes_a_layout_announces_it() -> None:
    written = {}
    for layout in LAYOUTS:
        quantizer = quantizer_of(layout)
        if quantizer is not None:
            values = quantizer.config(["lm_head"])
            assert values["ignore"] == ["lm_head"]
            written[layout] = read_schemes(ModelConfig("", Fields({}, ""), None, values))
    assert written == {layout: (layout,) for layout in (NVFP4_MODELOPT, NVFP4_COMPRESSED, MXFP8_LAYOUT)}
