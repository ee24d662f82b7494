"""The choice of a step's tokens: one after each sequence's last certain token, and more after the drafts that agree.

A token is chosen after the last certain token and then, as long as what is chosen is the draft there, after that draft.
Each is sampled exactly as without drafts: with the seed of its position, after penalties, bans and grammars of all
tokens before it. So the tokens are those of plain decoding for any sampling parameters; a draft that is right saves a
step, and a wrong one changes nothing.

A draft is accepted with the probability that the model gives it, as by rejection sampling of a drafter that is certain
of its draft (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", algorithm 1).

Shape suffixes: R rows, N sequences, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from strandline.device.hardware.upload import download
from strandline.device.sampling.sampler import LogprobTensors, sample_rows
from strandline.device.sampling.sampling_state import SamplingState
from strandline.ids import NO_TOKEN, RequestId
from strandline.kernels.binding import Kernels
from strandline.kernels.sampling.verification import Verdict


class Candidates(NamedTuple):
    """The rows of logits from which tokens of a sequence are chosen: after its last certain token, and its drafts."""

    plan_index: int
    """The sequence's index in the plan."""
    state: SamplingState
    draft_ids: tuple[int, ...]
    first_row: int
    """The row after the last certain token; those after the drafts follow."""
    verdicts: tuple[Verdict, ...] = ()
    """For each row, the verdict on the draft after it; empty: those drafts are accepted that are chosen."""

    @property
    def num_rows(self) -> int:
        return 1 + len(self.draft_ids)

    def take(self, taken: list[int], token: int) -> bool:
        """Append a chosen token; return whether it is a draft after which another can be chosen."""
        index = len(taken)
        verdict = self.verdicts[index] if self.verdicts else Verdict.COMPARE
        if verdict is Verdict.ACCEPT:
            token = self.draft_ids[index]
        agrees = verdict is not Verdict.REJECT and index < len(self.draft_ids) and self.draft_ids[index] == token
        taken.append(token)
        if token == NO_TOKEN:
            return False
        self.state.append(token)
        return agrees and not self.state.has_ended


@dataclass(slots=True)
class Chosen:
    """The tokens of a step."""

    candidates: Sequence[Candidates]
    tokens_R: Tensor
    """int64: chosen after each row. Not all of them count, where there are drafts."""
    logprobs: dict[int, list[LogprobTensors]] = field(default_factory=dict)
    """Log-probabilities of a sequence's tokens by its index in the plan, where requested."""
    failures: dict[RequestId, str] = field(default_factory=dict)
    """Why no token could be chosen: an exception concerned the request alone."""
    token_ids: list[list[int]] | None = None
    """For each sequence, the drafts that agree and the token after them, which may be a stop token or complete a stop
    string; None: the device alone knows them."""
    host_tokens_R: Tensor | None = None
    """``tokens_R`` on the host, once the device is done; None: they are not on their way there."""
    num_accepted_N: Tensor | None = None
    """How many drafts of each sequence agree, if the device compares them; None: it does not. Of the last sequences it
    may be missing: they have no drafts."""
    rows: slice | Tensor = field(default_factory=partial(slice, 0))
    """Where the hidden states of ``tokens_R`` are among those of a padded step that verifies drafts."""

    @property
    def known(self) -> dict[int, list[int]]:
        """The tokens of each sequence that the host knows, by its index in the plan."""
        return dict(zip((each.plan_index for each in self.candidates), self.token_ids or (), strict=True))

    @classmethod
    def joined(cls, parts: Mapping[int, "Chosen"]) -> "Chosen":
        """Return what was chosen on a CPU for sequences without drafts, one by one, given their indices in the plan."""
        rows = enumerate(parts.items())
        return cls(
            [part.candidates[0]._replace(plan_index=index, first_row=row) for row, (index, part) in rows],
            torch.cat([torch.empty(0, dtype=torch.int64), *(part.tokens_R for part in parts.values())]),
            {index: tensors for index, part in parts.items() for tensors in part.logprobs.values()},
            {request_id: text for part in parts.values() for request_id, text in part.failures.items()},
        )

    def fetch(self) -> None:
        """Begin to copy to the host what it does not know."""
        if self.token_ids is None and self.host_tokens_R is None:
            self.host_tokens_R = download(self.tokens_R)
        if self.num_accepted_N is not None:
            self.num_accepted_N = download(self.num_accepted_N)

    def read(self) -> list[list[int]]:
        """Return each sequence's tokens, as far as its drafts agree; append them to the sequences' states.

        Waits for the device, unless ``fetch`` was called: then the device must be done.
        """
        if self.token_ids is None:
            tokens = (self.tokens_R if self.host_tokens_R is None else self.host_tokens_R).tolist()
            accepted: list[int] = [] if self.num_accepted_N is None else self.num_accepted_N.tolist()
            accepted += [0] * (len(self.candidates) - len(accepted))
            self.token_ids = []
            for each, num_accepted in zip(self.candidates, accepted, strict=True):
                _, state, draft_ids, row, _ = each
                if draft_ids and self.num_accepted_N is None:
                    taken = _compared(each, tokens[row:])
                else:
                    taken = tokens[row : row + num_accepted + 1]
                    state.num_sampled += num_accepted
                    for token in taken:
                        if token != NO_TOKEN:
                            state.append(token)
                self.token_ids.append(taken)
        return self.token_ids


