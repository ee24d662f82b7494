"""What the prompt of a request is rendered from, as digests that can be compared with another request's."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2s
from typing import Any, NamedTuple

from strandline.server.requests.usage_and_logprobs import Json
from strandline.text.chat_messages import SYSTEM_ROLES
from strandline.text.picture_placeholders import PLACEHOLDER


class Rendered(NamedTuple):
    """What a prompt is rendered from."""

    model: str
    tools: Sequence[Mapping[str, Any]]
    messages: Sequence[Mapping[str, Any]]
    """Without marks and telemetry; those of the role system that come first are the system prompt."""
    pictures: Sequence[Any]
    """The pictures that placeholders in messages stand for."""
    settings: Any
    """Everything else that a prompt's tokens and their entries in the cache depend on."""

    def digests(self, num_messages: int | None = None) -> Json:
        """Return a digest of each part; of messages after the system prompt those of the first ``num_messages``."""
        start = next((n for n, x in enumerate(self.messages) if x["role"] not in SYSTEM_ROLES), len(self.messages))
        later = self.messages[start:]
        if later and later[-1]["role"] == "assistant":
            later = later[:-1]  # the answer continues it, and comes back as one message
        return {
            "model": self.model,
            "system": self._digest(self.messages[:start]),
            "tools": self._digest(self.tools),
            "settings": self._digest(self.settings),
            "num_messages": len(later),
            "messages": self._digest(later[:num_messages]),
        }

    def _digest(self, value: Any) -> str:
        pictures = {str(number): str(picture) for number, picture in enumerate(self.pictures)}
        text = PLACEHOLDER.sub(lambda found: pictures.get(found[1], ""), json.dumps(value, ensure_ascii=False))
        return blake2s(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
