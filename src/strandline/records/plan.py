"""One step as data: what the scheduler decides, the executor runs, and what comes back.

A plan is frozen and owns its data: enough to run the step in another process from its bytes, and unchanged when the
scheduler and the cache go on. The same holds for a result.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from strandline.ids import NO_TOKEN, NULL_LOG, NULL_SLOT, LogId, PendingToken, RequestId, SlotId
from strandline.records.actions import Action, Completion
from strandline.records.pictures import Picture, PictureSpan
from strandline.records.reasoning_rules import ReasoningRules, ThinkingBudget
from strandline.records.sampling_params import SamplingParams

MAX_STOP_IDS: Final = 8
"""Stop tokens of a request that a device compares with what it sampled; of a request with more the host must."""


def num_tokens_ahead(draft_tokens: int) -> int:
    """Return how many tokens a sequence may get before the host chooses one: those of a step in flight and the next.

    Args:
        draft_tokens: most drafts of a sequence in a step.
    """
    return 2 * (1 + draft_tokens)


class SequencePlan(NamedTuple):
    """What one sequence does in the step."""

    request_id: RequestId
    start: int
    """First token to compute. ``start == end``: nothing; the next token is sampled from ``state_src``."""
    end: int
    token_ids: tuple[int, ...]
    """Tokens ``[start, end)``. One of a picture is ``FIRST_VIRTUAL_ID`` plus the row of the memory of encoded pictures
    that has its embedding; so is ``next_id``."""
    block_table: bytes
    """The sequence's blocks in order, int32 each."""
    kv_start: int
    """Keys and values before this position are in shared blocks: not written."""
    state_src: SlotId
    state_dst: SlotId
    cuts: tuple[tuple[int, SlotId], ...]
    """Position and slot of each snapshot to emit in passing."""
    is_sampled: bool
    """Whether the step ends at the sequence's last token, so that a next one is sampled."""
    pending: PendingToken
    """Whether ``token_ids`` is a placeholder, because the token is only on the device."""
    is_prefill: bool
    """Whether the prefill kernels compute it even if it is a single token: deterministic, all of a prompt's are."""
    log: LogId
    """The log that the step reads, and writes its token or drafts to; the null log: none."""
    num_logged: int
    """Tokens in the log, the last ones before ``start``."""
    num_folded: int
    """Tokens that the step folds into ``state_dst``, counted from the position of the state in ``state_src``.

    0: the step's token is only appended to the log. ``num_logged`` plus the step's tokens: all of them. With drafts:
    all tokens before the drafts.
    """
    num_drafts: int = 0
    """The last tokens of ``token_ids`` that are drafts. A token is sampled after the token before them, and after
    each of them as long as the drafts agree with what is sampled."""
    window_blocks: tuple[bytes, ...] = ()
    """For each size of windows, the index of the first of the sequence's window blocks, then these, int32 each."""
    next_id: int = NO_TOKEN
    """The token after ``end``, if it is known. Where a draft layer runs, every sequence that is not sampled has one."""
    next_drafts: int = 0
    """Tokens that the draft layer drafts for the next step."""
    rotary_delta: int = 0
    """What pictures before all of ``pictures`` add to positions for rotary embeddings: 0 or less."""
    pictures: tuple[PictureSpan, ...] = ()
    """Pictures with a token in ``[start - 1, end]``, in order."""

    @property
    def is_decode(self) -> bool:
        """Whether the decode kernels compute it: one token, no cut, not to be prefilled."""
        return self.end - self.start == 1 and not self.cuts and not self.is_prefill

    @property
    def num_certain(self) -> int:
        """Tokens before the drafts."""
        return len(self.token_ids) - self.num_drafts

    @property
    def has_own_state(self) -> bool:
        """Whether it reads no shared snapshot."""
        return self.state_src in (NULL_SLOT, self.state_dst)

    @property
    def reads_stored(self) -> bool:
        """Whether a draft layer reads the stored hidden state before it, whose next token is the sequence's first.

        It does after a shared snapshot, unless that token is pending: then the step before has read it.
        """
        return not self.has_own_state and not self.pending

    @property
    def is_plain(self) -> bool:
        """Whether it computes as if there were no drafts: none to verify, none in its log, none to make."""
        return not (self.num_drafts or self.next_drafts or (self.log and not self.is_decode))

    @property
    def is_verification(self) -> bool:
        """Whether it computes its certain token and drafts alone."""
        return self.end - self.start == 1 + self.num_drafts and not self.cuts and self.is_sampled

    def stateless(self, start: int, token_ids: tuple[int, ...], kv_start: int) -> "SequencePlan":
        """Return the plan of tokens that a drafter computes in the sequence's blocks, from ``start`` on."""
        return self._replace(
            start=start,
            end=start + len(token_ids),
            token_ids=token_ids,
            kv_start=kv_start,
            cuts=(),
            pending=PendingToken.NONE,
            is_prefill=False,
            log=NULL_LOG,
            num_logged=0,
            num_drafts=0,
            window_blocks=(),
        )


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What an executor needs of a request beyond its tokens in the step."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    """Tokens that end the request; banned until ``min_tokens`` are out."""
    bad_words_ids: tuple[tuple[int, ...], ...]
    hidden_ids: frozenset[int] | None = None
    """Tokens that the text in which stop strings are searched leaves out; None: those of the parameters."""
    reasoning: ReasoningRules | None = None
    """The rules of the reasoning, in which stop strings do not hold; None: they hold everywhere."""
    thinking: ThinkingBudget | None = None
    """The budget of the reasoning; None: it has none."""
    adapter: str = ""
    """Digest of the LoRA adapter that computes it; "": none."""

    def stops_at(self, token_id: int, num_output_tokens: int) -> bool:
        """Whether a token ends the request as its output's token of that number, counted from 1."""
        return token_id in self.stop_ids and num_output_tokens > self.params.min_tokens

    @property
    def needs_host_tokens(self) -> bool:
        """Whether every token must reach the host before the next one can be computed."""
        # What is fetched of experts is named by positions, which the host must know.
        params = self.params
        return params.needs_host_tokens or params.returns_routed_experts or len(self.stop_ids) > MAX_STOP_IDS

    @property
    def is_independent(self) -> bool:
        """Whether next tokens can be chosen together: each depends on those before through the logits alone."""
        params = self.params
        has_history = params.has_penalties or params.min_tokens or params.logit_bias or self.bad_words_ids
        has_history = has_history or params.allowed_token_ids is not None
        is_chosen_by_host = params.structured_outputs is not None or params.logprobs is not None
        return not (has_history or is_chosen_by_host) and len(self.stop_ids) <= MAX_STOP_IDS


