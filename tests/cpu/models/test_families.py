"""Our models' logits equal transformers', however the tokens are spread over steps, sequences and snapshots."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strandline.models.model_options import ModelOptions
from strandline.models.registry import ARCHITECTURES
from strandline.models.weights import load_model
from tests.cpu.models.driver import Driver, Part, Running
from tests.cpu.models.families import (
    CONFIGS,
    FAMILIES,
    REPRESENTATIVES,
    config_of,
    kinds_of_layers,
    oracle_logits,
    prompt,
    random_model,
    save,
)

Loader = Callable[[str], Any]

TOLERANCE = 1e-4
"""Logits are of size 1 to 10; either side sums float32 in its own order, over 4 layers."""

LONG = 200
"""Tokens of a prompt that spans four blocks."""

MODELS = list(CONFIGS)


def each_family_at(argument: str, *values: int) -> pytest.MarkDecorator:
    """Run a test with every value for each family, and with the last one for the other configurations."""
    cases = [
        pytest.param(name, value, marks=[] if name in FAMILIES or value == values[-1] else pytest.mark.long)
        for value in values
        for name in MODELS
    ]
    return pytest.mark.parametrize(("name", argument), cases)


def assert_close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)


def run_in_chunks(driver: Driver, running: Running, tokens: tuple[int, ...], size: int) -> Tensor:
    rows = [driver.step([Part(running, tokens[i : i + size])])[0][0] for i in range(0, len(tokens), size)]
    return torch.cat(rows)


def test_every_architecture_has_a_configuration() -> None:
    assert {architecture for architecture, *_ in CONFIGS.values()} == set(ARCHITECTURES)


def test_representatives_have_every_kind_of_layer() -> None:
    represented = set().union(*map(kinds_of_layers, REPRESENTATIVES))
    assert {name: kinds_of_layers(name) - represented for name in FAMILIES} == {name: set() for name in FAMILIES}


@each_family_at("length", 1, 2, 64, LONG)
def test_a_whole_prefill_equals_transformers(load: Loader, name: str, length: int) -> None:
    tokens = prompt(length)
    logits, _ = Driver(load(name)).step([Part(Running(), tokens)])
    assert logits[0].dtype == torch.float32
    assert_close(logits[0], oracle_logits(name, tokens))


@each_family_at("size", 7, 63, 65)
def test_a_chunked_prefill_equals_transformers(load: Loader, name: str, size: int) -> None:
    whole = prompt(LONG)
    tokens = whole[: 14 * size]  # more chunks of few tokens would be as those before
    expected = oracle_logits(name, whole)[: len(tokens)]
    assert_close(run_in_chunks(Driver(load(name), 80), Running(), tokens, size), expected)


def test_every_chunk_size_gives_the_same_logits(load: Loader) -> None:
    tokens = prompt(70)
    for size in range(1, 70):
        ours = run_in_chunks(Driver(load("qwen3_5"), 160), Running(), tokens, size)
        assert_close(ours, oracle_logits("qwen3_5", tokens))


@pytest.mark.parametrize("name", MODELS)
def test_decoding_token_by_token_equals_transformers(load: Loader, name: str) -> None:
    tokens = prompt(LONG)
    driver, running = Driver(load(name), 60), Running()
    prefilled, _ = driver.step([Part(running, tokens[:-20])])
    decoded = run_in_chunks(driver, running, tokens[-20:], 1)
    assert_close(torch.cat((prefilled[0], decoded)), oracle_logits(name, tokens))


@pytest.mark.parametrize("name", MODELS)
def test_decodes_and_prefills_share_a_step(load: Loader, name: str) -> None:
    driver = Driver(load(name), 60)
    # Per sequence: its tokens, and where its second and its third step end.
    plans = [(prompt(100, 1), 99, 100), (prompt(68, 2), 63, 68), (prompt(7, 3), 1, 7), (prompt(66, 4), 65, 66)]
    runnings = [Running() for _ in plans]
    rows: list[list[Tensor]] = [[] for _ in plans]
    for bounds in ([(0, second) for _, second, _ in plans], [(second, third) for _, second, third in plans]):
        parts = [
            Part(running, tokens[start:end])
            for running, (tokens, _, _), (start, end) in zip(runnings, plans, bounds, strict=True)
        ]
        for kept, logits in zip(rows, driver.step(parts)[0], strict=True):
            kept.append(logits)
    for kept, (tokens, _, _) in zip(rows, plans, strict=True):
        assert_close(torch.cat(kept), oracle_logits(name, tokens))


@pytest.mark.parametrize("name", MODELS)
def test_a_snapshot_at_any_cut_resumes_with_the_cold_logits(load: Loader, name: str) -> None:
    tokens = prompt(LONG)
    expected = oracle_logits(name, tokens)
    driver, parent = Driver(load(name), 80), Running()
    cuts = (1, 2, 37, 64, 130, 199)
    _, (snapshots,) = driver.step([Part(parent, tokens, cuts)])
    forks = [driver.fork(parent, position, slot) for position, slot in snapshots.items()]
    resumed, _ = driver.step([Part(fork, tokens[fork.num_tokens :]) for fork in forks])
    for position, logits in zip(cuts, resumed, strict=True):
        assert_close(logits, expected[position:])


def test_equal_scores_of_an_index_choose_as_the_oracle(tmp_path: Path) -> None:
    config, tokens = config_of("glm5_next"), prompt(LONG)
    config.text_config.index_n_heads = 1  # where its weight is negative, the greatest scores are all 0
    expected = random_model(config, len("glm5_next"))(torch.tensor([tokens]), use_cache=False).logits[0]
    model = load_model(save("glm5_next", tmp_path, index_n_heads=1), ModelOptions(dtype=torch.float32))
    for size in (LONG, 63):
        assert_close(run_in_chunks(Driver(model), Running(), tokens, size), expected)


def test_a_snapshot_serves_many_and_is_never_written(load: Loader) -> None:
    tokens, others = prompt(130), [prompt(130)[:100] + prompt(30, seed) for seed in (5, 6)]
    driver, parent = Driver(load("qwen3_5"), 80), Running()
    _, (snapshots,) = driver.step([Part(parent, tokens, (100,))])
    before = driver.arena.slot(snapshots[100]).clone()
    forks = [driver.fork(parent, 100, snapshots[100]) for _ in others]
    resumed, _ = driver.step([Part(fork, other[100:]) for fork, other in zip(forks, others, strict=True)])
    for logits, other in zip(resumed, others, strict=True):
        assert_close(logits, oracle_logits("qwen3_5", other)[100:])
    assert torch.equal(driver.arena.slot(snapshots[100]), before)
    following, _ = driver.step([Part(parent, (3,))])
    assert_close(following[0], oracle_logits("qwen3_5", (*tokens, 3))[-1:])


def test_one_token_prompts_with_a_cut_run_as_prefills(load: Loader) -> None:
    driver, running = Driver(load("qwen3_5")), Running()
    logits, (snapshots,) = driver.step([Part(running, (5,), (1,))])
    assert_close(logits[0], oracle_logits("qwen3_5", (5,)))
    state = driver.arena.slot(running.slot)
    hidden = driver.model.spec.hidden_offset
    assert torch.equal(driver.arena.slot(snapshots[1])[:hidden], state[:hidden])


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_stays_close_to_float32(name: str, tmp_path: Any) -> None:
    tokens = prompt(100)
    model = load_model(save(name, tmp_path), ModelOptions(dtype=torch.bfloat16))
    (logits,), _ = Driver(model).step([Part(Running(), tokens)])
    expected = oracle_logits(name, tokens)
    # 8 bits of mantissa, 4 layers: a few per cent of the logits' spread. A wrong layer gives over 100 %.
    assert float((logits - expected).std() / expected.std()) < 0.1


@pytest.mark.parametrize("name", [name for name, family in CONFIGS.items() if family.is_altered])
def test_a_wrong_tensor_anywhere_shows_in_the_logits(name: str, tmp_path: Any) -> None:
    model, tokens = load_model(save(name, tmp_path), ModelOptions(dtype=torch.float32)), prompt(64)
    for parameter_name, parameter in model.named_parameters():
        right = parameter.clone()
        if not right.any():
            continue  # a part that the family does not have
        parameter.copy_(right.roll(1, 0 if len(right) > 1 else -1) if right.numel() > 1 else 2 * right)
        (logits,), _ = Driver(model).step([Part(Running(), tokens)])
        parameter.copy_(right)
        assert float((logits - oracle_logits(name, tokens)).abs().max()) > 10 * TOLERANCE, parameter_name
