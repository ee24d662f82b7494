"""Rows of one step have several adapters or none, and each is computed as the merged weights of its own compute it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strandline.device.batches.adapter_tiles import tile_rows
from strandline.device.hardware.upload import upload_together
from strandline.kernels.gemm.low_rank import NO_SLOT, TiledRows
from strandline.models.layers.parts.projection import Projection
from strandline.models.lora.adapter_files import AdapterFiles, read_adapter
from strandline.models.lora.adapter_slots import SlotSizes
from strandline.models.model_options import ModelOptions
from strandline.models.weights import FillOptions, load_model
from tests.cpu.models import adapters, families
from tests.cpu.models.adapters import ALPHA, RANK, Factors
from tests.cpu.models.driver import Driver, Part, Running
from tests.cpu.models.lora.test_adapters import ALL, OTHER_NAMES
from tests.cpu.models.quantized import load
from tests.cpu.models.quantized import logits as logits_of_model
from tests.cpu.models.storage.test_stored_formats import FORMATS, MAIN, save

PROMPTS = [families.prompt(20), families.prompt(20), families.prompt(7)[::-1], families.prompt(66)]
SLOTS = [2, NO_SLOT, 0, 2]
NEXT = 5
"""The token after each prompt."""
MERGED = "self_attn.kv_b_proj"
"""What adapters of requests may not change, of layers other than experts."""


def read(directory: Path, factors: Factors) -> AdapterFiles:
    return read_adapter(adapters.write(directory, factors))


def tiled_rows(slots_T: np.ndarray) -> TiledRows:
    return TiledRows(*upload_together(tile_rows(slots_T), torch.device("cpu")))


@pytest.mark.parametrize("name", ALL)
def test_each_row_is_computed_with_its_own_adapter(name: str, tmp_path: Path) -> None:
    oracle = families.oracle(name)
    shapes = {
        module: tuple(linear.weight.shape)
        for module, linear in adapters.linear_modules(oracle).items()
        if not any(part in module for part in OTHER_NAMES)
    }
    model = load_model(
        families.save(name, tmp_path), ModelOptions(dtype=torch.float32, adapter_slots=SlotSizes(3, RANK + 2))
    )
    shapes = {module: shape for module, shape in shapes.items() if not module.endswith(MERGED)}
    drawn = {slot: adapters.draw(shapes, seed=slot) for slot in (2, 0)}
    for slot, factors in drawn.items():
        model.adapters.fill(slot, model.adapters.read(read(tmp_path / f"{slot}", factors)))
    merged = {slot: adapters.merged(oracle, factors) for slot, factors in drawn.items()} | {NO_SLOT: oracle}
    driver, sequences = Driver(model), [Running() for _ in PROMPTS]

    def step(tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        rows = np.array(SLOTS).repeat([len(each) for each in tokens])
        model.adapters.rows.tiled = tiled_rows(rows)
        logits, _ = driver.step([Part(*each) for each in zip(sequences, tokens, strict=True)])
        return logits

    found = [torch.cat(each) for each in zip(step(PROMPTS), step([[NEXT]] * len(PROMPTS)), strict=True)]
    for slot, prompt, logits in zip(SLOTS, PROMPTS, found, strict=True):
        expected = logits_of(merged[slot], [*prompt, NEXT])
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)
    assert (found[0] - found[1]).abs().max() > 0.3


def test_ranks_of_all_projections_are_aligned(tmp_path: Path) -> None:
    """Kernels are compiled by whether 16 divides addresses and strides: once, so."""
    model = load_model(
        families.save("qwen3_5", tmp_path), ModelOptions(dtype=torch.float32, adapter_slots=SlotSizes(2, RANK))
    )
    adapted = [module.adapters for module in model.modules() if isinstance(module, Projection)]
    ranks = [adapters.weights.rank_SP for adapters in adapted if adapters is not None]
    assert len({rank_SP.shape[1] for rank_SP in ranks}) > 1
    assert len({rank_SP.data_ptr() for rank_SP in ranks}) == len(ranks)
    assert {rank_SP.data_ptr() % 16 for rank_SP in ranks} == {0}
    assert {rank_SP.stride(0) % 16 for rank_SP in ranks} == {0}


def logits_of(oracle: Any, tokens: Sequence[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = oracle(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("format", MAIN)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "nemotron_h"])
def test_adapters_change_weights_that_stay_quantised(name: str, format: str, tmp_path: Path) -> None:
    quantized, plain = save(name, format, tmp_path)
    before = logits_of_model(load(quantized, keeps_quantized=True))
    model = load(quantized, keeps_quantized=True, adapter_slots=SlotSizes(2, RANK))
    assert logits_of_model(model).equal(before)
    shapes = {module.removesuffix(".weight"): shape for module, shape in model.adapters.shapes.items()}
    # A small change: a large one would enlarge what FP8 rounds.
    config = {"lora_alpha": ALPHA / 4}
    adapter = read_adapter(adapters.write(tmp_path / "adapter", adapters.draw(shapes), config=config))
    model.adapters.fill(1, model.adapters.read(adapter))
    expected = logits_of_model(load(plain, FillOptions(adapter=adapter), keeps_quantized=False))
    assert (before - expected).norm() > 0.3 * expected.norm()
    driver, sequence, tokens, found = Driver(model), Running(), families.prompt(21), list[Tensor]()
    for part in (tokens[:-1], tokens[-1:]):
        model.adapters.rows.tiled = tiled_rows(np.full(len(part), 1))
        found += driver.step([Part(sequence, part)])[0]
    assert (torch.cat(found) - expected).norm() < FORMATS[format].tolerance * expected.norm()
