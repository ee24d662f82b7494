"""The draft layer of Nemotron 3 computes what the published one does, of the tensors that are published."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from strandline.errors import ConfigError, WeightsError
from strandline.kernels.gemm.weights import DenseWeight, ScaledWeight
from strandline.models.layers.parts.shard import Shard
from strandline.models.model_options import ModelOptions
from strandline.models.storage.conversion import convert
from strandline.models.weights import load_model
from tests.cpu.models import families, fp8, nemotron_drafts
from tests.cpu.models.driver import Driver, Running
from tests.cpu.models.rank_threads import RankThread, RankThreads
from tests.cpu.models.test_families import TOLERANCE

NAMES = sorted(nemotron_drafts.KINDS)
LENGTH = 140


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def directory(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nemotron_drafts.save(name, tmp_path_factory.mktemp("drafts"))


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """A copy of a model to change."""
    return nemotron_drafts.save("nemotron_h", tmp_path)


def load(directory: Path, **options: Any) -> Any:
    return load_model(directory, ModelOptions(dtype=torch.float32, with_draft_layer=True, **options))


def pairs(name: str) -> tuple[Tensor, tuple[int, ...]]:
    """Return the hidden states of a text, and the token after each."""
    tokens = families.prompt(LENGTH)
    return nemotron_drafts.oracle(name).hidden(tokens[:-1]), tokens[1:]


def expected_logits(name: str) -> Tensor:
    oracle = nemotron_drafts.oracle(name)
    return oracle.logits(oracle.draft(*pairs(name)))


def logits_in_parts(driver: Driver, name: str, ends: list[int]) -> Tensor:
    hidden_TE, following = pairs(name)
    running, bounds = Running(), zip([0, *ends[:-1]], ends, strict=True)
    parts = [driver.draft(running, following[start:end], hidden_TE[start:end]) for start, end in bounds]
    return torch.cat(parts)


@pytest.mark.parametrize("ends", [[139], [1, 2, 64, 65, 139], [63, *range(64, 140)]], ids=["whole", "parts", "steps"])
def test_logits_are_those_of_the_published_layer(directory: Path, name: str, ends: list[int]) -> None:
    found = logits_in_parts(Driver(load(directory), 200), name, ends)
    torch.testing.assert_close(found, expected_logits(name), rtol=0, atol=TOLERANCE)


def test_a_wrong_tensor_of_the_layer_shows_in_logits(directory: Path, name: str) -> None:
    model, expected = load(directory), expected_logits(name)
    for parameter_name, parameter in model.drafter.named_parameters():
        right = parameter.clone()
        parameter.copy_(right.flip(0))
        found = logits_in_parts(Driver(model), name, [LENGTH - 1])
        parameter.copy_(right)
        assert float((found - expected).abs().max()) > 10 * TOLERANCE, parameter_name


@pytest.mark.parametrize("count", [2, 4])
def test_shards_draft_what_the_whole_drafts(changed: Path, count: int) -> None:
    def logits(ranks: RankThread) -> Tensor:
        model = load(changed, shard=Shard(ranks.rank, ranks.size))
        return logits_in_parts(Driver(model, ranks=ranks), "nemotron_h", [66, 67, LENGTH - 1])

    # The last ranks' parts of the vocabulary are padded.
    expected = expected_logits("nemotron_h")
    found = torch.cat(RankThreads(count).run(logits), dim=-1)[:, : expected.shape[1]]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=TOLERANCE)


def test_every_published_tensor_is_read_and_none_skipped(directory: Path) -> None:
    names = load_file(directory / "model.safetensors").keys()
    found = load(directory).weights_report
    assert (found.num_tensors, found.skipped) == (len(names), {})
    without = load_model(directory, ModelOptions(dtype=torch.float32)).weights_report
    assert without.skipped == {"mtp.": sum(name.startswith("mtp.") for name in names)}


@pytest.mark.parametrize(
    "missing",
    ["0.enorm", "0.hnorm", "0.eh_proj", "0.norm", "0.mixer.k_proj", "1.norm", "1.mixer.gate", "1.final_layernorm"],
)
def test_a_missing_tensor_is_named(changed: Path, missing: str) -> None:
    missing = f"mtp.layers.{missing}.weight"
    fp8.change_tensors(changed, lambda tensors: tensors.pop(missing))
    with pytest.raises(WeightsError, match=rf"{missing} \[.*\] missing"):
        load(changed)
    load_model(changed)


def test_weights_without_a_draft_layer_are_refused_by_its_names(tmp_path: Path) -> None:
    directory = families.save("nemotron_h", tmp_path)
    fp8.change_json(directory / "config.json", num_nextn_predict_layers=1)
    with pytest.raises(WeightsError, match=r"mtp\.layers\.0\.enorm\.weight \[32\], .* more missing"):
        load(directory)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_nextn_predict_layers": 0}, "this model has no layer for multi-token prediction"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2; it must be 1, to draft with it"),
        (
            {"mtp_layers_block_type": ["linear_attention", "moe"]},
            r"mtp_layers_block_type is \['linear_attention', 'moe'\]; it must be full_attention, then mlp",
        ),
        ({"mtp_layers_block_type": ["full_attention", "full_attention"]}, "it must be full_attention, then mlp"),
        ({"mtp_layers_block_type": ["moe", "full_attention"]}, "it must be full_attention, then mlp"),
        ({"mtp_layers_block_type": ["full_attention", "moe", "mlp"]}, "it must be full_attention, then mlp"),
    ],
)
def test_other_draft_layers_are_refused_and_their_models_served(
    changed: Path, values: dict[str, Any], message: str
) -> None:
    fp8.change_json(changed / "config.json", **values)
    with pytest.raises(ConfigError, match=message) as refusal:
        load(changed)
    assert 'try {"method": "ngram"}' in str(refusal.value)
    load_model(changed)


def test_attention_alone_drafts_too(changed: Path) -> None:
    def drop_second_part(tensors: fp8.Tensors) -> None:
        tensors["mtp.layers.0.final_layernorm.weight"] = tensors.pop("mtp.layers.1.final_layernorm.weight")
        for name in [name for name in tensors if name.startswith("mtp.layers.1.")]:
            del tensors[name]

    fp8.change_json(changed / "config.json", mtp_layers_block_type=["full_attention"])
    model = load(fp8.change_tensors(changed, drop_second_part))
    oracle = nemotron_drafts.oracle("nemotron_h")
    second = oracle.layers.base_model.layers[1].mixer
    zeros = second.register_forward_hook(lambda *arguments: torch.zeros_like(arguments[-1]))
    try:
        expected = expected_logits("nemotron_h")
    finally:
        zeros.remove()
    found = logits_in_parts(Driver(model), "nemotron_h", [LENGTH - 1])
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_the_pattern_of_older_configurations_is_read(changed: Path) -> None:
    fp8.change_json(changed / "config.json", mtp_layers_block_type=None, mtp_hybrid_override_pattern="*-")
    with pytest.raises(WeightsError, match=r"mtp\.layers\.1\.mixer\.up_proj\.weight \[40, 32\]"):
        load(changed)


@pytest.mark.parametrize("keeps_quantized", [False, True])
def test_a_converted_draft_layer_drafts_within_the_precision_of_e4m3(
    directory: Path, name: str, tmp_path: Path, *, keeps_quantized: bool
) -> None:
    convert(directory, tmp_path / "fp8")
    model, exact = load(tmp_path / "fp8", keeps_quantized=keeps_quantized), load(directory)
    assert torch.equal(model.drafter.fc.weight_OI, exact.drafter.fc.weight_OI)
    attention = model.drafter.layer.mixer
    assert isinstance(attention.in_proj.weight, ScaledWeight if keeps_quantized else DenseWeight)
    found, expected = logits_in_parts(Driver(model), name, [LENGTH - 1]), expected_logits(name)
    # Three binary places, in a layer of few products: some per cent of the logits' spread. A wrong layer gives 100 %.
    assert 0 < float((found - expected).std() / expected.std()) < 0.1
