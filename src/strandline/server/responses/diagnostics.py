"""Why a prompt does not begin with that of a stored response: ``prompt_cache_diagnostics``, of OpenAI's Responses API.

What prompts are rendered from is compared, whether or not the cache hit: ``include_cache_account`` says that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from strandline.errors import RequestError
from strandline.server.requests.rendered import Rendered
from strandline.server.requests.usage_and_logprobs import Json

REASONS: Final = (
    ("model", "model_changed"),
    ("tools", "tools_changed"),
    ("settings", "reasoning_effort_changed"),
    ("system", "input_changed"),
    ("messages", "input_changed"),
)
"""Parts of a prompt, and OpenAI's reasons, in the order in which they are compared."""
DEFAULTS: Final = {"mode": "implicit", "ttl": "30m"}
"""What OpenAI's API repeats of options that are not sent."""


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """``prompt_cache_options`` of a request. ``mode`` and ``ttl`` are repeated, and have no effect.

    Args:
        given: the field, as sent.
        prewarm: compute the prompt, and generate nothing.
        comparison_id: the response that the prompt is compared with; None: none.
    """

    given: Mapping[str, Any] | None = None
    prewarm: bool = False
    comparison_id: str | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any] | None) -> "CacheOptions":
        """Read the field.

        Raises:
            RequestError: it is malformed.
        """
        if given is None:
            return cls()
        prewarm, comparison_id = given.get("prewarm"), given.get("comparison_response_id")
        if not isinstance(prewarm, bool | None):
            raise _malformed("prewarm", "true or false", prewarm)
        if comparison_id is not None and not isinstance(comparison_id, str):
            raise _malformed("comparison_response_id", "the id of a response", comparison_id)
        return cls(given, bool(prewarm), comparison_id)

    def repeated(self) -> Json:
        """Return the response's field, if the request has it."""
        return {} if self.given is None else {"prompt_cache_options": {**DEFAULTS, **self.given}}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prompt's comparison with an earlier one.

    Args:
        result: the type of the result, or the reason of a ``cache_miss``.
        num_earlier_tokens: tokens of the earlier prompt.
    """

    result: str
    num_earlier_tokens: int = 0

    @classmethod
    def of(cls, own: Rendered, earlier: Rendered, num_earlier_tokens: int, *, is_compacted: bool) -> "Comparison":
        """Compare what two prompts are rendered from.

        Args:
            is_compacted: an item of the request stands for several earlier ones.
        """
        theirs = earlier.digests()
        ours = own.digests(theirs["num_messages"])
        reason = next((reason for part, reason in REASONS if ours[part] != theirs[part]), "cache_hit")
        if reason == "input_changed" and is_compacted:
            reason = "context_compacted"
        return cls(reason, num_earlier_tokens)

    def diagnostics(self, num_cached_tokens: int) -> Json:
        """Return the response's field.

        Args:
            num_cached_tokens: tokens of the prompt that hit; the other tokens of the earlier prompt were missed.
        """
        if not self.result.endswith(("_changed", "_compacted")):
            return {"type": self.result}
        missed = max(0, self.num_earlier_tokens - num_cached_tokens)
        return {"type": "cache_miss", "reason": self.result, "cache_missed_tokens": missed}


def _malformed(name: str, wanted: str, got: Any) -> RequestError:
    name = f"prompt_cache_options.{name}"
    return RequestError(f"{name} must be {wanted}, got {got!r:.100}", param=name)
