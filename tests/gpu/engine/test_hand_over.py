"""Two engines on one GPU hand prompts over, with snapshots of several frames, while the second one generates."""

from pathlib import Path
from typing import Any

import pytest

from strandline.config import EngineConfig
from strandline.engine.loading import load_executor
from strandline.transfer.layout import CHUNK_BYTES
from tests.cpu.engine.test_hand_over import Node, decode, hand_over_stats, prefill, prompt_of, run
from tests.cpu.engine.tiny import save_tiny_model
from tests.gpu.engine.conftest import MAX_NUM_SEQS

DEVICE = "cuda"
SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_prompts_are_handed_over_beside_generation(tmp_path: Path, async_scheduling: bool) -> None:
    directory = save_tiny_model(tmp_path, **SIZES)
    options: dict[str, Any] = {"device": DEVICE, "dtype": "float32", "memory": "256MiB", "max_num_seqs": MAX_NUM_SEQS}
    options |= {"max_model_len": 1100, "skip_tokenizer_init": True, "async_scheduling": async_scheduling}
    config = EngineConfig(model=str(directory), **options)
    giving, fetching = (Node(load_executor(config), directory, **options) for _ in range(2))
    assert giving.core.spec.raw_slot_bytes > CHUNK_BYTES
    other, prompts = prompt_of(50, seed=9), [prompt_of(length, seed=length) for length in (1, 300, 1000)]
    fetching.submit("beside", other, max_tokens=200)
    for prompt in prompts:
        for node in (giving, fetching):
            node.answers.pop("prefill" if node is giving else "decode", None)
        answer = decode(giving, fetching, prompt, prefill(giving, prompt))
        giving.submit("same", prompt)
        run([giving])
        assert (answer.tokens, answer.hit) == (giving.answers.pop("same").tokens, len(prompt))
    giving.submit("beside", other, max_tokens=200)
    run([giving])
    assert fetching.answers["beside"].tokens == giving.answers["beside"].tokens
    assert hand_over_stats(fetching).pulls == {"done": len(prompts)}
    for node in (giving, fetching):
        node.check_nothing_leaks()
        node.core.close()
