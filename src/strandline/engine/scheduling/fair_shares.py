"""Whose request is admitted next when several tenants wait: the one with the least service for its weight.

Service is the number of tokens computed: those of prompts without what was hit, and those generated. Every tenant has a
counter of its service divided by its weight. A tenant that comes back after having had no requests starts from the
least counter of those that have some: it does not save up for later.

Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), the virtual token counter.
"""

from collections import Counter
from collections.abc import Iterable

from strandline.engine.requests.request import Request


class FairShares:
    """Counts the service of tenants."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        """By tenant that has requests: tokens of ended requests and of prompts, divided by its weight."""
        self._num_requests = Counter[str]()

    def add(self, request: Request) -> None:
        """Count a new request of its tenant."""
        tenant = request.submission.tenant
        if not self._num_requests[tenant]:
            self._served[tenant] = min(self._served.values(), default=0.0)
        self._num_requests[tenant] += 1

    def remove(self, request: Request) -> None:
        """Count a request that ends, with what it generated."""
        tenant = request.submission.tenant
        self._num_requests[tenant] -= 1
        if self._num_requests[tenant]:
            self._served[tenant] += len(request.output_ids) / request.submission.weight
        else:
            del self._num_requests[tenant], self._served[tenant]

    def serve(self, request: Request, num_tokens: int) -> None:
        """Count tokens of an admitted request's prompt."""
        asked = request.submission
        self._served[asked.tenant] += num_tokens / asked.weight

    def least_served(self, tenants: Iterable[str], running: Iterable[Request]) -> str:
        """Return the tenant with the least service, that of running requests included; of several, the first one."""
        served = dict.fromkeys(tenants, 0.0)
        for tenant in served:
            served[tenant] = self._served[tenant]
        for request in running:
            asked = request.submission
            if asked.tenant in served:
                served[asked.tenant] += len(request.output_ids) / asked.weight
        return min(served, key=served.__getitem__)
