"""A model that is divided among ranks is the same model: its shards are the whole, and compute what it computes."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from strandline.errors import ConfigError
from strandline.models.layers.parts.shard import WHOLE, Shard
from strandline.models.layers.parts.targets import Read, interleaved, sharded, spanned, stacked, stacked_rows, whole
from strandline.models.model_options import ModelOptions
from strandline.models.storage.weights_files import WeightsFile
from strandline.models.weights import load_model
from tests.cpu.models import families
from tests.cpu.models.driver import Driver, Part, Running
from tests.cpu.models.few_rows import CountingFewRows
from tests.cpu.models.rank_threads import RankThread, RankThreads

CASES = [(name, count) for name, family in families.CONFIGS.items() for count in family.shards]


def shards(count: int) -> list[Shard]:
    return [Shard(index, count) for index in range(count)]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("shards")
    return lambda name: families.save(name, directory)


@pytest.mark.parametrize(("name", "count"), CASES)
def test_shards_compute_what_the_whole_computes(directory_of: Any, name: str, count: int) -> None:
    directory, tokens = directory_of(name), families.prompt(70)

    def logits(ranks: RankThread) -> Tensor:
        model = load_model(directory, ModelOptions(dtype=torch.float32, shard=Shard(ranks.rank, ranks.size)))
        driver, sequence = Driver(model, ranks=ranks), Running()
        steps = [tokens[:66], *([token] for token in tokens[66:])]
        return torch.cat([driver.step([Part(sequence, step)])[0][0] for step in steps])

    expected = families.oracle_logits(name, tokens)
    for found in RankThreads(count).run(logits):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "num_norms_of_layer"),
    [
        ("llama", 2),
        ("qwen3_5_moe", 2),
        ("nemotron_h", 1),
        ("lfm2_moe", 2),
        ("granite_hybrid", 2),
        ("falcon_h1", 2),
        ("minimax", 0),
    ],
)
def test_norms_behind_parts_sum_over_ranks(directory_of: Any, name: str, num_norms_of_layer: int) -> None:
    """But for layers that scale the stream."""
    directory, tokens = directory_of(name), families.prompt(9)

    def logits(ranks: RankThread) -> Tensor:
        ranks.few_rows = few_rows = CountingFewRows(ranks, max_rows=1)
        model = load_model(directory, ModelOptions(dtype=torch.float32, shard=Shard(ranks.rank, ranks.size)))
        driver, sequence = Driver(model, ranks=ranks), Running()
        first = driver.step([Part(sequence, tokens[:8])])[0][0]
        assert few_rows.num_add_norms == 0
        second = driver.step([Part(sequence, tokens[8:])])[0][0]
        assert few_rows.num_add_norms == num_norms_of_layer * len(model.spec.layers)
        return torch.cat([first, second])

    expected = families.oracle_logits(name, tokens)
    for found in RankThreads(2).run(logits):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5_moe", "qwen3_next"])
def test_a_shard_reads_its_part_of_the_files(directory_of: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_read, get = 0, WeightsFile.get

    def counting(file: WeightsFile, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        nonlocal num_read
        tensor = get(file, name, index)
        num_read += tensor.numel()
        return tensor

    monkeypatch.setattr(WeightsFile, "get", counting)
    loaded = [load_model(directory_of(name), ModelOptions(shard=shard)) for shard in (WHOLE, Shard(0, 2))]
    num_all, num_held = (sum(x.numel() for _, x in model.named_parameters()) for model in loaded)
    assert num_held < 0.6 * num_all
    assert num_read <= num_all + num_held


def read_from(tensor: Tensor) -> Read:
    return lambda index: tensor[index]


sizes = st.integers(1, 4)


@given(count=sizes, rows=st.lists(sizes, min_size=1, max_size=3), columns=sizes, dim=st.integers(0, 1))
def test_shards_laid_side_by_side_are_the_whole(count: int, rows: list[int], columns: int, dim: int) -> None:
    """Every part of a fused parameter is divided for itself."""
    num_rows = sum(rows)

    def split(view: Tensor, shard: Shard) -> Any:
        return sharded(view, shard, dim=1) if dim else stacked_rows(view, rows, [shard] * len(rows))

    shape = (num_rows, columns)
    parts = [torch.zeros(shape) for _ in range(count)]
    full = (num_rows, columns * count) if dim else (num_rows * count, columns)
    published = torch.randn(full)
    for part, shard in zip(parts, shards(count), strict=True):
        target = split(part, shard)
        assert target.shape == full
        target.copy_from(read_from(published))
    if dim:
        joined = torch.cat(parts, dim=1)
    else:
        by_part = zip(*(part.split(rows) for part in parts), strict=True)
        joined = torch.cat([torch.cat(shards_of_part) for shards_of_part in by_part])
    assert joined.equal(published)


@given(count=sizes, groups=sizes, rows=st.lists(sizes, min_size=2, max_size=3))
def test_shards_of_interleaved_rows_are_whole_groups(count: int, groups: int, rows: list[int]) -> None:
    published = torch.randn(count * groups * sum(rows), 2)
    expected = published.view(count, groups, sum(rows), 2).split(rows, dim=2)
    for shard in shards(count):
        parts = [torch.zeros(groups, num_rows, 2) for num_rows in rows]
        target = interleaved(*parts, shard=shard)
        assert target.shape == published.shape
        target.copy_from(read_from(published))
        assert all(part.equal(x[shard.index]) for part, x in zip(parts, expected, strict=True))


@given(count=sizes, num=st.integers(1, 20))
def test_spans_cover_everything_once_or_are_refused(count: int, num: int) -> None:
    if num < count:
        with pytest.raises(ConfigError, match=f"{count} is more than the model's {num} things"):
            Shard(0, count).span(num, "things")
        return
    spans = [shard.span(num, "things") for shard in shards(count)]
    assert max(map(len, spans)) - min(map(len, spans)) <= 1
    assert [index for span in spans for index in span] == list(range(num))
    published = torch.arange(num).float()
    for span in spans:
        view = torch.zeros(len(span) + 1)
        spanned(view, span, num).copy_from(read_from(published))
        assert view.tolist() == [*span, 0]


@given(count=st.sampled_from([1, 2, 4, 8]), num=st.sampled_from([1, 2, 4, 8, 16]))
def test_few_heads_are_held_by_neighbours(count: int, num: int) -> None:
    held = [shard.shared(num, "heads") for shard in shards(count)]
    assert [x.index * num // x.count for x in held] == [index * num // count for index in range(count)]
    assert {x.part_of(num, "heads") for x in held} == {max(num // count, 1)}


def test_parts_of_different_shards_are_stacked() -> None:
    published = torch.arange(8.0)
    first, second, last = torch.zeros(2), torch.zeros(3), torch.zeros(1)
    target = stacked(sharded(first, Shard(1, 2)), whole(second), sharded(last, WHOLE))
    assert target.shape == (8,)
    target.copy_from(read_from(published))
    assert torch.cat((first, second, last)).tolist() == [2, 3, 4, 5, 6, 7]


REFUSED: Sequence[tuple[str, int, str]] = [
    ("qwen3_5", 3, "--tensor-parallel-size 3 does not divide the model's 2 key heads of Gated DeltaNet"),
    ("qwen3_5", 4, "--tensor-parallel-size 4 does not divide the model's 2 key heads of Gated DeltaNet"),
    ("qwen3_moe", 8, "--tensor-parallel-size 8 "),
    ("kimi_linear-odd", 2, "2 does not divide the model's 3 attention heads"),
    ("bamba-odd", 2, "2 is neither a divisor nor a multiple of the model's 3 groups of Mamba-2"),
]


@pytest.mark.parametrize(("name", "count", "message"), REFUSED)
def test_a_model_that_cannot_be_divided_is_refused(directory_of: Any, name: str, count: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(directory_of(name), ModelOptions(shard=Shard(0, count)))
