"""Conversations that ``/v1/messages`` holds between requests: ``thread``, of Anthropic's beta ``message-threads``.

A request with a thread of the type ``create`` sends the whole conversation, and one of the type ``continue`` only what
follows the response that it names. The system prompt and the tools are those of the first request. The prompt is the
same as that of the whole conversation, so it hits the cache alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strandline.errors import RequestError
from strandline.server.http.error_responses import ThreadError, UnknownPreviousResponseError
from strandline.server.requests.request_bodies import check_unicode
from strandline.server.requests.response_store import ResponseStore
from strandline.server.requests.usage_and_logprobs import Json
from strandline.text.chat_messages import MARK

FIXED: Final = ("system", "tools")
"""Fields of a conversation that a request which continues it does not send."""
REPLAY: Final = "send the whole conversation with thread {'type': 'create'}"


@dataclass(frozen=True, slots=True)
class Thread:
    """The conversation that a request belongs to.

    Args:
        owner: whose conversations these are.
        own: the request's messages.
        head: system prompt and tools of the conversation.
        is_kept: the response is stored, to be continued.
        earlier: messages before the request's.
        previous_id: the response that the request continues.
    """

    store: ResponseStore
    owner: str
    own: Sequence[Json]
    head: Json
    is_kept: bool = False
    earlier: Sequence[Json] = ()
    previous_id: str | None = None

    def keep(self, message_id: str, content: Sequence[Json]) -> None:
        """Store a finished response, if the request asks for that.

        Marks are left out: their snapshots are taken, and later requests may set as many again.
        """
        if not self.is_kept:
            return
        answer = {"role": "assistant", "content": list(content)}
        response = {"id": message_id, "previous_response_id": self.previous_id, "output": [answer]}
        first = () if self.previous_id else (_without_marks(self.head),)
        self.store.add(self.owner, response, [*first, *(_without_marks(message) for message in self.own)])


def read_thread(
    thread: Mapping[str, Any] | None,
    fields: Mapping[str, Any],
    messages: Sequence[Json],
    store: ResponseStore,
    owner: str,
) -> Thread:
    """Return the conversation that a request belongs to.

    Args:
        thread: the request's field.
        fields: the request's system prompt and tools.
        messages: those of the request.

    Raises:
        RequestError: the field is malformed.
        ThreadError: the conversation is not stored, or cannot be, or the request changes what is fixed.
    """
    owner = f"{owner}/threads"  # not found below /v1/responses
    if thread is None:
        return Thread(store, owner, messages, dict(fields))
    check_unicode({**fields, "messages": messages})
    match thread:
        case {"type": "create"}:
            if not store.is_on:
                raise ThreadError(
                    "thread is not supported: --response-store is 0; send the whole conversation without thread",
                    "thread_unsupported_request",
                )
            return Thread(store, owner, messages, dict(fields), is_kept=True)
        case {"type": "continue", "previous_message_id": str(previous_id)}:
            head, *earlier = _stored(store, owner, previous_id)
            if changed := [name for name in FIXED if fields[name] and _without_marks(fields[name]) != head[name]]:
                raise ThreadError(
                    f"{' and '.join(changed)} cannot change in a thread; send those of its first request, none, or "
                    f"{REPLAY}",
                    "thread_fingerprint_mismatch",
                )
            return Thread(store, owner, messages, head, True, earlier, previous_id)
        case _:
            raise RequestError(
                "thread must be {'type': 'create'} or {'type': 'continue', 'previous_message_id': …}, got "
                f"{dict(thread)!r:.100}",
                param="thread",
            )


def _stored(store: ResponseStore, owner: str, previous_id: str) -> list[Json]:
    """Return a conversation's head and messages. Raises ``ThreadError``: it is not stored."""
    try:
        return store.conversation(owner, previous_id)
    except UnknownPreviousResponseError as error:
        why = "it may have been dropped" if store.is_on else "--response-store is 0"
        raise ThreadError(
            f"no thread is stored for the message {previous_id[:100]!r}: {why}; {REPLAY}", "thread_not_found"
        ) from error


def _without_marks(value: Any) -> Any:
    """Return a message, a block or a tool without cache marks, and those inside it."""
    if isinstance(value, list | tuple):
        return [_without_marks(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        name: _without_marks(item) if name in ("content", "source", *FIXED) else item
        for name, item in value.items()
        if name != MARK
    }
