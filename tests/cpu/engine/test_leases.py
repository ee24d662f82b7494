"""Leases of prompts that other engines are to continue: one for each request, and none for aborted ones."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from strandline.engine.loading import load_uni_executor
from strandline.env import DEBUG_CACHE
from strandline.ids import RequestId
from tests.cpu.engine.test_failures import plant_in_gathering
from tests.cpu.engine.test_hand_over import KEEP, Node, config_of, hand_over_stats, prompt_of, run
from tests.cpu.engine.tiny import save_tiny_model

DRAFTING: dict[str, Any] = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    "async_scheduling": True,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose slots take the room of several blocks."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), linear_key_head_dim=32, linear_value_head_dim=32)


@pytest.fixture
def small_node(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """An engine with drafts, and with room for the leases of one prompt of 300 tokens, but not of two."""
    monkeypatch.setenv(DEBUG_CACHE, "1")
    threads = torch.get_num_threads()
    options = {"memory": "512KiB", "max_model_len": 400, **DRAFTING}
    node = Node(load_uni_executor(config_of(model_dir, **options)), model_dir, **options)
    yield node
    node.core.close()
    torch.set_num_threads(threads)


def test_outputs_of_one_request_share_one_lease(small_node: Node) -> None:
    """A proxy sends the client's ``n`` to the first engine, too, and gets one lease."""
    small_node.submit("several", prompt_of(100), KEEP, n=3, temperature=1.0, seed=1)
    run([small_node])
    assert hand_over_stats(small_node).num_leases == 1
    assert [answer.params is not None for answer in small_node.answers.values()] == [True, False, False]


def test_a_failed_request_takes_no_lease(small_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    params = plant_in_gathering(monkeypatch)
    small_node.submit("failing", prompt_of(100), KEEP, logprobs=params.logprobs)
    run([small_node])
    assert small_node.answers["failing"].params is None
    assert hand_over_stats(small_node).num_leases == 0
    small_node.check_nothing_leaks()


def test_an_aborted_requests_lease_may_have_been_given_up(small_node: Node) -> None:
    names = ["first", "second"]
    for seed, name in enumerate(names):
        small_node.submit(name, prompt_of(300, seed), KEEP)
    while not hand_over_stats(small_node).leases_ended:
        small_node.core.finish(RequestId("another"))  # settles the step in flight, in which both end
        if not hand_over_stats(small_node).leases_ended:
            small_node.core.step()
    assert hand_over_stats(small_node).num_leases == 1
    for name in names:
        small_node.core.finish(RequestId(name))
    assert hand_over_stats(small_node).num_leases == 0
    assert small_node.core.step().handed_over == []
    small_node.check_nothing_leaks()
