"""The loader reads what is published, in any layout, and names what is wrong with the rest."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5TextConfig

from strandline.errors import ConfigError, WeightsError
from strandline.model_config import read_model_config
from strandline.models.model_options import ModelOptions
from strandline.models.registry import ARCHITECTURES
from strandline.models.storage.weights_files import fingerprint
from strandline.models.weights import FillOptions, load_model
from tests.cpu.models import families
from tests.cpu.models.driver import Driver, Part, Running

Change = Callable[[dict[str, Tensor]], None]

TOKENS = families.prompt(20)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with some of the families, in the published layout, one file each."""
    directory = tmp_path_factory.mktemp("saved")
    for name in ("glm5_next", "inkling-towers", "qwen3_5", "qwen3_5_moe", "qwen3_5-odd-tied", "qwen3_5-vision"):
        families.save(name, directory)
    return directory


@pytest.fixture
def changed(saved: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return what copies a model and changes its tensors on the way."""

    def change_tensors(change: Change, name: str = "qwen3_5") -> Path:
        directory = tmp_path / name
        shutil.copytree(saved / name, directory)
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")
        return directory

    return change_tensors


def logits_of(model: Any) -> Tensor:
    (logits,), _ = Driver(model).step([Part(Running(), TOKENS)])
    return logits


def load_float32(directory: Path) -> Any:
    return load_model(directory, ModelOptions(dtype=torch.float32))


def assert_right(directory: Path, name: str) -> None:
    expected = families.oracle_logits(name, TOKENS)
    torch.testing.assert_close(logits_of(load_float32(directory)), expected, rtol=0, atol=1e-4)


def split_into_shards(directory: Path, num_shards: int = 3) -> Path:
    """Write a model's tensors into several files with an index; return the index."""
    single = directory / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    names = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    placed = {tensor: names[i % num_shards] for i, tensor in enumerate(tensors)}
    for file in names:
        save_file({tensor: tensors[tensor] for tensor in tensors if placed[tensor] == file}, directory / file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return index


def unfuse_experts(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        prefix = name.removesuffix("gate_up_proj")
        for expert, gate_up in enumerate(tensors.pop(name)):
            gate, up = gate_up.chunk(2)
            tensors[f"{prefix}{expert}.gate_proj.weight"] = gate.contiguous()
            tensors[f"{prefix}{expert}.up_proj.weight"] = up.contiguous()
        for expert, down in enumerate(tensors.pop(f"{prefix}down_proj")):
            tensors[f"{prefix}{expert}.down_proj.weight"] = down.contiguous()


def fuse_experts(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("experts.0.gate_proj.weight")]:
        prefix = name.removesuffix("0.gate_proj.weight")
        parts: dict[str, list[Tensor]] = {
            kind: [tensors.pop(f"{prefix}{expert}.{kind}_proj.weight") for expert in range(5)]
            for kind in ("gate", "up", "down")
        }
        pairs = zip(parts["gate"], parts["up"], strict=True)
        tensors[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{prefix}down_proj"] = torch.stack(parts["down"])


def nest_under_language_model(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        if name.startswith("model."):
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)


def wrap_in_language_model(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[f"language_model.{name}"] = tensors.pop(name)


@pytest.mark.parametrize("layout", [unfuse_experts, fuse_experts, nest_under_language_model, wrap_in_language_model])
def test_every_published_layout_of_experts_and_prefixes_loads(changed: Callable[..., Path], layout: Change) -> None:
    assert_right(changed(layout, "qwen3_5_moe"), "qwen3_5_moe")


@pytest.mark.parametrize("progress", [True, False])
def test_shards_with_an_index_load(
    changed: Callable[..., Path], capsys: pytest.CaptureFixture[str], *, progress: bool
) -> None:
    directory = changed(lambda _: None)
    split_into_shards(directory)
    load_model(directory, filling=FillOptions(progress=progress))
    assert ("3/3" in capsys.readouterr().err) is progress
    assert_right(directory, "qwen3_5")


def test_a_tied_head_that_is_published_all_the_same_loads(changed: Callable[..., Path]) -> None:
    def add_head(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    assert_right(changed(add_head, "qwen3_5-odd-tied"), "qwen3_5-odd-tied")


def test_draft_layers_and_the_vision_tower_are_skipped_and_reported(changed: Callable[..., Path]) -> None:
    def add_draft_layers(tensors: dict[str, Tensor]) -> None:
        tensors["mtp.fc.weight"] = torch.zeros(3)
        tensors["mtp.norm.weight"] = torch.zeros(3)

    report = load_float32(changed(add_draft_layers, "qwen3_5-vision")).weights_report
    assert report.is_mtp_present
    assert report.skipped["mtp."] == 2
    assert report.skipped["model.visual."] > 10


def test_towers_of_images_and_audio_are_skipped_and_reported(changed: Callable[..., Path]) -> None:
    def add_draft_layer(tensors: dict[str, Tensor]) -> None:
        tensors["model.mtp.layers.0.input_proj.weight"] = torch.zeros(3)

    report = load_float32(changed(add_draft_layer, "inkling-towers")).weights_report
    assert report.skipped == {"model.mtp.": 1, "model.visual.": 8, "model.audio.": 2}


@pytest.mark.parametrize("wrap", [nest_under_language_model, wrap_in_language_model])
@pytest.mark.parametrize("name", ["llama", "nemotron_h", "lfm2", "kimi_linear"])
def test_text_parts_of_wrapped_models_load_in_every_family(tmp_path: Path, name: str, wrap: Change) -> None:
    directory = families.save(name, tmp_path)
    tensors = load_file(directory / "model.safetensors")
    wrap(tensors)
    save_file(tensors, directory / "model.safetensors")
    assert_right(directory, name)


def test_a_tensor_that_is_there_wrapped_and_alone_is_named(changed: Callable[..., Path]) -> None:
    def add_wrapped(tensors: dict[str, Tensor]) -> None:
        tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"] + 1

    with pytest.raises(WeightsError, match=r"model\.(language_model\.)?norm\.weight and model\.\S+ are both published"):
        load_float32(changed(add_wrapped))


UNUSED = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": (4,),
    "model.rotary_emb.inv_freq": (4,),
    "model.rotary_emb.original_inv_freq": (4,),
    "rotary_emb.inv_freq": (4,),
    "model.layers.1.attention.rotary_emb.inv_freq": (4,),
    "model.layers.1.self_attn.rotary_emb.cos_cached": (1, 1, 9, 8),
    "model.layers.1.self_attn.rotary_emb.sin_cached": (1, 1, 9, 8),
    "model.rotary_pos_emb.inv_freq": (4,),
    "visual.blocks.0.attn.qkv.weight": (6, 2),
    "model.visual.merger.norm.bias": (2,),
    "vision_tower.vision_model.embeddings.position_embedding.weight": (2, 2),
    "model.vision_tower.encoder.layers.0.wqkv.weight": (2, 2),
    "vision_model.radio_model.input_conditioner.norm_mean": (3, 1, 1),
    "multi_modal_projector.linear_1.bias": (2,),
    "model.multi_modal_projector.linear_1.bias": (2,),
    "audio_tower.layers.0.fc1.weight": (2, 2),
    "image_newline": (2,),
    "model.image_newline": (2,),
    "model.embeddings.position_ids": (1, 9),
    "model.layers.0.attn.bias": (1, 1, 9, 9),
    "model.layers.0.attention.bias": (1, 1, 9, 9),
    "model.layers.0.attn.masked_bias": (),
    "model.layers.0.self_attn._extra_state": (0,),
    "model.layers.1.self_attn.q_scale": (1,),
    "model.layers.1.self_attn.prob_scale": (),
    "model.layers.0.self_attn.attn.q_scale": (),
    "mtp.layers.0.self_attn.rotary_emb.inv_freq": (4,),
}


@pytest.mark.parametrize("name", UNUSED)
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_tensors_that_no_model_needs_are_skipped_and_reported(
    changed: Callable[..., Path], name: str, prefix: str
) -> None:
    def add_tensor(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.ones(UNUSED[name])
        for present in [*tensors] if prefix else []:
            tensors[prefix + present] = tensors.pop(present)

    directory = changed(add_tensor)
    assert sum(load_float32(directory).weights_report.skipped.values()) == 1
    assert_right(directory, "qwen3_5")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.bias", (32,)),
        ("model.layers.0.attn.bias", (1, 1, 9, 8)),
        ("model.layers.0.attn.bias", (9, 9)),
        ("model.layers.0.self_attn.inv_freq", (4,)),
        ("model.layers.0.self_attn.rotary_emb.weight", (4,)),
        ("model.layers.0.self_attn.rotary_emb.inv_freq.lora_A.weight", (4,)),
        ("model.visualizer.weight", (4,)),
        ("model.layers.0.visual.weight", (4,)),
        ("model.layers.0.mlp.audio.weight", (4,)),
        ("language_modelling.head.weight", (4,)),
        ("model.layers.0.mlp.k_scale", ()),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", (4, 4)),
    ],
)
def test_any_other_unknown_tensor_is_named(changed: Callable[..., Path], name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(WeightsError, match=rf"{re.escape(name)} not known to this architecture"):
        load_float32(changed(lambda tensors: tensors.update({name: torch.ones(shape)})))


OTHER_FILES = [
    "adapter_model.safetensors",
    "consolidated-00001-of-00001.safetensors",
    "consolidated.safetensors",
    "extra.safetensors",
    "optimizer.safetensors",
]


@pytest.mark.parametrize("layout", ["one file", "an index", "shards alone"])
def test_other_files_beside_the_weights_are_not_read(changed: Callable[..., Path], layout: str) -> None:
    directory = changed(lambda _: None)
    if layout != "one file":
        index = split_into_shards(directory)
        if layout == "shards alone":
            index.unlink()
    for name in OTHER_FILES:
        save_file({"base_model.model.lora_A.weight": torch.ones(1)}, directory / name)
    assert load_float32(directory).weights_report.unread == tuple(OTHER_FILES)
    assert_right(directory, "qwen3_5")


def test_an_adapter_alone_is_no_model(changed: Callable[..., Path]) -> None:
    directory = changed(lambda _: None)
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    with pytest.raises(WeightsError, match=r"holds no model: adapter_model\.safetensors"):
        load_float32(directory)


def test_a_text_model_alone_loads_without_its_draft_layer(changed: Callable[..., Path]) -> None:
    def leave_text(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensor = tensors.pop(name)
            if not name.startswith("model.visual."):
                tensors[name.replace("model.language_model.", "model.")] = tensor
        tensors["model.layers.4.eh_proj.weight"] = torch.zeros(3)

    directory = changed(leave_text, "glm5_next")
    config = json.loads((directory / "config.json").read_text())
    text = config.pop("text_config")
    (directory / "config.json").write_text(json.dumps({**text, **config}))
    assert load_float32(directory).weights_report.skipped == {"model.layers.4.": 1}
    assert_right(directory, "glm5_next")


def test_without_draft_layers_none_are_reported(saved: Path) -> None:
    assert not load_float32(saved / "qwen3_5").weights_report.is_mtp_present


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_dtypes_are_converted(changed: Callable[..., Path], dtype: torch.dtype) -> None:
    def convert(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    model = load_float32(changed(convert))
    exact = load_float32(changed(lambda _: None, "qwen3_5_moe").parent / "qwen3_5")
    for parameter, rounded in zip(exact.parameters(), model.parameters(), strict=True):
        assert parameter.dtype == rounded.dtype == torch.float32
        assert torch.equal(parameter.to(dtype).float(), rounded)


def test_decays_stay_float32_in_a_bfloat16_model(saved: Path) -> None:
    model = load_model(saved / "qwen3_5", ModelOptions(dtype=torch.bfloat16))
    found = {".".join(name.split(".")[-2:]): parameter.dtype for name, parameter in model.named_parameters()}
    assert found["mixer.A_log_H"] == found["mixer.dt_bias_H"] == torch.float32
    assert found["in_proj.weight_OI"] == torch.bfloat16


def test_auto_takes_the_dtype_of_the_configuration(saved: Path) -> None:
    config = read_model_config(saved / "qwen3_5-vision")
    assert load_model(saved / "qwen3_5-vision", config=config).spec.hidden_dtype == "float32"
    config = replace(config, dtype="float16")
    assert load_model(saved / "qwen3_5-vision", config=config).spec.hidden_dtype == "float16"


def test_the_spec_counts_every_layer(saved: Path) -> None:
    config = read_model_config(saved / "qwen3_5")
    spec = load_model(saved / "qwen3_5", ModelOptions(dtype=torch.bfloat16)).spec
    assert [index for index, layer in enumerate(spec.layers) if layer.streams] == [1, 3]
    assert spec.layers[0] == spec.layers[2]
    state, window = spec.layers[0].states
    assert (state.shape, state.dtype, state.is_recurrent) == ((4, 16, 12), "float32", True)
    assert window.shape == (config.text.size("linear_conv_kernel_dim") - 1, 2 * 32 + 48)
    assert (window.dtype, window.is_recurrent) == ("bfloat16", False)


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.self_attn.k_proj.weight"]


def drop_all_norms(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if "layernorm" in name]:
        del tensors[name]


def add(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.adapter.weight"] = torch.zeros(1)


def misshape(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(64, 32)


def quantise(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, r"model\.layers\.1\.self_attn\.k_proj\.weight \[32, 32\] missing"),
        (drop_all_norms, r"input_layernorm\.weight \[32\].* and 3 more missing"),
        (add, r"model\.layers\.0\.adapter\.weight not known to this architecture"),
        (misshape, r"q_proj\.weight has shape \[64, 32\], the configuration asks for \[128, 32\]"),
        (quantise, r"up_proj\.weight is stored as F8_E4M3; supported: F32, BF16, F16"),
    ],
)
def test_a_wrong_tensor_is_named(changed: Callable[..., Path], change: Change, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        load_float32(changed(change))


def test_a_missing_shard_is_named(changed: Callable[..., Path]) -> None:
    directory = changed(lambda _: None)
    split_into_shards(directory)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-00003\.safetensors is missing: .* names it"):
        load_float32(directory)


QUERY = "model.layers.1.self_attn.q_proj.weight"
DECAY = "model.layers.0.linear_attn.A_log"
UNREAD = "model.layers.0.self_attn.rotary_emb.inv_freq"


def with_number(name: str, value: float) -> Change:
    """Return what changes one number of a tensor."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors.setdefault(name, torch.ones(4)).view(-1)[-1] = value

    return change


@pytest.mark.parametrize(
    ("name", "value"),
    [(QUERY, torch.nan), (QUERY, torch.inf), (QUERY, -torch.inf), (DECAY, torch.nan), (DECAY, torch.inf)],
)
def test_a_weight_that_is_not_finite_is_named(changed: Callable[..., Path], name: str, value: float) -> None:
    found = "NaN" if value != value else "infinity"
    with pytest.raises(WeightsError, match=rf"model\.safetensors: {re.escape(name)} holds {found}"):
        load_float32(changed(with_number(name, value)))


def test_allowed_numbers_that_are_not_finite_load_with_a_warning(
    changed: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        with_number(QUERY, torch.nan)(tensors)
        with_number(DECAY, torch.inf)(tensors)

    directory = changed(change)
    with pytest.raises(WeightsError, match="--allow-non-finite-weights"):
        load_float32(directory)
    load_model(directory, ModelOptions(dtype=torch.float32), FillOptions(allows_non_finite=True))
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert re.search(r"holds (NaN|infinity) once it is loaded; .*\(weights that are not finite: 2\)", record.message)


def test_a_number_too_large_for_the_dtype_is_named(changed: Callable[..., Path]) -> None:
    directory = changed(with_number(QUERY, 1e5))
    load_float32(directory)
    with pytest.raises(WeightsError, match=rf"{re.escape(QUERY)} holds infinity"):
        load_model(directory, ModelOptions(dtype=torch.float16))


@pytest.mark.parametrize(("name", "value"), [(DECAY, -torch.inf), (UNREAD, torch.nan)])
def test_infinite_decays_and_unread_numbers_load(changed: Callable[..., Path], name: str, value: float) -> None:
    load_float32(changed(with_number(name, value)))


@pytest.mark.parametrize("shape", [(32, 128), (256, 32), (4096,), (1, 128, 32), ()])
def test_every_other_shape_is_refused(changed: Callable[..., Path], shape: tuple[int, ...]) -> None:
    wanted = rf"{re.escape(QUERY)} has shape {re.escape(str(list(shape)))}, the configuration asks for \[128, 32\]"
    with pytest.raises(WeightsError, match=wanted):
        load_float32(changed(lambda tensors: tensors.update({QUERY: torch.zeros(shape)})))


@pytest.mark.parametrize("layout", ["index", "index of a folder", "no index"])
def test_the_index_chooses_among_repeated_tensors(changed: Callable[..., Path], layout: str) -> None:
    directory = changed(lambda _: None)
    index = split_into_shards(directory)
    shard_of = json.loads(index.read_text())["weight_map"]
    for path in sorted(directory.glob("model-*.safetensors")):
        if path.name != shard_of[QUERY]:
            save_file({**load_file(path), QUERY: torch.zeros(1)}, path)
    if layout == "no index":
        index.unlink()
        message = rf"{re.escape(QUERY)} is in model-00001\S+ and model-00002\S+ and model-0"
        with pytest.raises(WeightsError, match=message):
            load_float32(directory)
        return
    if layout == "index of a folder":
        (directory / "shards").mkdir()
        for path in sorted(directory.glob("model-*.safetensors")):
            path.rename(directory / "shards" / path.name)
        index.write_text(json.dumps({"weight_map": {name: f"./shards/{shard}" for name, shard in shard_of.items()}}))
    assert_right(directory, "qwen3_5")


def test_a_missing_shard_is_named_without_an_index(changed: Callable[..., Path]) -> None:
    directory = changed(lambda _: None)
    split_into_shards(directory).unlink()
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"file 2 of model-…-of-00003\.safetensors is missing"):
        load_float32(directory)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "{}"]
)
def test_a_broken_index_is_named(changed: Callable[..., Path], text: str) -> None:
    directory = changed(lambda _: None)
    split_into_shards(directory).write_text(text)
    with pytest.raises(WeightsError, match=r"index\.json is not an index"):
        load_float32(directory)


@pytest.mark.parametrize("num_bytes", [0, 4, 100, 20_000])
def test_a_file_that_is_cut_short_is_named(changed: Callable[..., Path], num_bytes: int) -> None:
    file = changed(lambda _: None) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(WeightsError, match=r"model\.safetensors is not a safetensors file, or is truncated"):
        load_float32(file.parent)


def test_a_directory_without_weights_is_named(saved: Path, tmp_path: Path) -> None:
    shutil.copy(saved / "qwen3_5" / "config.json", tmp_path)
    with pytest.raises(WeightsError, match=r"holds no \*\.safetensors"):
        load_float32(tmp_path)


def changed_config(saved: Path, directory: Path, **changes: Any) -> Path:
    """Write a model's configuration, without its weights, with other values."""
    values = json.loads((saved / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**values, **changes}))
    return directory


def test_an_unknown_architecture_lists_the_supported_ones(saved: Path, tmp_path: Path) -> None:
    directory = changed_config(saved / "qwen3_5", tmp_path, architectures=["GPT2LMHeadModel"])
    with pytest.raises(ConfigError) as error:
        load_model(directory)
    assert "GPT2LMHeadModel" in str(error.value)
    assert all(name in str(error.value) for name in ARCHITECTURES)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("quantization_config", {"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        ("hidden_act", "gelu", "hidden_act 'gelu' is not supported; supported: silu"),
    ],
)
def test_an_unsupported_setting_is_named(saved: Path, tmp_path: Path, setting: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(changed_config(saved / "qwen3_5", tmp_path, **{setting: value}))


def test_an_unknown_load_format_is_named(saved: Path) -> None:
    with pytest.raises(ConfigError, match="--load-format 'pickle' is unknown; known: auto, safetensors, dummy"):
        load_model(saved / "qwen3_5", filling=FillOptions(load_format="pickle"))


@pytest.mark.parametrize("name", list(families.CONFIGS))
def test_dummy_weights_need_a_configuration_alone(name: str) -> None:
    model = load_model(
        "nowhere",
        ModelOptions(dtype=torch.bfloat16),
        FillOptions(load_format="dummy"),
        config=families.model_config(families.config_of(name)),
    )
    logits = logits_of(model)
    assert bool(logits.isfinite().all())
    assert 0.05 < float(logits.std()) < 20


def dummy_of_a_deep_model(seed: int, dtype: torch.dtype) -> Any:
    """Return a model with the proportions of Qwen3.5-4B: 32 layers, twice as many value heads as key heads."""
    config = Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=80,
        intermediate_size=288,
        num_hidden_layers=32,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        tie_word_embeddings=True,
        architectures=["Qwen3_5ForCausalLM"],
    )
    return load_model(
        "nowhere",
        ModelOptions(dtype=dtype),
        FillOptions(load_format="dummy", seed=seed),
        config=families.model_config(config),
    )


def test_dummy_weights_keep_a_deep_model_in_range() -> None:
    model = dummy_of_a_deep_model(0, torch.bfloat16)
    logits = logits_of(model)
    assert bool(logits.isfinite().all())
    assert 0.05 < float(logits.std()) < 20


def test_dummy_weights_depend_on_the_seed_alone() -> None:
    models = [dummy_of_a_deep_model(seed, torch.float32) for seed in (0, 0, 1)]
    first, same, other = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_any_changed_number_changes_the_fingerprint(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("first", "second")]
    for directory in directories:
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        save_file({"a": torch.zeros(3000, 1000), "b": torch.zeros(5)}, directory / "model.safetensors")
    first, second = directories
    before = fingerprint(first)
    assert fingerprint(second) == before
    for index in ((2999, 999), (1500, 0)):
        weight = torch.zeros(3000, 1000)
        weight[index] = 1
        save_file({"a": weight, "b": torch.zeros(5)}, second / "model.safetensors")
        assert fingerprint(second) != before
    shutil.copy(first / "model.safetensors", second)
    (second / "config.json").write_text('{"rope": 1}')
    assert fingerprint(second) != before
    shutil.copy(first / "config.json", second)
    (second / "preprocessor_config.json").write_text('{"image_mean": 0}')
    assert fingerprint(second) != before
