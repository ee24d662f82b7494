"""Methods of vLLM's ``LLM`` that this one has not, and what to do instead: errors about them say so."""

from collections.abc import Mapping
from typing import Final

_IN_THREADS: Final = "call generate or chat in several threads: their requests run together"
_NO_MODEL: Final = "the model in the engine's processes is not accessible"
_PROFILER: Final = "use the device's profiler around the process; each RequestOutput has times"
_WITHOUT_HEAD: Final = "models with heads for classification and rewards are not supported"

FOREIGN_METHODS: Final[Mapping[str, str]] = {
    "embed": "run 'strandline serve' and send the texts to /v1/embeddings",
    "encode": "run 'strandline serve' and send the texts to /pooling",
    "score": "run 'strandline serve' and send the texts to /score",
    "classify": _WITHOUT_HEAD,
    "reward": _WITHOUT_HEAD,
    "beam_search": "give SamplingParams n, and choose by cumulative_logprob",
    "enqueue": _IN_THREADS,
    "enqueue_chat": _IN_THREADS,
    "wait_for_completion": _IN_THREADS,
    "collective_rpc": _NO_MODEL,
    "apply_model": _NO_MODEL,
    "start_profile": _PROFILER,
    "stop_profile": _PROFILER,
    "release_kv_cache_memory": "call sleep, and wake_up(['weights'])",
    "reset_mm_cache": "call reset_prefix_cache: pictures are cached with prefixes",
    "get_world_size": "the number of ranks is config.tensor_parallel_size",
    "get_metrics": "each RequestOutput has times and cache_account; a server's metrics are at /metrics",
}


def foreign_method_error(name: str) -> AttributeError:
    """Return the error about an attribute that ``LLM`` has not."""
    text = f"'LLM' object has no attribute {name!r}"
    reason = FOREIGN_METHODS.get(name)
    return AttributeError(text if reason is None else f"{text}: {reason}", name=name)
