"""Methods of vLLM's ``LLM`` that this one has not, and what to do instead: errors about them say so."""

from collections.abc import Mapping
from typing import Final

_WITHOUT_HEAD: Final = "models with heads for classification and rewards are not supported"

FOREIGN_METHODS: Final[Mapping[str, str]] = {
    "embed": "run 'strandline serve' and send the texts to /v1/embeddings",
    "encode": "run 'strandline serve' and send the texts to /pooling",
    "score": "run 'strandline serve' and send the texts to /score",
    "classify": _WITHOUT_HEAD,
    "reward": _WITHOUT_HEAD,
    "beam_search": "give SamplingParams n, and choose by cumulative_logprob",
    "get_metrics": "each RequestOutput has times and cache_account; a server's metrics are at /metrics",
}


def foreign_method_error(name: str) -> AttributeError:
    """Return the error about an attribute that ``LLM`` has not."""
    text = f"'LLM' object has no attribute {name!r}"
    reason = FOREIGN_METHODS.get(name)
    return AttributeError(text if reason is None else f"{text}: {reason}", name=name)
