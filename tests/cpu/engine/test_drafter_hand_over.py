"""Prompts that another engine continues, with drafts: these are what an engine drafts that computes the prompt."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from strandline.engine.loading import load_uni_executor
from strandline.records.transfer_params import TransferParams
from tests.cpu.engine.small_demo import small_demo
from tests.cpu.engine.test_block_drafter import note_drafts
from tests.cpu.engine.test_hand_over import Node, config_of, decode, prefill, prompt_of
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.engine.tiny_drafter import save_drafter, save_eagle

NUM_TOKENS = 14
MakeNode = Callable[..., Node]


@pytest.fixture(params=["mtp", "dflash", "eagle3"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeNode]:
    """Build engines that draft with a method, or as told."""
    method, nodes, threads = request.param, list[Node](), torch.get_num_threads()
    default = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    if method == "mtp":
        model = small_demo()
    else:
        model = save_tiny_model(tmp_path / "model")
        default["model"] = str((save_drafter if method == "dflash" else save_eagle)(tmp_path / "drafter"))

    def node(**changes: Any) -> Node:
        speculation = {"speculative_config": {**default, **changes}}
        nodes.append(Node(load_uni_executor(config_of(model, **speculation)), model, **speculation))
        return nodes[-1]

    yield node
    for each in nodes:
        each.core.close()
    torch.set_num_threads(threads)


def drafts_of(node: Node, run: Callable[[], None]) -> dict[int, tuple[int, ...]]:
    """Return what an engine drafts of one request, by the number of tokens before."""
    drafted = note_drafts(cast(Any, SimpleNamespace(engine=node.core)))
    run()
    [(_, drafts)] = drafted.values()
    return drafts


@pytest.mark.parametrize("num_tokens", [1, 64, 130])
def test_a_handed_over_prompt_drafts_at_once(make: MakeNode, num_tokens: int) -> None:
    producer, consumer, alone = make(), make(), make()
    prompt = prompt_of(num_tokens)
    params = prefill(producer, prompt)
    found = drafts_of(consumer, lambda: decode(producer, consumer, prompt, params, max_tokens=NUM_TOKENS))
    expected = drafts_of(alone, lambda: decode(None, alone, prompt, TransferParams(), max_tokens=NUM_TOKENS))
    answer = consumer.answers["decode"]
    assert (answer.tokens, answer.hit) == (alone.answers["decode"].tokens, num_tokens)
    assert found == expected
    assert num_tokens + 1 in found


def test_engines_may_draft_other_numbers_of_tokens(make: MakeNode) -> None:
    producer, consumer = make(num_speculative_tokens=1), make()
    prompt = prompt_of(100)
    assert decode(producer, consumer, prompt, prefill(producer, prompt)).hit == 100


def test_an_engine_without_the_drafter_is_refused(make: MakeNode, caplog: pytest.LogCaptureFixture) -> None:
    plain = {"model": None, "method": "ngram"}
    producer, consumer = make(**plain), make()
    prompt = prompt_of(100)
    answer = decode(producer, consumer, prompt, prefill(producer, prompt))
    assert (answer.hit, answer.lost) == (0, 100)
    [method] = {"mtp", "dflash", "eagle3"} & set(caplog.text.split())
    assert f"with {method}" in caplog.text


def test_lookups_need_nothing_of_the_other_engine(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path)
    speculation = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}}
    nodes = [Node(load_uni_executor(config_of(model, **options)), model, **options) for options in ({}, speculation)]
    prompt = prompt_of(100)
    assert decode(*nodes, prompt, prefill(nodes[0], prompt)).hit == 100
    for node in nodes:
        node.core.close()
