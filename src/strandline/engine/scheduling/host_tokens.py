"""Requests whose tokens must each reach the host before the next one can be computed.

As long as there are any, no step is planned before the tokens of the previous one are known.
"""

from strandline.engine.requests.request import Request
from strandline.records.plan import num_tokens_ahead


class HostTokens:
    """Counts these requests.

    Args:
        draft_tokens: most drafts of a request in a step.
    """

    def __init__(self, draft_tokens: int) -> None:
        self._tokens_ahead = num_tokens_ahead(draft_tokens)
        self._num_requests = 0

    @property
    def are_needed(self) -> bool:
        return self._num_requests > 0

    def add(self, request: Request) -> None:
        """Count a request that is queued."""
        thinking = request.new.thinking
        request.is_bound = thinking is not None and thinking.num_free_tokens < self._tokens_ahead
        self._num_requests += request.needs_host_tokens

    def remove(self, request: Request) -> None:
        """Count a request no longer."""
        self._num_requests -= request.needs_host_tokens

    def update(self, request: Request, is_bound: bool) -> None:
        """Note whether the budget of a request's reasoning may end within the next tokens."""
        self._num_requests -= request.needs_host_tokens
        request.is_bound = is_bound
        self._num_requests += request.needs_host_tokens
