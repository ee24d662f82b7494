"""What the runner holds of a request to sample its tokens: parameters, and the tokens so far.

Shape suffixes: P the rank's part of the vocabulary.
"""

import logging
from array import array
from typing import Final

import numpy as np
import torch
from torch import Tensor

from strandline.device.hardware.upload import upload
from strandline.device.sampling.allowed_tokens import forbidden_mask
from strandline.device.sampling.grammar_mask import GuardedMatcher
from strandline.ids import NO_TOKEN
from strandline.records.constraints import StopFinder
from strandline.records.failures import OUTPUT_FAILED
from strandline.records.plan import MAX_STOP_IDS, NewRequest

LOGGER: Final = logging.getLogger(__name__)

NO_STOPS: Final = array("q", [NO_TOKEN] * MAX_STOP_IDS).tobytes()
"""The stop tokens of a request that has none, as the device compares them: int64 each."""


class SamplingState:
    """The sampler's state of one request: its parameters and its tokens so far.

    Args:
        columns: tokens whose logits this rank has.
        tokens_ahead: most tokens that are chosen before the matcher takes them (``num_tokens_ahead``).
    """

    def __init__(
        self,
        new: NewRequest,
        columns: range,
        device: torch.device,
        matcher: GuardedMatcher | None = None,
        stop_finder: StopFinder | None = None,
        tokens_ahead: int = 0,
    ) -> None:
        self.new = new
        self.matcher = matcher
        self.stop_finder = stop_finder
        self.stop_string: str | None = None
        """The stop string that the last token known to the host completes."""
        self.num_stop_tokens = 0
        """The last tokens known to the host that belong to a stop string, or may do so."""
        self.params = new.params
        self.stop_ids = array("q", new.stop_ids).tobytes() + NO_STOPS[8 * len(new.stop_ids) :]
        """Its stop tokens as the device compares them, if there are no more than ``MAX_STOP_IDS``."""
        self.output_ids: list[int] = []
        """Output tokens that the host has received."""
        self.num_sampled = 0
        """Number of sampled tokens; of a step whose tokens the host has not received yet, one."""
        self.num_verified = 0
        """Steps that verified drafts by chance."""
        self._tokens_ahead = tokens_ahead
        self._is_greedy = new.params.is_greedy
        self.has_bans_or_biases = bool(new.bad_words_ids or new.params.min_tokens or new.params.logit_bias)
        self._is_always_adjusted = (
            self.has_bans_or_biases or new.params.has_penalties or new.params.allowed_token_ids is not None
        )
        self.forbidden_P = forbidden_mask(new, columns, device)
        """Tokens that are not among those that the request allows; None: it allows all."""
        self.prompt_mask_P: Tensor | None = None
        self.output_counts_P: Tensor | None = None
        self._first_token = columns.start
        self.num_routed = 0
        """Tokens whose experts the host knows."""
        if new.params.has_penalties:
            held_ids = [token - columns.start for token in new.prompt_ids if token in columns]
            self.prompt_mask_P = torch.zeros(len(columns), dtype=torch.bool, device=device)
            self.prompt_mask_P.index_fill_(0, upload(np.array(held_ids, dtype=np.int64), device), 1)
            self.output_counts_P = torch.zeros(len(columns), dtype=torch.int64, device=device)

    @property
    def is_constrained(self) -> bool:
        """Whether a matcher chooses among the tokens that may come next."""
        return self.matcher is not None and self.matcher.num_free_tokens == 0

    @property
    def is_bound(self) -> bool:
        """Whether a matcher may have to choose one of the next tokens before it has taken those in flight."""
        return self.matcher is not None and self.matcher.num_free_tokens < self._tokens_ahead

    @property
    def is_adjusted(self) -> bool:
        """Whether the next token's logits are changed before one is chosen by temperature and filters."""
        return self._is_always_adjusted or self.is_constrained

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is the likeliest one, whatever came before."""
        return self._is_greedy and not self.is_adjusted

    @property
    def is_independent(self) -> bool:
        """Whether the next tokens can be chosen together (``NewRequest.is_independent``)."""
        return self.new.is_independent and not self.is_bound

    @property
    def is_compared_on_device(self) -> bool:
        """Whether the device alone can tell which drafts agree, and whether one ends the request."""
        return self.is_independent and self.stop_finder is None

    @property
    def wants_hidden_state(self) -> bool:
        """Whether the hidden state from which the next token is sampled is to be returned: that of the prompt."""
        return self.new.params.returns_hidden_state and self.num_sampled == 0

    @property
    def position(self) -> int:
        """The position of the token to sample."""
        return len(self.new.prompt_ids) + self.num_sampled

    def count(self, tokens_N: Tensor, row: int) -> None:
        """Count the token of a row, which the host may not have received yet."""
        self.num_sampled += 1
        if self.output_counts_P is not None:
            last, column_1 = len(self.output_counts_P) - 1, tokens_N[row : row + 1] - self._first_token
            is_held_1 = (column_1 >= 0) & (column_1 <= last)
            self.output_counts_P.index_add_(0, column_1.clamp(0, last), is_held_1.long())

    def append(self, token: int) -> None:
        """Append a token that the host has received."""
        self.output_ids.append(token)
        if self.matcher is not None:
            self.matcher.append(token)
        if self.stop_finder is not None:
            try:
                self.stop_string = self.stop_finder.append(token)
                self.num_stop_tokens = self.stop_finder.num_stop_tokens
            except Exception:  # the text part meets it at the same token, and ends the output with an error
                LOGGER.exception(OUTPUT_FAILED)
                self.stop_finder, self.stop_string, self.num_stop_tokens = None, None, 0

    @property
    def has_ended(self) -> bool:
        """Whether the last token known to the host is a stop token, or completes a stop string."""
        is_stop_token = self.new.stops_at(self.output_ids[-1], len(self.output_ids))
        return is_stop_token or self.stop_string is not None
