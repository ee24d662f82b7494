"""What ``--speculative-config`` takes, and what it says of anything else."""

import pytest

from strandline.config import EngineConfig
from strandline.errors import ConfigError
from strandline.speculative_config import read_speculative_config

FAULTS = {
    '{"method"': "must be JSON",
    "[1]": "must be a mapping such as",
    '{"method": "ngram"}': "num_speculative_tokens is missing",
    '{"num_speculative_tokens": 1}': "method is missing",
    '{"method": "eagle", "num_speculative_tokens": 1}': "must be one of dflash, dspark, eagle3, mtp, .*got 'eagle'",
    **{
        f'{{"method": {methods}, "num_speculative_tokens": 1}}': "one of dflash, dspark, eagle3, mtp and one of ngram"
        for methods in ("[]", '["mtp", "mtp"]', '["mtp", "dflash"]', '["suffix", "ngram"]', '["mtp", 3]', "3", "null")
    },
    '{"method": "mtp", "num_speculative_tokens": 1, "prompt_lookup_max": 4}': r'both, "method": \["mtp", "ngram"\]',
    '{"method": ["ngram", "eagle3"], "num_speculative_tokens": 1}': "and model, the drafter, go together",
    '{"method": "mtp", "num_speculative_tokens": 0}': "at least 1 and at most 16, got 0",
    '{"method": "mtp", "num_speculative_tokens": true}': "at least 1 and at most 16, got True",
    '{"method": "mtp", "num_speculative_tokens": 17}': "at least 1 and at most 16, got 17",
    '{"method": "mtp", "num_speculative_token": 1}': "unknown field 'num_speculative_token'; known are method",
    '{"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 5, "prompt_lookup_max": 2}': "above",
    '{"method": "mtp", "num_speculative_tokens": 1, "adaptive": 1}': "adaptive must be true or false, got 1",
    '{"method": "mtp", "num_speculative_tokens": 1, "rejection_sample_method": "x"}': "one of standard, synthetic",
    '{"method": "mtp", "num_speculative_tokens": 1, "rejection_sample_method": "synthetic"}': "go together",
    '{"method": "mtp", "num_speculative_tokens": 1, "synthetic_acceptance_rates": [0.5]}': "go together",
    **{
        '{"method": "mtp", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic", '
        f'"synthetic_acceptance_rates": {rates}}}': "must be 2 numbers from 0 to 1, none above the one before"
        for rates in ("[0.5]", "[0.5, 0.6]", "[1.5, 0.6]", '["a", 0.6]', "0.5")
    },
    '{"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 0}': "at least 1, got 0",
    '{"method": "mtp", "num_speculative_tokens": 1, "draft_vocab_size": 0}': "draft_vocab_size .* at least 1, got 0",
    '{"method": "ngram", "num_speculative_tokens": 1, "draft_vocab_size": 9}': "is for methods mtp, dflash, dspark",
    '{"method": "suffix", "num_speculative_tokens": 1, "draft_vocab_size": 9}': "is for methods mtp, dflash, dspark",
    '{"method": "suffix", "num_speculative_tokens": 1, "prompt_lookup_max": 4}': "max is for method ngram",
    '{"method": "suffix", "num_speculative_tokens": 1, "prompt_lookup_min": 4}': "min is for method ngram",
    '{"method": "ngram", "num_speculative_tokens": 1, "suffix_decoding_max_tree_depth": 9}': "is for method suffix",
    '{"method": "mtp", "num_speculative_tokens": 1, "suffix_decoding_min_token_prob": 0}': "prob is for method suffix",
    '{"method": "dflash", "num_speculative_tokens": 1}': "and model, the drafter, go together; got .* None",
    '{"method": "mtp", "model": "x", "num_speculative_tokens": 1}': "go together; got method 'mtp', model 'x'",
    '{"method": "dflash", "model": 3, "num_speculative_tokens": 1}': "model must be a directory or a name .*, got 3",
    **{
        f'{{"method": "suffix", "num_speculative_tokens": 1, "suffix_decoding_{field}}}': message
        for field, message in {
            'max_tree_depth": 3': "max_tree_depth must be a whole number of at least 4 and at most 256, got 3",
            'max_tree_depth": 257': "at least 4 and at most 256, got 257",
            'max_tree_depth": 24.0': "at least 4 and at most 256, got 24.0",
            'max_cached_requests": -1': "max_cached_requests must be a whole number of at least 0, got -1",
            'max_spec_factor": 0': "max_spec_factor must be a number above 0, got 0",
            'max_spec_factor": "1"': "max_spec_factor must be a number above 0, got '1'",
            'max_spec_factor": Infinity': "max_spec_factor must be a number above 0, got inf",
            'min_token_prob": 1.5': "min_token_prob must be a number from 0 to 1, got 1.5",
            'min_token_prob": true': "min_token_prob must be a number from 0 to 1, got True",
            'max_depth": 9': "unknown field 'suffix_decoding_max_depth'",
        }.items()
    },
}


@pytest.mark.parametrize(("text", "message"), FAULTS.items())
def test_faults_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--speculative-config.*{message}"):
        EngineConfig(model="demo", speculative_config=text)


def test_a_reduced_vocabulary_of_drafts_is_for_one_rank() -> None:
    speculation = {"method": "mtp", "num_speculative_tokens": 1, "draft_vocab_size": 9}
    with pytest.raises(ConfigError, match=r"draft_vocab_size is for one rank.*which is 2"):
        EngineConfig(model="demo", speculative_config=speculation, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, (5, 5)), ({"prompt_lookup_max": 3}, (3, 3)), ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4))],
)
def test_lookup_lengths_have_vllms_defaults(given: dict[str, int], expected: tuple[int, int]) -> None:
    config = read_speculative_config({"method": "ngram", "num_speculative_tokens": 1, **given})
    assert (config.min_match, config.max_match) == expected


def test_suffix_fields_have_vllms_defaults() -> None:
    config = read_speculative_config({"method": "suffix", "num_speculative_tokens": 1})
    assert (config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_cached_requests) == (24, 10_000)
    assert (config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob) == (1.0, 0.1)


@pytest.mark.parametrize("given", [["suffix", "mtp"], ["mtp", "suffix"]])
def test_two_methods_are_taken_in_any_order(given: list[str]) -> None:
    config = read_speculative_config(
        {"method": given, "num_speculative_tokens": 1, "suffix_decoding_max_tree_depth": 9}
    )
    assert (config.methods, config.drafter_method, config.lookup_method) == (("mtp", "suffix"), "mtp", "suffix")
