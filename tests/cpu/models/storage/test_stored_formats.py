"""Models of every family hold the numbers of every published format, and answer as the dequantised ones."""

import itertools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from strandline.errors import WeightsError
from strandline.kernels.gemm.formats import format as kernel_format
from strandline.kernels.gemm.formats.four_bit import FOUR_BIT
from strandline.kernels.gemm.formats.fp4 import FP4
from strandline.kernels.gemm.formats.fp8 import FP8
from strandline.kernels.gemm.formats.mxfp8 import MXFP8
from strandline.model_config import read_model_config
from strandline.models.families.causal_lm import CausalLM
from strandline.models.layers.feed_forward.experts import Experts
from strandline.models.layers.parts.projection import Projection
from strandline.models.layers.parts.shard import Shard
from strandline.models.storage.conversion import is_converted
from strandline.models.weights import FillOptions
from tests.cpu.models import families, four_bit, fp8, microscaled
from tests.cpu.models.quantized import (
    TOLERANCE,
    TOLERANCE_FP8,
    assert_same_weights,
    check,
    check_parts_read,
    load,
    logits,
    values_of,
)
from tests.cpu.models.rank_threads import RankThread, RankThreads
from tests.cpu.models.storage.test_four_bit_storage import KEPT
from tests.cpu.models.storage.test_quantization import (
    block_config,
    blocks_of,
    channel,
    compressed_config,
    modelopt_config,
    whole,
)
from tests.cpu.models.test_weights import unfuse_experts


class Format(NamedTuple):
    """A published format."""

    convert: Callable[..., tuple[Path, Path]]
    """Writes a saved model in this format, and what it stands for; returns both directories."""
    stored: kernel_format.Format
    tolerance: float = TOLERANCE


def in_fp8(config: dict[str, Any], block: Any, **options: Any) -> Format:
    return Format(partial(fp8.convert, config=config, block=block, **options), FP8, TOLERANCE_FP8)


FORMATS = {
    "fp8 blocks": in_fp8(block_config(128, 128), blocks_of(128, 128)),
    "fp8 channels": in_fp8(compressed_config(strategy="channel"), channel, suffix="_scale"),
    "fp8 tensors": in_fp8(
        compressed_config(strategy="tensor"), whole, suffix="_scale", shape_scale=lambda scale: scale.reshape(-1)
    ),
    "fp8 modelopt": in_fp8(
        modelopt_config("FP8"), whole, suffix="_scale", shape_scale=lambda scale: scale.reshape(scale.shape[:-2])
    ),
    **{name: Format(partial(four_bit.convert, scheme=KEPT[name]), FOUR_BIT) for name in ("compressed", "gptq")},
    **{
        way if "mxfp8" in way else f"fp4 {way}": Format(
            partial(microscaled.convert, way=way), MXFP8 if "mxfp8" in way else FP4
        )
        for way in microscaled.WAYS
    },
}

MAIN = ("fp8 blocks", "compressed", "fp4 modelopt")
"""One of each kind of weight, but for MXFP8, which shares its code with FP4."""

