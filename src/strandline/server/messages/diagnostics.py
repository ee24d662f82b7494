"""Why a prompt does not begin with an earlier one: ``diagnostics``, of Anthropic's API.

What prompts are rendered from is compared, without marks and clients' telemetry, whether or not the cache hit:
``include_cache_account`` says that. Digests of each request with the field are stored under the id of its response.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from strandline.errors import RequestError
from strandline.server.http.error_responses import UnknownResponseError
from strandline.server.requests.rendered import Rendered
from strandline.server.requests.response_store import ResponseStore
from strandline.server.requests.usage_and_logprobs import Json

REASONS: Final = (("model", "model_changed"), ("system", "system_changed"), ("tools", "tools_changed"))
"""Parts that differ as a whole, and Anthropic's reasons, in the order in which they are compared."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A request's comparison with an earlier one.

    Args:
        owner: whose digests are stored and compared.
        rendered: what the request's prompt is rendered from; None: nothing is asked for.
        previous_id: the response to the earlier request; None: there was none.
    """

    store: ResponseStore
    owner: str
    rendered: Rendered | None = None
    previous_id: str | None = None

    def keep(self, message_id: str, num_prompt_tokens: int) -> None:
        """Store the request's digests for the one after it."""
        if self.rendered is not None:
            entry = {**self.rendered.digests(), "num_tokens": num_prompt_tokens}
            self.store.add(self.owner, {"id": message_id, "previous_response_id": None, "output": [], **entry}, ())

    def result(self, num_cached_tokens: int) -> Json:
        """Return the response's field, if the request asks for it.

        Args:
            num_cached_tokens: tokens of the prompt that hit; the other tokens of the earlier prompt were missed.
        """
        if self.rendered is None:
            return {}
        if self.previous_id is None:
            return {"diagnostics": None}
        reason = _reason(self.rendered, self.store, self.owner, self.previous_id, num_cached_tokens)
        return {"diagnostics": None if reason is None else {"cache_miss_reason": reason}}


def read_previous_id(diagnostics: Mapping[str, Any]) -> str | None:
    """Return the response that a request is to be compared with; None: none.

    Raises:
        RequestError: the field is malformed.
    """
    previous_id = diagnostics.get("previous_message_id")
    if previous_id is not None and not isinstance(previous_id, str):
        raise RequestError(
            f"diagnostics.previous_message_id must be the id of a response or null, got {previous_id!r:.100}",
            param="diagnostics.previous_message_id",
        )
    return previous_id


def _reason(
    rendered: Rendered, store: ResponseStore, owner: str, previous_id: str, num_cached_tokens: int
) -> Json | None:
    """Return the first difference from an earlier request, in Anthropic's terms; None: there is no difference."""
    if not store.is_on:
        return {"type": "unavailable"}
    try:
        earlier = store.response(owner, previous_id)
    except UnknownResponseError:
        return {"type": "previous_message_not_found"}
    own = rendered.digests(earlier["num_messages"])
    missed = {"cache_missed_input_tokens": max(0, earlier["num_tokens"] - num_cached_tokens)}
    for part, reason in REASONS:
        if own[part] != earlier[part]:
            return {"type": reason, **missed}
    if own["settings"] != earlier["settings"]:
        return {"type": "unavailable"}
    return None if own["messages"] == earlier["messages"] else {"type": "messages_changed", **missed}
