"""Models bound to the Triton versions of all operations, interpreted, give the logits of the CPU's kernels."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from strandline.device.uni_executor import choose_kernels
from strandline.kernels import binding
from strandline.kernels.gemm.weights import DenseWeight
from strandline.kernels.ranks import ONE_RANK, Ranks
from strandline.models.layers.decoder import Decoder
from strandline.models.layers.parts.shard import Shard
from strandline.models.model_options import ModelOptions
from strandline.models.weights import load_model
from tests.cpu.models import families, four_bit, fp8, microscaled
from tests.cpu.models.driver import Driver, Part, Running
from tests.cpu.models.families import prompt
from tests.cpu.models.few_rows import CountingManyRows, FirstOfTwo
from tests.cpu.models.storage.test_four_bit_storage import KEPT
from tests.cpu.models.storage.test_quantization import block_config
from tests.cpu.models.test_weights import unfuse_experts

TOLERANCE = 2e-4
"""Four layers in float32, whose sums are in another order."""

NO_LAUNCHES = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten._unsafe_view}

FP8_TOLERANCE = 0.05
"""``|logits - expected| / |expected|``: an input that lies between two e4m3 numbers may be rounded to either."""


FOUR_BIT_TOLERANCE = 5e-4
"""``|logits - expected| / |expected|``: products of few rows have sums of 2,048 times an input."""


@pytest.mark.parametrize(
    ("name", "is_deterministic"),
    [
        # Its layers are those of the next but for the MLP, which is bamba's.
        pytest.param("qwen3_5", False, marks=pytest.mark.long),
        ("qwen3_5_moe", False),
        ("qwen3_5_moe", True),
        ("bamba", False),
        ("kimi_linear", True),
        ("nemotron_h", False),
        ("gpt_oss", False),
        ("inkling2", False),
        # Their kernels are those of others; the interpreter takes long.
        pytest.param("glm5_next", False, marks=pytest.mark.long),
        pytest.param("inkling", False, marks=pytest.mark.long),
        pytest.param("qwen4_exp", False, marks=pytest.mark.long),
        pytest.param("zaya", False, marks=pytest.mark.long),
    ],
)
def test_triton_versions_fit_the_layers(
    name: str, is_deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = partial(load_model, families.save(name, tmp_path), ModelOptions(dtype=torch.float32))
    tokens = prompt(70)
    expected = logits(model(), tokens, "cpu")
    monkeypatch.setattr(binding, "_why_no_triton", lambda device_type: None)
    found = logits(model(), tokens, "cuda", is_deterministic=is_deterministic)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def save_in(form: str, name: str, directory: Path) -> Path:
    """Write a family in a format, with its experts one by one; in FP4 also the head."""
    source = families.save(name, directory, **({"intermediate_size": 32} if form == "gpt_oss" else {}))
    if form == "gpt_oss":
        return microscaled.convert(source, directory, form, lambda name, tensor: name.endswith("_proj"))[0]
    if form == "dense":
        return source
    source = fp8.change_tensors(source, unfuse_experts)
    if form == "FP8":
        return fp8.convert(source, directory, block_config(128, 128), block=lambda _: (128, 128))[0]
    if form in microscaled.WAYS:
        return microscaled.convert(source, directory, form, microscaled.is_projection_or_head)[0]
    return four_bit.convert(source, directory, KEPT[form])[0]


@pytest.mark.parametrize(
    ("name", "form", "is_deterministic"),
    [
        ("qwen3_5_moe", "FP8", False),
        ("qwen3_5", "FP8", True),
        ("qwen3_5_moe", "compressed", False),
        ("qwen3_5", "gptq", True),
        ("qwen3_5_moe", "modelopt", False),
        ("falcon_h1", "mxfp4", True),
        ("qwen3_5_moe", "mxfp8", False),
        ("gpt_oss", "gpt_oss", False),
        # Its kernels are those of the others.
        pytest.param("kimi_linear", "awq", False, marks=pytest.mark.long),
        pytest.param("nemotron_h", "modelopt", False, marks=pytest.mark.long),
    ],
)
def test_triton_versions_fit_quantised_layers(
    name: str, form: str, is_deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = partial(load_model, save_in(form, name, tmp_path), ModelOptions(dtype=torch.float32, keeps_quantized=True))
    tokens, quantized = prompt(6), model()
    assert len(quantized.weights_report.stored) > 0
    expected = logits(quantized, tokens, "cpu")
    monkeypatch.setattr(binding, "_why_no_triton", lambda device_type: None)
    found = logits(model(), tokens, "cuda", is_deterministic=is_deterministic)
    tolerance = FP8_TOLERANCE if form == "FP8" else FOUR_BIT_TOLERANCE
    assert float((found - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize(
    ("name", "form", "is_deterministic"),
    [
        ("qwen3_5_moe", "dense", False),
        ("qwen3_5_moe", "FP8", True),
        ("qwen3_5_moe", "compressed", False),
        ("kimi_linear", "dense", False),
    ],
)
def test_sums_over_ranks_add_up_choices_of_experts(
    name: str, form: str, is_deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_in(form, name, tmp_path)
    model = partial(load_model, directory, ModelOptions(dtype=torch.float32, keeps_quantized=form != "dense"))
    tokens = prompt(8)
    monkeypatch.setattr(binding, "_why_no_triton", lambda device_type: None)
    expected = logits(model(), tokens, "cuda", is_deterministic=is_deterministic)
    ranks = FirstOfTwo()
    ranks.many_rows = CountingManyRows(ranks, len(tokens))
    sharded = model()
    sharded.decoder.shard = Shard(0, 2)
    found = logits(sharded, tokens, "cuda", ranks, is_deterministic=is_deterministic)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert ranks.num_choices > 0


class Launches(TorchDispatchMode):
    """Notes torch's operations, but for views and for memory that is not filled."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.overloadpacket not in NO_LAUNCHES:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_few_decodes_of_nemotron_launch_our_kernels_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches, forward = Launches(), Decoder.forward

    def watched(self: Decoder, *arguments: Any) -> torch.Tensor:
        with launches:
            return forward(self, *arguments)

    model = load_model(families.save("nemotron_h", tmp_path), ModelOptions(dtype=torch.bfloat16))
    model.lay_out(DenseWeight)
    monkeypatch.setattr(binding, "_why_no_triton", lambda device_type: None)
    # What kernels would compute does not matter here.
    executor = pytest.importorskip("triton.runtime.interpreter").GridExecutor
    monkeypatch.setattr(executor, "__call__", lambda self, *_, **__: launches.names.append(self.fn.__name__))
    driver, sequence = Driver(model, kernels=choose_kernels(model, "cuda", is_deterministic=False)), Running()
    driver.step([Part(sequence, prompt(6))])
    monkeypatch.setattr(Decoder, "forward", watched)
    launches.names.clear()
    driver.step([Part(sequence, prompt(1))])
    first, *names = launches.names
    assert first == "embedding"
    assert all(name.startswith("_") and name.endswith("_kernel") for name in names), names
    pair = names.index("_few_up_kernel") - 1
    assert names[pair : pair + 4] == ["_gemv_kernel", "_few_up_kernel", "_few_down_kernel", "_norm_kernel"]


def logits(
    model: Any, tokens: list[int], device_type: str, ranks: Ranks = ONE_RANK, *, is_deterministic: bool = False
) -> torch.Tensor:
    """Return those of a prompt and of a token after it, with the kernels of a type of device."""
    model.lay_out(DenseWeight)
    kernels = choose_kernels(model, device_type, ranks, is_deterministic=is_deterministic)
    driver, sequence = Driver(model, kernels=kernels, ranks=ranks), Running()
    (prefilled,), _ = driver.step([Part(sequence, tokens[:-1])])
    (decoded,), _ = driver.step([Part(sequence, tokens[-1:])])
    return torch.cat((prefilled, decoded))
