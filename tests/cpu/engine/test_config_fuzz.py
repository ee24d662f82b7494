"""Random wrong values in a model's ``config.json``: it is refused by a ConfigError, or the model loads and answers."""

import contextlib
import copy
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline import LLM, SamplingParams
from strandline.errors import ConfigError, RequestError
from tests.cpu.models import families

UNSET_FIELDS = (
    *("mamba_ssm_dtype", "dtype", "quantization_config", "num_labels", "full_attention_interval", "rope_scaling"),
    *("mlp_only_layers", "num_experts", "per_layer_config", "auto_map", "eos_token_id"),
)
"""Fields that the tiny configurations leave out, and something reads."""

Key = tuple[str, ...]

numbers = st.sampled_from([-1, 0, 1, 2, 3, 5, 7, 2**31, 2**63, -(2**63), 10**30])
floats = st.sampled_from([0.0, 0.3, -0.5, 1.5, 5e-324, 1e308, float("nan"), float("inf"), float("-inf")])
scalars = st.one_of(st.none(), st.booleans(), numbers, floats, st.sampled_from(["", "x", "7", "float16", "yarn"]))
values = st.one_of(scalars, st.lists(scalars, max_size=3), st.dictionaries(st.sampled_from(["0", "x"]), scalars))


@cache
def published(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(families.config_of(name).to_json_string(use_diff=False))
    return config


def keys(config: dict[str, Any], outer: Key = ()) -> Iterator[Key]:
    """Yield the path of every field, those of the text model and of its rotary embedding included."""
    for name, value in config.items():
        yield (*outer, name)
        if isinstance(value, dict) and name not in ("vision_config", "audio_config"):
            yield from keys(value, (*outer, name))
    if "vocab_size" in config:
        yield from ((*outer, name) for name in UNSET_FIELDS if name not in config)


@st.composite
def wrong_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a configuration with one to three fields replaced or left out."""
    config = copy.deepcopy(published(draw(st.sampled_from(sorted(families.CONFIGS)))))
    for key in draw(st.lists(st.sampled_from(sorted(keys(config))), min_size=1, max_size=3)):
        part: Any = config
        for name in key[:-1]:
            part = part.get(name) if isinstance(part, dict) else None
        if not isinstance(part, dict):
            continue  # an earlier change has replaced what the field was in
        if draw(st.integers(0, 9)):
            part[key[-1]] = draw(values)
        else:
            part.pop(key[-1], None)
    return config


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def answer(directory: Path) -> None:
    """Load what the directory describes, with random weights, and let it answer twice, cached the second time."""
    options: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True}
    llm = LLM(str(directory), memory="4MiB", max_num_seqs=4, **options)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    for _ in range(2):
        try:
            outputs = llm.generate([[0], [0, 0, 0]], params, use_tqdm=False)
        except RequestError:
            assert llm.engine.max_model_len <= 3
            return
        assert all(0 <= token < llm.engine.vocab_size for output in outputs for token in output.outputs[0].token_ids)


@pytest.mark.filterwarnings("ignore")
@given(config=wrong_configs())
@settings(max_examples=2 * settings().max_examples)
def test_any_config_is_refused_or_answers(directory: Path, config: dict[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    with contextlib.suppress(ConfigError):
        answer(directory)


@pytest.mark.parametrize("name", families.CONFIGS)
def test_unchanged_config_answers(directory: Path, name: str) -> None:
    (directory / "config.json").write_text(json.dumps(published(name)))
    answer(directory)