def _compared(each: Candidates, tokens: Sequence[int]) -> list[int]:
    """Take chosen tokens as far as the drafts before them agree."""
    taken = list[int]()
    while each.take(taken, tokens[len(taken)]):
        each.state.num_sampled += 1
    return taken


def choose(
    logits_RV: Tensor,
    candidates: Sequence[Candidates],
    kernels: Kernels,
    *,
    positions_R: Tensor | None = None,
    greedy_R: Tensor | None = None,
) -> Chosen:
    """Choose the tokens of a step.

    Waits for the device where a choice needs those before: of drafts, unless all sequences are independent.

    Args:
        logits_RV: a row for each sequence, and one more for each of its drafts; may be overwritten.
        positions_R: positions of the tokens to choose; None: the states know them.
        greedy_R: the likeliest tokens, if they are known; may be overwritten.
    """
    if len(logits_RV) > len(candidates) and not all(each.state.is_independent for each in candidates):
        return _choose_in_turn(logits_RV, candidates, kernels)
    states = [each.state for each in candidates for _ in range(each.num_rows)]
    tokens_R, logprobs, failures = sample_rows(logits_RV, states, kernels, position_N=positions_R, greedy_N=greedy_R)
    for each in candidates:
        each.state.count(tokens_R, each.first_row)
    return Chosen(
        candidates,
        tokens_R,
        {candidates[row].plan_index: [tensors] for row, tensors in logprobs.items()},
        {states[row].new.request_id: text for row, text in failures.items()},
    )


def _choose_in_turn(logits_RV: Tensor, candidates: Sequence[Candidates], kernels: Kernels) -> Chosen:
    """Choose one token of each sequence after the other, as far as the drafts before them agree."""
    chosen = Chosen(candidates, logits_RV.new_empty(0), token_ids=[[] for _ in candidates])
    remaining = list(zip(candidates, chosen.token_ids or (), strict=True))
    while remaining:
        rows = [each.first_row + len(taken) for each, taken in remaining]
        singles = [each._replace(draft_ids=(), first_row=row) for row, (each, _) in enumerate(remaining)]
        found = choose(logits_RV[rows], singles, kernels)
        chosen.failures |= found.failures
        for index, tensors in found.logprobs.items():
            chosen.logprobs.setdefault(index, []).extend(tensors)
        remaining = [
            (each, taken)
            for (each, taken), token in zip(remaining, found.tokens_R.tolist(), strict=True)
            if each.take(taken, token)
        ]
    return chosen
