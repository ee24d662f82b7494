"""States before stop strings: an answer's text ends there, and the next turn continues that.

While the end of an output may be the beginning of a stop string, the cache keeps the state before it.
"""

from collections.abc import Sequence

from strandline.cache import PrefixCache
from strandline.engine.requests.request import Request


def note_stop_tokens(
    cache: PrefixCache,
    request: Request,
    num_stop_tokens: int,
    stop_string: str | None,
    under_way: Sequence[Request],
) -> None:
    """Keep or drop a request's state before the last tokens of its output.

    Args:
        num_stop_tokens: how many of them belong to a stop string, or may do so.
        stop_string: the one that ends the request; None: it goes on, or has ended in another way.
        under_way: the requests of a step that has been planned and is not committed: it changes their states.
    """
    lease, position = request.lease, request.num_prompt_tokens + len(request.output_ids) - num_stop_tokens
    if stop_string is not None:
        request.shared_end = position
    elif lease is None or request.finish_reason is not None:
        return
    elif num_stop_tokens:
        if request not in under_way:
            cache.keep_fallback(lease, position)
    else:
        cache.drop_fallback(lease)
