"""Fields that request structured outputs."""

from strandline.server.requests.structured_fields import structure_of_format

NAME = "response_format"


def test_json_object_with_empty_schema_is_an_object() -> None:
    plain = structure_of_format({"type": "json_object"}, NAME)
    assert plain is not None
    assert plain.json_object
    for schema in ({}, None):
        assert structure_of_format({"type": "json_object", "schema": schema}, NAME) == plain
