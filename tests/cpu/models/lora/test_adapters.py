"""An adapter that is merged changes the weights that it was trained on, or is refused by the name of what is wrong."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from strandline.errors import ConfigError, WeightsError
from strandline.models.layers.parts.shard import Shard
from strandline.models.lora import adapter_files
from strandline.models.lora.adapter_files import read_adapter, read_adapter_config
from strandline.models.lora.adapter_slots import SlotSizes
from strandline.models.lora.low_rank import LowRank
from strandline.models.model_options import ModelOptions
from strandline.models.weights import FillOptions, load_model
from tests.cpu.models import adapters, families, fp8
from tests.cpu.models.adapters import ALPHA, RANK, Factors
from tests.cpu.models.driver import Driver, Part, Running
from tests.cpu.models.quantized import assert_same_weights
from tests.cpu.models.storage.test_four_bit_storage import save as save_four_bit
from tests.cpu.models.storage.test_fp8_storage import BLOCKS
from tests.cpu.models.storage.test_fp8_storage import save as save_fp8
from tests.cpu.models.test_weights import fuse_experts, unfuse_experts

TOKENS = families.prompt(20)
SCALE = ALPHA / RANK
PREFIX = "model.layers.0."

OTHER_NAMES = ("shared_transformer", "gate_up_proj_adapter_list", "linear_")
"""Parts of names of modules that cannot be changed one by one: a block of several layers, and its own adapters."""

ALL = [
    pytest.param(name, marks=() if name in families.FAMILIES else pytest.mark.long)
    for name in families.CONFIGS
    if name
    not in (
        "inkling-towers",
        "inkling2",
        "inkling2-odd",
        "inkling2-vision",
        "lara_mini",
        "lara_mini-odd",
    )  # transformers has other names for what is published, of other tensors
]


def load(directory: Path, adapter: Path | None = None, **options: Any) -> Any:
    read = None if adapter is None else read_adapter(adapter)
    return load_model(directory, ModelOptions(dtype=torch.float32, **options), FillOptions(adapter=read))


def logits_of(model: Any) -> Tensor:
    (logits,), _ = Driver(model).step([Part(Running(), TOKENS)])
    return logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two families, in the published layout."""
    directory = tmp_path_factory.mktemp("saved")
    for name in ("qwen3_5", "qwen3_5_moe", "qwen3_5-odd-tied"):
        families.save(name, directory)
    return directory


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    """Return an adapter of some modules of ``qwen3_5``."""
    names = (f"{PREFIX}mlp.down_proj", f"{PREFIX}linear_attn.in_proj_qkv", "model.layers.1.self_attn.q_proj")
    tensors = load_file(saved / "qwen3_5" / "model.safetensors")
    shapes = {name: tuple(tensors[f"{name}.weight"].shape) for name in names}
    return adapters.write(tmp_path / "adapter", adapters.draw(shapes))


def read_factors(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / adapters.WEIGHTS)


@pytest.mark.parametrize("name", ALL)
def test_merged_adapter_gives_the_logits_of_merged_weights(name: str, tmp_path: Path) -> None:
    oracle = families.oracle(name)
    shapes = {
        module: tuple(linear.weight.shape)
        for module, linear in adapters.linear_modules(oracle).items()
        if not any(part in module for part in OTHER_NAMES)
    }
    factors = adapters.draw(shapes)
    model = load(families.save(name, tmp_path), adapters.write(tmp_path / "adapter", factors))
    expected = adapters.merged(oracle, factors)(torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert (expected - families.oracle_logits(name, TOKENS)).abs().max() > 0.3
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace("base_model.model.model.", "base_model.model.model.language_model."),
        lambda name: name.replace("base_model.model.model.", "base_model.model.language_model.model."),
        lambda name: name.replace("base_model.model.", ""),
        lambda name: name.replace(".weight", ".default.weight"),
    ],
    ids=["in a wrapper", "in another wrapper", "none", "the adapter's name"],
)
def test_prefixes_of_other_classes_change_the_same_weights(
    saved: Path, adapter: Path, rename: Callable[[str], str]
) -> None:
    expected = load(saved / "qwen3_5", adapter)
    tensors = read_factors(adapter)
    save_file({rename(name): tensor for name, tensor in tensors.items()}, adapter / adapters.WEIGHTS)
    assert_same_weights(load(saved / "qwen3_5", adapter), expected)