SIZES = {
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "moe_latent_size": None,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
"""Multiples of groups."""

FAMILIES = [name for name, family in families.CONFIGS.items() if family.is_quantized]

OWN_SIZES = {
    "bailing_hybrid": {"num_experts_per_token": 4},
    "nemotron_h-odd": {"moe_latent_size": 32, "moe_intermediate_size": 160},
}
"""Other values of families. Ling 3's tokens take all experts of two groups: of 2, rounding in FP8 flips some."""

IN_ONE_TENSOR = ("granite_hybrid", "inkling", "inkling-towers", "inkling2")
"""Families whose experts are published so, for which GPTQ has no layout."""

OWN_CASES = [("inkling2", "mxfp8"), ("nemotron_h-odd", "mxfp8")]
"""Families that are published so, and with odd sizes."""

CASES = [
    *((name, format) for name in FAMILIES for format in MAIN),
    *(("qwen3_5_moe", format) for format in FORMATS if format not in MAIN),
    *OWN_CASES,
    *(
        pytest.param(name, format, marks=pytest.mark.long)
        for name in FAMILIES
        for format in FORMATS
        if format not in MAIN and name != "qwen3_5_moe" and (name, format) not in OWN_CASES
    ),
]


def save(name: str, format: str, directory: Path) -> tuple[Path, Path]:
    """Write a family as published, quantised and dequantised."""
    sizes: dict[str, Any] = {**SIZES, **OWN_SIZES.get(name, {})}
    source = fp8.change_tensors(families.save(name, directory, **sizes), unfuse_experts)
    return FORMATS[format].convert(
        source, directory, is_converted=lambda name, tensor: is_converted(name, tensor.shape)
    )


def weights_of_experts(model: Any) -> list[Any]:
    """Return the first weights of all experts, format by format."""
    return [part.up for module in model.modules() if isinstance(module, Experts) for part in module.parts]


@pytest.mark.parametrize(("name", "format"), CASES)
def test_weights_stay_as_published(name: str, format: str, tmp_path: Path) -> None:
    directory, plain = save(name, format, tmp_path)
    model = check(directory, FORMATS[format].tolerance)
    assert_same_weights(model, load(plain, keeps_quantized=False))
    # Latent attention multiplies with parts of these, head by head.
    published = load_file(directory / "model.safetensors")
    of_heads = [key for key in published if re.search(r"kv_b_proj\.(weight(_packed)?|qweight)$", key)]
    num_dequantized = sum(published[key].dtype != torch.float32 for key in of_heads)
    report = model.weights_report
    assert len(report.stored) == report.num_quantized - num_dequantized > 0
    assert any(isinstance(module, Projection) and module.is_quantized for module in model.modules())
    if format != "gptq" or name not in IN_ONE_TENSOR:
        assert {up.format for up in weights_of_experts(model)} <= {FORMATS[format].stored}


@pytest.mark.parametrize(
    ("name", "format"),
    [*itertools.product(["qwen3_5_moe", "nemotron_h", "kimi_linear", "falcon_h1"], MAIN), ("qwen3_5_moe", "mxfp8")],
)
def test_ranks_hold_and_compute_their_part(name: str, format: str, tmp_path: Path) -> None:
    directory, _ = save(name, format, tmp_path)
    expected = logits(load(directory, keeps_quantized=True))
    for index in range(2):
        quantized, dequantized = (
            load(directory, keeps_quantized=keeps, shard=Shard(index, 2)) for keeps in (True, False)
        )
        assert_same_weights(quantized, dequantized)
        assert len(quantized.weights_report.stored) > 0

    def run(ranks: RankThread) -> Tensor:
        return logits(load(directory, keeps_quantized=True, shard=Shard(ranks.rank, ranks.size)), ranks=ranks)

    for found in RankThreads(2).run(run):
        assert float((found - expected).norm() / expected.norm()) < FORMATS[format].tolerance


@pytest.mark.parametrize("format", [*MAIN, "gptq"])
@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
def test_ranks_read_only_their_part(name: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_parts_read(save(name, format, tmp_path)[0], monkeypatch)


@pytest.mark.parametrize("format", [*MAIN, "gptq", "fp4 mxfp4", "mxfp8"])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_random_weights_stay_quantised(name: str, format: str, tmp_path: Path) -> None:
    config, stored = read_model_config(save(name, format, tmp_path)[0]), FORMATS[format].stored
    model = load(Path("nowhere"), FillOptions(load_format="dummy"), keeps_quantized=True, config=config)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert {up.format for up in weights_of_experts(model)} == ({stored} if name == "qwen3_5_moe" else set())
    spread = values_of(model.decoder.layers[0].mixer.in_proj.weight).std() * model.embedding_size**0.5
    assert 0.5 < float(spread) < 1.5
    assert bool(logits(model).isfinite().all())


@pytest.mark.parametrize("format", ["fp8 blocks", "compressed"])
def test_random_weights_do_not_depend_on_the_order_of_modules(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, modules = read_model_config(save("qwen3_5", format, tmp_path)[0]), CausalLM.modules

    def drawn() -> list[Tensor]:
        model = load(Path("nowhere"), FillOptions(load_format="dummy"), keeps_quantized=True, config=config)
        return [values_of(layer.mlp.down.weight) for layer in model.decoder.layers]

    first = drawn()
    assert not torch.equal(*first[:2])
    monkeypatch.setattr(CausalLM, "modules", lambda model: reversed([*modules(model)]))
    assert all(map(torch.equal, drawn(), first))


def spoil(tensors: fp8.Tensors, name: str, fault: str) -> None:
    scale = tensors[name].flatten()
    if fault == "missing":
        del tensors[name]
    elif fault == "shape":
        tensors[name] = scale.new_zeros(3, 3)
    elif scale.dtype == torch.uint8:
        scale[-1] = 255 if fault == "nan" else 200
    elif scale.dtype == torch.float8_e4m3fn:
        scale.view(torch.uint8)[-1] = 0xFF if fault == "nan" else 0xB8
    else:
        scale[-1] = torch.nan if fault == "nan" else -scale[-1]


@pytest.mark.parametrize("fault", ["missing", "shape", "nan", "range"])
@pytest.mark.parametrize("format", [*MAIN, "mxfp8"])
def test_faults_of_an_expert_are_named(format: str, fault: str, tmp_path: Path) -> None:
    directory, _ = save("qwen3_5_moe", format, tmp_path)
    name = "model.layers.1.mlp.experts.3.down_proj.weight_scale"
    [scale] = {name, f"{name}_inv"} & load_file(directory / "model.safetensors").keys()
    fp8.change_tensors(directory, lambda tensors: spoil(tensors, scale, fault))
    with pytest.raises(WeightsError, match=re.escape(name)):
        load(directory, keeps_quantized=True)
