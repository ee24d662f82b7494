"""The bodies that the API gives back, as plain dictionaries in OpenAI's shapes."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from strandline.records.outputs import CompletionOutput, Logprob, RequestOutput
from strandline.text.cache_report import account_data

LOWEST_LOGPROB: Final = -9999.0
"""JSON has no infinity."""

Json = dict[str, Any]
Entry = dict[int, Logprob]


class Growth:
    """What is new of one output since the last look."""

    def __init__(self) -> None:
        self.num_characters = 0
        self._num_tokens = 0
        self._num_logprobs = 0
        self._is_finished = False

    def take(self, output: CompletionOutput) -> tuple[str, list[Entry], bool]:
        """Return the new text, the new tokens' log-probabilities, and whether there is anything to say."""
        text = output.text[self.num_characters :]
        logprobs = (output.logprobs or [])[self._num_logprobs :]
        has_news = bool(text or logprobs) or (output.finish_reason is not None and not self._is_finished)
        self.num_characters += len(text)
        self._num_logprobs += len(logprobs)
        self._is_finished = output.finish_reason is not None
        return text, logprobs, has_news

    def take_token_ids(self, output: CompletionOutput) -> list[int]:
        """Return the tokens since the last call. A token may come before its text, which may need more of them."""
        token_ids = output.token_ids[self._num_tokens :]
        self._num_tokens += len(token_ids)
        return token_ids


def usage(outputs: Sequence[RequestOutput], *, is_batch: bool, with_account: bool) -> Json:
    """Count tokens; a prompt counts once however many outputs it has."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_completion = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    body: Json = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }
    if with_account:
        accounts = [cache_account(output) for output in outputs]
        body["cache"] = accounts if is_batch else accounts[0]
    return body


def usage_so_far(output: RequestOutput, completion: CompletionOutput) -> Json:
    """Count the tokens of a prompt and of one of its outputs, as far as it has come."""
    num_prompt, num_completion = len(output.prompt_token_ids), len(completion.token_ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def cache_account(output: RequestOutput) -> Json | None:
    """Return what the lookup found, and why it found no more. ``queried`` is ``hit`` plus the misses' tokens."""
    if output.cache_account is None:
        return None
    return account_data(output.cache_account.for_callers())


def completion_logprobs(entries: Iterable[tuple[str, Entry | None]], offset: int) -> Json:
    """Return log-probabilities in the completions' shape. As from OpenAI, the chosen token is among the top ones.

    Args:
        entries: each token's text and log-probabilities, the chosen one first; None for a prompt's first token.
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
    """Return the tokens' log-probabilities by text. Of tokens with the same text (parts of characters) the likeliest
    counts: clients compare the chosen token's with the largest, to see whether it was the likeliest.
    """
    top: dict[str, float] = {}
    for item in sorted(found, key=lambda item: item.rank):
        top.setdefault(item.decoded_token or "", _finite(item.logprob))
    return top


def chat_logprobs(entries: Iterable[Entry], num_top: int) -> Json:
    """Return log-probabilities in the chat completions' shape."""
    content = []
    for entry in entries:
        chosen = next(iter(entry.values()))
        content.append(
            {**_chat_logprob(chosen), "top_logprobs": [_chat_logprob(e) for e in _likeliest(entry, num_top)]}
        )
    return {"content": content, "refusal": None}


def _chat_logprob(entry: Logprob) -> Json:
    text = entry.decoded_token or ""
    return {"token": text, "logprob": _finite(entry.logprob), "bytes": list(text.encode())}


def _likeliest(entry: Entry, num_top: int) -> list[Logprob]:
    """Return the ``num_top`` likeliest, without the chosen one if it is not among them."""
    return [found for found in entry.values() if found.rank <= num_top]


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
