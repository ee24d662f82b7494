"""Verification of drafts against the tokens that the model samples.

A token is sampled behind the last certain token and then, as long as what is sampled is the draft that stands there,
behind that draft. Each is sampled exactly as without drafts: with the seed of its position, after penalties, bans and
grammars of all tokens before it. So the tokens are those of plain decoding for any sampling parameters; a draft that is
right saves a step, and a wrong one changes nothing.

A draft is accepted with the probability that the model gives it, as by rejection sampling of a drafter that is certain
of its draft (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", algorithm 1).

Shape suffixes: R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from strandline.device.sampler import LogprobTensors, SamplingState, choose_tokens
from strandline.ids import NO_TOKEN
from strandline.kernels.binding import Kernels
from strandline.kernels.sampling.verification import Verdict
from strandline.speculative_config import MAX_DRAFT_TOKENS

WORD: Final = 2**64 - 1


@dataclass(slots=True)
class Verified:
    """A sequence's drafts, and the sampled tokens."""

    index: int
    """The sequence's place in the plan."""
    state: SamplingState
    draft_ids: tuple[int, ...]
    first_row: int
    """The row of the logits behind the token before the drafts; those behind the drafts follow."""
    token_ids: list[int] = field(default_factory=list)
    """The drafts that agree, and the token after them. The last may be a stop token, or complete a stop string."""
    logprobs: list[LogprobTensors] = field(default_factory=list)
    """Log-probabilities of these tokens, where requested."""
    failure: str | None = None
    """Why no token could be chosen: the exception of this sequence."""
    synthetic_rates: Sequence[float] | None = None
    """By place, how often drafts are accepted whatever is sampled, for benchmarks; None: those that agree are."""
    verdicts: list[Verdict] = field(init=False)
    """For each row, the verdict on the draft after it."""

    def __post_init__(self) -> None:
        self.verdicts = [Verdict.COMPARE] * self.num_rows
        if self.synthetic_rates is not None:
            self.state.num_verified += 1
            for place in range(len(self.draft_ids)):
                is_accepted = self._is_accepted_at(place, self.synthetic_rates)
                self.verdicts[place] = Verdict.ACCEPT if is_accepted else Verdict.REJECT

    @property
    def num_rows(self) -> int:
        return len(self.draft_ids) + 1

    def take(self, token: int) -> bool:
        """Append a sampled token; return whether it is a draft behind which another can be sampled."""
        place = len(self.token_ids)
        verdict = self.verdicts[place]
        if verdict is Verdict.ACCEPT:
            token = self.draft_ids[place]
        agrees = verdict is not Verdict.REJECT and place < len(self.draft_ids) and self.draft_ids[place] == token
        self.token_ids.append(token)
        if token == NO_TOKEN:
            return False
        self.state.append(token)
        return agrees and not self.state.has_ended

    def take_all(self, tokens: Sequence[int]) -> None:
        """Append all tokens that a step brought; the drafts among them agree."""
        self.token_ids += tokens
        self.state.num_sampled += len(tokens)
        for token in tokens:
            if token != NO_TOKEN:
                self.state.append(token)

    def _is_accepted_at(self, place: int, rates: Sequence[float]) -> bool:
        """Draw whether a draft behind accepted ones is accepted, given how often drafts at each place are in all."""
        before = rates[place - 1] if place else 1.0
        index = self.state.num_verified * MAX_DRAFT_TOKENS + place
        return draw(self.state.new.seed, index) * before < rates[place]


def draw(seed: int, index: int) -> float:
    """Return a pseudorandom number in ``[0, 1)`` of a seed's sequence.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (SplitMix64). To seed a generator of
    the standard library for each draw takes longer.
    """
    state = (seed + (index + 1) * 0x9E3779B97F4A7C15) & WORD
    state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ state >> 27) * 0x94D049BB133111EB) & WORD
    return ((state ^ state >> 31) >> 11) / 2**53


def sample_and_verify(
    logits_RV: Tensor,
    sequences: Sequence[Verified],
    kernels: Kernels,
) -> None:
    """Sample behind each sequence's certain token and its drafts, as far as these agree. Waits for the device.

    Args:
        logits_RV: a row for each sequence, and one more for each of its drafts.
    """
    remaining = list(sequences)
    while remaining:
        rows = [sequence.first_row + len(sequence.token_ids) for sequence in remaining]
        chosen = choose_tokens(logits_RV[rows], [sequence.state for sequence in remaining], kernels)
        agreeing = []
        for row, (sequence, token) in enumerate(zip(remaining, chosen.tokens_N.tolist(), strict=True)):
            sequence.failure = chosen.failures.get(row)
            if row in chosen.logprobs:
                sequence.logprobs.append(chosen.logprobs[row])
            if sequence.take(token):
                agreeing.append(sequence)
        remaining = agreeing


def verify_chosen(tokens_R: Sequence[int], sequences: Sequence[Verified]) -> None:
    """Take the tokens chosen behind each sequence's certain token and its drafts, as far as these agree.

    Args:
        tokens_R: by row, of sequences whose tokens depend on those before through the logits alone.
    """
    for sequence in sequences:
        for token in tokens_R[sequence.first_row : sequence.first_row + sequence.num_rows]:
            sequence.state.num_sampled += 1
            if not sequence.take(token):
                break


@dataclass(slots=True)
class VerifiedOnDevice:
    """Sequences whose drafts were compared on the device, and the copies of what it found."""

    sequences: list[Verified]
    tokens_T: Tensor
    """Chosen behind each row. Where the host has chosen them already, it does not look here."""
    num_accepted_N: Tensor
    """By row of the sequence, drafts that agree."""
    drafts_ND: Tensor
    """For the next step, by row of the sequence; more of them than are wanted."""
    next_drafts: Sequence[int]
    """How many are wanted of each sequence."""

    def read(self) -> dict[int, tuple[int, ...]]:
        """Take the tokens; return the drafts of sequences by their places in the plan. The device must be done."""
        tokens = self.tokens_T.tolist()
        for sequence, num_accepted in zip(self.sequences, self.num_accepted_N.tolist(), strict=True):
            if not sequence.token_ids:
                sequence.take_all(tokens[sequence.first_row : sequence.first_row + num_accepted + 1])
        rows = zip(self.sequences, self.drafts_ND.tolist(), self.next_drafts, strict=True)
        return {x.index: tuple(t for t in drafts[:count] if t != NO_TOKEN) for x, drafts, count in rows if count}
