"""Floors of decodes and prefills follow from the sizes of a model."""

from pathlib import Path

import pytest

from benchmarks.floors import decode_bytes, peak_of, prefill_flops
from strandline.device.meta_device import META, zeros_from_meta
from strandline.models.families.causal_lm import CausalLM
from strandline.models.model_options import ModelOptions
from strandline.models.weights import FillOptions, load_model

CONFIGS = Path(__file__).parents[3] / "benchmarks" / "configs"
MANY = 10**6
"""Tokens that choose all experts."""


def load(name: str) -> CausalLM:
    with zeros_from_meta():
        return load_model(
            CONFIGS / name, ModelOptions(device=META, keeps_quantized=True), FillOptions(load_format="dummy")
        )


def test_a_decode_reads_weights_once_and_moves_states_twice() -> None:
    model = load("mamba-codestral-7b")
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    embedding, states = 32768 * 4096 * 2, sum(layer.slot_bytes for layer in model.spec.layers)
    assert decode_bytes(model, 1, 1000) == weights - embedding + 2 * states
    assert decode_bytes(model, 5, 1000) - decode_bytes(model, 1, 1000) == 8 * states
    assert decode_bytes(model, 1, 1000, log_tokens=4) == weights - embedding + 1.25 * states


def test_decode_reads_chosen_experts_and_keys_and_values() -> None:
    model = load("lfm2-8b-a1b")
    experts, states = 22 * 32 * 3 * 2048 * 1792 * 2, sum(layer.slot_bytes for layer in model.spec.layers)
    assert MANY * 2 * states + decode_bytes(model, 1, 0) - decode_bytes(model, MANY, 0) == pytest.approx(
        2 * states - experts * (1 - 1 / 8)
    )
    assert decode_bytes(model, 1, 7) - decode_bytes(model, 1, 0) == 7 * 6 * 2 * 8 * 64 * 2


@pytest.mark.parametrize(("name", "share"), [("nvfp4", 0.5 + 1 / 16)])
def test_quantised_experts_take_the_bytes_of_their_format(name: str, share: float) -> None:
    model = load(f"qwen3.5-35b-a3b-{name}")
    per_token = decode_bytes(model, 2, 0) - decode_bytes(model, 1, 0)
    states = 2 * sum(layer.slot_bytes for layer in model.spec.layers)
    products = 40 * 8 * (1 - 8 / 256) * 3 * 2048 * 512
    assert per_token - states == pytest.approx(share * products, rel=0.01)


def test_products_of_a_prompt_take_chosen_experts_and_no_head() -> None:
    attention, conv, dense, experts = (4096 + 1024) * 2048, 4 * 2048**2, 3 * 7168 * 2048, 4 * 3 * 1792 * 2048
    products = 6 * attention + 18 * conv + 2 * dense + 22 * (experts + 32 * 2048)
    assert prefill_flops(load("lfm2-8b-a1b")) == 2 * products


def test_only_measured_gpus_have_floors() -> None:
    assert peak_of("NVIDIA H200") is not None
    assert peak_of("CPU") is None
