"""An output head in FP8 is rounded from what each rank has, and follows weights that change."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from strandline.device.weights.model_memory import pair_tensors, tensors_of
from strandline.kernels.gemm.weights import DenseWeight, ScaledWeight
from strandline.kernels.ranks import columns_of
from strandline.models.drafters import draft_head
from strandline.models.layers.parts.shard import WHOLE, Shard
from strandline.models.model_options import ModelOptions
from strandline.models.weights import FillOptions, load_model
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.models.driver import Driver
from tests.cpu.models.rank_threads import RankThread, RankThreads

VOCAB_SIZE, HIDDEN_SIZE = 397, 160
"""Two ranks have 199 columns each, one of them to spare, and inputs have a second scale."""


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "own"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, tie_word_embeddings=request.param)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))
    return directory


def rounded_model(directory: Path, seed: int = 1, shard: Shard = WHOLE) -> Any:
    model = load_model(
        directory,
        ModelOptions(dtype=torch.float32, shard=shard, with_draft_layer=True),
        FillOptions(load_format="dummy", seed=seed),
    )
    model.lay_out(DenseWeight)
    model.round_draft_head()
    return model


@pytest.mark.parametrize("count", [1, 2])
def test_every_rank_rounds_the_rows_it_has(directory: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_head, "ROWS_AT_ONCE", 128)
    hidden_NE = torch.randn(5, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))

    def draft_logits(ranks: RankThread) -> tuple[torch.Tensor, torch.Tensor]:
        model = rounded_model(directory, shard=Shard(ranks.rank, ranks.size))
        Driver(model, ranks=ranks)
        assert isinstance(model.decoder.embedding.draft_weight, ScaledWeight)
        return model.draft_logits(hidden_NE), model.logits(hidden_NE)

    found, exact = (torch.cat(parts, dim=1) for parts in zip(*RankThreads(count).run(draft_logits), strict=True))
    assert found.shape[1] == count * len(columns_of(VOCAB_SIZE, 0, count))
    assert found[:, VOCAB_SIZE:].isneginf().all()
    error = (found - exact)[:, :VOCAB_SIZE].norm() / exact[:, :VOCAB_SIZE].norm()
    assert 0 < error < 0.06  # two numbers with three bits after the first


def test_changed_weights_change_the_rounded_head(directory: Path) -> None:
    old, new = (rounded_model(directory, seed) for seed in (1, 2))
    hidden_NE = torch.randn(5, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    for model in (old, new):
        Driver(model)
    assert not torch.equal(old.draft_logits(hidden_NE), new.draft_logits(hidden_NE))
    addresses = {tensor.data_ptr() for tensor in tensors_of(old)}
    assert {
        old.decoder.embedding.draft_weight.values.data_ptr(),
        old.decoder.embedding.draft_weight.scales.data_ptr(),
    } <= addresses
    for mine, other in pair_tensors(old, new):
        mine.copy_(other)
    assert torch.equal(old.draft_logits(hidden_NE), new.draft_logits(hidden_NE))