class PictureToEncode(NamedTuple):
    """A picture that the vision tower encodes before the step."""

    picture: Picture
    row: int
    """Row of the memory of encoded pictures that takes the embedding of its first token; the others follow."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the whole batch."""

    sequences: tuple[SequencePlan, ...]
    actions: tuple[Action, ...]
    """Copies and moves to carry out first, in order."""
    new: tuple[NewRequest, ...]
    """Requests that the executor has not heard of yet."""
    gone: tuple[RequestId, ...]
    """Requests that have ended, to be forgotten."""
    pictures: tuple[PictureToEncode, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(sequence.end - sequence.start for sequence in self.sequences)

    @property
    def num_prefilled_tokens(self) -> int:
        """The number of tokens of prompts."""
        return sum(x.end - x.start for x in self.sequences if x.end - x.start > 1 + x.num_drafts)


class TokenLogprobs(NamedTuple):
    """Log-probability of one token, and of those reported with it: the likeliest, or those that the request names."""

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token."""
    reported_ids: tuple[int, ...]
    reported_logprobs: tuple[float, ...]
    reported_ranks: tuple[int, ...]


class RoutedTokens(NamedTuple):
    """The experts that tokens of a sequence are routed to."""

    start: int
    """Position of the first of these tokens. What was said before of these and later ones holds no more."""
    experts: bytes
    """The experts of each token, as ``RoutingShape`` says."""
    token_bytes: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the step produced, in the order of the plan's sequences."""

    token_ids: tuple[tuple[int, ...], ...]
    """The sampled tokens: none, one, or with drafts several; ``NO_TOKEN`` where no token could be sampled."""
    logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Those of the sampled tokens by index of the sequence, where asked for."""
    prompt_logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By index: of the prompt's tokens ``[start + 1, end + 1)`` as far as they are the prompt's."""
    drafts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """For the next step, by index of the sequence."""
    failures: Mapping[RequestId, str] = field(default_factory=dict)
    """Requests that an exception concerned alone, and its text. Other results of theirs are discarded."""
    stop_strings: Mapping[int, str] = field(default_factory=dict)
    """By index: the stop string that the last of the sampled tokens completes."""
    num_stop_tokens: Mapping[int, int] = field(default_factory=dict)
    """By index: the last tokens that belong to a stop string which the text leaves out, or may turn out to."""
    is_bound: Mapping[int, bool] = field(default_factory=dict)
    """By index, of sequences with a budget of reasoning: whether the host has to choose one of the next tokens."""
    hidden_states: Mapping[int, bytes] = field(default_factory=dict)
    """Final hidden states of prompts' last tokens by index, where asked for: float32 of the machine."""
    routed: Mapping[int, RoutedTokens] = field(default_factory=dict)
    """Experts of tokens by index of the sequence, where asked for."""
    completions: tuple[Completion, ...] = ()
    """Transfers that have ended since the last result, in any order."""