def expert_factors(saved: Path) -> tuple[Factors, dict[str, Tensor]]:
    """Return factors for every expert of a layer, and the fused tensors that mean the same in PEFT's nested form."""
    tensors = load_file(saved / "qwen3_5_moe" / "model.safetensors")
    unfuse_experts(tensors)
    experts, shapes = f"{PREFIX}mlp.experts", {}
    for index in range(families.EXPERTS["num_experts"]):
        for part in ("gate_proj", "up_proj", "down_proj"):
            name = f"{experts}.{index}.{part}"
            shapes[name] = tuple(tensors[f"{name}.weight"].shape)
    factors = adapters.draw(shapes)
    size = families.EXPERTS["moe_intermediate_size"]
    down_ranks, up_ranks = list[Tensor](), list[Tensor]()
    for index in range(families.EXPERTS["num_experts"]):
        # One factor is shared by the gate and the up projection, which are one parameter.
        shared = factors[f"{experts}.{index}.gate_proj"][0]
        factors[f"{experts}.{index}.up_proj"] = shared.clone(), factors[f"{experts}.{index}.up_proj"][1]
        down_ranks.append(shared)
        both = [factors[f"{experts}.{index}.{part}"][1] for part in ("gate_proj", "up_proj")]
        up_ranks.append(torch.cat(both))
    assert up_ranks[0].shape == (2 * size, RANK)
    downs = [factors[f"{experts}.{index}.down_proj"] for index in range(len(down_ranks))]
    prefix = f"base_model.model.{experts}."
    return factors, {
        f"{prefix}base_layer.lora_A.weight": torch.cat(down_ranks),
        f"{prefix}base_layer.lora_B.weight": torch.stack(up_ranks, dim=-1).flatten(1),
        f"{prefix}lora_A.weight": torch.cat([down for down, _ in downs]),
        f"{prefix}lora_B.weight": torch.stack([up for _, up in downs], dim=-1).flatten(1),
    }


@pytest.mark.parametrize("published", [fuse_experts, unfuse_experts])
@pytest.mark.parametrize("form", ["one by one", "nested", "nested, first wrapped last", "inputs and outputs swapped"])
def test_experts_are_changed_in_every_layout(
    saved: Path, tmp_path: Path, published: Callable[[dict[str, Tensor]], object], form: str
) -> None:
    directory = fp8.change_tensors(families.save("qwen3_5_moe", tmp_path), published)
    factors, nested = expert_factors(saved)
    if form == "nested, first wrapped last":
        nested = {
            name.replace(".lora", ".base_layer.lora")
            if "base_layer" not in name
            else name.replace("base_layer.", ""): x
            for name, x in nested.items()
        }
    if form == "inputs and outputs swapped":
        num = families.EXPERTS["num_experts"]
        for name in [name for name in nested if ".lora_A." in name]:
            down, up = nested[name], nested[name.replace("_A.", "_B.")]
            downs, ups = down.unflatten(0, (num, RANK)), up.unflatten(1, (RANK, num)).permute(2, 0, 1)
            nested[name] = ups.mT.flatten(0, 1).contiguous()
            nested[name.replace("_A.", "_B.")] = downs.permute(2, 1, 0).flatten(1).contiguous()
    path = adapters.write(tmp_path / "adapter", factors if form == "one by one" else {})
    if form != "one by one":
        save_file(nested, path / adapters.WEIGHTS)
    tensors = load_file(directory / "model.safetensors")
    unfuse_experts(tensors)
    for name, (down, up) in factors.items():
        tensors[f"{name}.weight"] += SCALE * up @ down
    (tmp_path / "merged").mkdir()
    expected = fp8.change_tensors(families.save("qwen3_5_moe", tmp_path / "merged"), lambda old: old.update(tensors))
    fp8.change_tensors(expected, lambda old: [old.pop(name) for name in list(old) if name not in tensors])
    found, wanted = load(directory, path), load(expected)
    for name, parameter in wanted.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), parameter, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"use_rslora": True}, {"": ALPHA / RANK**0.5}),
        ({"alpha_pattern": {"down_proj": 12}}, {"": SCALE, "down_proj": 4.0}),
        ({"alpha_pattern": {r"layers\.1\..*": -3}}, {"": SCALE, "layers.1.": -1.0}),
        ({"r": 64, "rank_pattern": {".*_proj": 3, "in_proj_qkv": 3}}, {"": SCALE}),
        ({"lora_alpha": 0.5, "alpha_pattern": {"proj": 100, ".*": 6}}, {"": SCALE}),
    ],
)
def test_patterns_and_rank_stabilisation_scale_changes(
    saved: Path, adapter: Path, tmp_path: Path, config: dict[str, Any], scales: dict[str, float]
) -> None:
    factors = read_factors(adapter)
    fp8.change_json(adapter / adapters.CONFIG, **config)
    tensors = load_file(saved / "qwen3_5" / "model.safetensors")
    for name in {name.partition(".lora_")[0] for name in factors}:
        scale = next(scale for part, scale in reversed(scales.items()) if part in name)
        weight = tensors[f"{name.removeprefix('base_model.model.')}.weight"]
        weight += scale * factors[f"{name}.lora_B.weight"] @ factors[f"{name}.lora_A.weight"]
    expected = fp8.change_tensors(families.save("qwen3_5", tmp_path), lambda old: old.update(tensors))
    found, wanted = load(saved / "qwen3_5", adapter), load(expected)
    for name, parameter in wanted.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), parameter, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("save", [partial(save_fp8, scheme=BLOCKS), save_four_bit], ids=["FP8", "4 bits"])
