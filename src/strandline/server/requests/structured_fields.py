"""Fields of OpenAI's and vLLM's APIs that request structured outputs."""

from collections.abc import Mapping
from typing import Any, Final

from strandline.errors import RequestError
from strandline.records.sampling_params import STRUCTURED_OUTPUTS, StructuredOutputsParams

GUIDED: Final[Mapping[str, str]] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older fields, and their names in ``structured_outputs``."""


def binds_whole_answer(structure: StructuredOutputsParams) -> bool:
    """Return whether a structure holds for all of an answer, calls included: a response format is one of its text."""
    return structure.origin in (STRUCTURED_OUTPUTS, *GUIDED)


def structure_of(fields: Mapping[str, Any], format_name: str = "response_format") -> StructuredOutputsParams | None:
    """Return the structure requested by ``response_format``, ``structured_outputs`` or ``guided_…``.

    Args:
        format_name: the field that the API has instead of ``response_format``.

    Raises:
        RequestError: one of them is wrong, or there are several.
    """
    found: dict[str, StructuredOutputsParams | None] = {}
    if fields.get("structured_outputs") is not None:
        found["structured_outputs"] = StructuredOutputsParams.from_mapping(fields["structured_outputs"])
    if fields.get(format_name) is not None:
        found[format_name] = structure_of_format(fields[format_name], format_name)
    for field, name in GUIDED.items():
        if fields.get(field) is not None:
            pattern = fields.get("guided_whitespace_pattern")
            values = {name: fields[field], "whitespace_pattern": pattern}
            found[field] = StructuredOutputsParams.from_mapping(values, field)
    given = {name: structure for name, structure in found.items() if structure is not None}
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} cannot be combined; give one")
    return next(iter(given.values()), None)


def structure_of_format(value: Any, name: str) -> StructuredOutputsParams | None:
    """Return the structure of a ``response_format``; None for plain text. The schema may also be next to the type.

    Args:
        name: the field that has it.

    Raises:
        RequestError: it is of an unknown type, or has no schema.
    """
    match value.get("type") if isinstance(value, Mapping) else value:
        case "text":
            return None
        case "json_object" if isinstance(value, Mapping) and value.get("schema") not in (None, {}):
            # As in the APIs of llama.cpp, Together and Fireworks. An empty schema allows more than objects.
            if not isinstance(value["schema"], Mapping):
                raise RequestError(f"{name}.schema must be an object, got {value['schema']!r:.100}", param=name)
            return StructuredOutputsParams(json=dict(value["schema"]), origin=name)
        case "json_object":
            return StructuredOutputsParams(json_object=True, origin=name)
        case "json_schema":
            holder = value.get("json_schema", value)
            schema = holder.get("schema") if isinstance(holder, Mapping) else None
            if not isinstance(schema, Mapping):
                field = "json_schema.schema" if name == "response_format" else "schema"
                raise RequestError(f"{name} of type json_schema needs {field}, an object", param=name)
            return StructuredOutputsParams(json=dict(schema), origin=name)
        case other:
            raise RequestError(
                f"{name} must be of type text, json_object or json_schema, got {str(other)[:100]!r}", param=name
            )
