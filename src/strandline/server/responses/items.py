"""Output items of OpenAI's Responses API, and their events."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Final
from uuid import uuid4

from strandline.server.requests.text_logprobs import TextLogprobs
from strandline.server.requests.usage_and_logprobs import Json
from strandline.server.responses.custom_input import CustomInput
from strandline.server.responses.tools import SEARCH, ToolName
from strandline.text.json_calls import parse_json
from strandline.text.segments import Segment, SegmentKind

FUNCTION_CALL: Final = "function_call"
CUSTOM_CALL: Final = "custom_tool_call"
SEARCH_CALL: Final = "tool_search_call"
CALLS: Final = (FUNCTION_CALL, CUSTOM_CALL, SEARCH_CALL)


class Items:
    """Builds a response's output items and their events.

    Args:
        tool_of: returns the client's name of a function that the model calls.
        logprobs: log-probabilities of the output's tokens; empty: the client has not asked for them.
        seal: encrypts reasoning for clients that send it back; None: the client has not asked for it.
    """

    def __init__(
        self,
        tool_of: Callable[[str], ToolName],
        logprobs: TextLogprobs,
        seal: Callable[[str], str] | None = None,
    ) -> None:
        self.items: list[Json] = []
        self._tool_of = tool_of
        self._logprobs = logprobs
        self._seal = seal
        self._custom_input = CustomInput()
        self._search = ""
        """Arguments of the search that is open."""
        self._is_open = False

    def append(self, segments: Iterable[Segment]) -> list[Json]:
        """Append segments; return their events."""
        events: list[Json] = []
        for segment in segments:
            if segment.kind is SegmentKind.CALL:
                events += self._open_call(self._tool_of(segment.text), segment.call_id or _name("call"))
                continue
            if segment.kind is SegmentKind.CONTENT:
                events += self._need("message")
            elif segment.kind is SegmentKind.REASONING:
                events += self._need("reasoning")
            events += self._grow(segment)
        return events

    def finish(self, status: str) -> list[Json]:
        """Close the last item and return its events. A response has at least one item.

        Args:
            status: status of the last item.
        """
        events = self._need("message") if not self.items else []
        return events + self._close(status)

    @property
    def _last(self) -> Json:
        return self.items[-1]

    def _location(self) -> Json:
        location: Json = {"item_id": self._last["id"], "output_index": len(self.items) - 1}
        return location if self._last["type"] in CALLS else {**location, "content_index": 0}

    def _need(self, kind: str) -> list[Json]:
        """Open an item of a kind unless it is open."""
        if self._is_open and self._last["type"] == kind:
            return []
        if kind == "message":
            item: Json = {"id": _name("msg"), "type": kind, "status": "in_progress", "role": "assistant", "content": []}
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._logprobs.begin()
        else:
            item = {"id": _name("rs"), "type": kind, "status": "in_progress", "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        events = self._open(item)
        item["content"].append(part)
        return [*events, {"type": "response.content_part.added", **self._location(), "part": deepcopy(part)}]

    def _open(self, item: Json) -> list[Json]:
        events = self._close("completed")
        self.items.append(item)
        self._is_open = True
        shown = {**item, "content": []} if "content" in item else dict(item)
        return [*events, {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": shown}]

    def _open_call(self, tool: ToolName, call_id: str) -> list[Json]:
        self._custom_input, self._search = CustomInput(), ""
        called: Json = {"status": "in_progress", "call_id": call_id}
        if tool.kind == SEARCH:
            return self._open(
                {"id": _name("tsc"), "type": SEARCH_CALL, **called, "execution": "client", "arguments": {}}
            )
        called |= {"name": tool.name, **({} if tool.namespace is None else {"namespace": tool.namespace})}
        if tool.kind == "custom":
            return self._open({"id": _name("ctc"), "type": CUSTOM_CALL, **called, "input": ""})
        return self._open({"id": _name("fc"), "type": FUNCTION_CALL, **called, "arguments": ""})

    def _grow(self, segment: Segment) -> list[Json]:
        item, text = self._last, segment.text
        if item["type"] == FUNCTION_CALL:
            item["arguments"] += text
            return [{"type": "response.function_call_arguments.delta", **self._location(), "delta": text}]
        if item["type"] == CUSTOM_CALL:
            return self._grow_input(self._custom_input.feed(text))
        if item["type"] == SEARCH_CALL:
            self._search += text
            return []
        part = item["content"][0]
        part["text"] += text
        more: Json = {}
        if part["type"] == "output_text":
            more["logprobs"] = self._logprobs.take(segment.spans)
            part["logprobs"] += more["logprobs"]
        return [{"type": f"response.{part['type']}.delta", **self._location(), "delta": text, **more}]

    def _grow_input(self, text: str) -> list[Json]:
        if not text:
            return []
        self._last["input"] += text
        return [{"type": "response.custom_tool_call_input.delta", **self._location(), "delta": text}]

    def _close(self, status: str) -> list[Json]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self._last
        item["status"] = status
        events: list[Json] = []
        if item["type"] == FUNCTION_CALL:
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append({"type": "response.function_call_arguments.done", **self._location(), **done})
        elif item["type"] == CUSTOM_CALL:
            events += self._grow_input(self._custom_input.finish())
            events.append({"type": "response.custom_tool_call_input.done", **self._location(), "input": item["input"]})
        elif item["type"] == SEARCH_CALL:
            arguments = parse_json(self._search)
            item["arguments"] = arguments if isinstance(arguments, dict) else {}
        else:
            part = item["content"][0]
            if part["type"] == "reasoning_text" and self._seal is not None:
                item["encrypted_content"] = self._seal(part["text"])
            more: Json = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
            done = {"text": part["text"], **more}
            events.append({"type": f"response.{part['type']}.done", **self._location(), **done})
            events.append({"type": "response.content_part.done", **self._location(), "part": part})
        return [*events, {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}]


def _name(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"