def test_changed_weights_are_dequantised_and_others_stay(
    adapter: Path, tmp_path: Path, save: Callable[[str, Path], Path]
) -> None:
    directory = save("qwen3_5", tmp_path)
    factors = read_factors(adapter)
    plain, quantized = load(directory), load(directory, adapter, keeps_quantized=True)
    expected = load(directory, adapter)
    assert len(quantized.weights_report.stored) == plain.weights_report.num_quantized - len(factors) // 2 > 0
    assert_same_weights(quantized, expected)
    assert (logits_of(expected) - logits_of(plain)).abs().max() > 0.1


@pytest.mark.parametrize("index", [0, 1])
def test_every_shard_is_changed_by_its_part(saved: Path, adapter: Path, index: int) -> None:
    whole, shard = load(saved / "qwen3_5", adapter), load(saved / "qwen3_5", adapter, shard=Shard(index, 2))
    (before,) = (load(saved / "qwen3_5", shard=Shard(index, 2)),)
    name = "decoder.layers.0.mlp.down.weight_OI"
    columns = whole.get_parameter(name).chunk(2, dim=1)[index]
    torch.testing.assert_close(shard.get_parameter(name), columns, rtol=0, atol=1e-6)
    assert not torch.equal(shard.get_parameter(name), before.get_parameter(name))


@given(st.data())
def test_parts_of_a_change_are_parts_of_the_product(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=3))
    *outer, rows, columns = sizes
    change = LowRank(torch.randn(*outer, 2, columns), torch.randn(*outer, rows, 2))
    index = tuple(data.draw(st.slices(size).filter(lambda part: (part.step or 1) > 0)) for size in sizes)
    index = index[: data.draw(st.integers(0, len(index)))]
    torch.testing.assert_close(change.read(index), (change.up_OR @ change.down_RI)[index])


def test_a_digest_depends_on_every_tensor_and_on_the_configuration(adapter: Path) -> None:
    first = read_adapter(adapter).digest
    assert read_adapter(adapter).digest == first
    fp8.change_json(adapter / adapters.CONFIG, lora_alpha=7)
    second = read_adapter(adapter).digest
    tensors = read_factors(adapter)
    next(iter(tensors.values()))[0, 0] += 1
    save_file(tensors, adapter / adapters.WEIGHTS)
    assert len({first, second, read_adapter(adapter).digest}) == 3


