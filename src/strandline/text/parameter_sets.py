"""The parameters of a function, by name, for formats that write each one by itself instead of an object.

The schema of a function's parameters may combine others (``allOf``, ``anyOf``, ``oneOf``, ``$ref``). Each way to
fulfil it is a set of parameters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from strandline.text.closed_objects import LISTS, MAPS
from strandline.text.schema_types import referred, value_types

MAX_SETS: Final = 32
"""Sets of one function. If there are more, the combined schemas are left out."""
MAX_SCHEMAS: Final = 256
"""Combined schemas that are read, as references may be cyclic."""
DEFINITIONS: Final = ("$defs", "definitions")

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParameterSet:
    """Parameters that fulfil a schema together."""

    properties: Mapping[str, Any]
    required: frozenset[str]
    others: Any = None
    """Schema of further parameters; False: there are none; None: the schema does not mention them."""

    @property
    def free_values(self) -> Any:
        """Schema of the values of parameters with any name; False: all are listed."""
        if self.properties:
            return False
        return True if self.others is None else self.others


class _TooManyError(Exception):
    """The schema combines too many others."""


def parameter_sets(schema: Schema) -> list[ParameterSet]:
    """Return the sets of parameters that fulfil a schema, at least one."""
    try:
        sets = _Reader(schema).sets(schema)
    except _TooManyError:
        sets = []
    return [*filter(None, map(_complete, sets))] or [_complete(_own(schema)) or ParameterSet({}, frozenset())]


def parameter_types(schema: Schema, name: str) -> frozenset[str] | None:
    """Return the types of a parameter's values; None if the schema says nothing about them."""
    found = [
        value_types(each.properties.get(name, each.free_values), schema)
        for each in parameter_sets(schema)
        if name in each.properties or each.free_values is not False
    ]
    if all(types is None for types in found):
        return None
    return frozenset(type for types in found for type in types or ("string",))


def self_contained(schema: Any, root: Schema) -> Any:
    """Return a part of a schema together with all that it refers to in the root, as a schema of its own."""
    if not isinstance(schema, Mapping):
        return {}
    names: dict[str, str] = {}

    def renamed(reference: Any) -> Any:
        if not isinstance(reference, str) or referred(reference, root) is None:
            return reference  # the compiler reports it
        return f"#/$defs/{names.setdefault(reference, f'r{len(names)}')}"

    found: dict[str, Any] = _with_references(schema, renamed)
    definitions: dict[str, Any] = {}
    while len(definitions) < len(names):
        for reference, name in [*names.items()][len(definitions) :]:
            definitions[name] = _with_references(referred(reference, root), renamed)
    return {**found, "$defs": definitions} if definitions else found


class _Reader:
    """Reads the schemas that a root combines."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_left = MAX_SCHEMAS

    def sets(self, schema: Any) -> list[ParameterSet]:
        """Return the sets that fulfil a schema. Raises a _TooManyError if they are too many."""
        self._num_left -= 1
        if self._num_left < 0:
            raise _TooManyError
        if not isinstance(schema, Mapping):
            return [] if schema is False else [ParameterSet({}, frozenset())]
        if schema.get("type", "object") != "object" and "object" not in schema["type"]:
            return []
        sets = [_own(schema)]
        for alternatives in self._combined(schema):
            others = [each for one in alternatives for each in self.sets(one)]
            sets = [*filter(None, (_joined(*pair) for pair in product(sets, others)))]
            if len(sets) > MAX_SETS:
                raise _TooManyError
        return sets

    def _combined(self, schema: Schema) -> Iterator[Sequence[Any]]:
        """Yield lists of schemas; of each list, one schema must hold as well."""
        if "$ref" in schema:
            yield [referred(schema["$ref"], self._root)]
        if isinstance(every := schema.get("allOf"), list):
            yield from ([one] for one in every)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(some := schema.get(keyword), list):
                yield some


def _own(schema: Schema) -> ParameterSet:
    """Return the parameters that a schema itself lists."""
    properties, required = schema.get("properties"), schema.get("required")
    others = None if "patternProperties" in schema else schema.get("additionalProperties")
    return ParameterSet(
        properties if isinstance(properties, Mapping) else {},
        frozenset(name for name in required if isinstance(name, str)) if isinstance(required, list) else frozenset(),
        None if others is True else others,
    )


def _joined(one: ParameterSet, two: ParameterSet) -> ParameterSet | None:
    """Return the parameters that fulfil two sets; None if none do."""
    names = dict.fromkeys((*one.properties, *two.properties))
    values = {name: [each.properties.get(name, each.others) for each in (one, two)] for name in names}
    required = one.required | two.required
    if any(False in values[name] for name in required & values.keys()):
        return None
    return ParameterSet(
        {name: _every(schemas) for name, schemas in values.items() if False not in schemas},
        required,
        False if False in (one.others, two.others) else _every([one.others, two.others]),
    )


def _every(schemas: Sequence[Any]) -> Any:
    """Return a schema of what fulfils several; None does not mention anything."""
    distinct: list[Any] = []
    distinct += (each for each in schemas if each is not None and each not in distinct)
    return {"allOf": distinct} if len(distinct) > 1 else next(iter(distinct), None)


def _complete(found: ParameterSet) -> ParameterSet | None:
    """Return a set that lists all parameters that it requires; None if it forbids one of them."""
    missing = sorted(found.required - found.properties.keys())
    if missing and found.others is False:
        return None
    others = {} if found.others is None else found.others
    return replace(found, properties={**found.properties, **dict.fromkeys(missing, others)})


def _with_references(schema: Any, renamed: Callable[[Any], Any]) -> Any:
    """Return a schema with other references, and without definitions."""
    if isinstance(schema, list):
        return [_with_references(each, renamed) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "$ref":
            found[keyword] = renamed(value)
        elif keyword in MAPS and isinstance(value, Mapping):
            if keyword not in DEFINITIONS:
                found[keyword] = {name: _with_references(each, renamed) for name, each in value.items()}
        else:
            found[keyword] = _with_references(value, renamed) if keyword in LISTS else value
    return found
