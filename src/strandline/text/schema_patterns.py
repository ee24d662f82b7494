"""Rejection of JSON schemas that bind one string to several patterns.

llguidance intersects the patterns, and both compiling and every step then take time that is exponential in their
number. It intersects two schemas that apply to the same value: through ``allOf``, through keywords next to ``$ref``,
``anyOf`` and ``oneOf``, and for properties or items of such schemas.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, Final
from urllib.parse import unquote

from strandline.errors import RequestError

MAX_STEPS: Final = 200_000
"""Maximum comparisons of subschemas: some tenths of a second."""
IN_PLACE: Final = ("allOf", "anyOf", "oneOf")
DATA: Final = ("const", "enum", "default", "examples")

Node = Mapping[str, Any]


def check_patterns(schema: Any) -> None:
    """Raise a RequestError if two different patterns, or two different formats, can hold for the same string."""
    nodes = list(_nodes(schema))
    for keyword in ("pattern", "format"):
        if len({node[keyword] for node in nodes if isinstance(node.get(keyword), str)}) > 1:
            return _Intersections(schema, nodes).check()
    return None


def _nodes(schema: Any) -> Iterator[Node]:
    """Yield all objects in a schema, including objects that are not schemas, such as ``properties``."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending += (inner for name, inner in value.items() if name not in DATA or isinstance(inner, dict))
        elif isinstance(value, list):
            pending += value


class _Intersections:
    """Compares the subschemas that can hold for the same value."""

    def __init__(self, root: Any, nodes: Sequence[Node]) -> None:
        self._root = root
        self._nodes = nodes
        self._reachable: dict[int, list[Node]] = {}
        self._pairs: set[tuple[int, int]] = set()
        self._pending: list[tuple[Node, Node]] = []
        self._steps_left = MAX_STEPS

    def check(self) -> None:
        self._require_plain_references()
        for node in self._nodes:
            groups = [[node], *(self._reach_all(parts) for parts in self._applicators(node))]
            for ones, others in combinations(groups, 2):
                self._add(ones, others)
            self._meet(_values(node.get("properties")), _values(node.get("patternProperties")))
        while self._pending:
            self._compare(*self._pending.pop())

    def _require_plain_references(self) -> None:
        """Reject names of inner schemas, since ``_resolve`` would not resolve references relative to them."""
        if any("$ref" in node for node in self._nodes):
            for node in self._nodes:
                if node is not self._root and any(isinstance(node.get(name), str) for name in ("$id", "id")):
                    raise RequestError("in a JSON schema with a $ref only the outermost schema may have an $id")

    def _applicators(self, node: Node) -> Iterator[list[Any]]:
        """Yield the schemas that apply together with a node's own keywords; of each list, one at a time."""
        if isinstance(node.get("$ref"), str):
            yield [self._resolve(node["$ref"])]
        for name in IN_PLACE:
            parts = node.get(name)
            if isinstance(parts, list):
                yield from ([part] for part in parts) if name == "allOf" else [parts]

    def _meet(self, ones: Sequence[Any], others: Sequence[Any]) -> None:
        """Record that a schema of the first and one of the second may apply to the same value."""
        self._add(self._reach_all(ones), self._reach_all(others))

    def _add(self, ones: Sequence[Node], others: Sequence[Node]) -> None:
        self._spend(len(ones) * len(others))
        for one, other in product(ones, others):
            key = (id(one), id(other))
            if one is not other and key not in self._pairs:
                self._pairs.add(key)
                self._pending.append((one, other))

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise RequestError("the JSON schema combines too many schemas by allOf, $ref, anyOf or oneOf")

    def _compare(self, one: Node, other: Node) -> None:
        for keyword in ("pattern", "format"):
            values = one.get(keyword), other.get(keyword)
            if isinstance(values[0], str) and isinstance(values[1], str) and values[0] != values[1]:
                raise RequestError(
                    f"the JSON schema binds one string to the {keyword}s {values[0][:100]!r} and "
                    f"{values[1][:100]!r}: their intersection may take hours to compile; give one {keyword}"
                )
        ours, theirs = _mapping(one.get("properties")), _mapping(other.get("properties"))
        our_rest, their_rest = _other_properties(one), _other_properties(other)
        for name, schema in ours.items():
            matching = [theirs[name], *_values(other.get("patternProperties"))] if name in theirs else their_rest
            self._meet([schema], matching)
        self._meet(our_rest, [*theirs.values(), *their_rest])
        self._meet(_items(one), _items(other))

    def _reach_all(self, schemas: Sequence[Any]) -> list[Node]:
        return [node for schema in schemas for node in self._reach(schema)]

    def _reach(self, schema: Any) -> list[Node]:
        """Return the schemas that apply to the same value as this one, itself included."""
        if not isinstance(schema, dict):
            return []
        found = self._reachable.get(id(schema))
        if found is None:
            seen: dict[int, Node] = {}
            pending: list[Any] = [schema]
            while pending:
                node = pending.pop()
                if isinstance(node, dict) and id(node) not in seen:
                    seen[id(node)] = node
                    pending += (part for parts in self._applicators(node) for part in parts)
            self._spend(len(seen))
            found = self._reachable[id(schema)] = list(seen.values())
        return found

    def _resolve(self, ref: str) -> Any:
        """Return the target of a reference; None if it does not exist, which llguidance reports."""
        if ref != "#" and not ref.startswith("#/"):
            raise RequestError(f"the $ref {ref[:100]!r} must be '#' or begin with '#/'")
        value = self._root
        for part in ref[2:].split("/") if len(ref) > 1 else ():
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                value = _mapping(value).get(name)
        return value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _values(value: Any) -> list[Any]:
    return list(_mapping(value).values())


def _other_properties(node: Node) -> list[Any]:
    return [*_values(node.get("patternProperties")), node.get("additionalProperties")]


def _items(node: Node) -> list[Any]:
    found: list[Any] = []
    for name in ("items", "prefixItems", "additionalItems"):
        value = node.get(name)
        found += value if isinstance(value, list) else [value]
    return found
