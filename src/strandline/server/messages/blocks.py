"""Segments of an answer as Anthropic's content blocks."""

from collections.abc import Iterable

from strandline.server.requests.output_parser import new_call_id
from strandline.server.requests.usage_and_logprobs import Json
from strandline.text.json_calls import parse_json
from strandline.text.segments import Segment, SegmentKind


class Blocks:
    """Builds a message's content blocks and their events."""

    def __init__(self) -> None:
        self.blocks: list[Json] = []
        self._is_open = False
        self._arguments = ""

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def append(self, segments: Iterable[Segment]) -> list[Json]:
        """Append segments; return their events."""
        events: list[Json] = []
        for segment in segments:
            text = segment.text
            match segment.kind:
                case SegmentKind.CALL:
                    empty = {
                        "type": "tool_use",
                        "id": segment.call_id or new_call_id().replace("call_", "toolu_"),
                        "name": text,
                        "input": {},
                    }
                    events += self._open(empty)
                case SegmentKind.ARGUMENTS:
                    self._arguments += text
                    events.append(self._delta({"type": "input_json_delta", "partial_json": text}))
                case SegmentKind.CONTENT:
                    events += self._grow("text", "text", text, {})
                case SegmentKind.REASONING:
                    events += self._grow("thinking", "thinking", text, {"signature": ""})
        return events

    def finish(self) -> list[Json]:
        """Close the last block and return its events. A message has at least one block."""
        events = [] if self.blocks else self._open({"type": "text", "text": ""})
        return events + self._close()

    def _grow(self, kind: str, field: str, text: str, more: Json) -> list[Json]:
        events: list[Json] = []
        if not self._is_open or self.blocks[-1]["type"] != kind:
            events += self._open({"type": kind, field: "", **more})
        self.blocks[-1][field] += text
        return [*events, self._delta({"type": f"{kind}_delta", field: text})]

    def _open(self, block: Json) -> list[Json]:
        events = self._close()
        self.blocks.append(block)
        self._is_open = True
        self._arguments = ""
        index = len(self.blocks) - 1
        return [*events, {"type": "content_block_start", "index": index, "content_block": dict(block)}]

    def _close(self) -> list[Json]:
        if not self._is_open:
            return []
        self._is_open = False
        if self.blocks[-1]["type"] == "tool_use":
            self.blocks[-1]["input"] = _input(self._arguments)
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _input(arguments: str) -> Json:
    """Return a call's arguments as an object, which Anthropic's API requires even if the model wrote none."""
    value = parse_json(arguments or "{}")
    return value if isinstance(value, dict) else {"invalid_json": arguments}
