"""Features of n-grams: tokens before the last end token do not count, and tables load in parts or as one."""

import torch
from torch import Tensor
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpTextNGramEmbedding,
    _build_layer_multipliers,
    _find_nth_prime_after,
)

from strandline.kernels.binding import reference_kernels
from strandline.models.layers.ngram_features import (
    NgramFeaturesConfig,
    NgramTable,
    hash_multipliers,
    primes_from,
)
from strandline.models.layers.parts.shard import Shard
from strandline.models.layers.parts.site import Site
from tests.cpu.models.families import VOCAB_SIZE, config_of, model_config
from tests.cpu.models.rank_threads import RankThread, RankThreads

END = VOCAB_SIZE - 1
PREFIX = "model.ple_embedding."


def read_config(number: int = 1) -> NgramFeaturesConfig:
    return NgramFeaturesConfig.read(model_config(config_of("qwen4_exp")).text, 3, number)


def ngrams(token_ids: list[int]) -> Tensor:
    """Return each token and the two before it, the latest first, by the definition."""
    rows = []
    for position in range(len(token_ids)):
        last, *others = reversed([END, END, *token_ids[: position + 1]][-3:])
        others = [END if END in others[: index + 1] else token for index, token in enumerate(others)]
        rows.append([last, *others])
    return torch.tensor(rows)


def test_primes_and_multipliers_are_those_of_transformers() -> None:
    primes = primes_from(50)
    assert [next(primes) for _ in range(40)] == [_find_nth_prime_after(49, count) for count in range(1, 41)]
    for vocab_size, max_ngram, number, seed in [(97, 3, 0, 1234), (248320, 4, 2, 7), (2, 2, 1, 2**64 - 1)]:
        expected = _build_layer_multipliers(vocab_size, max_ngram, number, seed)
        assert list(hash_multipliers(vocab_size, max_ngram, number, seed)) == expected.tolist()


def test_features_equal_transformers_around_end_tokens() -> None:
    config, token_ids = read_config(), [END, 3, END, 4, 5, END, END, 6, 7, 8, 3, END, 9, 9]
    oracle = Qwen4ExpTextNGramEmbedding(config_of("qwen4_exp"), config.feature_dim, 0, 1)
    table = NgramTable(config, Site(torch.float32, "cpu"))
    table.use_kernels(reference_kernels(()))
    table.embed_ZD.copy_(oracle.ngram_embedding.weight.detach())
    expected = oracle(torch.tensor([token_ids]), None)[0].detach()
    assert torch.equal(table(ngrams(token_ids)), expected)


def test_a_table_in_parts_is_the_table_divided_among_ranks() -> None:
    config = read_config()
    rows_ZD = torch.randn(config.num_rows, 4)
    size = config.num_rows // config.num_parts
    in_parts = {f"{PREFIX}ngram_embedding.shard_{i}.weight": part for i, part in enumerate(rows_ZD.split(size))}
    whole = {f"{PREFIX}ngram_embedding.weight": rows_ZD}
    token_ids_TN = ngrams(list(range(20)))

    def features(published: dict[str, Tensor], ranks: RankThread) -> Tensor:
        table = NgramTable(config, Site(torch.float32, "cpu", Shard(ranks.rank, ranks.size)))
        targets = dict(table.targets(PREFIX, frozenset(published)))
        assert targets.keys() == published.keys()
        for name, target in targets.items():
            assert target.shape == published[name].shape
            target.copy_from(lambda index, name=name: published[name][index])
        table._ranks = ranks
        found: Tensor = table(token_ids_TN)
        return found

    expected, *others = (
        found
        for published in (whole, in_parts)
        for count in (1, 2, 3)
        for found in RankThreads(count).run(lambda ranks, published=published: features(published, ranks))
    )
    assert len(others) == 11
    assert all(torch.equal(found, expected) for found in others)
