"""A JSON schema as a list of parts that can be left out: keywords, and entries of keywords that map names to schemas.

A part is named by its path from the root. To leave it out leaves out everything inside of it.
"""

from collections.abc import Collection, Iterator
from typing import Any, Final

from strandline.text.closed_objects import LISTS, MAPS

MAX_PARTS: Final = 4096
"""Parts of a schema that can be left out by themselves; later ones, in preorder, only with a part that holds them."""

Part = tuple[str | int, ...]


def schema_parts(schema: Any) -> list[Part]:
    """Return all parts of a schema, each after the part that holds it."""
    found: list[Part] = []
    for part in _parts(schema, ()):
        if len(found) == MAX_PARTS:
            break
        found.append(part)
    return found


def without_parts(schema: Any, parts: Collection[Part]) -> Any:
    """Return a schema without some of its parts."""
    return _without(schema, frozenset(parts), ())


def _parts(schema: Any, path: Part) -> Iterator[Part]:
    if isinstance(schema, list):
        for index, each in enumerate(schema):
            yield from _parts(each, (*path, index))
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        yield (*path, keyword)
        if keyword in MAPS and isinstance(value, dict):
            for name, each in value.items():
                yield (*path, keyword, name)
                yield from _parts(each, (*path, keyword, name))
        elif keyword in LISTS:
            yield from _parts(value, (*path, keyword))


def _without(schema: Any, left_out: frozenset[Part], path: Part) -> Any:
    if isinstance(schema, list):
        return [_without(each, left_out, (*path, index)) for index, each in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        inner = (*path, keyword)
        if inner in left_out:
            continue
        if keyword in MAPS and isinstance(value, dict):
            names = [name for name in value if (*inner, name) not in left_out]
            found[keyword] = {name: _without(value[name], left_out, (*inner, name)) for name in names}
        else:
            found[keyword] = _without(value, left_out, inner) if keyword in LISTS else value
    return found
