"""Usage and log-probabilities in the shapes of OpenAI's API."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from strandline.records.events import SpeculationStats
from strandline.records.outputs import Logprob, OutputDelta, RequestDelta
from strandline.text.cache_report import account_data
from strandline.text.output_streams import RequestStream

LOWEST_LOGPROB: Final = -9999.0
"""JSON has no infinity."""

Json = dict[str, Any]
Entry = dict[int, Logprob]
TokenName = Callable[[int, Logprob], str]
"""Returns how a token is shown."""


class ScoredToken(NamedTuple):
    """A token of a prompt or an output."""

    text: str
    offset: int
    """Characters before it in the choice's text, in which parts of a character count once."""
    entry: Entry | None
    """Its log-probability first, then the most likely ones; None for a prompt's first token."""


def text_name(token: int, entry: Logprob) -> str:
    """Return the text of a token; U+FFFD for a part of a character."""
    return entry.decoded_token or ""


def id_name(token: int, entry: Logprob) -> str:
    """Return a token's id as vLLM writes it."""
    return f"token_id:{token}"


def usage(streams: Sequence[RequestStream], *, is_batch: bool, with_account: bool) -> Json:
    """Count the tokens of finished requests; a prompt counts once however many outputs it has."""
    num_prompt = sum(len(stream.prompt_ids) for stream in streams)
    num_cached = sum(stream.account.hit for stream in streams if stream.account is not None)
    num_output = sum(stream.num_output_tokens for stream in streams)
    drafts = sum((stream.speculation for stream in streams), SpeculationStats())
    body = token_counts(num_prompt, num_output, num_cached, drafts)
    if with_account:
        accounts = [cache_account(stream) for stream in streams]
        body["cache"] = accounts if is_batch else accounts[0]
    return body


def usage_so_far(stream: RequestStream, delta: RequestDelta, output: OutputDelta) -> Json:
    """Count the tokens of a prompt and of one of its outputs, up to a delta."""
    return token_counts(len(stream.prompt_ids), output.num_tokens, delta.num_cached_tokens, output.speculation)


def token_counts(num_prompt: int, num_completion: int, num_cached: int, drafts: SpeculationStats) -> Json:
    """Return numbers of tokens as the API's usage."""
    counts: Json = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    if details := draft_counts(drafts):
        counts["completion_tokens_details"] = details
    return counts


def draft_counts(drafts: SpeculationStats) -> Json:
    """Return accepted and rejected drafts in the API's fields, and by position in another; empty without drafts."""
    if not drafts.num_drafts:
        return {}
    return {
        "accepted_prediction_tokens": drafts.num_accepted_tokens,
        "rejected_prediction_tokens": drafts.num_rejected_tokens,
        "accepted_prediction_tokens_by_position": list(drafts.num_accepted_by_position),
    }


def handed_over(streams: Sequence[RequestStream]) -> Json:
    """Return the field that lets another engine continue the request, if the request is held for it."""
    params = streams[0].handed_over
    return {} if params is None else {"kv_transfer_params": params}


def cache_account(stream: RequestStream) -> Json | None:
    """Return the cache lookup's account. ``queried`` is ``hit`` plus the misses' tokens."""
    return None if stream.account is None else account_data(stream.account.for_callers())


def prompt_logprobs(stream: RequestStream, num_top: int) -> list[Json | None]:
    """Return the log-probabilities of a prompt's tokens in vLLM's shape: by token id, None for the first."""
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": _finite(found.logprob), "rank": found.rank, "decoded_token": found.decoded_token}
            for token, found in most_likely(entry, num_top).items()
        }
        for entry in stream.prompt_logprobs or ()
    ]


def num_prompt_top(wanted: int | None, vocab_size: int) -> int:
    """Return how many of the most likely tokens a request wants per position of its prompt; -1: all."""
    return vocab_size if wanted == -1 else wanted or 0


def most_likely(entry: Entry, num_top: int) -> Entry:
    """Return the token itself and the most likely ones."""
    itself = next(iter(entry))
    return {token: found for token, found in entry.items() if token == itself or found.rank <= num_top}


def completion_logprobs(tokens: Iterable[ScoredToken], *, name: TokenName) -> Json:
    """Return log-probabilities in the shape of completions. As in OpenAI's API, the sampled token is included.

    Args:
        name: how tokens are named.
    """
    body: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for text, offset, entry in tokens:
        found = entry or {}
        chosen = next(iter(found.items()), None)
        body["tokens"].append(text if chosen is None else name(*chosen))
        body["token_logprobs"].append(_finite(chosen[1].logprob) if chosen else None)
        body["top_logprobs"].append(_by_name(found, name) or None)
        body["text_offset"].append(offset)
    return body


def _by_name(found: Entry, name: TokenName) -> dict[str, float]:
    """Return the tokens' log-probabilities by name. For tokens with the same text (parts of characters), the largest is
    kept: clients compare it with the sampled token's to see whether that was the most likely.
    """
    top: dict[str, float] = {}
    for token, item in sorted(found.items(), key=lambda pair: pair[1].rank):
        top.setdefault(name(token, item), _finite(item.logprob))
    return top


def chat_logprobs(entries: Iterable[Entry], num_top: int | None, *, name: TokenName = text_name) -> Json:
    """Return log-probabilities in the shape of chat completions.

    Args:
        num_top: most likely tokens per position; None: all that are reported, and the sampled one.
        name: how tokens are named.
    """
    content = []
    for entry in entries:
        chosen, *_ = named = [(found.rank, _chat_logprob(name(token, found), found)) for token, found in entry.items()]
        # The most likely ones may not include the sampled one.
        content.append(
            {**chosen[1], "top_logprobs": [each for rank, each in named if num_top is None or rank <= num_top]}
        )
    return {"content": content, "refusal": None}


def token_logprobs(entries: Iterable[Entry], num_top: int | None) -> Json:
    """Return log-probabilities by token ids, in the shape of ``/inference/v1/generate``.

    Args:
        num_top: most likely tokens per position; None: all that are reported, and the sampled one.
    """
    content = []
    for entry in entries:
        named = [(found.rank, _token_logprob(token, found)) for token, found in entry.items()]
        top = [shown for rank, shown in named if num_top is None or rank <= num_top]
        content.append({**named[0][1], "top_logprobs": top})
    return {"content": content}


def _token_logprob(token: int, entry: Logprob) -> Json:
    return {"token_id": token, "token": id_name(token, entry), "logprob": _finite(entry.logprob), "rank": entry.rank}


def _chat_logprob(name: str, entry: Logprob) -> Json:
    value = (entry.decoded_token or "").encode() if entry.token_bytes is None else entry.token_bytes
    return {"token": name, "logprob": _finite(entry.logprob), "bytes": list(value)}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