def only(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    """Return what changes the first tensor with a name like this."""

    def apply(tensors: dict[str, Tensor]) -> None:
        name = next(name for name in tensors if part in name)
        tensors[name] = change(tensors[name]).contiguous()

    return apply


def add(name: str, *shape: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({f"base_model.model.{name}": torch.ones(*shape)})


def add_pair(module: str, num_outputs: int, num_inputs: int) -> Callable[[dict[str, Tensor]], object]:
    def apply(tensors: dict[str, Tensor]) -> None:
        add(f"{module}.lora_A.weight", RANK, num_inputs)(tensors)
        add(f"{module}.lora_B.weight", num_outputs, RANK)(tensors)

    return apply


WRONG_TENSORS = {
    "magnitude": (add(f"{PREFIX}mlp.down_proj.lora_magnitude_vector", 32), "lora_magnitude_vector"),
    "bias": (add(f"{PREFIX}mlp.down_proj.lora_B.bias", 32), "lora_B.bias"),
    "saved module": (add("lm_head.weight", 97, 32), "lm_head.weight"),
    "embedding": (add("model.embed_tokens.lora_embedding_A", 3, 97), "lora_embedding_A"),
    "no layer": (add_pair("model.layers.9.mlp.down_proj", 32, 40), "model.layers.9.mlp.down_proj"),
    "tower": (add_pair("model.visual.blocks.0.attn.proj", 16, 16), "model.visual.blocks.0.attn.proj"),
    "convolution": (add_pair(f"{PREFIX}linear_attn.conv1d", 112, 4), "linear_attn.conv1d"),
    "norm": (add_pair(f"{PREFIX}input_layernorm", 32, 1), "input_layernorm"),
    "no experts": (add_pair(f"{PREFIX}mlp.experts", 12, 32), "mlp.experts"),
    "one half": (only("down_proj.lora_A", lambda x: x[:, :-1]), "do not fit a weight of [32, 40]"),
    "other half": (only("down_proj.lora_B", lambda x: x[:-1]), "do not fit a weight of [32, 40]"),
    "two ranks": (only("down_proj.lora_B", lambda x: x[:, :-1]), "share no rank"),
    "no rank": (only("down_proj.lora_A", lambda x: x[:0]), "share no rank"),
    "more dimensions": (only("down_proj.lora_A", lambda x: x[None]), "must be a matrix"),
    "whole numbers": (only("down_proj.lora_A", lambda x: x.int()), "torch.int32"),
    "not finite": (only("down_proj.lora_A", lambda x: x / 0), "not finite"),
    "no partner": (lambda tensors: tensors.pop(next(x for x in tensors if "lora_B" in x)), "has no lora_B"),
    "nothing": (lambda tensors: tensors.clear(), "has no tensors"),
    "two adapters": (
        add(f"{PREFIX}mlp.down_proj.lora_A.other.weight", 3, 40),
        "several lora_A",
    ),
    "too large": (lambda tensors: [tensor.mul_(3e38) for tensor in tensors.values()], "too large once they are scaled"),
    "a name without end": (add_pair("model." * 200 + "layers.0.mlp.up_proj", 40, 32), "no part of a LoRA adapter"),
    "two prefixes": (add_pair("model.language_model.layers.0.mlp.down_proj", 32, 40), "is changed twice"),
}


@pytest.mark.parametrize(("change", "message"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_tensors_that_cannot_be_merged_are_named(
    saved: Path, adapter: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    adapters.change_files(change, adapter)
    with pytest.raises(WeightsError) as raised:
        load(saved / "qwen3_5", adapter)
    assert message in str(raised.value)


WRONG_CONFIGS = {
    "peft_type": "LOHA",
    "use_dora": True,
    "bias": "lora_only",
    "lora_bias": True,
    "fan_in_fan_out": True,
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1],
    "init_lora_weights": "pissa_niter_4",
    "init_lora_weights ": "lora_ga",
    "layer_replication": [[0, 1]],
    "r": 4,
    "lora_alpha": "16",
    "rank_pattern": {"down_proj": 2},
    "alpha_pattern": {"(": 2},
    "use_rslora": 1,
}


@pytest.mark.parametrize(("name", "value"), WRONG_CONFIGS.items())
def test_configurations_that_mean_something_else_are_refused(saved: Path, adapter: Path, name: str, value: Any) -> None:
    name = name.strip()
    fp8.change_json(adapter / adapters.CONFIG, **{name: value})
    with pytest.raises(ConfigError) as raised:
        load(saved / "qwen3_5", adapter)
    assert name in str(raised.value) or ("rank 3" in str(raised.value) and name in ("r", "rank_pattern"))


def test_patterns_that_take_too_long_are_refused(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_files, "MATCHING_S", 0.05)
    fp8.change_json(adapter / adapters.CONFIG, rank_pattern={rf".*x\d{index}": 2 for index in range(300)})

    def match_many() -> None:
        config = read_adapter(adapter).config
        for layer in range(10**6):
            config.scale(f"model.layers.{layer}.mlp.down_projection", RANK)

    with pytest.raises(ConfigError, match=r"rank_pattern takes longer than 0\.05 s"):
        match_many()


def test_configurations_without_end_are_refused(adapter: Path) -> None:
    with (adapter / adapters.CONFIG).open("a") as file:
        file.write(" " * 2**24)
    with pytest.raises(ConfigError, match="at most 16,777,216"):
        read_adapter(adapter)


def test_files_may_be_rewritten_once_they_have_been_read(adapter: Path) -> None:
    read = read_adapter(adapter)
    (adapter / adapters.WEIGHTS).write_bytes(b"")
    assert all(bool(factors.down_RI.isfinite().all()) for factors in read.modules.values())


@pytest.mark.parametrize("options", [{}, {"adapter_slots": SlotSizes(1, RANK)}], ids=["merged", "by request"])
def test_a_block_that_several_layers_use_is_not_changed(tmp_path: Path, options: dict[str, Any]) -> None:
    module = "model.layers.1.shared_transformer.self_attn.o_proj"
    path = adapters.write(tmp_path / "adapter", adapters.draw({module: (32, 64)}))
    saved = families.save("zamba2", tmp_path)

    def take() -> None:
        if options:
            load(saved, **options).adapters.read(read_adapter(path))
        else:
            load(saved, path)

    with pytest.raises(WeightsError, match=f"changes {module}.weight for one of several layers that use it"):
        take()


def test_a_head_that_is_the_embedding_is_not_changed(saved: Path, tmp_path: Path) -> None:
    directory = fp8.change_tensors(
        families.save("qwen3_5-odd-tied", tmp_path),
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    )
    path = adapters.write(tmp_path / "adapter", adapters.draw({"lm_head": (97, 32)}))
    with pytest.raises(WeightsError, match="which are one weight of this model"):
        load(directory, path)


def test_files_that_are_missing_or_may_run_code_are_named(adapter: Path) -> None:
    (adapter / adapters.WEIGHTS).rename(adapter / "adapter_model.bin")
    with pytest.raises(WeightsError, match=r"adapter_model\.bin could run code"):
        read_adapter(adapter)
    (adapter / adapters.WEIGHTS).write_bytes(b"{}")
    with pytest.raises(WeightsError, match="is not a safetensors file"):
        read_adapter(adapter)
    (adapter / adapters.CONFIG).unlink()
    with pytest.raises(ConfigError, match=r"holds no adapter: adapter_config\.json is missing"):
        read_adapter(adapter)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias", "init_lora_weights")


@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_configuration_is_read_or_refused(values: dict[str, Any]) -> None:
    try:
        config = read_adapter_config({"peft_type": "LORA", **values}, "adapter_config.json")
        config.scale("model.layers.0.mlp.down_proj", config.rank)
    except ConfigError:
        return


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_any_damage_to_the_files_is_read_or_refused(saved: Path, adapter: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from([adapters.WEIGHTS, adapters.CONFIG]))
    content = bytearray((adapter / file).read_bytes())
    intact = bytes(content)
    end = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:end]
    else:
        content[end] ^= data.draw(st.integers(1, 255))
    (adapter / file).write_bytes(content)
    try:
        load(saved / "qwen3_5", adapter)
    except ConfigError:
        pass
    finally:
        (adapter / file).write_bytes(intact)


def test_a_file_that_is_not_json_is_refused(adapter: Path) -> None:
    (adapter / adapters.CONFIG).write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="must be a JSON object"):
        read_adapter(adapter)
