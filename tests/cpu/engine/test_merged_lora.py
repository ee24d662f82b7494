"""An engine with a merged adapter answers as the merged weights do, and shares nothing with engines without it."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from strandline import LLM, SamplingParams
from strandline.config import EngineConfig
from strandline.engine.startup.model_identity import weights_digest
from strandline.errors import ConfigError
from tests.cpu.engine.tiny import greedy_tokens, save_tiny_model
from tests.cpu.models import adapters, fp8

PROMPT = list(range(1, 40))
MODULES = ("model.layers.0.linear_attn.out_proj", "model.layers.1.self_attn.v_proj", "model.layers.2.mlp.up_proj")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return a model, an adapter of it, and a model with the merged weights."""
    directory = tmp_path_factory.mktemp("models")
    base, merged = save_tiny_model(directory / "base"), save_tiny_model(directory / "merged")
    tensors = load_file(base / "model.safetensors")
    factors = adapters.draw({name: tuple(tensors[f"{name}.weight"].shape) for name in MODULES})
    for name, (down, up) in factors.items():
        tensors[f"{name}.weight"] += adapters.ALPHA / adapters.RANK * up @ down
    fp8.change_tensors(merged, lambda old: old.update(tensors))
    return base, adapters.write(directory / "adapter", factors), merged


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("options", [{}, {"distributed_executor_backend": "mp"}], ids=["uni", "mp"])
def test_answers_are_those_of_merged_weights(models: tuple[Path, Path, Path], options: dict[str, str]) -> None:
    base, adapter, merged = models
    llm = LLM(str(base), merge_lora=f"sql={adapter}", memory="64MiB", skip_tokenizer_init=True, **options)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(temperature=0, max_tokens=12))
    tokens = output.outputs[0].token_ids
    llm.close()
    assert greedy_tokens(merged, [PROMPT], [tokens]) == [tokens]
    assert greedy_tokens(base, [PROMPT], [tokens]) != [tokens]


def test_disk_caches_and_engines_tell_adapters_apart(models: tuple[Path, Path, Path]) -> None:
    base, adapter, _ = models
    digests = {weights_digest(EngineConfig(model=str(base)))}
    digests.add(weights_digest(EngineConfig(model=str(base), merge_lora=f"sql={adapter}")))
    fp8.change_json(adapter / adapters.CONFIG, lora_alpha=1)
    digests.add(weights_digest(EngineConfig(model=str(base), merge_lora={"name": "sql", "path": str(adapter)})))
    fp8.change_json(adapter / adapters.CONFIG, lora_alpha=adapters.ALPHA)
    assert len(digests) == 3


@pytest.mark.parametrize("value", ["sql", "=path", "sql=", " =x", '{"name": "sql"}', {"path": "x"}, '{"nam": "x"}'])
def test_an_adapter_without_a_name_or_a_path_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="--merge-lora"):
        EngineConfig(model="demo", merge_lora=value)  # type: ignore[arg-type]


def test_random_weights_take_no_adapter() -> None:
    with pytest.raises(ConfigError, match="drop --load-format dummy"):
        EngineConfig(model="demo", merge_lora="sql=x", load_format="dummy")
