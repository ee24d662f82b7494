"""Limits of a scheduler's steps."""

from typing import NamedTuple


class StepLimits(NamedTuple):
    """How many sequences and tokens a step has, and from which sizes on it treats them in another way."""

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0
    """Prefills of more tokens are long; 0: none is."""
    fixed_step_tokens: int = 0
    """How many tokens of prompts take as long as the fixed cost of a step (``PromptGroups``)."""
    logged_from: int = 1
    """The least number of decodes for which a step uses logs."""
    encoder_tokens: int = 0
    """Rows of the memory of encoded pictures."""
    max_loras: int = 0
    """LoRA adapters that a step can use."""
