"""Finished responses that later requests continue: those of one API key are not visible to another.

A response holds its own input and output, and names the one before it. Responses that have not been used for the
longest time are dropped first; using one also uses those before it. Bodies are stored as encoded JSON, so that their
size is known and nothing changes them.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from strandline.server.http.error_responses import UnknownPreviousResponseError, UnknownResponseError
from strandline.server.requests.usage_and_logprobs import Json

MAX_RESPONSES: Final = 16_384
BYTES_PER_RESPONSE: Final = 1024
"""Estimated size of a response without its bodies."""
BYTES_PER_ITEM: Final = 256
"""Estimated size of an item's entry in the index."""

_JSON: Final = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class _Entry:
    response: bytes
    input_items: bytes
    previous_id: str | None
    item_ids: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        bodies = len(self.response) + len(self.input_items)
        return bodies + BYTES_PER_RESPONSE + BYTES_PER_ITEM * len(self.item_ids)


class ResponseStore:
    """Responses by owner and id.

    Args:
        max_bytes: maximum size of all; 0: nothing is stored.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._responses_of_items: dict[tuple[str, str], str] = {}
        """Response ids by owner and item id."""

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        """Return the estimated size of all responses."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, owner: str, response: Json, input_items: Sequence[Json]) -> None:
        """Store a response, unless it is larger than the store.

        Args:
            input_items: the request's own, without those of the response that it continues.
        """
        items = [*input_items, *response["output"]]
        entry = _Entry(
            _JSON.encode(response),
            _JSON.encode(input_items),
            response["previous_response_id"],
            tuple(item["id"] for item in items if isinstance(item.get("id"), str)),
        )
        if entry.num_bytes > self._max_bytes:
            return
        key = (owner, response["id"])
        self._entries[key] = entry
        self._num_bytes += entry.num_bytes
        self._responses_of_items.update({(owner, item_id): response["id"] for item_id in entry.item_ids})
        while self._num_bytes > self._max_bytes or len(self._entries) > MAX_RESPONSES:
            self._drop(next(iter(self._entries)))

    def response(self, owner: str, response_id: str) -> Json:
        """Return a response.

        Raises:
            UnknownResponseError: it is not stored.
        """
        found: Json = msgspec.json.decode(self._find(owner, response_id).response)
        return found

    def remove(self, owner: str, response_id: str) -> None:
        """Drop a response. Raises as ``response``."""
        self._find(owner, response_id)
        self._drop((owner, response_id))

    def input_items(self, owner: str, response_id: str) -> list[Json]:
        """Return the items that a response was generated from, those of the responses before it included.

        Raises:
            UnknownResponseError: the response is not stored.
            UnknownPreviousResponseError: one before it is not stored.
        """
        entry = self._find(owner, response_id)
        own: list[Json] = msgspec.json.decode(entry.input_items)
        return [*(self.conversation(owner, entry.previous_id) if entry.previous_id else ()), *own]

    def conversation(self, owner: str, response_id: str) -> list[Json]:
        """Return the items that a request continues: those of a response and of all before it, in order.

        Raises:
            UnknownPreviousResponseError: one of them is not stored.
        """
        turns: list[list[Json]] = []
        next_id: str | None = response_id
        while next_id is not None:
            entry = self._entries.get((owner, next_id))
            if entry is None:
                raise UnknownPreviousResponseError(self._why_unknown(response_id), param="previous_response_id")
            # Used after those that continue it, and so dropped after them.
            self._entries.move_to_end((owner, next_id))
            turns.append([*msgspec.json.decode(entry.input_items), *msgspec.json.decode(entry.response)["output"]])
            next_id = entry.previous_id
        return [item for turn in reversed(turns) for item in turn]

    def item(self, owner: str, item_id: str) -> Json | None:
        """Return an item of a stored response, or of its input; None if no item has this id."""
        response_id = self._responses_of_items.get((owner, item_id))
        entry = self._entries.get((owner, response_id)) if response_id is not None else None
        if response_id is None or entry is None:
            return None
        self._entries.move_to_end((owner, response_id))
        items = [*msgspec.json.decode(entry.response)["output"], *msgspec.json.decode(entry.input_items)]
        return next((item for item in items if item.get("id") == item_id), None)

    def _find(self, owner: str, response_id: str) -> _Entry:
        entry = self._entries.get((owner, response_id))
        if entry is None:
            raise UnknownResponseError(f"Response with id {response_id[:100]!r} not found.")
        self._entries.move_to_end((owner, response_id))
        return entry

    def _drop(self, key: tuple[str, str]) -> None:
        entry = self._entries.pop(key)
        self._num_bytes -= entry.num_bytes
        for item_id in entry.item_ids:
            if self._responses_of_items.get((key[0], item_id)) == key[1]:
                del self._responses_of_items[key[0], item_id]

    def _why_unknown(self, response_id: str) -> str:
        why = "It, or a response before it, may have been dropped" if self.is_on else "--response-store is 0"
        return (
            f"Previous response with id {response_id[:100]!r} not found. {why}; send the whole conversation as input."
        )
