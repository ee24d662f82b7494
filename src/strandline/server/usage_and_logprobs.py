"""Usage and log-probabilities in the shapes of OpenAI's API."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from strandline.records.events import SpeculationStats
from strandline.records.outputs import Logprob, OutputDelta, RequestDelta
from strandline.text.cache_report import account_data
from strandline.text.output_streams import RequestStream

LOWEST_LOGPROB: Final = -9999.0
"""JSON has no infinity."""

Json = dict[str, Any]
Entry = dict[int, Logprob]


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
        "accepted_prediction_tokens_by_position": list(drafts.num_accepted_by_place),
    }


def handed_over(streams: Sequence[RequestStream]) -> Json:
    """Return the field that lets another engine continue the request, if the request is held for it."""
    params = streams[0].handed_over
    return {} if params is None else {"kv_transfer_params": params}


def cache_account(stream: RequestStream) -> Json | None:
    """Return the cache lookup's account. ``queried`` is ``hit`` plus the misses' tokens."""
    return None if stream.account is None else account_data(stream.account.for_callers())


def completion_logprobs(entries: Iterable[tuple[str, Entry | None]], offset: int) -> Json:
    """Return log-probabilities in the shape of completions. As in OpenAI's API, the sampled token is included.

    Args:
        entries: each token's text and log-probabilities, the sampled one first; None for a prompt's first token.
        offset: characters before the first token's text.
    """
    body: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for text, entry in entries:
        found = list(entry.values()) if entry else []
        body["tokens"].append(text)
        body["token_logprobs"].append(_finite(found[0].logprob) if found else None)
        body["top_logprobs"].append(_by_text(found) or None)
        body["text_offset"].append(offset)
        offset += len(text)
    return body


def _by_text(found: Iterable[Logprob]) -> dict[str, float]:
    """Return the tokens' log-probabilities by text. For tokens with the same text (parts of characters), the largest is
    kept: clients compare it with the sampled token's to see whether that was the most likely.
    """
    top: dict[str, float] = {}
    for item in sorted(found, key=lambda item: item.rank):
        top.setdefault(item.decoded_token or "", _finite(item.logprob))
    return top


def chat_logprobs(entries: Iterable[Entry], num_top: int) -> Json:
    """Return log-probabilities in the shape of chat completions."""
    content = []
    for entry in entries:
        chosen = next(iter(entry.values()))
        content.append(
            {**_chat_logprob(chosen), "top_logprobs": [_chat_logprob(e) for e in _most_likely(entry, num_top)]}
        )
    return {"content": content, "refusal": None}


def _chat_logprob(entry: Logprob) -> Json:
    text = entry.decoded_token or ""
    return {"token": text, "logprob": _finite(entry.logprob), "bytes": list(text.encode())}


def _most_likely(entry: Entry, num_top: int) -> list[Logprob]:
    """Return the ``num_top`` most likely, which may not include the sampled one."""
    return [found for found in entry.values() if found.rank <= num_top]


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
